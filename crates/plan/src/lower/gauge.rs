//! How long whole tensors and their directions are, which LAMB's step depends on (You et al., arXiv
//! 1904.00962, algorithm 2).
//!
//! The sums go the way of the gradient's norm: by block, filled in among those who share an update,
//! then by tensor, filled in along tp (each rank has a part of a cut tensor), along ep and etp (each has other
//! experts, or other parts of them) and pp (a tied table counts where the embedding stands). So a step
//! has the same bits however the update is dealt out.

use super::bucket::{dense_norm_entries, norm_entries};
use super::role::Role;
use crate::dtype::DType;
use crate::graph::{BLOCK, OpKind};
use crate::ids::OpId;
use crate::mesh::{Axis, GroupKind};
use crate::program::{Gauge, MemoryKind, StepPhase, View};
use std::ops::Range;

impl Role<'_> {
    /// Gauges every bucket once the gradient's norm is known, which scales what moves the moments.
    /// Returns what the step must wait for.
    pub(super) fn gauge(&mut self, norm: &[OpId]) -> Vec<OpId> {
        let blocks: u64 = self.buckets.iter().map(|b| b.shape.elements / BLOCK).sum();
        let tensors = u64::from(norm_entries(&self.context.graph));
        let mut two = |name: &str, elements: u64| {
            let kind = MemoryKind::Communication;
            let buffer = self.buffer(name.into(), DType::F32, 2 * elements, 1, kind);
            self.whole(buffer)
        };
        let (block_sums, tensor_sums) =
            (two("gauge.blocks", blocks), two("gauge.tensors", tensors));

        let mut offset = 0;
        for bucket in 0..self.buckets.len() {
            let len = self.buckets[bucket].shape.elements / BLOCK;
            self.buckets[bucket].gauge = Some(Gauge {
                weights: View { offset, len, ..block_sums },
                directions: View { offset: blocks + offset, len, ..block_sums },
                tensors: tensor_sums,
            });
            self.step(bucket, StepPhase::Gauge, norm);
            offset += len;
        }
        let mut after = Vec::new();
        for (group, run) in self.dealt() {
            for view in both(block_sums, &run) {
                after = self.sum("gauge.blocks", group, view);
            }
        }
        for [from, into] in halves(block_sums, tensor_sums) {
            self.small(OpKind::TensorSquares, from, into, &after);
        }
        after.clear();
        let dense = u64::from(dense_norm_entries(&self.context.graph));
        let (rest, experts) = (0..dense, dense..tensors);
        let axes = [
            (Axis::Tp, rest),
            (Axis::Ep, experts.clone()),
            (Axis::Etp, experts),
            (Axis::Pp, 0..tensors),
        ];
        for (axis, run) in axes {
            // A stage that does not wait for the others needs its own tensors' alone.
            let waits = axis != Axis::Pp || self.context.strategy.schedule.flushes();
            if self.context.mesh.axis(axis) > 1 && waits && !run.is_empty() {
                for view in both(tensor_sums, &run) {
                    after = self.sum("gauge.tensors", GroupKind::Axis(axis), view);
                }
            }
        }
        after
    }
}

/// The same run of both halves: one view where it is all of them.
fn both(sums: View, run: &Range<u64>) -> Vec<View> {
    let half = sums.len / 2;
    if *run == (0..half) {
        return vec![sums];
    }
    let len = run.end - run.start;
    [0, half].map(|first| View { offset: sums.offset + first + run.start, len, ..sums }).to_vec()
}

/// The sums of weights by block and by tensor, then those of directions.
pub(super) fn halves(blocks: View, tensors: View) -> [[View; 2]; 2] {
    let half = |view: View, at: u64| {
        let len = view.len / 2;
        View { offset: view.offset + at * len, len, ..view }
    };
    [0, 1].map(|at| [half(blocks, at), half(tensors, at)])
}
