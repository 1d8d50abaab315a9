//! PipeDream (Narayanan et al., SOSP '19) on two stages: one forward, one backward, no flush. The
//! first stage runs one minibatch ahead, so it stashes two versions of its weights. A backward pass
//! uses the version of its forward pass.
//!
//! In body i, stage 0 runs the forward pass of minibatch i + 1 and the backward pass of i. Stage 1
//! runs both passes of i, while minibatch i + 1 already arrives. An early receive may still be in
//! flight when the next body starts; the forward pass that reads it waits for it.

use super::build::{Build, COMPUTE, compute, local, operand, template};
use paceline_plan::DType;
use paceline_plan::graph::{LinearRole, OpKind, OpPass};
use paceline_plan::ids::{LaneId, Microbatch, OpId, StageRank};
use paceline_plan::mesh::GroupKind;
use paceline_plan::program::{
    Access, Bucket, CarryoverOp, ComputePass, MemoryKind, Op, Peer, Plan, Program, StepPhase,
    Template, View,
};
use paceline_plan::samples::SampleKind;
use paceline_plan::strategy::{OptimizerKind, Strategy};

const STEP: Op = Op::Step { bucket: 0, phase: StepPhase::Apply };

const TOKENS: u64 = 8;
const WIDTH: u64 = 32;
const RECV: LaneId = LaneId(1);
const SEND: LaneId = LaneId(2);

pub(crate) fn plan() -> Plan {
    let strategy =
        Strategy { pp: 2, seq: TOKENS, optimizer: OptimizerKind::Sgd, ..Strategy::default() };
    Plan {
        model: "two linear layers".into(),
        mesh: strategy.mesh(),
        strategy,
        groups: Vec::<GroupKind>::new(),
        templates: templates(),
        programs: vec![first(), second()],
        layers: vec!["linear.0".into(), "linear.1".into()],
        parameters: 2 * WIDTH * WIDTH,
        samples: SampleKind::Tokens { vocab: 64, seq: 16, lookahead: 0 },
        norm_entries: 2,
        messages: None,
    }
}

fn templates() -> Vec<Template> {
    let linear = OpKind::Linear { role: LinearRole::Up };
    let (x, w) = (|access| operand(TOKENS, WIDTH, access), |access| operand(WIDTH, WIDTH, access));
    let forward = template(
        "F.linear",
        ComputePass::Forward,
        vec![x(Access::Read), w(Access::Read), x(Access::Write)],
        vec![local(linear, OpPass::Forward, &[0], &[1], &[2])],
    );
    let backward = template(
        "B.linear",
        ComputePass::Backward,
        vec![
            x(Access::Read),
            x(Access::Read),
            w(Access::Read),
            w(Access::Accumulate),
            x(Access::Write),
        ],
        vec![
            local(linear, OpPass::BackwardInput, &[0], &[2], &[4]),
            local(linear, OpPass::BackwardWeight, &[0, 1], &[3], &[]),
        ],
    );
    vec![forward, backward]
}

/// A stage's weights with their versions and gradient.
struct Weights {
    latest: View,
    versions: View,
    used: View,
    grad: View,
}

fn weights(b: &mut Build, versions: u32) -> Weights {
    let n = WIDTH * WIDTH;
    let latest = b.buffer("weight", DType::F32, n, 1, MemoryKind::Parameters);
    let kept = b.buffer("weight.versions", DType::F32, n, versions, MemoryKind::Activations);
    let used = b.buffer("weight.used", DType::F32, n, 1, MemoryKind::Activations);
    let grad = b.buffer("weight.grad", DType::F32, n, 1, MemoryKind::Gradients);
    b.program.buckets.push(Bucket {
        name: "weight".into(),
        elements: n,
        entries: Vec::new(),
        params: latest,
        grads: grad,
        master: None,
        moments: Vec::new(),
        offloaded: Vec::new(),
        shard: None,
        tensor_norms: None,
        updated: true,
    });
    b.program.frames.push(vec![kept.buffer]);
    Weights { latest, versions: kept, used, grad }
}

