//! Weight stash for pipelines that do not flush (Narayanan et al., SOSP 2019 and arXiv 2006.09503).
//!
//! **Stashed.** A stage that is `ahead` by a minibatches makes a updates between the forward and
//! the backward pass of one. Before each update, the weights that the last forward pass read are
//! stashed for its backward pass, in the copy that the previous backward pass has just freed. With
//! the latest weights these are a + 1 versions, as many as there are minibatches in flight.
//!
//! **Two.** A batch reads the weights that were the latest when the previous batch began its
//! updates. The forward passes that a stage runs ahead for the next batch read the latest weights,
//! all others the previous version; an update copies the latest weights there first.

use super::bucket_plan::Weights;
use super::role::RoleIr;
use super::slots::Point;
use crate::ids::Microbatch;
use crate::program::{AccumulateMode, Op, View};
use crate::schedule::{ScheduleKind, Versions};

/// Version of the weights that a pass reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightVersion {
    /// The latest weights.
    Latest,
    /// A stashed version.
    Stashed,
}

/// Stashes weights: initial ones before the first iteration, then those that a step replaces.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    match point {
        Point::Init => ir.stash_initial_weights(),
        Point::Step(bucket) => ir.stash_weights(bucket),
        _ => {}
    }
}

impl RoleIr<'_> {
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

    /// Number of stashed versions besides the latest, if any.
    pub(super) fn version_copies(&self) -> Option<u32> {
        match self.versions()? {
            Versions::Stashed => Some(self.ahead()).filter(|&ahead| ahead > 0),
            Versions::Two => Some(1),
        }
    }

    /// Version that a microbatch's forward pass reads; its backward pass reads the same values.
    pub(super) fn forward_reads(&self, microbatch: Microbatch) -> WeightVersion {
        let next = microbatch.0 >= self.context.strategy.microbatches();
        match self.versions() {
            Some(Versions::Two) if !next => WeightVersion::Stashed,
            Some(Versions::Two | Versions::Stashed) | None => WeightVersion::Latest,
        }
    }

    /// Version that backward passes read.
    pub(super) fn backward_reads(&self) -> WeightVersion {
        if self.version_copies().is_some() { WeightVersion::Stashed } else { WeightVersion::Latest }
    }

    /// Stashes every bucket's initial weights for the microbatches that run ahead.
    fn stash_initial_weights(&mut self) {
        for bucket in 0..self.buckets.len() {
            let Weights::Stashed { latest: from, versions: into } = self.buckets[bucket].weights
            else {
                continue;
            };
            match self.versions() {
                Some(Versions::Stashed) => {
                    for microbatch in (0..self.ahead()).map(Microbatch) {
                        self.compute(Op::Stash { from, into, microbatch }, &[]);
                    }
                }
                Some(Versions::Two) | None => self.replace_stash(from, into),
            }
        }
    }

    /// Stashes a bucket's weights before they are updated.
    fn stash_weights(&mut self, bucket: usize) {
        let Weights::Stashed { latest: from, versions: into } = self.buckets[bucket].weights else {
            return;
        };
        match self.versions() {
            Some(Versions::Stashed) => {
                // Weights of the forward pass that this iteration ran.
                let microbatch = Microbatch(self.ahead());
                self.compute(Op::Stash { from, into, microbatch }, &[]);
            }
            Some(Versions::Two) | None => self.replace_stash(from, into),
        }
    }

    fn replace_stash(&mut self, from: View, into: View) {
        self.compute(Op::Accumulate { from, into, mode: AccumulateMode::Move }, &[]);
    }
}
