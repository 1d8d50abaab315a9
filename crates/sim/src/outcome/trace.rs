//! The timeline in the form that both engines write.

use super::statistics::kind;
use super::unequal::shown;
use crate::cluster::Cluster;
use crate::engine::{Class, Timeline};
use paceline_plan::ids::{BufferId, OpId};
use paceline_plan::program::{LoadKind, Op, Plan, Program};
use paceline_plan::trace::{Origin, Span, SpanKind, Trace, TraceBuilder};
use paceline_plan::units::Seconds;

/// One rank of each role, and of each kind of ranks that differ from it, for one iteration. Waiting stands beside the op that waits: from the end
/// of what was before it on its lane to its own start.
pub(super) fn trace(plan: &Plan, cluster: &Cluster, timeline: &Timeline) -> Trace {
    let mut builder = TraceBuilder::new(Origin::Simulated, plan.model.clone(), plan.mesh.world());
    for class in shown(plan, cluster, timeline) {
        add_class(&mut builder, plan, class, timeline);
    }
    builder.finish()
}

fn add_class(builder: &mut TraceBuilder, plan: &Plan, class: u32, timeline: &Timeline) {
    let Class { rank, role, .. } = timeline.classes().get(class);
    let program = &plan.programs[role.index()];
    let lanes: Vec<u8> = program.lanes.iter().map(|name| builder.lane(name)).collect();
    let mut free = vec![Seconds::ZERO; lanes.len()];
    // Ops are numbered over the whole program; the body follows the prologue.
    let first = program.prologue.nodes.len() as u32;
    for (index, node) in program.body.nodes.iter().enumerate() {
        let (start, end) = timeline.span_of(class, OpId::from(index));
        let before = free[node.lane.index()];
        // An op that stands for many ranks may reach into the next one of its lane, or over it.
        let start = start.max(before);
        let end = end.max(start);
        free[node.lane.index()] = end;
        // Giving memory up is a note to the reader of a plan; no engine does anything for it.
        if matches!(node.op, Op::Free { .. }) {
            continue;
        }
        let span = Span {
            rank,
            lane: lanes[node.lane.index()],
            kind: kind(plan, program, &node.op),
            name: name(builder, plan, program, &node.op),
            microbatch: node.op.microbatch().map(|microbatch| microbatch.0),
            iteration: 0,
            op: first + index as u32,
            start,
            end,
        };
        if before.0 < start.0 {
            builder.push(Span { kind: SpanKind::Wait, start: before, end: start, ..span });
        }
        builder.push(span);
    }
}

/// An op's name: its template's or its call's where it has one, otherwise what it does to what.
fn name(builder: &mut TraceBuilder, plan: &Plan, program: &Program, op: &Op) -> u32 {
    let buffer = |id: BufferId| program.buffer(id).name.as_str();
    match *op {
        Op::Compute { segment, .. } => {
            builder.name(&plan.templates[program.segment(segment).template as usize].name)
        }
        Op::Collective { call, .. } => builder.name(&program.call(call).name),
        Op::Load { what: LoadKind::Tokens, .. } => builder.name("load tokens"),
        Op::Load { what: LoadKind::Features, .. } => builder.name("load features"),
        Op::Load { what: LoadKind::Targets, .. } => builder.name("load targets"),
        Op::Load { what: LoadKind::Further(_), .. } => builder.name("load further tokens"),
        Op::Send { view, .. } => builder.name(&format!("send {}", buffer(view.buffer))),
        Op::Recv { view, .. } => builder.name(&format!("recv {}", buffer(view.buffer))),
        Op::Accumulate { into, .. } => builder.name(&format!("accumulate {}", buffer(into.buffer))),
        Op::Step { bucket, phase } => {
            let bucket = &program.buckets[bucket as usize].name;
            builder.name(&format!("{} {bucket}", phase.word()))
        }
        Op::Stash { into, .. } => builder.name(&format!("stash {}", buffer(into.buffer))),
        Op::Restore { into, .. } => builder.name(&format!("restore {}", buffer(into.buffer))),
        Op::Free { .. } => builder.name("free"),
        Op::Serve { service } => builder.name(&format!("serve {service}")),
    }
}
