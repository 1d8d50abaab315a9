//! Trace format shared by the simulator and the executor.
//!
//! Both run the same program, so their spans carry the same rank and op number and can be compared
//! op by op ([`compare()`]). A trace may hold fewer ranks than its world: the simulator folds
//! symmetric ranks and writes one of each class.
//!
//! Rules for writers:
//! - A span covers the time in which its op occupied its lane. Time in which the op was only
//!   blocked is a [`SpanKind::Wait`] span with the same lane and op number. It may be written
//!   beside the op's own span or inside it: [`TraceBuilder::finish`] cuts waiting out of the
//!   enclosing spans, so the spans of a lane do not overlap for readers.
//! - Ops are numbered over the whole program (prologue, body, epilogue), and the same op has the
//!   same number in every iteration. The prologue counts to the first iteration, the epilogue to
//!   the last.

mod breakdown;
mod builder;
mod collective_wait;
mod compare;
mod error_attribution;
mod intervals;
mod perfetto;

pub use breakdown::{Breakdown, Window};
pub use builder::TraceBuilder;
pub use compare::{
    Comparison, NameComparison, OpComparison, RankComparison, Tally, compare, compare_ranks,
};
pub use error_attribution::{Cause, Class, ErrorAttribution, ErrorTerm, attribute_error};
pub use intervals::Intervals;
pub use perfetto::{to_perfetto, to_perfetto_with};

use crate::ids::Rank;
use crate::program::ComputePass;
use crate::units::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Spans of some iterations, written by one engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Stored")]
pub struct Trace {
    /// Engine that wrote it.
    pub origin: Origin,
    /// Human-readable title of the run.
    pub title: String,
    /// Number of ranks of the run; the trace may hold only representatives.
    pub world: u32,
    /// Lane names, indexed by spans.
    pub lanes: Vec<String>,
    /// Op names, indexed by spans.
    pub names: Vec<String>,
    /// The spans, sorted by rank, lane and start if a [`TraceBuilder`] built the trace.
    pub spans: Vec<Span>,
}

/// Engine that wrote a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The simulator, on a described cluster.
    Simulated,
    /// The executor, on real ranks.
    Measured,
}

impl Origin {
    /// Display name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Simulated => "simulated",
            Self::Measured => "measured",
        }
    }
}

/// Activity of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// Fetching a microbatch's data.
    Load,
    /// A segment's forward pass.
    Forward,
    /// A segment's full backward pass.
    Backward,
    /// The part of the backward pass that computes the input gradient.
    BackwardInput,
    /// The part of the backward pass that computes the weight gradients.
    BackwardWeight,
    /// A forward pass run again because its activations were not saved.
    Recompute,
    /// Point-to-point send.
    Send,
    /// Point-to-point receive.
    Recv,
    /// A collective of a group.
    Collective,
    /// Adding a gradient to its accumulator.
    Accumulate,
    /// The optimizer's update.
    Optimizer,
    /// Stashing or restoring a version of the weights.
    Weights,
    /// Transfer to or from a rank's offload store.
    Offload,
    /// A parameter server answering its peers.
    Serve,
    /// An op that is next on its lane and blocked by another rank or lane.
    Wait,
}

impl From<ComputePass> for SpanKind {
    fn from(pass: ComputePass) -> Self {
        match pass {
            ComputePass::Forward => Self::Forward,
            ComputePass::Backward => Self::Backward,
            ComputePass::BackwardInput => Self::BackwardInput,
            ComputePass::BackwardWeight => Self::BackwardWeight,
            ComputePass::Recompute => Self::Recompute,
            ComputePass::Update => Self::Optimizer,
        }
    }
}

impl SpanKind {
    /// All kinds, in legend order.
    pub const ALL: [Self; 15] = [
        Self::Load,
        Self::Forward,
        Self::Backward,
        Self::BackwardInput,
        Self::BackwardWeight,
        Self::Recompute,
        Self::Send,
        Self::Recv,
        Self::Collective,
        Self::Accumulate,
        Self::Optimizer,
        Self::Weights,
        Self::Offload,
        Self::Serve,
        Self::Wait,
    ];

