//! Tests of the matching and deadlock checks.

use super::*;

#[test]
fn a_missing_send_or_recv_is_missed_at_the_other_end() {
    expect(
        &with(1, |ops| remove(ops, 10)),
        &["rank 0, op 9 (recv 'dy' from stage 1 ch 1 mb 1): no matching send from rank 2"],
    );
    expect(
        &with(1, |ops| remove(ops, 6)),
        &[
            "rank 2, op 6 (compute F.layer mb 1): reads 'x', which nothing has written",
            "rank 0, op 5 (send 'y' to stage 1 ch 0 mb 1): no matching recv on rank 2",
        ],
    );
}

#[test]
fn messages_must_agree_in_size_and_type() {
    let mut plan = plan();
    plan.programs[0].buffers[Y as usize].dtype = DType::U32;
    plan.templates[0].operands[2].dtype = DType::U32;
    plan.programs[1].buffers[Y as usize].dtype = DType::U32;
    let messages = found(&plan);
    assert_eq!(
        messages[0],
        "rank 0, op 2 (send 'y' to stage 1 ch 0 mb 0): sends 16 x u32 to rank 2, whose op 0 (recv 'x' \
         from stage 0 ch 0 mb 0) expects 16 x f32"
    );
    assert_eq!(messages.len(), 2);
}

#[test]
fn members_of_a_group_must_make_the_same_calls() {
    expect(
        &with(1, |ops| remove(ops, 15)),
        &[
            "rank 0, op 15 (all_reduce 6 2 mb 0): rank 2 is a member of the group but makes only 0 of its \
           calls",
        ],
    );
    let mut plan = plan();
    plan.programs[1].calls[1].method = Method::Steps(Algorithm::Ring);
    expect(
        &plan,
        &[
            "rank 0, op 14 (all_reduce 6 1 mb 0): call 0 of its group matches op 14 (all_reduce 6 1 \
         mb 0) on rank 2: their methods differ",
        ],
    );
    // Groups within a role do not affect the other role.
    let mut plan = self::plan();
    plan.programs[1].calls[0].method = Method::Steps(Algorithm::Ring);
    expect(&plan, &[]);
}

#[test]
fn calls_in_crossed_order_hang() {
    let plan = with(1, |ops| {
        (ops[14].1, ops[15].1) = (ops[15].1, ops[14].1);
    });
    expect(
        &plan,
        &[
            "rank 0, op 14 (all_reduce 6 1 mb 0): is deadlocked: it waits for op 15 (all_reduce 6 1 mb 0) on rank \
             2, which waits for op 14 (all_reduce 6 2 mb 0)",
            "rank 2, op 14 (all_reduce 6 2 mb 0): is deadlocked: it waits for op 15 (all_reduce 6 2 mb 0) on rank \
             0, which waits for op 14 (all_reduce 6 1 mb 0)",
        ],
    );
}

#[test]
fn a_send_that_waits_for_the_answer_hangs() {
    let plan = with(0, |ops| {
        // Moves the first backward pass before the send that it answers.
        ops[2].2.push(1);
        let send = ops.remove(2);
        ops.insert(7, send);
        for (_, _, after) in ops.iter_mut() {
            for op in after.iter_mut() {
                *op = match *op {
                    2 => 7,
                    op @ 3..=7 => op - 1,
                    op => op,
                };
            }
        }
        ops[7].2 = vec![6];
    });
    let messages = found(&plan);
    assert!(messages.iter().any(|m| m.contains("is deadlocked")), "{messages:#?}");
}

/// A role whose ranks pass `y` around a ring, with the send and receive on the given lanes.
fn ring(send_lane: u8, recv_lane: u8) -> Plan {
    let (view, channel, microbatch) = (view(Y), 0, mb(0));
    let into = self::view(DY);
    let mut ops: Ops = vec![
        (COMPUTE, Op::Load { what: LoadKind::Tokens, into: BufferId(X), microbatch }, vec![]),
        (COMPUTE, compute(FORWARD, 0), vec![]),
        (send_lane, Op::Send { to: Peer::Next(Axis::Dp), channel, view, microbatch }, vec![1]),
    ];
    let recv = Op::Recv { from: Peer::Previous(Axis::Dp), channel, view: into, microbatch };
    ops.push((recv_lane, recv, vec![]));
    let mut plan = plan_of(&[ops]);
    plan.groups = vec![GroupKind::Axis(Axis::Dp); 3];
    plan
}

