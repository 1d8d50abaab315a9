//! A trace with fewer, larger spans, for drawings that cannot show all of them.

use paceline_plan::ids::Rank;
use paceline_plan::trace::{Span, SpanKind, Trace, TraceBuilder};
use paceline_plan::units::Seconds;
use std::collections::BTreeMap;

/// Gaps shorter than this share of the iteration are not visible.
const GAP: f64 = 1.0 / 800.0;

/// A trace whose spans represent runs of ops.
pub(super) struct Coarse {
    pub(super) trace: Trace,
    /// Share of a run that its ops fill, by rank, iteration and first op, if not all of it.
    filled: BTreeMap<(Rank, u32, u32), f64>,
}

impl Coarse {
    /// Joins the ops of one microbatch and one pass on one lane if no visible gap separates them. A
    /// run has the kind that takes most of its time. Short waits and ops of zero duration are left
    /// out.
    pub(super) fn new(trace: &Trace) -> Self {
        let gap = trace.steady_window().map_or(0.0, |window| window.length().0 * GAP);
        let mut builder = TraceBuilder::new(trace.origin, trace.title.clone(), trace.world);
        let mut filled = BTreeMap::new();
        let mut write = |run: SpanRun| {
            if let Some(share) = run.share().filter(|_| run.first.kind != SpanKind::Wait) {
                filled.insert((run.first.rank, run.first.iteration, run.first.op), share);
            }
            run.write(trace, &mut builder);
        };
        let mut open: Option<SpanRun> = None;
        // Spans are ordered by rank, lane and start.
        for span in trace.spans.iter().filter(|span| span.duration().0 > 0.0) {
            if span.kind == SpanKind::Wait && span.duration().0 < gap {
                continue;
            }
            match &mut open {
                Some(run) if run.takes(span, gap) => run.add(span),
                _ => open.replace(SpanRun::new(span)).into_iter().for_each(&mut write),
            }
        }
        open.into_iter().for_each(&mut write);
        Self { trace: builder.finish(), filled }
    }

    /// The share of a span that its ops fill.
    pub(super) fn filled(&self, span: &Span) -> f64 {
        if span.kind == SpanKind::Wait {
            return 1.0;
        }
        self.filled.get(&(span.rank, span.iteration, span.op)).copied().unwrap_or(1.0)
    }
}

/// A run of joined spans.
struct SpanRun {
    first: Span,
    end: Seconds,
    count: usize,
    time: BTreeMap<SpanKind, f64>,
}

impl SpanRun {
    fn new(span: &Span) -> Self {
        let mut run = Self { first: *span, end: span.end, count: 0, time: BTreeMap::new() };
        run.add(span);
        run
    }

    fn takes(&self, span: &Span, gap: f64) -> bool {
        let of =
            |span: &Span| (span.rank, span.lane, span.iteration, span.microbatch, pass(span.kind));
        of(&self.first) == of(span) && span.start.0 - self.end.0 < gap
    }

    fn add(&mut self, span: &Span) {
        self.end = self.end.max(span.end);
        self.count += 1;
        *self.time.entry(span.kind).or_default() += span.duration().0;
    }

    /// Share of the run that its ops fill; `None` if they fill all of it.
    fn share(&self) -> Option<f64> {
        let share = self.time.values().sum::<f64>() / (self.end - self.first.start).0;
        (share < 0.99).then_some(share)
    }

    fn write(&self, trace: &Trace, builder: &mut TraceBuilder) {
        let longest = self.time.iter().max_by(|a, b| a.1.total_cmp(b.1));
        let kind = longest.map_or(self.first.kind, |(&kind, _)| kind);
        let name = trace.name(&self.first);
        let name = match self.count {
            1 => builder.name(name),
            count => builder.name(&format!("{name} and {} more", count - 1)),
        };
        let lane = builder.lane(trace.lane(&self.first));
        builder.push(Span { kind, name, lane, end: self.end, ..self.first });
    }
}