    /// Name in files and legends.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::BackwardInput => "backward_input",
            Self::BackwardWeight => "backward_weight",
            Self::Recompute => "recompute",
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Collective => "collective",
            Self::Accumulate => "accumulate",
            Self::Optimizer => "optimizer",
            Self::Weights => "weights",
            Self::Offload => "offload",
            Self::Serve => "serve",
            Self::Wait => "wait",
        }
    }

    /// Returns true if the rank itself is working, which includes loading its data.
    pub const fn is_compute(self) -> bool {
        match self {
            Self::Load
            | Self::Forward
            | Self::Backward
            | Self::BackwardInput
            | Self::BackwardWeight
            | Self::Recompute
            | Self::Accumulate
            | Self::Optimizer
            | Self::Weights => true,
            Self::Send
            | Self::Recv
            | Self::Collective
            | Self::Offload
            | Self::Serve
            | Self::Wait => false,
        }
    }

    /// Returns true if bytes move between ranks, or between a rank and its offload store. Serving
    /// counts: a server spends its time on its peers' messages.
    pub const fn is_communication(self) -> bool {
        match self {
            Self::Send | Self::Recv | Self::Collective | Self::Offload | Self::Serve => true,
            Self::Load
            | Self::Forward
            | Self::Backward
            | Self::BackwardInput
            | Self::BackwardWeight
            | Self::Recompute
            | Self::Accumulate
            | Self::Optimizer
            | Self::Weights
            | Self::Wait => false,
        }
    }
}

impl fmt::Display for SpanKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One op's occupancy of a lane. Compact, because a run writes millions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Row", into = "Row")]
pub struct Span {
    /// The rank.
    pub rank: Rank,
    /// Lane, as an index into [`Trace::lanes`].
    pub lane: u8,
    /// Activity of the span.
    pub kind: SpanKind,
    /// Name, as an index into [`Trace::names`].
    pub name: u32,
    /// The microbatch, if the op belongs to one.
    pub microbatch: Option<u32>,
    /// The training iteration.
    pub iteration: u32,
    /// Op number in the rank's program; two traces are joined by it.
    pub op: u32,
    /// Start time.
    pub start: Seconds,
    /// End time.
    pub end: Seconds,
}

impl Span {
    /// Duration of the span.
    pub fn duration(&self) -> Seconds {
        self.end - self.start
    }
}

/// A span in a file: a row without field names, at a third of the size.
type Row = (Rank, u8, SpanKind, u32, Option<u32>, u32, u32, Seconds, Seconds);

impl From<Row> for Span {
    fn from((rank, lane, kind, name, microbatch, iteration, op, start, end): Row) -> Self {
        Self { rank, lane, kind, name, microbatch, iteration, op, start, end }
    }
}

impl From<Span> for Row {
    fn from(s: Span) -> Self {
        (s.rank, s.lane, s.kind, s.name, s.microbatch, s.iteration, s.op, s.start, s.end)
    }
}

/// Reason that a text is not a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Not JSON, or JSON of another structure. The message has line and column.
    #[error("not a trace: {0}")]
    Json(#[from] serde_json::Error),
    /// A span refers to an item that the trace does not have.
    #[error("span {span}: {what} {index} does not exist, the trace has {len}")]
    OutOfRange {
        /// Index of the span in the file.
        span: usize,
        /// The missing item: a rank, a lane or a name.
        what: &'static str,
        /// The given index.
        index: u32,
        /// Number of items.
        len: usize,
    },
    /// A span ends before it begins, or has a time that is not finite.
    #[error(
        "span {span}: runs from {start} s to {end} s; \
         both must be finite, the end not before the start"
    )]
    Time {
        /// Index of the span in the file.
        span: usize,
        /// The given start.
        start: f64,
        /// The given end.
        end: f64,
    },
}

impl Trace {
    /// Parses the output of [`Trace::to_json`] and rejects inconsistent traces.
    ///
    /// Times round-trip to within one unit in the last place.
    pub fn from_json(text: &str) -> Result<Self, TraceError> {
        Ok(serde_json::from_str(text)?)
    }

    /// Serializes as JSON, one array per span.
    ///
    /// Fails only for a trace that does not pass [`Trace::check`].
    pub fn to_json(&self) -> Result<String, TraceError> {
        self.check()?;
        Ok(serde_json::to_string(self)?)
    }

    /// Returns the first inconsistency as an error. Parsing a file calls this.
    pub fn check(&self) -> Result<(), TraceError> {
        for (span, s) in self.spans.iter().enumerate() {
            let indices = [
                ("rank", s.rank.0, self.world as usize),
                ("lane", u32::from(s.lane), self.lanes.len()),
                ("name", s.name, self.names.len()),
            ];
            for (what, index, len) in indices {
                if index as usize >= len {
                    return Err(TraceError::OutOfRange { span, what, index, len });
                }
            }
            let (start, end) = (s.start.0, s.end.0);
            if !(start.is_finite() && end.is_finite() && start <= end) {
                return Err(TraceError::Time { span, start, end });
            }
        }
        Ok(())
    }

