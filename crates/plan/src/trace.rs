//! The one trace that both engines write.
//!
//! The simulator and the executor run the same program, so their spans carry the same rank and op
//! number and can be laid over each other op by op ([`compare`]). A trace may hold fewer ranks than
//! its world: the simulator folds ranks that behave alike and writes one of each.
//!
//! The contract for writers:
//! - A span covers the time in which its op occupied its lane. Time in which the op was only
//!   blocked is a [`SpanKind::Wait`] span with the same lane and op number. It may be written
//!   beside the op's own span or inside it: [`TraceBuilder::finish`] cuts waiting out of the spans
//!   around it, so readers find the spans of a lane side by side.
//! - Ops are numbered over the whole program (prologue, body, epilogue), and the same op has the
//!   same number in every iteration. The prologue counts to the first iteration, the epilogue to
//!   the last.

mod breakdown;
mod builder;
mod compare;
mod gathered;
mod intervals;
mod misses;
mod perfetto;

pub use breakdown::{Breakdown, Window};
pub use builder::TraceBuilder;
pub use compare::{
    Comparison, NameComparison, OpComparison, RankComparison, Tally, compare, compare_ranks,
};
pub use intervals::Intervals;
pub use misses::{Cause, Class, Miss, Misses, misses};
pub use perfetto::{to_perfetto, to_perfetto_beside};

use crate::ids::Rank;
use crate::units::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// What ran, where, from when to when: an engine's account of some iterations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Stored")]
pub struct Trace {
    /// Which engine wrote it.
    pub origin: Origin,
    /// What was run, for people.
    pub title: String,
    /// Ranks of the run, of which the trace may hold only representatives.
    pub world: u32,
    /// Names of lanes, which spans index.
    pub lanes: Vec<String>,
    /// Names of ops, which spans index.
    pub names: Vec<String>,
    /// The spans, by rank, lane and start when a [`TraceBuilder`] made the trace.
    pub spans: Vec<Span>,
}

/// Which engine wrote a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The simulator, on a described cluster.
    Simulated,
    /// The executor, on real ranks.
    Measured,
}

impl Origin {
    /// The word shown to people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Simulated => "simulated",
            Self::Measured => "measured",
        }
    }
}

/// What a span's time was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// Fetching a microbatch's data.
    Load,
    /// A segment's forward pass.
    Forward,
    /// A segment's whole backward pass.
    Backward,
    /// The part of the backward pass that yields the gradient for the input.
    BackwardInput,
    /// The part of the backward pass that yields the gradient for the weights.
    BackwardWeight,
    /// A forward pass run again, because its activations were not kept.
    Recompute,
    /// Point-to-point, outgoing.
    Send,
    /// Point-to-point, incoming.
    Recv,
    /// A collective of a group.
    Collective,
    /// Adding a gradient to its accumulator.
    Accumulate,
    /// The optimizer's update.
    Optimizer,
    /// Stashing or restoring a version of the weights.
    Weights,
    /// To or from a rank's store.
    Offload,
    /// A parameter server answering its peers.
    Serve,
    /// An op that stands ready on its lane and is blocked by another rank or lane.
    Wait,
}

impl SpanKind {
    /// Every kind, in the order in which legends list them.
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

    /// The name in files and legends.
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

    /// Whether the rank itself is at work. Loading counts: a rank that reads its data is not idle.
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

    /// Whether bytes move between ranks, or between one and its store. Serving counts: a server's
    /// time goes to its peers' messages.
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

/// One op's occupation of a lane. Small, because a run writes millions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Row", into = "Row")]
pub struct Span {
    /// Where it ran.
    pub rank: Rank,
    /// Its lane, as an index into [`Trace::lanes`].
    pub lane: u8,
    /// What it did.
    pub kind: SpanKind,
    /// Its name, as an index into [`Trace::names`].
    pub name: u32,
    /// The microbatch it worked on, if it worked on one.
    pub microbatch: Option<u32>,
    /// The training iteration.
    pub iteration: u32,
    /// The op's number in its rank's program, by which two traces are joined.
    pub op: u32,
    /// When it began.
    pub start: Seconds,
    /// When it ended.
    pub end: Seconds,
}

impl Span {
    /// How long it lasted.
    pub fn duration(&self) -> Seconds {
        self.end - self.start
    }
}

/// A span in a file: a row without field names, a third of the size.
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

/// Why a text is not a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Not JSON, or JSON of another shape. The message has line and column.
    #[error("not a trace: {0}")]
    Json(#[from] serde_json::Error),
    /// A span refers to something the trace does not have.
    #[error("span {span}: {what} {index} does not exist, the trace has {len}")]
    OutOfRange {
        /// The span's position in the file.
        span: usize,
        /// What is missing: a rank, a lane or a name.
        what: &'static str,
        /// The index that was given.
        index: u32,
        /// How many there are.
        len: usize,
    },
    /// A span ends before it begins, or at no time at all.
    #[error(
        "span {span}: runs from {start} s to {end} s; \
         both must be finite, the end not before the start"
    )]
    Time {
        /// The span's position in the file.
        span: usize,
        /// The start that was given.
        start: f64,
        /// The end that was given.
        end: f64,
    },
}

impl Trace {
    /// Reads what [`Trace::to_json`] wrote, and refuses a trace that contradicts itself.
    ///
    /// Times come back to within one unit in the last place.
    pub fn from_json(text: &str) -> Result<Self, TraceError> {
        Ok(serde_json::from_str(text)?)
    }

    /// As JSON, one array for each span.
    ///
    /// Fails only for a trace that does not pass [`Trace::check`].
    pub fn to_json(&self) -> Result<String, TraceError> {
        self.check()?;
        Ok(serde_json::to_string(self)?)
    }

    /// The first contradiction in the trace, if there is one. Reading a file checks by itself.
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

    /// The name of a span's op.
    pub fn name(&self, span: &Span) -> &str {
        self.names.get(span.name as usize).map_or("?", String::as_str)
    }

    /// The name of a span's lane.
    pub fn lane(&self, span: &Span) -> &str {
        self.lanes.get(usize::from(span.lane)).map_or("?", String::as_str)
    }

    /// The ranks that the trace holds, ascending; representatives where the simulator folded.
    pub fn ranks(&self) -> Vec<Rank> {
        self.spans.iter().map(|s| s.rank).collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// A trace as it stands in a file, before it is known to make sense.
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

    /// A builder that takes spans in one line, for the tests of this module.
    pub(crate) struct Sketch(TraceBuilder);

    impl Sketch {
        pub(crate) fn new(origin: Origin, world: u32) -> Self {
            Self(TraceBuilder::new(origin, "sketch", world))
        }

        /// Rank, iteration and op, then lane, kind and name, then start and end.
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
