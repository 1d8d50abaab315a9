//! Tests of the dataflow check.

use super::*;

#[test]
fn an_edge_that_matters_is_missed() {
    expect(
        &with(0, |ops| ops[2].2.clear()),
        &[
            "rank 0, op 2 (send 'y' to stage 1 ch 0 mb 0): reads 'y' at the same time as op 1 (compute \
           F.layer mb 0) writes it; an after edge must order them",
        ],
    );
    expect(
        &with(0, |ops| ops[8].2.clear()),
        &[
            "rank 0, op 8 (free frame 0 mb 0): frees 'y' at the same time as op 2 (send 'y' to stage 1 \
           ch 0 mb 0) reads it; an after edge must order them",
        ],
    );
    expect(
        &with(1, |ops| ops[12].2.clear()),
        &[
            "rank 2, op 12 (all_reduce 5 0 mb 0): reads 'dw' at the same time as op 9 (compute B.layer \
           mb 1) writes it; an after edge must order them",
            "rank 2, op 12 (all_reduce 5 0 mb 0): writes 'dw' at the same time as op 9 (compute B.layer \
           mb 1) writes it; an after edge must order them",
        ],
    );
}

#[test]
fn memory_must_hold_what_is_read() {
    expect(
        &with(0, |ops| ops.swap(7, 8)),
        &["rank 0, op 8 (compute B.layer mb 0): reads 'x' after op 7 (free frame 0 mb 0) freed it"],
    );
    expect(
        &with(0, |ops| ops[11].1 = free(0)),
        &[
            "rank 0, op 11 (free frame 0 mb 0): frees 'x', which is free already",
            "rank 0, op 11 (free frame 0 mb 0): frees 'y', which is free already",
        ],
    );
    // Gradients of the previous iteration do not count.
    expect(
        &with(0, |ops| {
            ops[7].1 = Op::Compute { segment: BACKWARD, microbatch: mb(0), fresh: false }
        }),
        &["rank 0, op 7 (compute B.layer mb 0): reads 'dw', which nothing has written"],
    );
}

#[test]
fn a_microbatch_needs_a_copy_of_its_own() {
    let mut plan = plan();
    plan.programs[0].buffers[X as usize].copies = 1;
    lay_out(&mut plan.programs[0]);
    expect(
        &plan,
        &[
            "rank 0, op 7 (compute B.layer mb 0): reads 'x' of running microbatch 0, but op 3 (load \
           tokens mb 1) left that of 1 there",
            "rank 0, op 10 (compute B.layer mb 1): reads 'x' after op 8 (free frame 0 mb 0) freed it",
        ],
    );
}

#[test]
fn buffers_that_share_memory_end_each_other() {
    let mut plan = plan();
    let buffers = &mut plan.programs[0].buffers;
    buffers[DW as usize].offset = buffers[W as usize].offset;
    let messages = found(&plan);
    assert!(
        messages.contains(
            &"rank 0, op 10 (compute B.layer mb 1): reads 'w' after it was overwritten by op 7 (compute \
              B.layer mb 0), which wrote 'dw' to the same memory"
                .to_string()
        ),
        "{messages:#?}"
    );
    // A value private to a segment also ends the content of the memory it shares.
    let mut plan = self::plan();
    let buffers = &mut plan.programs[0].buffers;
    buffers[TEMP as usize].offset = buffers[X as usize].offset + buffers[X as usize].stride();
    expect(
        &plan,
        &[
            "rank 0: declares 320 B of activations, its buffers take 256 B",
            "rank 0, op 10 (compute B.layer mb 1): reads 'x' after it was overwritten by op 4 \
             (compute F.layer mb 1), which wrote 'temp' to the same memory",
        ],
    );
}

#[test]
fn operands_must_not_get_into_each_others_way() {
    let mut plan = plan();
    let buffers = &mut plan.programs[0].buffers;
    buffers[TEMP as usize].offset = buffers[W as usize].offset;
    assert_eq!(
        found(&plan)[0],
        "rank 0: 'temp' lies at bytes 0..64, its kind's part of the arena at 128..448"
    );
    assert_eq!(
        found(&plan)[2],
        "rank 0: segment 0 ('F.layer'): operator add reads 'w' after 'temp' was written to the same \
         memory"
    );
}

#[test]
fn ops_in_flight_must_not_meet_the_next_iteration() {
    let mut plan = plan();
    plan.programs[0].in_flight = vec![CarryoverOp { op: OpId(5), before: Vec::new() }];
    expect(&plan, &[]);
    // The free no longer waits for the second send, so the send may outlast the iteration.
    let mut ops = first_stage();
    ops[11].2.clear();
    ops.remove(11);
    for (_, _, after) in &mut ops {
        after.iter_mut().filter(|op| **op >= 11).for_each(|op| *op -= 1);
    }
    let mut plan = plan_of(&[ops, second_stage()]);
    expect(&plan, &[]);
    plan.programs[0].in_flight = vec![CarryoverOp { op: OpId(5), before: Vec::new() }];
    expect(
        &plan,
        &[
            "rank 0, op 4 (compute F.layer mb 1): writes 'y' at the same time as op 5 (send 'y' to stage 1 \
           ch 0 mb 1) reads it; an after edge must order them",
        ],
    );
    // An op of the next iteration that waits for it resolves the race.
    plan.programs[0].in_flight[0].before.push(OpId(4));
    expect(&plan, &[]);
}