    /// Name of a span's op.
    pub fn name(&self, span: &Span) -> &str {
        self.names.get(span.name as usize).map_or("?", String::as_str)
    }

    /// Name of a span's lane.
    pub fn lane(&self, span: &Span) -> &str {
        self.lanes.get(usize::from(span.lane)).map_or("?", String::as_str)
    }

    /// Ranks in the trace, ascending; representatives if the simulator folded ranks.
    pub fn ranks(&self) -> Vec<Rank> {
        self.spans.iter().map(|s| s.rank).collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// A trace as read from a file, before it is checked.
#[derive(Deserialize)]
struct Stored {
    origin: Origin,
    title: String,
    world: u32,
    lanes: Vec<String>,
    names: Vec<String>,
    spans: Vec<Span>,
}

impl TryFrom<Stored> for Trace {
    type Error = TraceError;
    fn try_from(stored: Stored) -> Result<Self, TraceError> {
        let Stored { origin, title, world, lanes, names, spans } = stored;
        let trace = Self { origin, title, world, lanes, names, spans };
        trace.check()?;
        Ok(trace)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A builder that adds a span per call, for the tests of this module.
    pub(crate) struct Sketch(TraceBuilder);

    impl Sketch {
        pub(crate) fn new(origin: Origin, world: u32) -> Self {
            Self(TraceBuilder::new(origin, "sketch", world))
        }

        /// Adds a span: rank, iteration and op, then lane, kind and name, then start and end.
        pub(crate) fn span(
            mut self,
            (rank, iteration, op): (u32, u32, u32),
            (lane, kind, name): (&str, SpanKind, &str),
            (start, end): (f64, f64),
        ) -> Self {
            let (lane, name) = (self.0.lane(lane), self.0.name(name));
            let (start, end) = (Seconds(start), Seconds(end));
            let rank = Rank(rank);
            self.0.push(Span {
                rank,
                lane,
                kind,
                name,
                microbatch: None,
                iteration,
                op,
                start,
                end,
            });
            self
        }

        pub(crate) fn finish(self) -> Trace {
            self.0.finish()
        }
    }

    pub(crate) fn two_ranks() -> Trace {
        Sketch::new(Origin::Measured, 2)
            .span((1, 0, 1), ("comm", SpanKind::Recv, "R0"), (1.0, 1.25))
            .span((0, 0, 0), ("compute", SpanKind::Forward, "F0"), (0.1, 1.0))
            .span((1, 0, 2), ("compute", SpanKind::Forward, "F0"), (1.25, 2.0))
            .finish()
    }

    #[test]
    fn json_comes_back() {
        let trace = two_ranks();
        let text = trace.to_json().unwrap();
        assert!(text.contains(r#"[0,1,"forward",1,null,0,0,0.1,1.0]"#), "{text}");
        assert_eq!(Trace::from_json(&text).unwrap(), trace);
    }

    #[test]
    fn kinds_in_files_have_their_names_and_one_class_each() {
        for kind in SpanKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
            assert!(!(kind.is_compute() && kind.is_communication()), "{kind}");
        }
        assert!(!SpanKind::Wait.is_compute() && !SpanKind::Wait.is_communication());
    }

    #[test]
    fn contradictions_are_refused_and_located() {
        let good = two_ranks();
        let refused = |change: fn(&mut Trace)| {
            let mut bad = good.clone();
            change(&mut bad);
            let text = serde_json::to_string(&bad).unwrap();
            Trace::from_json(&text).unwrap_err().to_string()
        };
        let message = refused(|t| t.spans[1].rank = Rank(2));
        assert!(message.contains("span 1: rank 2 does not exist, the trace has 2"), "{message}");
        assert!(refused(|t| t.spans[0].lane = 9).contains("lane 9"));
        assert!(refused(|t| t.spans[0].name = u32::MAX).contains("name 4294967295"));
        assert!(refused(|t| t.spans[2].end = Seconds(0.5)).contains("span 2: runs from"));
        let mut endless = good.clone();
        endless.spans[0].end = Seconds(f64::INFINITY);
        assert!(matches!(endless.to_json(), Err(TraceError::Time { span: 0, .. })));
    }
}
