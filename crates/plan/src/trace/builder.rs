//! Builder with which an engine writes a trace.

use super::{Origin, Span, SpanKind, Trace};
use crate::units::Seconds;
use std::collections::BTreeMap;

/// Collects spans into a [`Trace`], giving each distinct name one index.
#[derive(Clone, Debug)]
pub struct TraceBuilder {
    trace: Trace,
    names: BTreeMap<String, u32>,
}

/// Number of lanes that a span's index can address; the last one is shared by all that do not fit.
const MAX_LANES: usize = 256;

impl TraceBuilder {
    /// Creates an empty trace of a run of `world` ranks.
    pub fn new(origin: Origin, title: impl Into<String>, world: u32) -> Self {
        let (title, lanes, names) = (title.into(), Vec::new(), Vec::new());
        let trace = Trace { origin, title, world, lanes, names, spans: Vec::new() };
        Self { trace, names: BTreeMap::new() }
    }

    /// Returns the index of an op's name.
    pub fn name(&mut self, name: &str) -> u32 {
        if let Some(&index) = self.names.get(name) {
            return index;
        }
        let index = self.trace.names.len() as u32;
        self.trace.names.push(name.to_owned());
        self.names.insert(name.to_owned(), index);
        index
    }

    /// Returns the index of a lane's name. Lanes beyond 256 in a trace share one.
    pub fn lane(&mut self, name: &str) -> u8 {
        let lanes = &mut self.trace.lanes;
        let index = lanes.iter().position(|l| l == name).unwrap_or_else(|| {
            if lanes.len() + 1 < MAX_LANES {
                lanes.push(name.to_owned());
            } else if lanes.len() < MAX_LANES {
                lanes.push("other lanes".to_owned());
            }
            lanes.len() - 1
        });
        index as u8
    }

    /// Adds a span; its name and lane indices must come from this builder.
    pub fn push(&mut self, span: Span) {
        self.trace.spans.push(span);
    }

    /// Adds all spans of another trace, such as one rank's own. Clocks must agree.
    pub fn append(&mut self, other: &Trace) {
        for span in &other.spans {
            let (name, lane) = (self.name(other.name(span)), self.lane(other.lane(span)));
            self.push(Span { name, lane, ..*span });
        }
    }

    /// Returns the trace, with spans sorted by rank, lane and start, and waits cut out of the spans
    /// that enclose them.
    pub fn finish(mut self) -> Trace {
        self.trace.spans.sort_by(|a, b| {
            (a.rank, a.lane)
                .cmp(&(b.rank, b.lane))
                .then(a.start.0.total_cmp(&b.start.0))
                .then(b.end.0.total_cmp(&a.end.0))
                .then(a.op.cmp(&b.op))
        });
        self.trace.spans = without_waits(&self.trace.spans);
        self.trace
    }
}

/// Splits every span around the waits inside it. An op that only waited keeps an empty span, so
/// that it is still found in both traces.
fn without_waits(sorted: &[Span]) -> Vec<Span> {
    let mut out = Vec::with_capacity(sorted.len());
    // Rest of the latest working span, and a flag that a part of it was already written.
    let mut open: Option<(Span, bool)> = None;
    let close = |open: Option<(Span, bool)>, out: &mut Vec<Span>| {
        out.extend(
            open.and_then(|(rest, cut)| (!cut || rest.start.0 < rest.end.0).then_some(rest)),
        );
    };
    for span in sorted {
        if span.kind != SpanKind::Wait {
            close(open.replace((*span, false)), &mut out);
            continue;
        }
        if let Some((rest, cut)) = &mut open
            && (rest.rank, rest.lane) == (span.rank, span.lane)
            && span.start.0 < rest.end.0
        {
            if rest.start.0 < span.start.0 {
                out.push(Span { end: span.start, ..*rest });
                *cut = true;
            }
            rest.start = Seconds(rest.start.0.max(span.end.0.min(rest.end.0)));
        } else {
            close(open.take(), &mut out);
        }
        out.push(*span);
    }
    close(open, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Rank;
    use crate::trace::tests::{Sketch, two_ranks};

    #[test]
    fn names_are_interned_and_spans_ordered() {
        let trace = two_ranks();
        assert_eq!(trace.names, ["R0", "F0"]);
        assert_eq!(trace.lanes, ["comm", "compute"]);
        assert_eq!(trace.ranks(), [Rank(0), Rank(1)]);
        let order: Vec<_> = trace.spans.iter().map(|s| (s.rank.0, trace.lane(s), s.op)).collect();
        assert_eq!(order, [(0, "compute", 0), (1, "comm", 1), (1, "compute", 2)]);
    }

    #[test]
    fn traces_of_single_ranks_merge() {
        let whole = two_ranks();
        let mut builder = TraceBuilder::new(Origin::Measured, "sketch", 2);
        for rank in [Rank(1), Rank(0)] {
            let mut part = whole.clone();
            part.spans.retain(|s| s.rank == rank);
            builder.append(&part);
        }
        assert_eq!(builder.finish(), whole);
    }

    #[test]
    fn waiting_is_cut_out_of_the_span_around_it() {
        let kinds = [SpanKind::Wait, SpanKind::Serve, SpanKind::Recv];
        let [wait, serve, recv] = kinds.map(|kind| ("wire", kind, "op"));
        let cut = Sketch::new(Origin::Measured, 1)
            .span((0, 0, 0), serve, (0.0, 10.0))
            .span((0, 0, 0), wait, (0.0, 1.0))
            .span((0, 0, 0), wait, (4.0, 6.0))
            .span((0, 0, 0), wait, (9.0, 11.0))
            .span((0, 0, 1), recv, (12.0, 13.0))
            .span((0, 0, 1), wait, (12.0, 13.0))
            .span((0, 0, 2), recv, (13.0, 14.0))
            .finish();
        let lines: Vec<_> = cut.spans.iter().map(|s| (s.kind, s.start.0, s.end.0)).collect();
        use SpanKind::{Recv, Serve, Wait};
        let expected = [
            (Wait, 0.0, 1.0),
            (Serve, 1.0, 4.0),
            (Wait, 4.0, 6.0),
            (Serve, 6.0, 9.0),
            (Wait, 9.0, 11.0),
            (Wait, 12.0, 13.0),
            (Recv, 13.0, 13.0),
            (Recv, 13.0, 14.0),
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn lanes_beyond_the_index_share_one() {
        let mut builder = TraceBuilder::new(Origin::Simulated, "", 1);
        let indices: Vec<u8> = (0..300).map(|i| builder.lane(&format!("lane {i}"))).collect();
        assert_eq!(indices[254], 254);
        assert!(indices[255..].iter().all(|&i| i == 255));
        assert_eq!(builder.finish().lanes.len(), 256);
    }
}
