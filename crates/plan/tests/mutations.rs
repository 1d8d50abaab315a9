//! Lowered plans are valid, and validation finds every kind of damage to them.

use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, Method, SummationOrder};
use paceline_plan::ids::{BufferId, LaneId, Microbatch, OpId, SegmentId};
use paceline_plan::lower::lower;
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::model::built_in;
use paceline_plan::program::{
    Access, ComputePass, MemoryKind, Op, Peer, Plan, Program, Section, Template,
};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Recompute, Strategy, Sync, Zero};
use paceline_plan::validate::validate;
use proptest::prelude::{prop_assert, proptest};
use proptest::sample::select;
use proptest::test_runner::Config;
use std::sync::LazyLock;

/// Lowered plans of small models that cover all variations of a plan.
static PLANS: LazyLock<Vec<(String, Plan)>> = LazyLock::new(|| {
    let base = Strategy { global_batch: 8, seq: 16, ..Strategy::default() };
    let free = Strategy { order: SummationOrder::Free, ..base.clone() };
    let strategies = [
        ("mini", base.clone()),
        ("mlp", Strategy { dp: 2, leaves: 4, zero: Zero::Optimizer, ..base.clone() }),
        ("mini", Strategy { pp: 2, schedule: ScheduleKind::GPipe, ..base.clone() }),
        ("mini", Strategy { pp: 3, tp: 2, sp: true, dtype: DType::Bf16, ..base.clone() }),
        (
            "mini-llama",
            Strategy { pp: 2, dp: 2, recompute: Recompute::Full, leaves: 2, ..base.clone() },
        ),
        (
            "mini-llama",
            Strategy {
                pp: 2,
                tp: 2,
                schedule: ScheduleKind::Interleaved { chunks: 2 },
                recompute: Recompute::Selective,
                ..base.clone()
            },
        ),
        ("mini", Strategy { pp: 2, dp: 2, zero: Zero::Parameters, leaves: 2, ..free.clone() }),
        (
            "mlp",
            Strategy { pp: 4, dp: 2, zero: Zero::Gradients, leaves: 2, overlap: false, ..free },
        ),
        ("mini", Strategy { dp: 3, sync: Sync::Servers(2), global_batch: 6, leaves: 3, ..base }),
    ];
    strategies
        .map(|(name, strategy)| {
            let model = built_in::get(name).expect("built in").expect("sound");
            let plan = lower(&model, &strategy).unwrap_or_else(|error| panic!("{name}: {error}"));
            (format!("{name} {strategy:?}"), plan)
        })
        .into()
});

#[test]
fn lowered_plans_are_valid() {
    for (name, plan) in PLANS.iter() {
        let violations = validate(plan, None);
        assert!(violations.is_empty(), "{name}: {}", violations[0]);
    }
}

/// One op of a body with its lane and edges.
#[derive(Clone)]
struct Loose {
    lane: LaneId,
    op: Op,
    after: Vec<OpId>,
}

fn take_apart(section: &Section) -> Vec<Loose> {
    let loose = |(at, node): (usize, &paceline_plan::program::Node)| Loose {
        lane: node.lane,
        op: node.op,
        after: section.after(OpId::from(at)).to_vec(),
    };
    section.nodes.iter().enumerate().map(loose).collect()
}

fn put_together(ops: &[Loose]) -> Section {
    let mut section = Section::default();
    for Loose { lane, op, after } in ops {
        section.push(*lane, *op, after);
    }
    section
}

/// Removes an op. Ops that waited for it inherit its edges, so that nothing else changes.
fn remove(ops: &mut Vec<Loose>, at: usize) {
    let gone = ops.remove(at);
    for Loose { after, .. } in &mut ops[at..] {
        if after.contains(&OpId::from(at)) {
            after.retain(|&op| op.index() != at);
            after.extend(&gone.after);
        }
        after.iter_mut().filter(|op| op.index() > at).for_each(|op| op.0 -= 1);
    }
}

/// Kinds of damage, each of which must be found at any position.
#[derive(Clone, Copy, Debug)]
enum Damage {
    DropMessage,
    DropCrossingCall,
    ChangeCrossingCall,
    ChangeMessage,
    ShortenMessage,
    ShortenOperand,
    FreeEarly,
    FreeTwice,
    DropEdgeToRecv,
    DropEdgesOfSend,
    RetargetForward,
    ChangeMicrobatch,
    TooFewCopies,
    ShareMemory,
    DropLoad,
    WaitForLater,
}

