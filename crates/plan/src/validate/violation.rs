//! What can be wrong with a plan, in types and in words.

use super::SectionKind;
use crate::dtype::DType;
use crate::ids::{OpId, Rank, RoleId};
use crate::program::{Memory, MemoryKind};
use crate::units::Bytes;
use std::fmt;
use std::ops::Range;
use thiserror::Error;

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{place}: {kind}")]
pub struct Violation {
    /// Where.
    pub place: Place,
    /// What.
    pub kind: ViolationKind,
}

impl Violation {
    /// The rank it is told of, unless it concerns the plan as a whole. Ranks of the same role have
    /// the same problem.
    pub fn rank(&self) -> Option<Rank> {
        match &self.place {
            Place::Plan => None,
            Place::Role { rank, .. } | Place::Op { rank, .. } => Some(*rank),
        }
    }

    /// The op it is about, if it is about one.
    pub fn op(&self) -> Option<(SectionKind, OpId)> {
        match &self.place {
            Place::Plan | Place::Role { .. } => None,
            Place::Op { site, .. } => Some((site.section, site.op)),
        }
    }
}

/// Where something is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In what all roles share.
    Plan,
    /// In a role's declarations.
    Role {
        /// The role.
        role: RoleId,
        /// A rank that plays it.
        rank: Rank,
    },
    /// At an op.
    Op {
        /// The role.
        role: RoleId,
        /// A rank that plays it.
        rank: Rank,
        /// The op.
        site: Site,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plan => f.write_str("plan"),
            Self::Role { rank, .. } => write!(f, "rank {rank}"),
            Self::Op { rank, site, .. } => write!(f, "rank {rank}, {site}"),
        }
    }
}

