//! Older weights, for pipelines that do not flush (Narayanan et al., SOSP 2019 and arXiv 2006.09503).
//!
//! **Stashed.** A stage that is `ahead` by a minibatches has made a updates between the forward and
//! the backward pass of one. Before each update, the weights that the last forward pass read are
//! kept for its backward pass, in the copy that the backward pass before has just set free: with the
//! newest, a + 1 versions, as many as there are minibatches under way.
//!
//! **Two.** A batch reads the weights that were the newest when the batch before began its updates. The
//! forward passes that a stage runs ahead for the next batch read the newest, all others the
//! version before; an update moves the newest there first.

use super::role::Role;
use crate::ids::Microbatch;
use crate::program::{AccumulateMode, Op, View};
use crate::schedule::{ScheduleKind, Versions};

/// Which weights a pass reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reads {
    /// The newest.
    Newest,
    /// A version that was kept.
    Kept,
}

impl Role<'_> {
    fn versions(&self) -> Option<Versions> {
        match self.context.strategy.schedule {
            ScheduleKind::PipeDream { versions } => Some(versions),
            ScheduleKind::GPipe
            | ScheduleKind::OneFOneB
            | ScheduleKind::Interleaved { .. }
            | ScheduleKind::ZbH1 { .. }
            | ScheduleKind::DualPipeV => None,
        }
    }

    /// How many versions are kept beside the newest, if any are.
    pub(super) fn version_copies(&self) -> Option<u32> {
        match self.versions()? {
            Versions::Stashed => Some(self.ahead()).filter(|&ahead| ahead > 0),
            Versions::Two => Some(1),
        }
    }

    /// What the forward pass of a microbatch reads; the backward pass reads the same values.
    pub(super) fn forward_reads(&self, microbatch: Microbatch) -> Reads {
        let next = microbatch.0 >= self.context.strategy.microbatches();
        match self.versions() {
            Some(Versions::Two) if !next => Reads::Kept,
            Some(Versions::Two | Versions::Stashed) | None => Reads::Newest,
        }
    }

    /// What backward passes read.
    pub(super) fn backward_reads(&self) -> Reads {
        if self.version_copies().is_some() { Reads::Kept } else { Reads::Newest }
    }

    /// Keeps every bucket's first weights for the microbatches that are run ahead.
    pub(super) fn keep_first_versions(&mut self) {
        for bucket in 0..self.buckets.len() {
            let Some(into) = self.buckets[bucket].versions else { continue };
            let from = self.buckets[bucket].params;
            match self.versions() {
                Some(Versions::Stashed) => {
                    for microbatch in (0..self.ahead()).map(Microbatch) {
                        self.compute(Op::Stash { from, into, microbatch }, &[]);
                    }
                }
                Some(Versions::Two) | None => self.replace_version(from, into),
            }
        }
    }

    /// Keeps a bucket's weights before they are updated.
    pub(super) fn keep_version(&mut self, bucket: usize) {
        let Some(into) = self.buckets[bucket].versions else { return };
        let from = self.buckets[bucket].params;
        match self.versions() {
            Some(Versions::Stashed) => {
                // Those of the forward pass that this iteration ran.
                let microbatch = Microbatch(self.ahead());
                self.compute(Op::Stash { from, into, microbatch }, &[]);
            }
            Some(Versions::Two) | None => self.replace_version(from, into),
        }
    }

    fn replace_version(&mut self, from: View, into: View) {
        self.compute(Op::Accumulate { from, into, mode: AccumulateMode::Move }, &[]);
    }
}
