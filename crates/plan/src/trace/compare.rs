//! Op-by-op comparison of prediction and measurement.

use super::{Breakdown, Span, SpanKind, Trace, Window};
use crate::ids::Rank;
use crate::units::Seconds;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Compares a simulated with a measured trace: the same op of the same rank in both, averaged over
/// steady iterations and without waiting.
pub fn compare(simulated: &Trace, measured: &Trace) -> Comparison {
    let (predicted, seen) = (mean_ops(simulated), mean_ops(measured));
    let mut ops: Vec<OpComparison> = predicted
        .iter()
        .filter_map(|(&(rank, op), p)| {
            let m = seen.get(&(rank, op))?;
            let tally = Tally { simulated: p.time, measured: m.time };
            let (name, kind, microbatch) = (p.name.to_owned(), p.kind, p.microbatch);
            Some(OpComparison { rank, op, name, kind, microbatch, tally })
        })
        .collect();

    let mut names: BTreeMap<(&str, SpanKind), (usize, Tally)> = BTreeMap::new();
    for op in &ops {
        let (count, tally) = names.entry((&op.name, op.kind)).or_default();
        *count += 1;
        tally.simulated += op.tally.simulated;
        tally.measured += op.tally.measured;
    }
    let mut by_name: Vec<NameComparison> = names
        .into_iter()
        .map(|((name, kind), (count, tally))| NameComparison {
            name: name.to_owned(),
            kind,
            count,
            tally,
        })
        .collect();
    by_name.sort_by(|a, b| b.tally.gap().total_cmp(&a.tally.gap()));

    let joined = ops.len();
    ops.sort_by(|a, b| b.tally.gap().total_cmp(&a.tally.gap()));
    ops.truncate(Comparison::LARGEST);
    Comparison {
        iteration: steady_length(simulated)
            .zip(steady_length(measured))
            .map(|(simulated, measured)| Tally { simulated, measured }),
        ranks: compare_ranks(Some(simulated), Some(measured)),
        by_name,
        largest: ops,
        joined,
        only_simulated: predicted.len() - joined,
        only_measured: seen.len() - joined,
    }
}

/// Breakdown of the steady iteration on every rank that either trace holds.
pub fn compare_ranks(simulated: Option<&Trace>, measured: Option<&Trace>) -> Vec<RankComparison> {
    let of = |trace: Option<&Trace>| -> BTreeMap<Rank, Breakdown> {
        trace.map(Trace::breakdowns).unwrap_or_default().into_iter().collect()
    };
    let (predicted, seen) = (of(simulated), of(measured));
    let all: BTreeSet<Rank> = predicted.keys().chain(seen.keys()).copied().collect();
    all.into_iter()
        .map(|rank| RankComparison {
            rank,
            simulated: predicted.get(&rank).copied(),
            measured: seen.get(&rank).copied(),
        })
        .collect()
}

/// Result of [`compare`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Length of the steady iteration, if both traces have an iteration.
    pub iteration: Option<Tally>,
    /// Result of [`compare_ranks`].
    pub ranks: Vec<RankComparison>,
    /// Time per iteration by op name, summed over ranks; largest difference first.
    pub by_name: Vec<NameComparison>,
    /// Individual ops with the largest differences, largest first.
    pub largest: Vec<OpComparison>,
    /// Number of ops found in both traces.
    pub joined: usize,
    /// Number of ops found only in the simulation.
    pub only_simulated: usize,
    /// Number of ops found only in the measurement, such as those of folded ranks.
    pub only_measured: usize,
}

impl Comparison {
    /// Maximum length of [`Comparison::largest`].
    pub const LARGEST: usize = 64;
}

/// A predicted and a measured time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Tally {
    /// Time predicted by the simulator.
    pub simulated: Seconds,
    /// Time measured by the executor.
    pub measured: Seconds,
}

impl Tally {
    /// Predicted minus measured time.
    pub fn difference(&self) -> Seconds {
        self.simulated - self.measured
    }

    /// Error of the prediction relative to the measurement; `None` if nothing was measured.
    pub fn error(&self) -> Option<f64> {
        (self.measured.0 > 0.0).then(|| self.difference().0 / self.measured.0)
    }

    /// Absolute difference; lists are sorted by it.
    pub(super) fn gap(&self) -> f64 {
        self.difference().0.abs()
    }
}

/// All ops of one name, over all ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NameComparison {
    /// Name of the ops.
    pub name: String,
    /// Activity of the ops.
    pub kind: SpanKind,
    /// Number of such ops in an iteration, over all ranks that both traces hold.
    pub count: usize,
    /// Total time of the ops in one iteration.
    pub tally: Tally,
}

/// One op of one rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpComparison {
    /// The rank.
    pub rank: Rank,
    /// Op number in the rank's program.
    pub op: u32,
    /// Name of the op in the simulation.
    pub name: String,
    /// Activity of the op.
    pub kind: SpanKind,
    /// The microbatch, if the op belongs to one.
    pub microbatch: Option<u32>,
    /// Mean time of the op in an iteration.
    pub tally: Tally,
}

