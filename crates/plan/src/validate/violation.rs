//! Violations of a plan, as types with messages.

use super::SectionKind;
use crate::dtype::DType;
use crate::ids::{OpId, Rank, RoleId};
use crate::program::{Memory, MemoryKind};
use crate::units::Bytes;
use std::fmt;
use std::ops::Range;
use thiserror::Error;

/// A violation and its location.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{place}: {kind}")]
pub struct Violation {
    /// Location of the violation.
    pub place: Location,
    /// Kind of the violation.
    pub kind: ViolationKind,
}

impl Violation {
    /// Rank for which it is reported; `None` if it concerns the whole plan. All ranks of a role
    /// have the same problem.
    pub fn rank(&self) -> Option<Rank> {
        match &self.place {
            Location::Plan => None,
            Location::Role { rank, .. } | Location::Op { rank, .. } => Some(*rank),
        }
    }

    /// The violating op, if there is one.
    pub fn op(&self) -> Option<(SectionKind, OpId)> {
        match &self.place {
            Location::Plan | Location::Role { .. } => None,
            Location::Op { site, .. } => Some((site.section, site.op)),
        }
    }
}

/// Location of a violation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// In declarations that all roles share.
    Plan,
    /// In a role's declarations.
    Role {
        /// The role.
        role: RoleId,
        /// A rank of the role.
        rank: Rank,
    },
    /// At an op.
    Op {
        /// The role.
        role: RoleId,
        /// A rank of the role.
        rank: Rank,
        /// The op.
        site: Site,
    },
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plan => f.write_str("plan"),
            Self::Role { rank, .. } => write!(f, "rank {rank}"),
            Self::Op { rank, site, .. } => write!(f, "rank {rank}, {site}"),
        }
    }
}

/// An op with a short description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Section of the op.
    pub section: SectionKind,
    /// Position in the section.
    pub op: OpId,
    /// Description: `compute F.block.0 mb 2`.
    pub what: String,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.section {
            SectionKind::Body => write!(f, "op {} ({})", self.op, self.what),
            SectionKind::Prologue | SectionKind::Epilogue => {
                write!(f, "{} op {} ({})", self.section, self.op, self.what)
            }
        }
    }
}