/// An op, with enough words to recognise it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The section it stands in.
    pub section: SectionKind,
    /// Its position there.
    pub op: OpId,
    /// What it does: `compute F.block.0 mb 2`.
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

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ViolationKind {
    /// The mesh has no ranks, too many, or experts that do not divide it.
    #[error("the mesh {why}")]
    Mesh {
        /// What about it.
        why: &'static str,
    },
    /// There must be one program per pipeline rank and one per server.
    #[error("there are {found} programs for {expected} roles")]
    Programs {
        /// How many there should be.
        expected: u64,
        /// How many there are.
        found: u64,
    },
    /// A name leads nowhere.
    #[error("{what} {index} does not exist, there are {count}")]
    Dangling {
        /// What should be there.
        what: &'static str,
        /// The name.
        index: u64,
        /// How many there are.
        count: u64,
    },
    /// A declaration of the program contradicts itself or its doc.
    #[error("{subject}: {problem}")]
    Declaration {
        /// Which declaration.
        subject: String,
        /// What about it.
        problem: String,
    },
    /// A view reaches beyond its buffer.
    #[error("{subject}: elements {offset}..+{len} reach beyond '{buffer}', which has {elements}")]
    ViewOutside {
        /// Whose view.
        subject: String,
        /// The buffer's name.
        buffer: String,
        /// The view's first element.
        offset: u64,
        /// The view's elements.
        len: u64,
        /// The buffer's elements.
        elements: u64,
    },
    /// A segment has too few or too many operands.
    #[error("segment {segment} binds {found} operands, template '{template}' has {expected}")]
    OperandCount {
        /// The segment.
        segment: u32,
        /// The template's name.
        template: String,
        /// Operands of the template.
        expected: u64,
        /// Operands of the segment.
        found: u64,
    },
    /// A segment's operand has another size than its template's.
    #[error(
        "segment {segment} ('{template}') binds {found} elements to operand {operand}, which has {expected}"
    )]
    OperandElements {
        /// The segment.
        segment: u32,
        /// The template's name.
        template: String,
        /// The operand's position.
        operand: u64,
        /// Elements of the template's operand.
        expected: u64,
        /// Elements of the view.
        found: u64,
    },
    /// A segment's operand has another type than its template's.
    #[error(
        "segment {segment} ('{template}') binds {found} to operand {operand}, which is {expected}"
    )]
    OperandType {
        /// The segment.
        segment: u32,
        /// The template's name.
        template: String,
        /// The operand's position.
        operand: u64,
        /// Type of the template's operand.
        expected: DType,
        /// Type of the buffer.
        found: DType,
    },
    /// An op waits for one that does not stand before it.
    #[error("waits for op {after}, which does not stand before it")]
    AfterLater {
        /// The op it waits for.
        after: OpId,
    },
    /// A compute op stands beside the compute lane.
    #[error("computes on lane '{lane}', only the first lane computes")]
    ComputeLane {
        /// The lane's name.
        lane: String,
    },
    /// An op without a microbatch names a buffer that has a copy per microbatch.
    #[error(
        "belongs to no microbatch, so it cannot choose among the {copies} copies of '{buffer}'"
    )]
    AnyCopy {
        /// The buffer's name.
        buffer: String,
        /// How many copies it has.
        copies: u32,
    },

    /// Nothing wrote what is read.
    #[error("reads '{buffer}', which nothing has written")]
    Undefined {
        /// The buffer's name.
        buffer: String,
    },
    /// Something else lies in the memory that is read.
    #[error(
        "reads '{buffer}' after it was overwritten by {by}, which wrote '{other}' to the same memory"
    )]
    Overwritten {
        /// The buffer's name.
        buffer: String,
        /// The buffer that lies there now.
        other: String,
        /// Who wrote it.
        by: Site,
    },
    /// The copy that is read belongs to another microbatch by now.
    #[error(
        "reads '{buffer}' of running microbatch {expected}, but {by} left that of {found} there"
    )]
    WrongMicrobatch {
        /// The buffer's name.
        buffer: String,
        /// The reader's microbatch, counted from iteration to iteration.
        expected: u32,
        /// The writer's.
        found: u32,
        /// The writer.
        by: Site,
    },
    /// Two ops touch the same memory, one of them writes, and nothing orders them.
    #[error(
        "{verb} '{buffer}' at the same time as {other} {other_verb} it; an after edge must order them"
    )]
    Race {
        /// What this op does to it.
        verb: &'static str,
        /// The buffer's name.
        buffer: String,
        /// The other op.
        other: Site,
        /// What that does to it.
        other_verb: &'static str,
    },
    /// Within a segment, an operand is overwritten before it is read, or not written at all.
    #[error(
        "segment {segment} ('{template}'): operator {operator} reads '{operand}'{}",
        by.as_ref().map_or(", which nothing has written".into(), |by| format!(" after '{by}' was written to the same memory"))
    )]
    OperandOverwritten {
        /// The segment.
        segment: u32,
        /// The template's name.
        template: String,
        /// The operator that reads.
        operator: &'static str,
        /// The buffer that it reads.
        operand: String,
        /// The buffer that lies there instead, if any does.
        by: Option<String>,
    },
    /// The buffer had been given up.
    #[error("reads '{buffer}' after {by} freed it")]
    UseAfterFree {
        /// The buffer's name.
        buffer: String,
        /// Who gave it up.
        by: Site,
    },
    /// The buffer had been given up already.
    #[error("frees '{buffer}', which is free already")]
    DoubleFree {
        /// The buffer's name.
        buffer: String,
    },

    /// The peer that an op names does not exist.
    #[error("names a peer that this rank does not have")]
    NoPeer,
    /// Nobody receives what is sent.
    #[error("no matching recv on rank {to}")]
    UnmatchedSend {
        /// The rank that should receive.
        to: Rank,
    },
    /// Nobody sends what should be received.
    #[error("no matching send from rank {from}")]
    UnmatchedRecv {
        /// The rank that should send.
        from: Rank,
    },
    /// A send and its receive disagree.
    #[error(
        "sends {elements} x {dtype} to rank {to}, whose {recv} expects {recv_elements} x {recv_dtype}"
    )]
    MessageShape {
        /// Elements sent.
        elements: u64,
        /// Their type.
        dtype: DType,
        /// The receiver.
        to: Rank,
        /// Its op.
        recv: Site,
        /// Elements expected.
        recv_elements: u64,
        /// Their type.
        recv_dtype: DType,
    },
    /// Two members of a group disagree about a call.
    #[error("as call {position} of its group it meets {other} on rank {rank}: their {what} differ")]
    CollectiveMismatch {
        /// Position among the calls of the group.
        position: u64,
        /// The other member.
        rank: Rank,
        /// Its call.
        other: Site,
        /// In what they differ.
        what: &'static str,
    },
    /// A member of a group does not take part in a call.
    #[error("rank {rank} is a member of the group but makes only {calls} of its calls")]
    CollectiveMissing {
        /// The member.
        rank: Rank,
        /// How many calls it makes.
        calls: u64,
    },
    /// What a rank exchanges with an asynchronous server is not what that serves.
    #[error("{verb} {found} elements an iteration, server rank {server} serves {expected}")]
    ServiceTotal {
        /// Sends or receives.
        verb: &'static str,
        /// The server.
        server: Rank,
        /// Elements that the server declares.
        expected: u64,
        /// Elements of the rank's messages.
        found: u64,
    },
    /// The plan would hang here.
    #[error("waits for ever for {other} on rank {rank}, which waits for {behind}")]
    Deadlock {
        /// The rank it waits for.
        rank: Rank,
        /// The op that never starts.
        other: Site,
        /// The op of that rank which keeps it from starting, and waits for ever itself.
        behind: Site,
    },

    /// A buffer lies outside the part of the arena that is its kind's.
    #[error(
        "'{buffer}' lies at bytes {}..{}, its kind's part of the arena at {}..{}",
        bytes.start, bytes.end, part.start, part.end
    )]
    OutsideArena {
        /// The buffer's name.
        buffer: String,
        /// Its bytes.
        bytes: Range<u64>,
        /// The bytes of its kind.
        part: Range<u64>,
    },
    /// The declared bytes are not what the buffers take.
    #[error("declares {declared} of {kind}, its buffers take {used}", kind = kind.name())]
    KindBytes {
        /// The kind.
        kind: MemoryKind,
        /// What is declared.
        declared: Bytes,
        /// What the buffers take.
        used: Bytes,
    },
    /// The arena is larger than the device's memory.
    #[error("needs {} of {limit}: {}", memory.total(), breakdown(memory))]
    OverLimit {
        /// What there is.
        limit: Bytes,
        /// What the arena holds.
        memory: Memory,
    },
}

/// `1.50 GiB parameters + 3.00 GiB activations`, largest first.
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
