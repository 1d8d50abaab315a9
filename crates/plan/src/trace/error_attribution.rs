//! Error attribution: terms that sum to the prediction error.

use super::{Span, SpanKind, Trace, Window};
use crate::ids::Rank;
use crate::trace::Tally;
use crate::units::Seconds;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Attributes the time of the steady iteration in both traces, averaged over the ranks that both
/// hold. `None` if a trace has no iteration or the traces share no rank.
pub fn attribute_error(simulated: &Trace, measured: &Trace) -> Option<ErrorAttribution> {
    let (predicted, seen) = (simulated.steady_window()?, measured.steady_window()?);
    let held: BTreeSet<Rank> = measured.ranks().into_iter().collect();
    let both: BTreeSet<Rank> =
        simulated.ranks().into_iter().filter(|rank| held.contains(rank)).collect();
    if both.is_empty() {
        return None;
    }
    let share = 1.0 / both.len() as f64;
    let mut parts: BTreeMap<Cause, Tally> = BTreeMap::new();
    for rank in both {
        for (cause, time) in spent(simulated, rank, &predicted) {
            parts.entry(cause).or_default().simulated += time * share;
        }
        for (cause, time) in spent(measured, rank, &seen) {
            parts.entry(cause).or_default().measured += time * share;
        }
    }
    let mut parts: Vec<ErrorTerm> =
        parts.into_iter().map(|(cause, tally)| ErrorTerm { cause, tally }).collect();
    parts.sort_by(|a, b| b.tally.gap().total_cmp(&a.tally.gap()));
    let iteration = Tally { simulated: predicted.length(), measured: seen.length() };
    Some(ErrorAttribution { iteration, parts })
}

/// A prediction error, split by cause.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ErrorAttribution {
    /// The whole iteration.
    pub iteration: Tally,
    /// Time by cause, largest difference first. Every moment of a rank belongs to one cause, so
    /// that both sides sum to the iteration.
    pub parts: Vec<ErrorTerm>,
}

impl ErrorAttribution {
    /// Sum of all parts of one class.
    pub fn of(&self, class: Class) -> Tally {
        let mut sum = Tally::default();
        for part in self.parts.iter().filter(|part| part.cause.class() == class) {
            sum.simulated += part.tally.simulated;
            sum.measured += part.tally.measured;
        }
        sum
    }
}

/// Predicted and measured time of one cause, averaged over ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ErrorTerm {
    /// The cause.
    pub cause: Cause,
    /// Its predicted and measured time.
    pub tally: Tally,
}

/// Activity to which a moment of a rank is attributed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Ops of one name and kind; for communication, only the exposed part.
    Ops {
        /// Name of the ops.
        name: String,
        /// Activity of the ops.
        kind: SpanKind,
    },
    /// The bubble: nothing ran.
    Waiting,
}

/// Class of time in an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Computation.
    Compute,
    /// Communication not hidden by compute.
    Exposed,
    /// Neither.
    Waiting,
}

impl Cause {
    /// Class of the cause.
    pub fn class(&self) -> Class {
        match self {
            Self::Ops { kind, .. } if kind.is_compute() => Class::Compute,
            Self::Ops { .. } => Class::Exposed,
            Self::Waiting => Class::Waiting,
        }
    }
}

