//! Messages: tags, headers and the chunks in which they arrive.

use crate::error::CommError;
use crate::steps::CollectiveSpec;
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::fmt;

/// Channel of a message and its operation number.
///
/// Channels never mix: concurrent activities (the lanes of a program, the groups of a lane) each
/// use their own channel. Within a channel the sequence number counts operations, so that ranks out
/// of step are detected at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(u64);

impl Tag {
    /// Creates the tag of an operation of a channel.
    pub const fn new(channel: u32, sequence: u32) -> Self {
        Self((channel as u64) << 32 | sequence as u64)
    }

    /// The channel.
    pub const fn channel(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The operation's number within the channel.
    pub const fn sequence(self) -> u32 {
        self.0 as u32
    }

    /// The next operation of the same channel.
    pub const fn next(self) -> Self {
        Self::new(self.channel(), self.sequence().wrapping_add(1))
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "channel {}, operation {}", self.channel(), self.sequence())
    }
}

/// Description of a sender's operation, by which a receiver checks that it does the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Channel and operation number.
    pub tag: Tag,
    /// Operation of the sender.
    pub purpose: Purpose,
    /// Round of the collective.
    pub round: u32,
}

impl Header {
    /// Compares the header `found` from a peer with that of `rank`.
    pub fn check(&self, rank: Rank, peer: Rank, found: &Self) -> Result<(), CommError> {
        if self == found {
            return Ok(());
        }
        Err(CommError::Mismatch { rank, peer, expected: Box::new(*self), found: Box::new(*found) })
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, round {})", self.purpose, self.tag, self.round)
    }
}

/// Operation, which must be equal at both ends of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Part of a collective.
    Collective {
        /// Parameters that all members agree on.
        spec: CollectiveSpec,
        /// Number of members.
        ranks: u32,
        /// Number of elements of the whole vector.
        elements: u64,
        /// Dtype of the elements.
        dtype: DType,
    },
    /// A single message.
    PointToPoint {
        /// Number of elements.
        elements: u64,
        /// Dtype of the elements.
        dtype: DType,
    },
    /// A barrier message without payload.
    Barrier {
        /// Number of ranks that synchronise.
        ranks: u32,
    },
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Collective { spec, ranks, elements, dtype } => {
                let CollectiveSpec { kind, algorithm, .. } = spec;
                write!(f, "{kind} of {elements} {dtype} elements by {algorithm}")?;
                write!(f, " among {ranks} ranks")?;
                if spec.kind.reduces() {
                    write!(f, ", {} in {} order", spec.reduction, spec.order)?;
                }
                if spec.kind.has_root() {
                    write!(f, ", root {}", spec.root)?;
                }
                match spec.block {
                    0 | 1 => Ok(()),
                    block => write!(f, ", blocks of {block}"),
                }
            }
            Self::PointToPoint { elements, dtype } => {
                write!(f, "a message of {elements} {dtype} elements")
            }
            Self::Barrier { ranks } => write!(f, "a barrier of {ranks} ranks"),
        }
    }
}

/// Part of a message. All but the last end at a multiple of 64 bytes from the beginning.
#[derive(Clone, Copy, Debug)]
pub struct MessageChunk<'p> {
    /// Length of the whole message, in bytes.
    pub total: usize,
    /// Number of bytes before this chunk.
    pub at: usize,
    /// Elements in the sender's memory representation. All ranks have the same byte order.
    pub bytes: &'p [u8],
}

/// Amount of a message received by a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecvStatus {
    /// Nothing new.
    None,
    /// Part of it; more will follow.
    Partial,
    /// All of it, in this or earlier calls.
    Complete,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_keep_channel_and_sequence_apart() {
        let tag = Tag::new(7, u32::MAX);
        assert_eq!((tag.channel(), tag.sequence()), (7, u32::MAX));
        assert_eq!(tag.next(), Tag::new(7, 0));
    }
}