const DAMAGES: [Damage; 16] = [
    Damage::DropMessage,
    Damage::DropCrossingCall,
    Damage::ChangeCrossingCall,
    Damage::ChangeMessage,
    Damage::ShortenMessage,
    Damage::ShortenOperand,
    Damage::FreeEarly,
    Damage::FreeTwice,
    Damage::DropEdgeToRecv,
    Damage::DropEdgesOfSend,
    Damage::RetargetForward,
    Damage::ChangeMicrobatch,
    Damage::TooFewCopies,
    Damage::ShareMemory,
    Damage::DropLoad,
    Damage::WaitForLater,
];

/// Damages one role of a plan; `false` if this kind of damage does not apply to it.
fn damage(plan: &mut Plan, role: usize, how: Damage, which: usize) -> bool {
    let crossing: Vec<bool> = plan
        .groups
        .iter()
        .map(|group| {
            matches!(group, GroupKind::Axis(Axis::Pp) | GroupKind::Ends | GroupKind::Servers)
        })
        .collect();
    let groups_size = |group: GroupKind| plan.mesh.group_size(group);
    let sizes: Vec<u32> = plan.groups.iter().map(|&group| groups_size(group)).collect();
    let passes: Vec<ComputePass> = plan.templates.iter().map(|template| template.pass).collect();
    let writes = |template: &Template| template.operands.iter().any(|o| o.access == Access::Write);
    let writes: Vec<bool> = plan.templates.iter().map(writes).collect();
    let microbatches = plan.strategy.microbatches();
    let program = &mut plan.programs[role];
    let mut ops = take_apart(&program.body);
    let crosses = |program: &Program, op: &Op| match *op {
        Op::Collective { call, .. } => {
            let group = program.call(call).group.index();
            crossing[group] && sizes[group] > 1
        }
        _ => false,
    };
    // A segment that only adds to the loss leaves no trace if it runs once too often or too rarely.
    let forward = |program: &Program, op: &Op| match *op {
        Op::Compute { segment, .. } => {
            let template = program.segment(segment).template as usize;
            passes[template] == ComputePass::Forward && writes[template]
        }
        _ => false,
    };
    // Ops to which this kind of damage applies.
    let candidates: Vec<usize> = (0..ops.len())
        .filter(|&at| {
            let Loose { op, after, .. } = &ops[at];
            match how {
                Damage::DropMessage | Damage::ChangeMessage | Damage::ShortenMessage => {
                    matches!(op, Op::Send { .. } | Op::Recv { .. })
                }
                Damage::DropCrossingCall | Damage::ChangeCrossingCall => crosses(program, op),
                Damage::FreeEarly | Damage::FreeTwice => matches!(op, Op::Free { .. }),
                Damage::DropEdgeToRecv => {
                    let recv = |id: &OpId| matches!(ops[id.index()].op, Op::Recv { .. });
                    matches!(op, Op::Compute { .. }) && after.iter().any(recv)
                }
                // A server's messages are consecutive on one lane, which also orders them.
                Damage::DropEdgesOfSend => matches!(op, Op::Send { to: Peer::Stage(_), .. }),
                Damage::RetargetForward => forward(program, op),
                Damage::ChangeMicrobatch => forward(program, op) && microbatches > 1,
                Damage::DropLoad => matches!(op, Op::Load { .. }),
                Damage::ShortenOperand => matches!(op, Op::Compute { .. }),
                Damage::TooFewCopies | Damage::ShareMemory => at == 0,
                Damage::WaitForLater => at + 1 < ops.len(),
            }
        })
        .collect();
    if candidates.is_empty() {
        return false;
    }
    let at = candidates[which % candidates.len()];
    match how {
        Damage::DropMessage | Damage::DropCrossingCall | Damage::DropLoad => remove(&mut ops, at),
        Damage::ChangeCrossingCall => {
            let Op::Collective { call, .. } = ops[at].op else { return false };
            let call = &mut program.calls[call.index()];
            call.method = Method::Steps(match call.method {
                Method::Steps(Algorithm::Direct) => Algorithm::Ring,
                _ => Algorithm::Direct,
            });
        }
        Damage::ChangeMessage => match &mut ops[at].op {
            Op::Send { channel, .. } | Op::Recv { channel, .. } => *channel += 1000,
            _ => return false,
        },
        Damage::ShortenMessage => match &mut ops[at].op {
            Op::Send { view, .. } | Op::Recv { view, .. } => view.len -= 1,
            _ => return false,
        },
        Damage::ShortenOperand => {
            let Op::Compute { segment, .. } = ops[at].op else { return false };
            program.segments[segment.index()].operands[0].len -= 1;
        }
        Damage::FreeEarly => {
            // Moves the free before the last computation of its microbatch.
            let Op::Free { microbatch, .. } = ops[at].op else { return false };
            let compute = |op: &Op| matches!(op, Op::Compute { .. });
            let last = (0..at)
                .rev()
                .find(|&i| compute(&ops[i].op) && ops[i].op.microbatch() == Some(microbatch));
            let Some(last) = last else { return false };
            let free = ops[at].op;
            ops[at].op = std::mem::replace(&mut ops[last].op, free);
            let after = std::mem::take(&mut ops[last].after);
            ops[at].after.extend(after);
        }
        Damage::FreeTwice => ops.push(Loose { after: Vec::new(), ..ops[at].clone() }),
        Damage::DropEdgeToRecv => {
            let recv: Vec<OpId> =
                (0..at).filter(|&i| matches!(ops[i].op, Op::Recv { .. })).map(OpId::from).collect();
            ops[at].after.retain(|op| !recv.contains(op));
        }
        Damage::DropEdgesOfSend => ops[at].after.clear(),
        Damage::RetargetForward => {
            let Op::Compute { segment, .. } = &mut ops[at].op else { return false };
            let others: Vec<SegmentId> = (0..program.segments.len())
                .map(SegmentId::from)
                .filter(|other| other != segment)
                .filter(|&other| {
                    passes[program.segment(other).template as usize] == ComputePass::Forward
                })
                .collect();
            if others.is_empty() {
                return false;
            }
            *segment = others[which % others.len()];
        }
        Damage::ChangeMicrobatch => {
            let Op::Compute { microbatch, .. } = &mut ops[at].op else { return false };
            *microbatch = Microbatch((microbatch.0 + 1) % microbatches);
        }
        Damage::TooFewCopies => {
            let frames: Vec<BufferId> = program.frames.iter().flatten().copied().collect();
            let several = |id: &&BufferId| program.buffer(**id).copies > 1;
            let several: Vec<BufferId> = frames.iter().filter(several).copied().collect();
            if several.is_empty() {
                return false;
            }
            program.buffers[several[which % several.len()].index()].copies -= 1;
        }
        Damage::ShareMemory => return share_memory(program, which),
        Damage::WaitForLater => ops[at].after.push(OpId::from(at + 1)),
    }
    program.body = put_together(&ops);
    true
}

