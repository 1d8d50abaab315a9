//! The optimizer's step where ranks exchange first moments: before the exchange each makes its share, after it all
//! make the same step.

use crate::memory::Memory;
use crate::place::Place;
use crate::types::{Types, typed};
use crate::update::{Held, STRETCH};
use paceline_kernels::Element;
use paceline_kernels::arena::{Access, ArenaError};
use paceline_kernels::optimizer::Weights;
use paceline_kernels::pool::{Pool, strips};
use paceline_kernels::settled::{Settled, follow, share};
use paceline_plan::program::{Bucket, Entry};

/// What an op of a bucket works on.
pub(crate) struct On<'a> {
    pub(crate) types: Types,
    pub(crate) memory: &'a Memory<'a>,
    pub(crate) pool: &'a Pool,
    pub(crate) place: Place,
    pub(crate) bucket: &'a Bucket,
    pub(crate) running: u64,
}

impl On<'_> {
    /// Turns the gradients of this rank into its share of the next first moment.
    pub(crate) fn share(&self, rule: &Settled) -> Result<(), ArenaError> {
        self.each(|_, held| typed!(self.types, <_T, G> self.share_of::<G>(rule, held)))
    }

    /// Changes the weights by the first moment that stands where gradients do.
    pub(crate) fn follow(&self, rule: &Settled) -> Result<(), ArenaError> {
        self.each(
            |entry, held| typed!(self.types, <T, G> self.follow_of::<T, G>(rule, entry, held)),
        )
    }

    /// Tensor by tensor: all of them are held whole.
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

    fn share_of<G: Element>(&self, rule: &Settled, held: &Held<'_>) -> Result<(), ArenaError> {
        let Bucket { grads, moments, .. } = self.bucket;
        let spans = [(held.span(*grads), Access::Write), (held.span(moments[0]), Access::Read)];
        let views = held.memory.views(&spans)?;
        let (grads, first) = (views.take::<G>(0), views.slice::<f32>(1));
        self.pool.for_each_block(first.len(), STRETCH, strips(grads, 1), |at, grads| {
            share(rule, grads, &first[at]);
        });
        Ok(())
    }

    fn follow_of<T: Element, G: Element>(
        &self,
        rule: &Settled,
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
            follow(rule, entry.decay, weights, &agreed[at], m, v);
        });
        Ok(())
    }
}