#[test]
fn ranks_of_one_role_may_talk_to_each_other() {
    expect(&ring(SEND, RECV), &[]);
    expect(
        &ring(SEND, SEND),
        &[
            "rank 0, op 2 (send 'y' to next dp ch 0 mb 0): is deadlocked: it waits for op 3 (recv 'dy' from \
           previous dp ch 0 mb 0) on rank 0, which waits for op 2 (send 'y' to next dp ch 0 mb 0)",
        ],
    );
    let mut plan = ring(SEND, RECV);
    plan.mesh.dp = 3;
    expect(&plan, &[]);
    plan.programs[0].body.nodes[2].op =
        Op::Send { to: Peer::Previous(Axis::Dp), channel: 0, view: view(Y), microbatch: mb(0) };
    expect(
        &plan,
        &[
            "rank 0, op 2 (send 'y' to previous dp ch 0 mb 0): no matching recv on rank 2",
            "rank 0, op 3 (recv 'dy' from previous dp ch 0 mb 0): no matching send from rank 2",
        ],
    );
    // With two ranks, next and previous are the same rank.
    plan.mesh.dp = 2;
    expect(&plan, &[]);
}

/// Two replicas that send their gradient to a server and receive the weights from it.
fn served(server: &Ops, services: Vec<Service>) -> Plan {
    let microbatch = mb(0);
    let send = Op::Send { to: Peer::Server(0), channel: 0, view: view(X), microbatch };
    let recv = Op::Recv { from: Peer::Server(0), channel: 0, view: view(W), microbatch };
    let replica: Ops = vec![
        (COMPUTE, Op::Load { what: LoadKind::Tokens, into: BufferId(X), microbatch }, vec![]),
        (SEND, send, vec![0]),
        (RECV, recv, vec![1]),
    ];
    let mut plan = plan_of(&[replica]);
    plan.mesh.servers = 1;
    plan.groups = vec![GroupKind::Served(0); 3];
    plan.programs[0].calls.clear();
    let mut program = program("server", server);
    program.calls.clear();
    program.services = services;
    plan.programs.push(program);
    plan
}

#[test]
fn servers_deal_with_every_rank() {
    let recv = |rank, into| {
        let from = Peer::Replica(rank);
        Op::Recv { from, channel: 0, view: view(into), microbatch: mb(0) }
    };
    let reply =
        |rank| Op::Send { to: Peer::Replica(rank), channel: 0, view: view(W), microbatch: mb(0) };
    let mut ops: Ops = vec![
        (RECV, recv(0, DX), vec![]),
        (RECV, recv(1, DY), vec![]),
        (SEND, reply(0), vec![1]),
        (SEND, reply(1), vec![]),
    ];
    expect(&served(&ops, vec![]), &[]);
    ops[1].1 = recv(0, DY);
    ops[3].1 = reply(7);
    expect(
        &served(&ops, vec![]),
        &[
            "rank 1, op 1 (send 'x' to server 0 ch 0 mb 0): no matching recv on rank 2",
            "rank 1, op 2 (recv 'w' from server 0 ch 0 mb 0): no matching send from rank 2",
            "rank 2, op 3 (send 'w' to rank 7 ch 0 mb 0): names a peer that this rank does not have",
            "rank 2, op 1 (recv 'dy' from rank 0 ch 0 mb 0): no matching send from rank 0",
        ],
    );
}

#[test]
fn asynchronous_servers_must_be_asked_as_often_as_they_serve() {
    let service = |requests| Service {
        group: GroupId(0),
        receives: view(DX),
        sends: view(W),
        requests,
        staleness: None,
    };
    let serve: Ops = vec![(COMPUTE, Op::Serve { service: 0 }, vec![])];
    expect(&served(&serve, vec![service(1)]), &[]);
    expect(
        &served(&serve, vec![service(2)]),
        &[
            "rank 0: sends 16 elements an iteration, server rank 2 serves 32",
            "rank 0: receives 16 elements an iteration, server rank 2 serves 32",
        ],
    );
}
