//! Conversion of the timeline to the trace format shared with the executor.

use super::rank_groups::shown;
use crate::cluster::Cluster;
use crate::engine::{Class, Timeline};
use paceline_plan::ids::OpId;
use paceline_plan::program::{Plan, label};
use paceline_plan::trace::{Origin, Span, SpanKind, Trace, TraceBuilder};
use paceline_plan::units::Seconds;

/// Traces one iteration on one rank of each role and of each group of ranks that differ. A wait
/// span precedes its op: from the end of the previous op on the lane to the op's start.
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
    // Ops are numbered over the whole program, and the body follows the prologue.
    let first = program.prologue.nodes.len() as u32;
    for (index, node) in program.body.nodes.iter().enumerate() {
        let (start, end) = timeline.span_of(class, OpId::from(index));
        let before = free[node.lane.index()];
        // An op that represents many ranks may overlap the next op of its lane or end after it.
        let start = start.max(before);
        let end = end.max(start);
        free[node.lane.index()] = end;
        let Some(kind) = label::span_kind(plan, program, &node.op) else { continue };
        let span = Span {
            rank,
            lane: lanes[node.lane.index()],
            kind,
            name: builder.name(&label::span_name(plan, program, &node.op)),
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
