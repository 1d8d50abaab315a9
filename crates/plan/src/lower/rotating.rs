//! Buffers that layers use in turn: whole weights that are gathered, and whole gradients until they are reduced.

use super::bucket::BucketShape;
use super::role::Role;
use super::update::BucketState;
use crate::dtype::DType;
use crate::ids::BufferId;
use crate::program::{MemoryKind, View};
use crate::strategy::Zero;

impl Role<'_> {
    /// One of two buffers that blocks use in turn; embedding, head and tied tables have their own.
    ///
    /// Gradients share one only with those that lie alike: what stands between tensors counts in norms, and
    /// must stay zero.
    pub(super) fn rotating(&mut self, what: &str, shape: &BucketShape, dtype: DType) -> View {
        let inner = |shape: &BucketShape| {
            let inner = |l: usize| self.context.graph.layer(l.into()).is_block();
            !shape.tied && shape.layers.clone().all(inner)
        };
        let name = if inner(shape) {
            let alike = |b: &&BucketState| b.shape.experts == shape.experts && inner(&b.shape);
            let before: Vec<&BucketShape> =
                self.buckets.iter().filter(alike).map(|b| &b.shape).collect();
            let turn = if self.context.strategy.zero == Zero::Parameters {
                shape.layers.start
            } else {
                self.buckets.iter().filter(|b| b.shape.experts == shape.experts).count()
            };
            // A layer's experts are at hand together with the rest of it.
            let whose = if shape.experts { ".experts" } else { "" };
            let like = before.iter().position(|of| what != "grads" || lie_alike(of, shape));
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

/// Whether tensors of the same sizes stand at the same places of two buckets.
fn lie_alike(a: &BucketShape, b: &BucketShape) -> bool {
    let places = |shape: &BucketShape| -> Vec<(u64, u64)> {
        shape.entries.iter().map(|entry| (entry.offset, entry.elements())).collect()
    };
    a.elements == b.elements && places(a) == places(b)
}
