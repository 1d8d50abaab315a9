//! Double buffers that layers use alternately: gathered weights, and full gradients until they are
//! reduced.

use super::bucket::BucketShape;
use super::bucket_plan::BucketPlan;
use super::role::RoleIr;
use crate::dtype::DType;
use crate::ids::BufferId;
use crate::program::{MemoryKind, View};
use crate::strategy::Zero;

impl RoleIr<'_> {
    /// Returns one of two buffers that blocks use alternately; embedding, head and tied tables have
    /// their own.
    ///
    /// Gradients share a buffer only with gradients of the same layout: the padding between tensors
    /// counts in norms and must stay zero.
    pub(super) fn double_buffered(
        &mut self,
        what: &str,
        shape: &BucketShape,
        dtype: DType,
    ) -> View {
        let inner = |shape: &BucketShape| {
            let inner = |l: usize| self.context.graph.layer(l.into()).is_block();
            !shape.tied && shape.layers.clone().all(inner)
        };
        let name = if inner(shape) {
            let same_kind = |b: &&BucketPlan| b.shape.experts == shape.experts && inner(&b.shape);
            let before: Vec<&BucketShape> =
                self.buckets.iter().filter(same_kind).map(|b| &b.shape).collect();
            let turn = if self.context.strategy.zero == Zero::Parameters {
                shape.layers.start
            } else {
                self.buckets.iter().filter(|b| b.shape.experts == shape.experts).count()
            };
            // A layer's experts are in memory at the same time as the rest of the layer.
            let whose = if shape.experts { ".experts" } else { "" };
            let like = before.iter().position(|of| what != "grads" || same_layout(of, shape));
            let like = match like {
                Some(0) => String::new(),
                None if before.is_empty() => String::new(),
                Some(at) => format!(".{}", before[at].name),
                None => format!(".{}", shape.name),
            };
            format!("{what}{whose}{like}.{}", turn % 2)
        } else {
            format!("{}.{what}", shape.name)
        };
        let id = match self.buffers.iter().position(|b| b.name == name) {
            Some(at) => {
                self.buffers[at].elements = self.buffers[at].elements.max(shape.elements);
                BufferId::from(at)
            }
            None => self.buffer(name, dtype, shape.elements, 1, MemoryKind::Communication),
        };
        View { buffer: id, offset: 0, len: shape.elements }
    }
}

/// Returns true if two buckets hold tensors of the same sizes at the same offsets.
fn same_layout(a: &BucketShape, b: &BucketShape) -> bool {
    let places = |shape: &BucketShape| -> Vec<(u64, u64)> {
        shape.entries.iter().map(|entry| (entry.offset, entry.elements())).collect()
    };
    a.elements == b.elements && places(a) == places(b)
}
