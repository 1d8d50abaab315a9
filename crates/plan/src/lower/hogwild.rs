//! Hogwild: replicas share one set of weights and update it without locks (Recht et al., NIPS 2011,
//! section 2).
//!
//! Weights and moments are in memory shared by all ranks of a process. Before an iteration's first
//! forward pass over a layer, a rank copies the layer's weights to its own arena. It computes on
//! that copy until the end of the iteration. The step then changes the shared weights, regardless
//! of concurrent changes by other ranks. Ranks synchronise twice: after the weights are
//! initialised, and after the last step.

use super::bucket_plan::Weights;
use super::role::RoleIr;
use super::slots::Point;
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::ids::{LaneId, Microbatch};
use crate::mesh::GroupKind;
use crate::program::{AccumulateMode, MemoryKind, Op, Section, StepPhase, View};
use crate::schedule::Pass;
use crate::strategy::Sync;

/// Copies shared weights before their first use, and updates them after the last.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    match point {
        Point::Start => ir.barrier(),
        Point::Enter(turn, layer) if turn.pass == Pass::Forward => ir.pull(layer),
        Point::Update => ir.push(),
        _ => {}
    }
}

impl RoleIr<'_> {
    /// Returns true if all ranks share weights and moments.
    pub(super) fn shares_weights(&self) -> bool {
        self.context.strategy.sync == Sync::Hogwild
    }

    /// Buffer that a bucket's shared weights are copied to.
    pub(super) fn own_copy(&mut self, name: &str, elements: u64, dtype: DType) -> View {
        let name = format!("{name}.copy");
        let copy = self.buffer(name, dtype, elements, 1, MemoryKind::Parameters);
        self.whole(copy)
    }

    /// Copies a layer's current weights before its forward pass, if this iteration has not read
    /// them yet.
    fn pull(&mut self, layer: usize) {
        for bucket in self.buckets_of(layer) {
            if let Weights::Shared { shared: from, copy: into, copied } =
                &mut self.buckets[bucket].weights
                && !std::mem::replace(copied, true)
            {
                let (from, into) = (*from, *into);
                self.compute(Op::Restore { from, into, microbatch: Microbatch(0) }, &[]);
            }
        }
    }

    /// Updates every bucket's shared weights with this rank's own gradients.
    fn push(&mut self) {
        let known = std::mem::take(&mut self.walk.known);
        for bucket in 0..self.buckets.len() {
            self.step(bucket, StepPhase::Apply, &known);
        }
    }

    /// Adds a barrier before the first iteration, so that no rank reads uninitialised weights. A
    /// second one after the last iteration keeps ranks from reading weights that others still
    /// change.
    fn barrier(&mut self) {
        let replicas = self.context.mesh.replicas();
        let (true, Some(bucket)) = (replicas > 1, self.buckets.first()) else { return };
        // The exchanged value is irrelevant.
        let from = View { len: 1, ..bucket.weights.read() };
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
