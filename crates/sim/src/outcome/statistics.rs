//! Time breakdown of one role.

use super::OpStat;
use crate::engine::Timeline;
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::Plan;
use paceline_plan::program::label::{Label, span_kind};
use paceline_plan::trace::{Intervals, SpanKind};
use paceline_plan::units::Seconds;
use std::collections::BTreeMap;

/// Time breakdown of one rank: compute + exposed + idle is the iteration.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    pub(super) compute: Seconds,
    pub(super) communication: Seconds,
    pub(super) exposed: Seconds,
    pub(super) idle: Seconds,
    /// Intervals in which it computes.
    busy: Intervals,
}

impl Account {
    /// Computes the breakdown of a rank of a class.
    pub(super) fn new(plan: &Plan, class: u32, timeline: &Timeline, iteration: Seconds) -> Self {
        let program = &plan.programs[timeline.classes().get(class).role.index()];
        let (mut busy, mut moving) = (Vec::new(), Vec::new());
        for (index, node) in program.body.nodes.iter().enumerate() {
            let Some(kind) = span_kind(plan, program, &node.op) else { continue };
            let span = timeline.span_of(class, OpId::from(index));
            if kind.is_compute() {
                busy.push(span);
            } else if kind.is_communication() {
                moving.push(span);
            }
        }
        let (busy, moving) = (Intervals::new(busy), Intervals::new(moving));
        let (compute, exposed) = (busy.measure(), moving.subtract(&busy).measure());
        // Rounding may leave a negative rest in a full iteration.
        let idle = (iteration - compute - exposed).max(Seconds::ZERO);
        Self { compute, communication: moving.measure(), exposed, idle, busy }
    }

    /// Part of an interval in which the rank does not compute.
    pub(super) fn exposed_within(&self, start: Seconds, end: Seconds) -> Seconds {
        (end - start - self.busy.measure_within(start, end)).max(Seconds::ZERO)
    }

    /// Ops of the rank by kind, longest first.
    pub(super) fn ops(&self, plan: &Plan, role: RoleId, timeline: &Timeline) -> Vec<OpStat> {
        let Some(program) = plan.programs.get(role.index()) else { return Vec::new() };
        let mut sums: BTreeMap<Label, (u64, Seconds, Seconds)> = BTreeMap::new();
        for (index, node) in program.body.nodes.iter().enumerate() {
            let Some(label) = Label::of(plan, program, &node.op) else { continue };
            let (start, end) = timeline.span(role, OpId::from(index));
            let time = end - start;
            let kind = span_kind(plan, program, &node.op);
            let exposed = if kind.is_some_and(SpanKind::is_communication) {
                self.exposed_within(start, end)
            } else {
                Seconds::ZERO
            };
            let sum = sums.entry(label).or_default();
            sum.0 += 1;
            sum.1 += time;
            sum.2 += exposed;
        }
        let mut stats: Vec<OpStat> = sums
            .into_iter()
            .map(|(label, (count, time, exposed))| {
                let name = label.words(&plan.mesh);
                OpStat { name, count, time, exposed }
            })
            .collect();
        stats.sort_by(|a, b| b.time.0.total_cmp(&a.time.0));
        stats
    }
}
