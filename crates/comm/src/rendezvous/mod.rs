//! How the ranks of a job find each other, and how they notice that one is lost.
//!
//! A [`Hub`] listens, in the launcher or in rank 0. Every rank comes in through its door, which
//! only the job's [`Secret`](crate::Secret) opens, says what it is and what it believes about the
//! job, and is told who the others are. Ranks that believe different things do not start. The
//! connection then stays open and carries signs of life both ways.

pub(crate) mod control;
pub(crate) mod door;
mod hub;
mod loopback;

pub use hub::{Hub, HubOptions};

/// Whether bytes are something that a rank or the hub can be told: what a fuzzer calls.
pub fn understood(bytes: &[u8]) -> bool {
    control::Control::decode(bytes).is_some()
}
