//! Separates waiting for the last arrival at a collective from communication.
//!
//! A rank alone only knows when the first reply arrived, and a ring neighbour may reply long before
//! the rank behind it has arrived. The merged traces of all ranks give every arrival time. The
//! executor's communication then begins as in the simulator: when all members have arrived.

use super::{Span, SpanKind, Trace};
use crate::collective::CollectiveKind;
use crate::ids::Rank;
use crate::matching;
use crate::mesh::GroupKind;
use crate::program::{Plan, Program};
use crate::units::Seconds;
use std::collections::BTreeMap;

/// Collectives that meet: group, name of the lane, and number of the call there.
type CallKey<'p> = (GroupKind, &'p str, u32);

/// A collective of an iteration: iteration, matching key, first member.
type CollectiveInstance<'p> = (u32, CallKey<'p>, Rank);

impl Trace {
    /// Converts the time that ranks spent in a collective of the body, before all traced members
    /// arrived, into waiting. The spans must be sorted as by [`TraceBuilder`](super::TraceBuilder),
    /// with one clock for all ranks.
    pub fn split_arrival_wait(mut self, plan: &Plan) -> Self {
        let programs: Vec<_> = plan.programs.iter().map(|program| keys(plan, program)).collect();
        let mut firsts: BTreeMap<(GroupKind, Rank), Rank> = BTreeMap::new();
        let mut meeting = |span: &Span| -> Option<CollectiveInstance<'_>> {
            let of_role = programs.get(plan.role(span.rank).index())?;
            let key = (*of_role.get(span.op as usize)?)?;
            let first = *firsts.entry((key.0, span.rank)).or_insert_with(|| {
                let members = plan.mesh.members(key.0, span.rank);
                members.first().copied().unwrap_or(span.rank)
            });
            Some((span.iteration, key, first))
        };
        // Arrival and departure of each rank at each collective.
        let mut stays: BTreeMap<CollectiveInstance<'_>, BTreeMap<Rank, (f64, f64)>> =
            BTreeMap::new();
        for span in &self.spans {
            if let Some(meeting) = meeting(span) {
                let ranks = stays.entry(meeting).or_default();
                let (came, left) = ranks.entry(span.rank).or_insert((span.start.0, span.end.0));
                (*came, *left) = (came.min(span.start.0), left.max(span.end.0));
            }
        }
        let mut spans = Vec::with_capacity(self.spans.len());
        for span in &self.spans {
            let stay = meeting(span).filter(|_| span.kind == SpanKind::Collective);
            let Some(ranks) = stay.and_then(|meeting| stays.get(&meeting)) else {
                spans.push(*span);
                continue;
            };
            let last = ranks.values().map(|&(came, _)| came).fold(f64::NEG_INFINITY, f64::max);
            let cut = Seconds(last.clamp(span.start.0, span.end.0));
            if span.start.0 < cut.0 {
                spans.push(Span { kind: SpanKind::Wait, end: cut, ..*span });
            }
            // An op that only waited keeps an empty span.
            let leaves = ranks.get(&span.rank).is_some_and(|&(_, left)| left <= span.end.0);
            if cut.0 < span.end.0 || leaves {
                spans.push(Span { start: cut, ..*span });
            }
        }
        self.spans = spans;
        self
    }
}

