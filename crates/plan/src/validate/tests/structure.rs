//! Tests of the structure check.

use super::*;
use proptest::prelude::*;

#[test]
fn the_plan_is_valid() {
    expect(&plan(), &[]);
    assert_eq!(validate(&plan(), Some(Bytes(1 << 20))), []);
}

#[test]
fn segments_must_fit_their_templates() {
    let mut plan = plan();
    plan.programs[0].segments[0].operands[0].len = N - 1;
    plan.programs[0].segments[1].operands[0].offset = 1;
    plan.programs[0].segments[2].operands.pop();
    plan.programs[1].buffers[DW as usize].dtype = DType::Bf16;
    expect(
        &plan,
        &[
            "rank 0: segment 0 ('F.layer') binds 15 elements to operand 0, which has 16",
            "rank 0: segment 1: elements 1..+16 reach beyond 'x', which has 16",
            "rank 0: segment 2 binds 1 operands, template 'U.squares' has 2",
            "rank 2: segment 1 ('B.layer') binds bf16 to operand 4, which is f32",
            "rank 2: segment 2 ('U.squares') binds bf16 to operand 0, which is f32",
        ],
    );
}

#[test]
fn names_must_lead_somewhere() {
    expect(
        &with(0, |ops| {
            ops[0].0 = 9;
            ops[1].1 = compute(SegmentId(7), 0);
            ops[2].2 = vec![2];
            ops[7].0 = SEND;
            ops[12].1 = collective(5);
        }),
        &[
            "rank 0, op 0 (load tokens mb 0): lane 9 does not exist, there are 4",
            "rank 0, op 1 (compute segment 7 mb 0): segment 7 does not exist, there are 3",
            "rank 0, op 2 (send 'y' to stage 1 ch 0 mb 0): waits for op 2, which does not stand before it",
            "rank 0, op 7 (compute B.layer mb 0): computes on lane 'send', only the first lane computes",
            "rank 0, op 12 (call 5 mb 0): call 5 does not exist, there are 3",
        ],
    );
}

#[test]
fn the_arena_must_add_up() {
    let mut plan = plan();
    plan.programs[0].memory.by_kind[4].0 += 64;
    plan.programs[1].memory.by_kind[4].0 -= 64;
    expect(
        &plan,
        &[
            "rank 0: declares 384 B of communication, its buffers take 320 B",
            "rank 2: 'norm' lies at bytes 704..768, its kind's part of the arena at 448..704",
        ],
    );
    let messages: Vec<String> =
        validate(&self::plan(), Some(Bytes(700))).iter().map(Violation::to_string).collect();
    assert_eq!(
        messages[0],
        "rank 0: needs 768 B of 700 B: 320 B activations + 320 B communication + 64 B parameters + \
         64 B gradients"
    );
    assert_eq!(messages.len(), 2);
}

#[test]
fn a_plan_without_sense_is_told_so() {
    let mut plan = plan();
    plan.mesh.cp = 0;
    expect(&plan, &["plan: the mesh has an axis of size 0"]);
    plan.mesh.cp = u32::MAX;
    expect(&plan, &["plan: the mesh has more than 2^32 ranks"]);
    plan.mesh.cp = 1;
    plan.mesh.ep = 3;
    expect(&plan, &["plan: the mesh has expert axes that do not divide dp·cp·tp"]);
    plan.mesh.ep = 1;
    plan.programs.pop();
    expect(&plan, &["plan: there are 1 programs for 2 roles"]);
    let mut plan = self::plan();
    plan.programs[0].lanes[0] = "x".into();
    plan.programs[0].buffers[0].copies = 0;
    plan.programs[0].buffers[1].elements = WHOLE;
    plan.programs[1].buffers[1].offset = Bytes(WHOLE - 63);
    expect(
        &plan,
        &[
            "rank 0: lanes: the first must be named 'compute'",
            "rank 0: buffer 0 ('x'): must have between 1 and 65536 copies",
            "rank 0: buffer 1 ('y'): ends beyond 2^64 bytes",
            "rank 2: buffer 1 ('y'): ends beyond 2^64 bytes",
        ],
    );
}

proptest! {
    /// No numbers in a plan make validation panic.
    #[test]
    fn absurd_numbers_do_no_harm(
        role in 0usize..2,
        at in 0usize..17,
        what in 0usize..8,
        number in prop_oneof![Just(0), 0u64..20, Just(u64::MAX), Just(1 << 63), any::<u64>()],
    ) {
        let mut plan = plan();
        let program = &mut plan.programs[role];
        let small = number as u32;
        match what {
            0 => program.buffers[at % 8].elements = number,
            1 => program.buffers[at % 8].copies = small,
            2 => program.buffers[at % 8].offset = Bytes(number),
            3 => program.segments[at % 3].operands[0].offset = number,
            4 => program.calls[at % 3].output.len = number,
            5 => program.memory.by_kind[at % 5] = Bytes(number),
            6 => program.body.nodes[at].op = Op::Compute {
                segment: SegmentId(small % 4),
                microbatch: mb(small),
                fresh: false,
            },
            _ => program.body.nodes[at].op = Op::Send {
                to: Peer::Stage(StageRank(number as u16)),
                channel: number as u16,
                view: View { buffer: BufferId(small % 9), offset: number, len: number },
                microbatch: mb(small),
            },
        }
        for violation in validate(&plan, Some(Bytes(number))) {
            prop_assert!(!violation.to_string().is_empty());
        }
    }
}
