//! What can go wrong between ranks.

use crate::transport::Header;
use paceline_plan::collective::CollectiveError;
use paceline_plan::ids::Rank;
use std::time::Duration;
use thiserror::Error;

/// Why communication ended; the rank that is to blame is always named.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CommError {
    /// A rank said that it cannot go on, or died.
    #[error("rank {rank} failed: {reason}")]
    Failed {
        /// The rank that failed.
        rank: Rank,
        /// What it said, or how it was noticed.
        reason: String,
    },
    /// A rank ended its part while another still counted on it.
    #[error("rank {peer} has left, but rank {rank} still has messages to exchange with it")]
    Departed {
        /// The rank that noticed.
        rank: Rank,
        /// The rank that left.
        peer: Rank,
    },
    /// A rank did not send what it owes for too long. The transport never says this: whoever waits
    /// decides how long is too long.
    #[error("rank {rank} has been silent for {after:?}")]
    Silent {
        /// The rank that owes a message.
        rank: Rank,
        /// How long it was waited for.
        after: Duration,
    },
    /// Two ranks do different things at the same point of their programs.
    #[error("rank {rank} is at {expected}, but rank {peer} is at {found}")]
    Mismatch {
        /// The rank that noticed.
        rank: Rank,
        /// The rank whose message came.
        peer: Rank,
        /// What the first rank does.
        expected: Box<Header>,
        /// What the second rank does.
        found: Box<Header>,
    },
    /// A message's length contradicts its own header.
    #[error("rank {rank} received {found} elements from rank {peer} instead of {expected}")]
    Length {
        /// The receiver.
        rank: Rank,
        /// The sender.
        peer: Rank,
        /// What the header implies.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// A rank that does not exist is addressed.
    #[error("rank {rank} is not in a world of {world} ranks")]
    NoSuchRank {
        /// The address.
        rank: Rank,
        /// How many ranks there are.
        world: u32,
    },
    /// A rank takes part in an operation of a group that it does not belong to.
    #[error("rank {rank} is not in the group {}", list(.members))]
    NotAMember {
        /// The rank.
        rank: Rank,
        /// The group.
        members: Vec<Rank>,
    },
    /// A group names a rank twice.
    #[error("rank {rank} is in the group twice")]
    Twice {
        /// The rank.
        rank: Rank,
    },
    /// The buffers do not suit the collective.
    #[error("rank {rank}, {kind}: {problem}")]
    Buffers {
        /// The rank.
        rank: Rank,
        /// The kind of the collective.
        kind: &'static str,
        /// What does not fit, and what would.
        problem: String,
    },
    /// The collective itself is impossible.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

/// The group as people write it, cut short where it is long.
fn list(members: &[Rank]) -> String {
    const SHOWN: usize = 16;
    let mut names: Vec<_> = members.iter().take(SHOWN).map(Rank::to_string).collect();
    if members.len() > SHOWN {
        names.push(format!("… ({} ranks)", members.len()));
    }
    format!("{{{}}}", names.join(", "))
}