/// The pass that a kind belongs to; recomputation is part of the backward pass.
fn pass(kind: SpanKind) -> SpanKind {
    match kind {
        SpanKind::Recompute
        | SpanKind::Backward
        | SpanKind::BackwardInput
        | SpanKind::BackwardWeight => SpanKind::Backward,
        SpanKind::Load
        | SpanKind::Forward
        | SpanKind::Send
        | SpanKind::Recv
        | SpanKind::Collective
        | SpanKind::Accumulate
        | SpanKind::Optimizer
        | SpanKind::Weights
        | SpanKind::Offload
        | SpanKind::Serve
        | SpanKind::Wait => kind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::ids::Rank;
    use paceline_plan::trace::Origin;

    /// Joins spans, given as kind, microbatch, start and end, on one lane of an iteration of 1 s.
    fn joined(spans: &[(SpanKind, u32, f64, f64)]) -> Coarse {
        let mut builder = TraceBuilder::new(Origin::Simulated, "t", 1);
        let lane = builder.lane("compute");
        for (op, &(kind, microbatch, start, end)) in (0..).zip(spans) {
            let name = builder.name(&format!("op {op}"));
            let (start, end) = (Seconds(start), Seconds(end));
            let (rank, microbatch, iteration) = (Rank(0), Some(microbatch), 0);
            builder.push(Span { rank, lane, kind, name, microbatch, iteration, op, start, end });
        }
        Coarse::new(&builder.finish())
    }

    fn drawn(spans: &[(SpanKind, u32, f64, f64)]) -> Vec<(SpanKind, String, f64, f64)> {
        let Coarse { trace, .. } = joined(spans);
        let row = |span: &Span| (span.kind, trace.name(span).to_owned(), span.start.0, span.end.0);
        trace.spans.iter().map(row).collect()
    }

    #[test]
    fn a_pass_of_a_microbatch_is_one_span() {
        use SpanKind::{Backward, Forward, Recompute, Wait};
        let found = drawn(&[
            (Forward, 0, 0.0, 0.1),
            (Wait, 0, 0.1, 0.1005),
            (Forward, 0, 0.1005, 0.2),
            (Forward, 1, 0.2, 0.3),
            (Recompute, 0, 0.3, 0.4),
            (Backward, 0, 0.4, 0.6),
            (Recompute, 0, 0.6, 0.65),
            (Wait, 0, 0.65, 0.9),
            (Backward, 0, 0.9, 1.0),
        ]);
        let expected = [
            (Forward, "op 0 and 1 more", 0.0, 0.2),
            (Forward, "op 3", 0.2, 0.3),
            (Backward, "op 4 and 2 more", 0.3, 0.65),
            (Wait, "op 7", 0.65, 0.9),
            (Backward, "op 8", 0.9, 1.0),
        ];
        let expected = expected.map(|(kind, name, start, end)| (kind, name.to_owned(), start, end));
        assert_eq!(found, expected);
    }

    #[test]
    fn a_run_says_how_much_of_it_is_filled() {
        let (kind, step) = (SpanKind::Collective, 1.0 / 1000.0);
        let spans = [0.0, 1.0, 2.0, 3.0].map(|i| (kind, 0, i * step, (i + 0.25) * step));
        let run = joined(&[&spans[..], &[(kind, 1, 0.5, 1.0)]].concat());
        let shares: Vec<f64> = run.trace.spans.iter().map(|span| run.filled(span)).collect();
        assert_eq!(shares.len(), 2);
        assert!((shares[0] - 1.0 / 3.25).abs() < 1e-9 && shares[1] == 1.0, "{shares:?}");
    }

    #[test]
    fn what_lies_apart_stays_apart() {
        use SpanKind::Collective;
        let apart =
            [(Collective, 0, 0.0, 0.1), (Collective, 0, 0.5, 0.6), (Collective, 0, 0.9, 1.0)];
        assert_eq!(drawn(&apart).len(), 3);
        assert_eq!(drawn(&[]).len(), 0);
    }
}