fn first() -> Program {
    let mut b = Build::new("pipeline rank 0", &["compute", "recv", "send", "load"]);
    let w = weights(&mut b, 2);
    let x = b.buffer("x", DType::F32, TOKENS * WIDTH, 2, MemoryKind::Activations);
    let y = b.activation("y", TOKENS * WIDTH, 2);
    let dy = b.activation("y.grad", TOKENS * WIDTH, 1);
    let dx = b.activation("x.grad", TOKENS * WIDTH, 1);
    let forward = b.segment(0, &[x, w.latest, y]);
    let backward = b.segment(1, &[dy, x, w.used, w.grad, dx]);
    let next = Peer::Stage(StageRank(1));
    let load = |m| Op::Load {
        what: paceline_plan::program::LoadKind::Tokens,
        into: x.buffer,
        microbatch: Microbatch(m),
    };
    let stash = |m| Op::Stash { from: w.latest, into: w.versions, microbatch: Microbatch(m) };
    let restore = |m| Op::Restore { from: w.versions, into: w.used, microbatch: Microbatch(m) };
    let send = |m| Op::Send { to: next, channel: 0, view: y, microbatch: Microbatch(m) };
    let recv = |m| Op::Recv { from: next, channel: 1, view: dy, microbatch: Microbatch(m) };
    let drop = |m| Op::Free { frame: 0, microbatch: Microbatch(m) };

    let p = &mut b.program.prologue;
    let loaded = p.push(LaneId(3), load(0), &[]);
    p.push(COMPUTE, stash(0), &[]);
    let ahead = p.push(COMPUTE, compute(forward, 0), &[loaded]);
    p.push(SEND, send(0), &[ahead]);

    let body = &mut b.program.body;
    let loaded = body.push(LaneId(3), load(1), &[]);
    body.push(COMPUTE, stash(1), &[]);
    let ahead = body.push(COMPUTE, compute(forward, 1), &[loaded]);
    body.push(SEND, send(1), &[ahead]);
    let arrived = body.push(RECV, recv(0), &[]);
    body.push(COMPUTE, restore(0), &[]);
    body.push(COMPUTE, compute(backward, 0), &[arrived]);
    body.push(COMPUTE, STEP, &[]);
    body.push(COMPUTE, drop(0), &[]);

    let e = &mut b.program.epilogue;
    let arrived = e.push(RECV, recv(0), &[]);
    e.push(COMPUTE, restore(0), &[]);
    e.push(COMPUTE, compute(backward, 0), &[arrived]);
    e.push(COMPUTE, STEP, &[]);
    b.finish()
}

fn second() -> Program {
    let mut b = Build::new("pipeline rank 1", &["compute", "recv", "send"]);
    let w = weights(&mut b, 1);
    let x = b.activation("x", TOKENS * WIDTH, 2);
    let y = b.activation("y", TOKENS * WIDTH, 1);
    let dx = b.activation("x.grad", TOKENS * WIDTH, 1);
    let forward = b.segment(0, &[x, w.latest, y]);
    // The loss is the output's square, so its gradient is the output itself.
    let backward = b.segment(1, &[y, x, w.used, w.grad, dx]);
    let before = Peer::Stage(StageRank(0));
    let recv = |m| Op::Recv { from: before, channel: 0, view: x, microbatch: Microbatch(m) };
    let send = |m| Op::Send { to: before, channel: 1, view: dx, microbatch: Microbatch(m) };
    let steps = |section: &mut paceline_plan::program::Section, after: &[OpId]| {
        let m = Microbatch(0);
        section.push(COMPUTE, Op::Stash { from: w.latest, into: w.versions, microbatch: m }, &[]);
        let reads = section.push(COMPUTE, compute(forward, 0), after);
        section.push(COMPUTE, Op::Restore { from: w.versions, into: w.used, microbatch: m }, &[]);
        let done = section.push(COMPUTE, compute(backward, 0), &[]);
        section.push(SEND, send(0), &[done]);
        section.push(COMPUTE, STEP, &[]);
        section.push(COMPUTE, Op::Free { frame: 0, microbatch: m }, &[]);
        reads
    };
    b.program.prologue.push(RECV, recv(0), &[]);
    let arriving = b.program.body.push(RECV, recv(1), &[]);
    let reads = steps(&mut b.program.body, &[]);
    b.program.in_flight.push(CarryoverOp { op: arriving, before: vec![reads] });
    steps(&mut b.program.epilogue, &[]);
    b.finish()
}
