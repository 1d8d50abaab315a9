//! Rendezvous: the ranks of a job find each other, and lost ranks are detected.
//!
//! A [`RendezvousServer`] listens, in the launcher or in rank 0. Every rank authenticates with the
//! job's [`Secret`](crate::Secret), sends its identity and its facts about the job, and receives
//! the list of members. Ranks whose facts differ do not start. The connection then stays open and
//! carries heartbeats both ways.

pub(crate) mod control;
pub(crate) mod handshake;
pub(crate) mod loopback;
mod server;

pub use server::{RendezvousOptions, RendezvousServer};

/// Returns true if `bytes` are a valid control message; entry point of a fuzzer.
pub fn understood(bytes: &[u8]) -> bool {
    control::Control::decode(bytes).is_some()
}