/// Kind of a violation.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ViolationKind {
    /// The mesh has no ranks, too many, or expert axes that do not divide it.
    #[error("the mesh {why}")]
    Mesh {
        /// The problem.
        why: &'static str,
    },
    /// The number of programs is not one per pipeline rank and one per server.
    #[error("there are {found} programs for {expected} roles")]
    Programs {
        /// Required number of programs.
        expected: u64,
        /// Actual number of programs.
        found: u64,
    },
    /// A dangling reference.
    #[error("{what} {index} does not exist, there are {count}")]
    Dangling {
        /// Kind of the referenced item.
        what: &'static str,
        /// The referenced index.
        index: u64,
        /// Number of existing items.
        count: u64,
    },
    /// A declaration of the program contradicts itself or its documentation.
    #[error("{subject}: {problem}")]
    Declaration {
        /// The declaration.
        subject: String,
        /// The problem.
        problem: String,
    },
    /// A view extends beyond its buffer.
    #[error("{subject}: elements {offset}..+{len} reach beyond '{buffer}', which has {elements}")]
    ViewOutside {
        /// Owner of the view.
        subject: String,
        /// Name of the buffer.
        buffer: String,
        /// First element of the view.
        offset: u64,
        /// Number of elements of the view.
        len: u64,
        /// Number of elements of the buffer.
        elements: u64,
    },
    /// A segment has too few or too many operands.
    #[error("segment {segment} binds {found} operands, template '{template}' has {expected}")]
    OperandCount {
        /// The segment.
        segment: u32,
        /// Name of the template.
        template: String,
        /// Number of operands of the template.
        expected: u64,
        /// Number of operands of the segment.
        found: u64,
    },
    /// A segment's operand differs in size from its template's.
    #[error(
        "segment {segment} ('{template}') binds {found} elements to operand {operand}, which has {expected}"
    )]
    OperandElements {
        /// The segment.
        segment: u32,
        /// Name of the template.
        template: String,
        /// Index of the operand.
        operand: u64,
        /// Number of elements of the template's operand.
        expected: u64,
        /// Number of elements of the view.
        found: u64,
    },
    /// A segment's operand differs in dtype from its template's.
    #[error(
        "segment {segment} ('{template}') binds {found} to operand {operand}, which is {expected}"
    )]
    OperandType {
        /// The segment.
        segment: u32,
        /// Name of the template.
        template: String,
        /// Index of the operand.
        operand: u64,
        /// Dtype of the template's operand.
        expected: DType,
        /// Dtype of the buffer.
        found: DType,
    },
    /// An op waits for one that is not before it.
    #[error("waits for op {after}, which does not stand before it")]
    AfterLater {
        /// The op it waits for.
        after: OpId,
    },
    /// A compute op is not on the compute lane.
    #[error("computes on lane '{lane}', only the first lane computes")]
    ComputeLane {
        /// Name of the lane.
        lane: String,
    },
    /// An op without a microbatch refers to a buffer with a copy per microbatch.
    #[error(
        "belongs to no microbatch, so it cannot choose among the {copies} copies of '{buffer}'"
    )]
    AnyCopy {
        /// Name of the buffer.
        buffer: String,
        /// Number of copies.
        copies: u32,
    },

    /// The memory that is read was never written.
    #[error("reads '{buffer}', which nothing has written")]
    Undefined {
        /// Name of the buffer.
        buffer: String,
    },
    /// The memory that is read holds another buffer's content.
    #[error(
        "reads '{buffer}' after it was overwritten by {by}, which wrote '{other}' to the same memory"
    )]
    Overwritten {
        /// Name of the buffer.
        buffer: String,
        /// The buffer now stored there.
        other: String,
        /// The op that wrote it.
        by: Site,
    },
    /// The copy that is read now belongs to another microbatch.
    #[error(
        "reads '{buffer}' of running microbatch {expected}, but {by} left that of {found} there"
    )]
    WrongMicrobatch {
        /// Name of the buffer.
        buffer: String,
        /// Microbatch of the reader, counted across iterations.
        expected: u32,
        /// Microbatch of the writer.
        found: u32,
        /// The writer.
        by: Site,
    },
    /// Race: two unordered ops access the same memory, and one of them writes.
    #[error(
        "{verb} '{buffer}' at the same time as {other} {other_verb} it; an after edge must order them"
    )]
    Race {
        /// Access of this op.
        verb: &'static str,
        /// Name of the buffer.
        buffer: String,
        /// The other op.
        other: Site,
        /// Access of the other op.
        other_verb: &'static str,
    },
    /// Within a segment, an operand is overwritten before it is read, or never written.
    #[error(
        "segment {segment} ('{template}'): operator {operator} reads '{operand}'{}",
        by.as_ref().map_or(", which nothing has written".into(), |by| format!(" after '{by}' was written to the same memory"))
    )]
    OperandOverwritten {
        /// The segment.
        segment: u32,
        /// Name of the template.
        template: String,
        /// The operator that reads.
        operator: &'static str,
        /// The buffer that it reads.
        operand: String,
        /// The buffer stored there instead, if any.
        by: Option<String>,
    },
    /// The buffer was already freed.
    #[error("reads '{buffer}' after {by} freed it")]
    UseAfterFree {
        /// Name of the buffer.
        buffer: String,
        /// The op that freed it.
        by: Site,
    },
    /// The buffer is freed twice.
    #[error("frees '{buffer}', which is free already")]
    DoubleFree {
        /// Name of the buffer.
        buffer: String,
    },

    /// The peer that an op names does not exist.
    #[error("names a peer that this rank does not have")]
    NoPeer,
    /// No rank receives the message.
    #[error("no matching recv on rank {to}")]
    UnmatchedSend {
        /// The rank that should receive.
        to: Rank,
    },
    /// No rank sends the message.
    #[error("no matching send from rank {from}")]
    UnmatchedRecv {
        /// The rank that should send.
        from: Rank,
    },
    /// A send and its receive differ in size or dtype.
    #[error(
        "sends {elements} x {dtype} to rank {to}, whose {recv} expects {recv_elements} x {recv_dtype}"
    )]
    MessageShape {
        /// Number of elements sent.
        elements: u64,
        /// Dtype sent.
        dtype: DType,
        /// The receiver.
        to: Rank,
        /// The receive op.
        recv: Site,
        /// Number of elements expected.
        recv_elements: u64,
        /// Dtype expected.
        recv_dtype: DType,
    },
    /// Two members of a group disagree about a call.
    #[error("call {position} of its group matches {other} on rank {rank}: their {what} differ")]
    CollectiveMismatch {
        /// Position among the calls of the group.
        position: u64,
        /// The other member.
        rank: Rank,
        /// Call of the other member.
        other: Site,
        /// Property in which the calls differ.
        what: &'static str,
    },
    /// A member of a group does not take part in a call.
    #[error("rank {rank} is a member of the group but makes only {calls} of its calls")]
    CollectiveMissing {
        /// The member.
        rank: Rank,
        /// Number of calls it makes.
        calls: u64,
    },
    /// A rank's traffic with an asynchronous server differs from the server's declaration.
    #[error("{verb} {found} elements an iteration, server rank {server} serves {expected}")]
    ServiceTotal {
        /// Sends or receives.
        verb: &'static str,
        /// The server.
        server: Rank,
        /// Number of elements that the server declares.
        expected: u64,
        /// Number of elements in the rank's messages.
        found: u64,
    },
    /// The plan deadlocks at this op.
    #[error("is deadlocked: it waits for {other} on rank {rank}, which waits for {behind}")]
    Deadlock {
        /// The rank it waits for.
        rank: Rank,
        /// The op that never starts.
        other: Site,
        /// The op of that rank that blocks it and is itself blocked.
        behind: Site,
    },

    /// A buffer is outside the region of its kind.
    #[error(
        "'{buffer}' lies at bytes {}..{}, its kind's part of the arena at {}..{}",
        bytes.start, bytes.end, part.start, part.end
    )]
    OutsideArena {
        /// Name of the buffer.
        buffer: String,
        /// Bytes of the buffer.
        bytes: Range<u64>,
        /// Bytes of the kind's region.
        part: Range<u64>,
    },
    /// The declared size of a kind differs from its buffers' size.
    #[error("declares {declared} of {kind}, its buffers take {used}", kind = kind.name())]
    KindBytes {
        /// The kind.
        kind: MemoryKind,
        /// Declared size.
        declared: Bytes,
        /// Size of the buffers.
        used: Bytes,
    },
    /// The arena is larger than the device's memory.
    #[error("needs {} of {limit}: {}", memory.total(), breakdown(memory))]
    OverLimit {
        /// Available memory.
        limit: Bytes,
        /// Memory of the arena, by kind.
        memory: Memory,
    },
}

/// Formats `1.50 GiB parameters + 3.00 GiB activations`, largest first.
fn breakdown(memory: &Memory) -> String {
    let mut kinds = MemoryKind::ARENA.map(|kind| (memory.of(kind), kind));
    kinds.sort_by_key(|&(bytes, kind)| (std::cmp::Reverse(bytes), kind));
    let parts: Vec<String> = kinds
        .iter()
        .filter(|(bytes, _)| bytes.0 > 0)
        .map(|(bytes, kind)| format!("{bytes} {}", kind.name()))
        .collect();
    parts.join(" + ")
}
