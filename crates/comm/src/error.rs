//! Errors of communication between ranks.

use crate::transport::Header;
use paceline_plan::collective::{Algorithm, CollectiveError};
use paceline_plan::ids::Rank;
use std::time::Duration;
use thiserror::Error;

/// Reason why communication ended; names the rank at fault, if there is one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CommError {
    /// A rank reported that it cannot continue, or died.
    #[error("rank {rank} failed: {reason}")]
    Failed {
        /// The rank that failed.
        rank: Rank,
        /// Reason given by the rank, or the way the failure was detected.
        reason: String,
    },
    /// A rank died, or was silent for too long.
    #[error(
        "rank {rank} on {host} {how}; last heard of {:.1} s ago, {}",
        silent.as_secs_f64(),
        if doing.is_empty() { "before its first operation" } else { doing.as_str() }
    )]
    PeerLost {
        /// The rank that is lost.
        rank: Rank,
        /// The host it ran on.
        host: String,
        /// Way the loss was detected.
        how: String,
        /// Operation of the rank when it was last heard of.
        doing: String,
        /// Duration of its silence when it was declared lost.
        silent: Duration,
    },
    /// Bytes changed between two ranks, or between a rank and the rendezvous server.
    #[error(
        "{way} were altered on the way: an authentication tag is wrong, so that something between \
         them changes what they send"
    )]
    Altered {
        /// The messages, their sender and their receiver.
        way: String,
    },
    /// The job could not start, or lost its coordination; no single rank is at fault.
    #[error("{problem}")]
    Job {
        /// The problem, the ranks concerned, and a possible remedy.
        problem: String,
    },
    /// A rank left while another still depended on it.
    #[error("rank {peer} has left, but rank {rank} still has messages to exchange with it")]
    PeerClosed {
        /// The rank that noticed.
        rank: Rank,
        /// The rank that left.
        peer: Rank,
    },
    /// A rank did not send an expected message in time. The transport never returns this: the
    /// caller sets the timeout.
    #[error("rank {rank} has been silent for {after:?}")]
    Timeout {
        /// The rank that owes a message.
        rank: Rank,
        /// Time waited for it.
        after: Duration,
    },
    /// Two ranks execute different operations at the same point of their programs.
    #[error("rank {rank} is at {expected}, but rank {peer} is at {found}")]
    Mismatch {
        /// The rank that noticed.
        rank: Rank,
        /// The rank whose message arrived.
        peer: Rank,
        /// Operation of the first rank.
        expected: Box<Header>,
        /// Operation of the second rank.
        found: Box<Header>,
    },
    /// A message's length contradicts its own header.
    #[error("rank {rank} received {found} bytes from rank {peer} instead of {expected}")]
    Length {
        /// The receiver.
        rank: Rank,
        /// The sender.
        peer: Rank,
        /// Length in bytes implied by the header.
        expected: u64,
        /// Length received.
        found: u64,
    },
    /// An operation addresses a rank that does not exist.
    #[error("rank {rank} is not in a world of {world} ranks")]
    NoSuchRank {
        /// The addressed rank.
        rank: Rank,
        /// Number of ranks.
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
    DuplicateRank {
        /// The rank.
        rank: Rank,
    },
    /// The buffers are unsuitable for the collective.
    #[error("rank {rank}, {kind}: {problem}")]
    Buffers {
        /// The rank.
        rank: Rank,
        /// The kind of the collective.
        kind: &'static str,
        /// The mismatch, and the expected value.
        problem: String,
    },
    /// The collective reads the memory of other ranks, but this transport cannot.
    #[error(
        "rank {rank}: {algorithm} reads the memory of other ranks, which this transport does not \
         share; direct sends the same as messages"
    )]
    NoSharedMemory {
        /// The rank.
        rank: Rank,
        /// Requested algorithm of the collective.
        algorithm: Algorithm,
    },
    /// The collective needs a switch that sums, but no transport here reaches one.
    #[error(
        "rank {rank}: {algorithm} needs a switch that sums, which this transport does not reach; auto \
         chooses an algorithm without one"
    )]
    NoSummingSwitch {
        /// The rank.
        rank: Rank,
        /// Requested algorithm of the collective.
        algorithm: Algorithm,
    },
    /// The collective itself is impossible.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

/// Formats the group for display, shortened if it is long.
fn list(members: &[Rank]) -> String {
    const SHOWN: usize = 16;
    let mut names: Vec<_> = members.iter().take(SHOWN).map(Rank::to_string).collect();
    if members.len() > SHOWN {
        names.push(format!("… ({} ranks)", members.len()));
    }
    format!("{{{}}}", names.join(", "))
}
