//! Points that no rank passes before all have reached them.

use crate::collective::Running;
use crate::error::CommError;
use crate::transport::{Progress, Tag, Transport, finish};
use paceline_plan::ids::Rank;
use std::time::Duration;

/// One rank's side of a barrier: 2 ⌈log₂ P⌉ rounds of empty messages at most.
#[derive(Debug)]
pub struct Barrier(Running);

impl Barrier {
    /// Prepares the side of rank `me`, a member.
    pub fn start(members: &[Rank], me: Rank, tag: Tag) -> Result<Self, CommError> {
        Running::barrier(members, me, tag).map(Self)
    }

    /// Done once every member has come this far.
    pub fn progress(&mut self, transport: &mut dyn Transport) -> Result<Progress, CommError> {
        self.0.progress(transport, &mut [], None)
    }
}

/// Waits until every member has come this far, giving up on one that is silent for as long as
/// `patience`.
pub fn wait(
    transport: &mut dyn Transport,
    members: &[Rank],
    tag: Tag,
    patience: Duration,
) -> Result<(), CommError> {
    let mut barrier = Barrier::start(members, transport.rank(), tag)?;
    finish(transport, patience, |transport| barrier.progress(transport))
}
