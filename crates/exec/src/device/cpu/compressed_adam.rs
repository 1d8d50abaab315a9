//! Optimizer step of ranks that exchange first moments. Before the exchange each rank computes its
//! local momentum; after it all ranks make the same step.

use crate::device::cpu::step::{Held, STRETCH};
use crate::memory::Memory;
use crate::rank_coords::RankCoords;
use crate::types::{Types, typed};
use paceline_kernels::Element;
use paceline_kernels::arena::{Access, ArenaError};
use paceline_kernels::compressed_adam::{CompressedAdam, apply_momentum, local_momentum};
use paceline_kernels::optimizer::Weights;
use paceline_kernels::pool::{Pool, strips};
use paceline_plan::program::{Bucket, Entry};

/// Operands of a momentum op on a bucket.
pub(crate) struct MomentumExchange<'a> {
    pub(crate) types: Types,
    pub(crate) memory: &'a Memory<'a>,
    pub(crate) pool: &'a Pool,
    pub(crate) place: RankCoords,
    pub(crate) bucket: &'a Bucket,
    pub(crate) running: u64,
}

impl MomentumExchange<'_> {
    /// Replaces this rank's gradients by its contribution to the next first moment.
    pub(crate) fn local_momentum(&self, rule: &CompressedAdam) -> Result<(), ArenaError> {
        self.each(|_, held| typed!(self.types, <_T, G> self.local_momentum_of::<G>(rule, held)))
    }

    /// Updates the weights from the agreed first moment, stored in the gradient buffer.
    pub(crate) fn apply_momentum(&self, rule: &CompressedAdam) -> Result<(), ArenaError> {
        self.each(
            |entry, held| typed!(self.types, <T, G> self.apply_momentum_of::<T, G>(rule, entry, held)),
        )
    }

    /// Calls `act` for each tensor; all of them are held whole.
    fn each(
        &self,
        mut act: impl FnMut(&Entry, &Held<'_>) -> Result<(), ArenaError>,
    ) -> Result<(), ArenaError> {
        let (memory, running, owned) = (self.memory, self.running, self.place.owned(self.bucket));
        for entry in &self.bucket.entries {
            let elements = entry.offset..entry.offset + entry.elements();
            act(entry, &Held { memory, running, owned: &owned, elements })?;
        }
        Ok(())
    }

    fn local_momentum_of<G: Element>(
        &self,
        rule: &CompressedAdam,
        held: &Held<'_>,
    ) -> Result<(), ArenaError> {
        let Bucket { grads, moments, .. } = self.bucket;
        let spans = [(held.span(*grads), Access::Write), (held.span(moments[0]), Access::Read)];
        let views = held.memory.views(&spans)?;
        let (grads, first) = (views.take::<G>(0), views.slice::<f32>(1));
        self.pool.for_each_block(first.len(), STRETCH, strips(grads, 1), |at, grads| {
            local_momentum(rule, grads, &first[at]);
        });
        Ok(())
    }

    fn apply_momentum_of<T: Element, G: Element>(
        &self,
        rule: &CompressedAdam,
        entry: &Entry,
        held: &Held<'_>,
    ) -> Result<(), ArenaError> {
        let Bucket { params, grads, master, moments, .. } = self.bucket;
        let mut spans = vec![
            (held.span(master.unwrap_or(*params)), Access::Write),
            (held.span(*grads), Access::Read),
            (held.span(moments[0]), Access::Write),
            (held.span(moments[1]), Access::Write),
        ];
        spans.extend(master.map(|_| (held.span(*params), Access::Write)));
        let views = held.memory.views(&spans)?;
        let agreed = views.slice::<G>(1);
        let rounded = master.map(|_| strips(views.take::<T>(4), 1));
        let weights = (strips(views.take::<f32>(0), 1), rounded);
        let moments = (strips(views.take::<f32>(2), 1), strips(views.take::<f32>(3), 1));
        let outputs = (weights, moments);
        self.pool.for_each_block(agreed.len(), STRETCH, outputs, |at, (weights, (m, v))| {
            let weights = Weights { master: weights.0, rounded: weights.1 };
            apply_momentum(rule, entry.decay, weights, &agreed[at], m, v);
        });
        Ok(())
    }
}