/// Matching key by op of a program, for the body's collectives that no rank can leave before all
/// have arrived.
fn keys<'p>(plan: &Plan, program: &'p Program) -> Vec<Option<CallKey<'p>>> {
    let before = program.prologue.nodes.len();
    let mut keys = vec![None; before + program.body.nodes.len()];
    for ((group, lane), ops) in matching::calls(plan, program, &program.body) {
        for (k, op) in (0..).zip(ops) {
            let call = program.body.nodes[op.index()].op.call().map(|call| program.call(call).kind);
            keys[before + op.index()] = match call {
                Some(
                    CollectiveKind::AllReduce
                    | CollectiveKind::ReduceScatter
                    | CollectiveKind::AllGather
                    | CollectiveKind::AllToAll
                    | CollectiveKind::Barrier,
                ) => Some((group, lane, k)),
                // A root may send and leave; other members may contribute their part and leave.
                Some(
                    CollectiveKind::Broadcast
                    | CollectiveKind::Gather
                    | CollectiveKind::Reduce
                    | CollectiveKind::Scatter
                    | CollectiveKind::SendRecv,
                )
                | None => None,
            };
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use crate::ids::Rank;
    use crate::lower::lower;
    use crate::model::built_in;
    use crate::program::{Op, Plan};
    use crate::strategy::Strategy;
    use crate::trace::tests::Sketch;
    use crate::trace::{Origin, SpanKind::*, Trace};
    use crate::units::Seconds;

    /// Plan of four replicas, and the op number of their first all_reduce.
    fn replicas() -> (Plan, u32) {
        let model = built_in::get("mini").unwrap().unwrap();
        let strategy =
            Strategy { dp: 4, leaves: 4, global_batch: 4, seq: model.seq, ..Strategy::default() };
        let plan = lower(&model, &strategy).unwrap();
        let program = &plan.programs[0];
        let first = program.body.nodes.iter().position(|n| matches!(n.op, Op::Collective { .. }));
        let op = (program.prologue.nodes.len() + first.unwrap()) as u32;
        (plan, op)
    }

    fn exposed(trace: &Trace) -> Vec<f64> {
        let all = trace.breakdowns().into_iter();
        all.map(|(_, breakdown)| breakdown.exposed_communication.0).collect()
    }

    #[test]
    fn the_last_to_come_begins_it_for_all() {
        let (plan, op) = replicas();
        let mut sketch = Sketch::new(Origin::Measured, 4);
        // Rank 0 hears from rank 1 at once; rank 3 arrives at 6. All leave at 8, except rank 0,
        // which is off its core until 9.
        for (rank, (came, left)) in
            [(1.0, 9.0), (2.0, 8.0), (4.0, 8.0), (6.0, 8.0)].iter().enumerate()
        {
            let rank = rank as u32;
            sketch = sketch.span((rank, 0, 0), ("compute", Forward, "F"), (0.0, *came)).span(
                (rank, 0, op),
                ("reduce", Collective, "C"),
                (*came, *left),
            );
        }
        let sketch = sketch.span((0, 0, op), ("reduce", Wait, "C"), (1.5, 2.0));
        let trace = sketch.finish();
        assert_eq!(exposed(&trace), [7.5, 6.0, 4.0, 2.0]);
        let gathered = trace.clone().split_arrival_wait(&plan);
        assert_eq!(exposed(&gathered), [3.0, 2.0, 2.0, 2.0]);
        // No time is lost: former communication is now communication or waiting.
        let all = |trace: &Trace, rank| -> f64 {
            let own = trace.spans.iter().filter(|s| s.rank == Rank(rank) && s.op == op);
            own.map(|s| (s.end - s.start).0).sum()
        };
        assert!((0..4).all(|rank| all(&trace, rank) == all(&gathered, rank)));
        assert_eq!(gathered.clone().split_arrival_wait(&plan), gathered, "once is enough");
    }

    #[test]
    fn clocks_that_disagree_leave_an_empty_span() {
        let (plan, op) = replicas();
        let trace = Sketch::new(Origin::Measured, 4)
            .span((0, 0, op), ("reduce", Collective, "C"), (0.0, 1.0))
            .span((1, 0, op), ("reduce", Collective, "C"), (2.0, 3.0))
            .finish()
            .split_arrival_wait(&plan);
        let of_first: Vec<_> = trace.spans.iter().filter(|s| s.rank == Rank(0)).collect();
        assert_eq!((of_first[0].kind, of_first[0].end), (Wait, Seconds(1.0)));
        assert_eq!((of_first[1].kind, of_first[1].start), (Collective, Seconds(1.0)));
        assert_eq!(of_first.len(), 2);
    }
}
