//! What can go wrong between ranks.

use crate::transport::Header;
use paceline_plan::collective::{Algorithm, CollectiveError};
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
    /// A rank died, or nothing has been heard of it for too long.
    #[error(
        "rank {rank} on {host} {how}; last heard of {:.1} s ago, {}",
        silent.as_secs_f64(),
        if doing.is_empty() { "before its first operation" } else { doing.as_str() }
    )]
    Lost {
        /// The rank that is lost.
        rank: Rank,
        /// The host it ran on.
        host: String,
        /// How it was noticed.
        how: String,
        /// What the rank was doing when it was last heard of.
        doing: String,
        /// For how long it had been silent when it was given up.
        silent: Duration,
    },
    /// The job could not start, or lost what holds it together; no single rank is to blame.
    #[error("{problem}")]
    Job {
        /// What is wrong, who is concerned, and what would work.
        problem: String,
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
    #[error("rank {rank} received {found} bytes from rank {peer} instead of {expected}")]
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
    /// The collective reads the memory of other ranks, which this transport cannot.
    #[error(
        "rank {rank}: {algorithm} reads the memory of other ranks, which this transport does not \
         share; direct sends the same as messages"
    )]
    NoSharedMemory {
        /// The rank.
        rank: Rank,
        /// How the collective should have been done.
        algorithm: Algorithm,
    },
    /// The collective needs a switch that sums, which no transport here reaches.
    #[error(
        "rank {rank}: {algorithm} needs a switch that sums, which this transport does not reach; auto \
         chooses an algorithm without one"
    )]
    NoSummingSwitch {
        /// The rank.
        rank: Rank,
        /// How the collective should have been done.
        algorithm: Algorithm,
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