/// One rank's breakdown in each trace that holds the rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankComparison {
    /// The rank.
    pub rank: Rank,
    /// Breakdown predicted by the simulator.
    pub simulated: Option<Breakdown>,
    /// Breakdown measured by the executor.
    pub measured: Option<Breakdown>,
}

/// An op of a rank, averaged over iterations.
struct MeanOp<'a> {
    name: &'a str,
    kind: SpanKind,
    microbatch: Option<u32>,
    time: Seconds,
}

/// Mean time of every op, over the steady iterations in which it ran.
fn mean_ops(trace: &Trace) -> BTreeMap<(Rank, u32), MeanOp<'_>> {
    let steady: BTreeSet<u32> = trace.steady_windows().iter().map(|w| w.iteration).collect();
    let counts = |s: &&Span| s.kind != SpanKind::Wait && steady.contains(&s.iteration);
    let mut spans: BTreeMap<(Rank, u32), Vec<&Span>> = BTreeMap::new();
    for span in trace.spans.iter().filter(counts) {
        spans.entry((span.rank, span.op)).or_default().push(span);
    }
    let mean = |spans: Vec<&Span>| {
        let iterations: BTreeSet<u32> = spans.iter().map(|s| s.iteration).collect();
        let total: Seconds = spans.iter().map(|s| s.duration()).sum();
        let Span { kind, microbatch, .. } = *spans[0];
        let time = total * (1.0 / iterations.len() as f64);
        MeanOp { name: trace.name(spans[0]), kind, microbatch, time }
    };
    spans.into_iter().map(|(place, spans)| (place, mean(spans))).collect()
}

fn steady_length(trace: &Trace) -> Option<Seconds> {
    trace.steady_window().as_ref().map(Window::length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Origin;
    use crate::trace::SpanKind::*;
    use crate::trace::tests::Sketch;

    /// Three iterations of forward, send and all_reduce on two ranks; `slow` scales the all_reduce.
    fn run(origin: Origin, slow: f64) -> Trace {
        let mut sketch = Sketch::new(origin, 2);
        for i in 0..4u32 {
            let t = 10.0 * f64::from(i);
            for rank in 0..2 {
                sketch = sketch
                    .span((rank, i, 0), ("compute", Forward, "F"), (t, t + 2.0))
                    .span((rank, i, 1), ("compute", Forward, "F"), (t + 2.0, t + 4.0))
                    .span((rank, i, 2), ("grads", Wait, "AR"), (t + 4.0, t + 5.0))
                    .span((rank, i, 2), ("grads", Collective, "AR"), (t + 4.0, t + 5.0 + slow));
            }
        }
        sketch.finish()
    }

    #[test]
    fn ops_are_joined_summed_and_ordered() {
        let comparison = compare(&run(Origin::Simulated, 1.0), &run(Origin::Measured, 1.5));
        assert_eq!(
            (comparison.joined, comparison.only_simulated, comparison.only_measured),
            (6, 0, 0)
        );
        let names: Vec<_> = comparison
            .by_name
            .iter()
            .map(|n| (n.name.as_str(), n.count, n.tally.simulated.0, n.tally.measured.0))
            .collect();
        assert_eq!(names, [("AR", 2, 2.0, 3.0), ("F", 4, 8.0, 8.0)]);
        assert_eq!(comparison.largest[0].op, 2);
        assert!((comparison.largest[0].tally.error().unwrap() + 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(comparison.iteration.unwrap().error(), Some(0.0));
    }

    #[test]
    fn warmup_does_not_count() {
        let mut cold = run(Origin::Measured, 1.0);
        for span in cold.spans.iter_mut().filter(|s| s.iteration == 0 && s.op == 0) {
            span.start = Seconds(-100.0);
        }
        let comparison = compare(&run(Origin::Simulated, 1.0), &cold);
        assert!(comparison.by_name.iter().all(|n| n.tally.difference() == Seconds::ZERO));
    }

    #[test]
    fn folded_ranks_are_counted_as_not_joined() {
        let mut folded = run(Origin::Simulated, 1.0);
        folded.spans.retain(|s| s.rank == Rank(0));
        let comparison = compare(&folded, &run(Origin::Measured, 1.0));
        assert_eq!((comparison.joined, comparison.only_measured), (3, 3));
        assert_eq!(comparison.ranks.len(), 2);
        assert!(comparison.ranks[1].simulated.is_none() && comparison.ranks[1].measured.is_some());
    }

    #[test]
    fn an_empty_trace_compares_to_nothing() {
        let empty = Sketch::new(Origin::Simulated, 0).finish();
        let comparison = compare(&empty, &run(Origin::Measured, 1.0));
        assert_eq!((comparison.joined, comparison.only_measured), (0, 6));
        assert!(comparison.iteration.is_none() && comparison.by_name.is_empty());
        assert_eq!(Tally::default().error(), None);
    }
}
