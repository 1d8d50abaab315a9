//! Breakdown of an iteration's time, per rank.

use super::{Intervals, Span, SpanKind, Trace};
use crate::ids::Rank;
use crate::units::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Time of one rank in an iteration: `compute + exposed_communication + idle = total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Breakdown {
    /// Length of the iteration.
    pub total: Seconds,
    /// Time in which the rank computes.
    pub compute: Seconds,
    /// Time in which the rank communicates, overlapped with compute or not.
    pub communication: Seconds,
    /// Communication not hidden by compute.
    pub exposed_communication: Seconds,
    /// The bubble: neither compute nor communication.
    pub idle: Seconds,
}

impl Breakdown {
    /// Idle fraction of the iteration, between 0 and 1.
    pub fn bubble_fraction(&self) -> f64 {
        if self.total.0 > 0.0 { self.idle.0 / self.total.0 } else { 0.0 }
    }
}

/// Time interval of an iteration over all ranks.
///
/// It lasts from the start of the iteration's first op on any rank to the start of the next
/// iteration's; an op that waits has not started. If iterations overlap, as in PipeDream or with
/// prefetched parameters, this is the steady-state period, not the longer time from an iteration's
/// first op to its last.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// The iteration.
    pub iteration: u32,
    /// Start of its first op.
    pub start: Seconds,
    /// Start of the next iteration; end of its own last op if the next one was not traced.
    pub end: Seconds,
}

impl Window {
    /// Duration of the iteration.
    pub fn length(&self) -> Seconds {
        self.end - self.start
    }

    fn is_touched_by(&self, span: &Span) -> bool {
        span.start.0 < self.end.0 && span.end.0 > self.start.0
    }
}

/// Windows of the iterations in some spans, in order.
fn windows<'s>(spans: impl IntoIterator<Item = &'s Span>) -> Vec<Window> {
    let mut extents: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
    for span in spans.into_iter().filter(|s| s.kind != SpanKind::Wait) {
        let extent = extents.entry(span.iteration).or_insert((f64::INFINITY, f64::NEG_INFINITY));
        *extent = (extent.0.min(span.start.0), extent.1.max(span.end.0));
    }
    let extents: Vec<_> = extents.into_iter().collect();
    let next = extents.iter().skip(1).map(Some).chain([None]);
    extents
        .iter()
        .zip(next)
        .map(|(&(iteration, (start, last)), next)| {
            let end = match next {
                Some(&(following, (begin, _))) if following - iteration == 1 => begin,
                _ => last,
            };
            // If the next iteration was prefetched before this one began, the window is empty.
            Window { iteration, start: Seconds(start), end: Seconds(end.max(start)) }
        })
        .collect()
}

/// Drops the first and the last window, unless nothing would be left.
fn steady(mut windows: Vec<Window>) -> Vec<Window> {
    if windows.len() > 2 {
        windows.pop();
    }
    if windows.len() > 1 {
        windows.remove(0);
    }
    windows
}

/// The window of median length, the lower one of two.
fn median(mut windows: Vec<Window>) -> Option<Window> {
    windows.sort_by(|a, b| a.length().0.total_cmp(&b.length().0));
    windows.get(windows.len().checked_sub(1)? / 2).copied()
}

impl Trace {
    /// The traced iterations, in order.
    pub fn windows(&self) -> Vec<Window> {
        windows(&self.spans)
    }

    /// Duration of each traced iteration.
    pub fn iteration_times(&self) -> Vec<Seconds> {
        self.windows().iter().map(Window::length).collect()
    }

    /// Iterations that represent the run: without the first (warm-up) and the last (draining),
    /// unless nothing would be left.
    pub fn steady_windows(&self) -> Vec<Window> {
        steady(self.windows())
    }

    /// The steady iteration of median length (the lower one of two), which reports show and
    /// compare. Asynchronous ranks drift apart; iterations in which all of them work are preferred.
    pub fn steady_window(&self) -> Option<Window> {
        let windows = self.steady_windows();
        let shared = self.shared_by_all(&windows);
        median(if shared.is_empty() { windows } else { shared })
    }

    /// Windows in which every rank that has any work is working.
    fn shared_by_all(&self, windows: &[Window]) -> Vec<Window> {
        let mut at_work: BTreeMap<Rank, Vec<bool>> = BTreeMap::new();
        for span in self.spans.iter().filter(|s| s.kind != SpanKind::Wait) {
            let touched = at_work.entry(span.rank).or_insert_with(|| vec![false; windows.len()]);
            for (touched, window) in touched.iter_mut().zip(windows) {
                *touched |= window.is_touched_by(span);
            }
        }
        let by_all = |at: usize| at_work.values().all(|touched| touched[at]);
        (0..windows.len()).filter(|at| by_all(*at)).map(|at| windows[at]).collect()
    }

    /// Breakdown of the steady iteration on every traced rank.
    pub fn breakdowns(&self) -> Vec<(Rank, Breakdown)> {
        self.steady_window().map_or_else(Vec::new, |window| self.breakdowns_in(&window))
    }

    /// Breakdown of an iteration's window on every traced rank; the spans in it may belong to other
    /// iterations. Asynchronous ranks may run that iteration long before or after; such a rank is
    /// shown in its own window.
    pub fn breakdowns_in(&self, window: &Window) -> Vec<(Rank, Breakdown)> {
        let mut by_rank: BTreeMap<Rank, Vec<&Span>> = BTreeMap::new();
        for span in &self.spans {
            by_rank.entry(span.rank).or_default().push(span);
        }
        let parts = by_rank.into_iter().map(|(rank, spans)| {
            let window = own_window(&spans, window).unwrap_or(*window);
            let spans: Vec<&Span> =
                spans.into_iter().filter(|span| window.is_touched_by(span)).collect();
            (rank, breakdown(&spans, &window))
        });
        parts.collect()
    }
}

/// Window of a rank that did no work of the iteration in `world`: the rank's own window of that
/// iteration. If that was not traced and the rank did no other work in `world`, its own steady
/// window.
fn own_window(spans: &[&Span], world: &Window) -> Option<Window> {
    let worked = |span: &&&Span| span.kind != SpanKind::Wait && world.is_touched_by(span);
    if spans.iter().filter(worked).any(|span| span.iteration == world.iteration) {
        return None;
    }
    let own = windows(spans.iter().copied());
    if let Some(same) = own.iter().find(|window| window.iteration == world.iteration) {
        return Some(*same);
    }
    if spans.iter().any(|span| worked(&span)) { None } else { median(steady(own)) }
}

/// One rank's breakdown over a window, from the spans that touch it.
fn breakdown(spans: &[&Span], window: &Window) -> Breakdown {
    let union = |chosen: fn(SpanKind) -> bool| {
        Intervals::new(spans.iter().filter(|s| chosen(s.kind)).map(|s| (s.start, s.end)))
    };
    let compute = union(SpanKind::is_compute);
    let communication = union(SpanKind::is_communication);
    let within = |set: &Intervals| set.measure_within(window.start, window.end);
    let exposed = within(&communication.subtract(&compute));
    let idle = window.length() - within(&compute) - exposed;
    Breakdown {
        total: window.length(),
        compute: within(&compute),
        communication: within(&communication),
        exposed_communication: exposed,
        // Rounding may make the idle time of a full window negative.
        idle: idle.max(Seconds::ZERO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Origin;
    use crate::trace::SpanKind::*;
    use crate::trace::tests::Sketch;
    use proptest::prelude::*;

    fn only(trace: &Trace) -> Breakdown {
        let all = trace.breakdowns();
        assert_eq!(all.len(), 1);
        all[0].1
    }

    #[test]
    fn overlap_waiting_and_bubbles_are_told_apart() {
        // compute  FFFFFF....BBBB
        // comm     ....CCCCCC.... with the collective blocked for its first unit
        let trace = Sketch::new(Origin::Simulated, 1)
            .span((0, 0, 0), ("compute", Forward, "F"), (0.0, 6.0))
            .span((0, 0, 1), ("comm", Collective, "C"), (4.0, 9.0))
            .span((0, 0, 1), ("comm", Wait, "C"), (4.0, 5.0))
            .span((0, 0, 2), ("compute", Backward, "B"), (10.0, 14.0))
            .finish();
        let expected = Breakdown {
            total: Seconds(14.0),
            compute: Seconds(10.0),
            communication: Seconds(4.0),
            exposed_communication: Seconds(3.0),
            idle: Seconds(1.0),
        };
        assert_eq!(only(&trace), expected);
        assert!((expected.bubble_fraction() - 1.0 / 14.0).abs() < 1e-12);
    }

    #[test]
    fn one_lane_waiting_does_not_hide_another_lanes_work() {
        let trace = Sketch::new(Origin::Measured, 1)
            .span((0, 0, 0), ("compute", Load, "L"), (0.0, 1.0))
            .span((0, 0, 1), ("compute", Wait, "F"), (1.0, 3.0))
            .span((0, 0, 2), ("recv", Recv, "R"), (2.0, 3.0))
            .span((0, 0, 1), ("compute", Forward, "F"), (3.0, 4.0))
            .finish();
        assert_eq!(only(&trace).exposed_communication, Seconds(1.0));
        assert_eq!(only(&trace).idle, Seconds(1.0));
    }

    #[test]
    fn overlapping_iterations_are_timed_by_their_period() {
        // Each iteration takes 3 on rank 0 and ends 2 later on rank 1; a new one starts every 3.
        let mut sketch = Sketch::new(Origin::Simulated, 2);
        for i in 0..4u32 {
            let t = 3.0 * f64::from(i);
            sketch = sketch.span((0, i, 0), ("compute", Forward, "F"), (t, t + 3.0)).span(
                (1, i, 0),
                ("compute", Forward, "F"),
                (t + 3.0, t + 5.0),
            );
        }
        let trace = sketch.finish();
        assert_eq!(trace.iteration_times(), [3.0, 3.0, 3.0, 5.0].map(Seconds));
        assert_eq!(trace.steady_window().unwrap().iteration, 1);
        // Rank 1's work of iteration 0 falls into the window of iteration 1: the steady state.
        let (rank, second) = trace.breakdowns()[1];
        assert_eq!((rank, second.compute, second.idle), (Rank(1), Seconds(2.0), Seconds(1.0)));
    }

    #[test]
    fn ranks_that_wait_for_nobody_are_told_of_by_their_own_clocks() {
        // Rank 0 finishes all of its iterations before rank 1 reaches its second.
        let mut sketch = Sketch::new(Origin::Measured, 2);
        for i in 0..4u32 {
            let (fast, slow) = (f64::from(i), 10.0 * f64::from(i));
            sketch = sketch.span((0, i, 0), ("compute", Forward, "F"), (fast, fast + 0.75)).span(
                (1, i, 0),
                ("compute", Forward, "F"),
                (slow, slow + 10.0),
            );
        }
        let trace = sketch.finish();
        let window = Window { iteration: 2, start: Seconds(20.0), end: Seconds(30.0) };
        let parts: Vec<_> = trace.breakdowns_in(&window).into_iter().map(|(_, b)| b).collect();
        assert_eq!((parts[0].total, parts[0].compute), (Seconds(1.0), Seconds(0.75)));
        assert_eq!((parts[0].idle, parts[0].communication), (Seconds(0.25), Seconds::ZERO));
        assert_eq!((parts[1].total, parts[1].compute), (Seconds(10.0), Seconds(10.0)));
        assert!(parts[1].exposed_communication.0.is_sign_positive());
    }

    #[test]
    fn a_rank_of_which_other_iterations_were_traced_is_shown_in_its_own() {
        // Rank 1 ran ahead and ended before the first traced iteration of rank 0.
        let mut sketch = Sketch::new(Origin::Measured, 2);
        for i in 0..5u32 {
            let (late, early) = (100.0 + 10.0 * f64::from(i), 2.0 * f64::from(i));
            sketch = sketch
                .span((0, 90 + i, 0), ("compute", Forward, "F"), (late, late + 8.0))
                .span((1, 97 + i, 0), ("compute", Forward, "F"), (early, early + 1.5));
        }
        let parts: Vec<_> = sketch.finish().breakdowns().into_iter().map(|(_, b)| b).collect();
        let spent = |b: &Breakdown| (b.total, b.compute, b.idle);
        assert_eq!(spent(&parts[0]), (Seconds(10.0), Seconds(8.0), Seconds(2.0)));
        assert_eq!(spent(&parts[1]), (Seconds(2.0), Seconds(1.5), Seconds(0.5)));
    }

    #[test]
    fn an_iteration_that_finds_everyone_at_work_is_shown() {
        // Rank 1 is traced from the middle of rank 0's iteration 3.
        let mut sketch = Sketch::new(Origin::Measured, 2);
        for i in 0..6u32 {
            let t = 10.0 * f64::from(i);
            sketch = sketch.span((0, i, 0), ("compute", Forward, "F"), (t, t + 9.0 - f64::from(i)));
        }
        for i in 3..5u32 {
            let t = 35.0 + 5.0 * f64::from(i - 3);
            sketch = sketch.span((1, i, 0), ("compute", Forward, "F"), (t, t + 1.0));
        }
        assert_eq!(sketch.finish().steady_window().unwrap().iteration, 3);
    }

    #[test]
    fn an_iteration_does_not_begin_with_a_wait() {
        let trace = Sketch::new(Origin::Measured, 2)
            .span((1, 0, 0), ("compute", Wait, "F"), (0.0, 2.0))
            .span((0, 0, 0), ("compute", Forward, "F"), (1.0, 2.0))
            .span((1, 0, 0), ("compute", Forward, "F"), (2.0, 3.0))
            .span((1, 1, 0), ("compute", Wait, "F"), (3.0, 5.0))
            .span((0, 1, 0), ("compute", Forward, "F"), (4.0, 5.0))
            .finish();
        let windows: Vec<_> = trace.windows().iter().map(|w| (w.start.0, w.end.0)).collect();
        assert_eq!(windows, [(1.0, 4.0), (4.0, 5.0)]);
    }

    #[test]
    fn the_steady_iteration_is_the_median_without_warmup() {
        let mut sketch = Sketch::new(Origin::Measured, 1);
        let mut t = 0.0;
        for (i, length) in [50.0, 4.0, 9.0, 5.0, 6.0, 1.0].into_iter().enumerate() {
            sketch = sketch.span((0, i as u32, 0), ("compute", Forward, "F"), (t, t + length));
            t += length;
        }
        let trace = sketch.finish();
        assert_eq!(trace.steady_window().unwrap().length(), Seconds(5.0));
        assert_eq!(trace.breakdowns()[0].1.total, Seconds(5.0));
    }

    #[test]
    fn few_iterations_still_have_a_steady_one() {
        let empty = Sketch::new(Origin::Measured, 1).finish();
        assert!(empty.steady_window().is_none() && empty.breakdowns().is_empty());
        let mut sketch = Sketch::new(Origin::Measured, 1);
        for i in [7, 9] {
            let t = f64::from(i);
            sketch = sketch.span((0, i, 0), ("compute", Forward, "F"), (t, t + 0.5));
            let trace = Sketch::new(Origin::Measured, 1)
                .span((0, i, 0), ("compute", Forward, "F"), (t, t + 0.5))
                .finish();
            assert_eq!(trace.steady_window().unwrap().iteration, i);
        }
        // Iteration 8 was not traced, so 7 ends with its own last span.
        assert_eq!(sketch.finish().iteration_times(), [0.5, 0.5].map(Seconds));
    }

    proptest! {
        #[test]
        fn the_parts_make_the_whole(
            spans in prop::collection::vec(
                (0..3u32, 0..14usize, 0..3usize, 0.0..100.0f64, 0.0..20.0f64, 0..4u32), 1..60),
        ) {
            let mut sketch = Sketch::new(Origin::Measured, 3);
            for (op, span) in spans.into_iter().enumerate() {
                let (rank, kind, lane, start, length, iteration) = span;
                let lane = ["a", "b", "c"][lane];
                let kind = SpanKind::ALL[kind];
                let place = (rank, iteration, op as u32);
                sketch = sketch.span(place, (lane, kind, "op"), (start, start + length));
            }
            let trace = sketch.finish();
            for window in trace.windows() {
                for (_, b) in trace.breakdowns_in(&window) {
                    let sum = b.compute + b.exposed_communication + b.idle;
                    prop_assert!((sum - b.total).0.abs() < 1e-9, "{b:?}");
                    prop_assert!(b.exposed_communication.0 <= b.communication.0 + 1e-9, "{b:?}");
                    prop_assert!(b.communication.0 <= b.total.0 + 1e-9, "{b:?}");
                    prop_assert!((0.0..=1.0 + 1e-9).contains(&b.bubble_fraction()), "{b:?}");
                }
            }
        }
    }
}
