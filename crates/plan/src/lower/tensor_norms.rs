//! Norms of whole tensors and of their update directions, needed by LAMB's step (You et al., arXiv
//! 1904.00962, algorithm 2).
//!
//! The sums follow the path of the gradient norm. They are formed by block and completed among the
//! ranks that share an update, then by tensor. The sums by tensor are completed along tp, where
//! each rank has a shard of a tensor. They are also completed along ep and etp, where each rank has
//! other experts or other shards of them, and along pp; a tied table counts on the embedding's
//! stage. A step is therefore bitwise identical for every sharding of the update.

use super::bucket::{dense_norm_entries, norm_entries};
use super::role::RoleIr;
use crate::dtype::DType;
use crate::graph::{BLOCK, OpKind};
use crate::ids::OpId;
use crate::mesh::{Axis, GroupKind};
use crate::program::{MemoryKind, StepPhase, TensorNorms, View};
use std::ops::Range;

impl RoleIr<'_> {
    /// Computes the tensor norms of every bucket after the gradient norm, which scales the
    /// gradients that enter the moments. Returns the ops that the step must wait for.
    pub(super) fn tensor_norms(&mut self, norm: &[OpId]) -> Vec<OpId> {
        let blocks: u64 = self.buckets.iter().map(|b| b.shape.elements / BLOCK).sum();
        let tensors = u64::from(norm_entries(&self.context.graph));
        let mut two = |name: &str, elements: u64| {
            let kind = MemoryKind::Communication;
            let buffer = self.buffer(name.into(), DType::F32, 2 * elements, 1, kind);
            self.whole(buffer)
        };
        let (block_sums, tensor_sums) =
            (two("tensor_norms.blocks", blocks), two("tensor_norms.tensors", tensors));

        let mut offset = 0;
        for bucket in 0..self.buckets.len() {
            let len = self.buckets[bucket].shape.elements / BLOCK;
            self.buckets[bucket].optimizer.tensor_norms = Some(TensorNorms {
                weights: View { offset, len, ..block_sums },
                directions: View { offset: blocks + offset, len, ..block_sums },
                tensors: tensor_sums,
            });
            self.step(bucket, StepPhase::TensorNorms, norm);
            offset += len;
        }
        let mut after = Vec::new();
        for (group, run) in self.dealt() {
            for view in both(block_sums, &run) {
                after = self.sum("tensor_norms.blocks", group, view);
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
            // A stage that does not wait for the others needs only its own tensors.
            let waits = axis != Axis::Pp || self.context.strategy.schedule.flushes();
            if self.context.mesh.axis(axis) > 1 && waits && !run.is_empty() {
                for view in both(tensor_sums, &run) {
                    after = self.sum("tensor_norms.tensors", GroupKind::Axis(axis), view);
                }
            }
        }
        after
    }
}

/// The same range of both halves; a single view if the range is all of them.
fn both(sums: View, run: &Range<u64>) -> Vec<View> {
    let half = sums.len / 2;
    if *run == (0..half) {
        return vec![sums];
    }
    let len = run.end - run.start;
    [0, half].map(|first| View { offset: sums.offset + first + run.start, len, ..sums }).to_vec()
}

/// Sums of weights by block and by tensor, then those of directions.
pub(super) fn halves(blocks: View, tensors: View) -> [[View; 2]; 2] {
    let half = |view: View, at: u64| {
        let len = view.len / 2;
        View { offset: view.offset + at * len, len, ..view }
    };
    [0, 1].map(|at| [half(blocks, at), half(tensors, at)])
}