/// Time of a rank's window by cause: the compute op that ran, else the exchange in flight for the
/// longest time, else waiting.
fn spent(trace: &Trace, rank: Rank, window: &Window) -> BTreeMap<Cause, Seconds> {
    let touches = |s: &&Span| {
        s.rank == rank
            && (s.kind.is_compute() || s.kind.is_communication())
            && s.start.0 < window.end.0
            && s.end.0 > window.start.0
            && s.start.0 < s.end.0
    };
    let spans: Vec<&Span> = trace.spans.iter().filter(touches).collect();
    let mut edges: Vec<(f64, bool, usize)> = Vec::with_capacity(2 * spans.len());
    for (at, span) in spans.iter().enumerate() {
        edges.push((span.start.0.max(window.start.0), true, at));
        edges.push((span.end.0.min(window.end.0), false, at));
    }
    edges.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut times: BTreeMap<(u32, SpanKind), Seconds> = BTreeMap::new();
    let mut idle = Seconds::ZERO;
    // Running spans: compute before communication, earliest first.
    let mut running: BTreeSet<(bool, u64, usize)> = BTreeSet::new();
    let key = |at: usize| {
        let started = (spans[at].start.0 - window.start.0).max(0.0);
        // Non-negative floats sort like their bits.
        (!spans[at].kind.is_compute(), started.to_bits(), at)
    };
    let mut now = window.start.0;
    let last = (window.end.0, false, usize::MAX);
    for (edge, begins, at) in edges.into_iter().chain([last]) {
        let passed = Seconds(edge - now);
        match running.first() {
            Some(&(_, _, first)) => {
                let Span { name, kind, .. } = *spans[first];
                *times.entry((name, kind)).or_default() += passed;
            }
            None => idle += passed,
        }
        now = edge;
        if at == usize::MAX {
            break;
        }
        if begins {
            running.insert(key(at))
        } else {
            running.remove(&key(at))
        };
    }
    let named = |((name, kind), time): ((u32, SpanKind), Seconds)| {
        let name = trace.names.get(name as usize).cloned().unwrap_or_default();
        (Cause::Ops { name, kind }, time)
    };
    let mut spent: BTreeMap<Cause, Seconds> = BTreeMap::new();
    for (cause, time) in times.into_iter().map(named).chain([(Cause::Waiting, idle)]) {
        *spent.entry(cause).or_default() += time;
    }
    spent
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::SpanKind::*;
    use crate::trace::tests::Sketch;
    use crate::trace::{Breakdown, Origin};
    use proptest::prelude::*;

    /// Four iterations of ten seconds: a forward pass, and an exchange that it partly hides.
    fn run(origin: Origin, forward: f64, exchange: f64) -> Trace {
        let mut sketch = Sketch::new(origin, 2);
        for i in 0..4u32 {
            let t = 10.0 * f64::from(i);
            for rank in 0..2 {
                sketch = sketch
                    .span((rank, i, 0), ("compute", Forward, "F"), (t, t + forward))
                    .span((rank, i, 1), ("grads", Collective, "AR"), (t + 2.0, t + exchange));
            }
        }
        sketch.finish()
    }

    #[test]
    fn what_is_off_is_named_and_adds_up() {
        let misses =
            attribute_error(&run(Origin::Simulated, 4.0, 6.0), &run(Origin::Measured, 5.0, 9.0))
                .unwrap();
        let ops = |name: &str, kind| Cause::Ops { name: name.to_owned(), kind };
        let found: Vec<(Cause, f64, f64)> = misses
            .parts
            .iter()
            .map(|part| (part.cause.clone(), part.tally.simulated.0, part.tally.measured.0))
            .collect();
        assert_eq!(
            found,
            [
                (Cause::Waiting, 4.0, 1.0),
                (ops("AR", Collective), 2.0, 4.0),
                (ops("F", Forward), 4.0, 5.0),
            ]
        );
        let exposed = misses.of(Class::Exposed);
        assert_eq!((exposed.simulated.0, exposed.measured.0), (2.0, 4.0));
        assert_eq!(misses.iteration.difference(), Seconds::ZERO);
    }

    #[test]
    fn traces_that_have_nothing_in_common_have_no_misses() {
        let empty = Sketch::new(Origin::Simulated, 0).finish();
        let some = run(Origin::Measured, 1.0, 3.0);
        assert!(attribute_error(&empty, &some).is_none());
        let mut elsewhere = run(Origin::Simulated, 1.0, 3.0);
        elsewhere.spans.iter_mut().for_each(|span| span.rank = Rank(7));
        assert!(attribute_error(&elsewhere, &some).is_none());
    }

    proptest! {
        /// The parts match the breakdown, however spans overlap.
        #[test]
        fn parts_agree_with_the_breakdown(
            spans in prop::collection::vec((0u32..4, 0u32..3, 0.0f64..30.0, 0.0f64..9.0), 1..40),
        ) {
            let lanes = ["compute", "more", "grads", "sends"];
            let kinds = [Forward, Optimizer, Collective, Send];
            let mut sketch = Sketch::new(Origin::Measured, 1);
            for (op, (lane, iteration, start, long)) in (0..).zip(spans) {
                let at = lane as usize;
                sketch = sketch.span(
                    (0, iteration, op),
                    (lanes[at], kinds[at], lanes[at]),
                    (start, start + long),
                );
            }
            let trace = sketch.finish();
            let found = attribute_error(&trace, &trace).unwrap();
            let Breakdown { total, compute, exposed_communication, idle, .. } =
                trace.breakdowns()[0].1;
            for (class, time) in [
                (Class::Compute, compute),
                (Class::Exposed, exposed_communication),
                (Class::Waiting, idle),
            ] {
                prop_assert!((found.of(class).measured.0 - time.0).abs() < 1e-9, "{class:?}");
            }
            let sum: f64 = found.parts.iter().map(|part| part.tally.measured.0).sum();
            prop_assert!((sum - total.0).abs() < 1e-9);
        }
    }
}
