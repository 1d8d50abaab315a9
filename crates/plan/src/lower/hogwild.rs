//! Replicas that share one set of weights and update it without locks (Recht et al., NIPS 2011, section 2).
//!
//! Weights and moments stand in memory that all ranks of a process share. Before the first forward pass of
//! an iteration over a layer, a rank copies its weights to its own arena, and computes on that copy to the end of
//! the iteration; the step then changes the shared weights, whatever others have made of them meanwhile.
//! Ranks meet twice: when the first weights are there, and when the last step is made.

use super::role::Role;
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::ids::{LaneId, Microbatch, OpId};
use crate::mesh::GroupKind;
use crate::program::{AccumulateMode, MemoryKind, Op, Section, StepPhase, View};
use crate::strategy::Sync;

impl Role<'_> {
    /// Whether weights and moments are shared by all ranks.
    pub(super) fn shares_weights(&self) -> bool {
        self.context.strategy.sync == Sync::Hogwild
    }

    /// Where a bucket's shared weights are copied to.
    pub(super) fn own_copy(&mut self, name: &str, elements: u64, dtype: DType) -> View {
        let name = format!("{name}.copy");
        let copy = self.buffer(name, dtype, elements, 1, MemoryKind::Parameters);
        self.whole(copy)
    }

    /// Before a layer's forward pass: its weights as they now are, if this iteration has not read them yet.
    pub(super) fn pull(&mut self, layer: usize) {
        if !self.shares_weights() {
            return;
        }
        for bucket in self.buckets_of(layer) {
            let state = &mut self.buckets[bucket];
            if !std::mem::replace(&mut state.gathered, true) {
                let (from, into) = (state.params, state.compute_params);
                self.compute(Op::Restore { from, into, microbatch: Microbatch(0) }, &[]);
            }
        }
    }

    /// Steps every bucket's shared weights along this rank's own gradients, once `known` is.
    pub(super) fn push(&mut self, known: &[OpId]) {
        for bucket in 0..self.buckets.len() {
            self.step(bucket, StepPhase::Apply, known);
        }
    }

    /// Has ranks meet before the first iteration, so that nobody reads weights that are not there yet, and
    /// after the last one, so that nobody takes weights for final that others still change.
    pub(super) fn meet(&mut self) {
        let replicas = self.context.mesh.replicas();
        let (true, true, Some(bucket)) =
            (self.shares_weights(), replicas > 1, self.buckets.first())
        else {
            return;
        };
        // What they exchange does not matter.
        let from = View { len: 1, ..bucket.compute_params };
        let meeting = self.buffer("meeting".into(), DType::F32, 1, 1, MemoryKind::Communication);
        let into = self.whole(meeting);
        let (kind, most) = (CollectiveKind::AllReduce, Reduction::Max);
        let call = self.call("meeting", kind, most, GroupKind::Replicas, into, into, 1);
        let lane = self.lane("control");
        let met = |section: &mut Section| {
            let op = Op::Accumulate { from, into, mode: AccumulateMode::Move };
            let at_hand = section.push(LaneId(0), op, &[]);
            section.push(lane, Op::Collective { call, microbatch: Microbatch(0) }, &[at_hand]);
        };
        met(&mut self.prologue);
        met(&mut self.epilogue);
    }
}