/// Moves one persistent buffer onto another.
fn share_memory(program: &mut Program, which: usize) -> bool {
    let pairs: Vec<(usize, usize)> = (0..program.buffers.len())
        .flat_map(|a| (0..a).map(move |b| (a, b)))
        .filter(|&(a, b)| {
            let (a, b) = (&program.buffers[a], &program.buffers[b]);
            let lasting = matches!(a.kind, MemoryKind::Parameters | MemoryKind::Optimizer);
            lasting && a.kind == b.kind
        })
        .collect();
    if pairs.is_empty() {
        return false;
    }
    let (a, b) = pairs[which % pairs.len()];
    program.buffers[a].offset = program.buffers[b].offset;
    true
}

#[test]
fn every_kind_of_damage_can_be_done_somewhere() {
    for how in DAMAGES {
        let done = PLANS.iter().any(|(_, plan)| {
            (0..plan.programs.len()).any(|role| damage(&mut plan.clone(), role, how, 0))
        });
        assert!(done, "{how:?}");
    }
}

/// Number of random cases: `PROPTEST_CASES`, or few enough for every `cargo test`.
#[allow(clippy::disallowed_methods)]
#[expect(clippy::disallowed_methods, reason = "a test, not the crate, reads the number of cases")]
fn cases(few: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(few)
}

proptest! {
    #![proptest_config(Config { cases: cases(2000), failure_persistence: None, ..Config::default() })]

    #[test]
    fn damage_is_found(plan: usize, role: usize, which: usize, how in select(&DAMAGES)) {
        let (name, plan) = &PLANS[plan % PLANS.len()];
        let mut plan = plan.clone();
        let role = role % plan.programs.len();
        if damage(&mut plan, role, how, which) {
            let found = validate(&plan, None);
            prop_assert!(!found.is_empty(), "{:?} in role {} of {}", how, role, name);
        }
    }
}
