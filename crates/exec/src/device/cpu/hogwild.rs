//! Hogwild: reads and updates of weights that other ranks update concurrently.
//!
//! A step reads a few of the shared numbers at a time, computes their new values, and writes them
//! back at once. Weights are written as differences, so that a concurrent step is not lost. Of
//! moments the last write counts: the sum of two changes of a mean is not a mean, and that of
//! squares could even be negative.

use crate::device::cpu::step::{AVERAGED, Held, Rule, STRETCH};
use crate::memory::Memory;
use crate::memory::shared_weights::SharedWeights;
use paceline_kernels::Element;
use paceline_kernels::arena::{Access, ArenaError, Span};
use paceline_kernels::optimizer::{self, Weights};
use paceline_kernels::pool::{Pool, strips};
use paceline_plan::program::{Bucket, Entry};

/// Copies the current shared weights to a rank's own arena.
pub(crate) fn pull(
    pool: &Pool,
    memory: &Memory<'_>,
    from: Span,
    into: Span,
) -> Result<(), ArenaError> {
    let Some(shared_weights) = memory.shared(from) else { return Ok(()) };
    let words = shared_weights.words(from)?;
    let views = memory.views(&[(into, Access::Write)])?;
    let into = views.take::<f32>(0);
    pool.for_each_block(into.len(), STRETCH, strips(into, 1), |at, into| words.part(at).read(into));
    Ok(())
}

/// Number of elements per step: they stay in the L1 cache, and other ranks have little time to
/// interleave.
const AT_A_TIME: usize = 512;

impl Rule {
    /// Updates the elements of an entry whose weights and moments are shared by all ranks.
    pub(crate) fn hogwild_step<G: Element>(
        &self,
        pool: &Pool,
        shared_weights: &SharedWeights,
        bucket: &Bucket,
        entry: &Entry,
        held: &Held<'_>,
    ) -> Result<(), ArenaError> {
        let weights = shared_weights.words(held.span(bucket.params))?;
        let moment =
            |at: usize| bucket.moments.get(at).map(|&view| shared_weights.words(held.span(view)));
        let moments = [moment(0).transpose()?, moment(1).transpose()?];
        let views = held.memory.views(&[(held.span(bucket.grads), Access::Read)])?;
        let grads = views.slice::<G>(0);
        pool.for_each(grads.len().div_ceil(AT_A_TIME), |tile| {
            let at = tile * AT_A_TIME..grads.len().min((tile + 1) * AT_A_TIME);
            let (mut before, mut after) = ([0.0; AT_A_TIME], [0.0; AT_A_TIME]);
            let mut state = [[0.0; AT_A_TIME]; 2];
            let count = at.len();
            let (weights, before) = (weights.part(at.clone()), &mut before[..count]);
            weights.read(before);
            let after = &mut after[..count];
            after.copy_from_slice(before);
            for (words, state) in moments.iter().zip(&mut state) {
                words.iter().for_each(|words| words.part(at.clone()).read(&mut state[..count]));
            }
            let [m, v] = state.each_mut().map(|state| &mut state[..count]);
            self.move_on(entry, after, &grads[at.clone()], m, v);
            weights.add_delta(before, after);
            for (words, state) in moments.iter().zip(&state) {
                words.iter().for_each(|words| words.part(at.clone()).write(&state[..count]));
            }
        });
        Ok(())
    }

    /// Updates some weights and their moments.
    fn move_on<G: Element>(
        &self,
        entry: &Entry,
        master: &mut [f32],
        grads: &[G],
        m: &mut [f32],
        v: &mut [f32],
    ) {
        let weights = Weights::<f32> { master, rounded: None };
        match self {
            _ if entry.running => optimizer::average(AVERAGED, weights, grads),
            Self::Sgd(rule) => optimizer::sgd(rule, entry.decay, weights, grads),
            Self::Momentum(rule) => optimizer::momentum(rule, entry.decay, weights, grads, m),
            Self::AdamW(rule) => optimizer::adamw(rule, entry.decay, weights, grads, m, v),
            // A plan whose steps depend on tensor norms shares no weights.
            Self::Lamb(_) | Self::Lars(_) => {}
        }
    }
}
