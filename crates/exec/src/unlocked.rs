//! Reading and stepping weights that other ranks step at the same time.
//!
//! A step takes a few of the shared numbers at a time, computes what they should become from what they now are,
//! and puts that back at once. Weights are put back as differences, so that a step that came in between
//! stays; of moments the last ones put back stand, because a sum of two moves of a mean is no mean, and
//! one of squares could even be negative.

use crate::commons::Commons;
use crate::memory::Memory;
use crate::update::{AVERAGED, Held, Rule, STRETCH};
use paceline_kernels::Element;
use paceline_kernels::arena::{Access, ArenaError, Span};
use paceline_kernels::optimizer::{self, Weights};
use paceline_kernels::pool::{Pool, strips};
use paceline_plan::program::{Bucket, Entry};

/// Copies shared weights, as they now are, to a rank's own arena.
pub(crate) fn pull(
    pool: &Pool,
    memory: &Memory<'_>,
    commons: &Commons,
    from: Span,
    into: Span,
) -> Result<(), ArenaError> {
    let words = commons.words(from)?;
    let views = memory.views(&[(into, Access::Write)])?;
    let into = views.take::<f32>(0);
    pool.for_each_block(into.len(), STRETCH, strips(into, 1), |at, into| words.part(at).read(into));
    Ok(())
}

/// How many numbers a step takes at a time: they stay in the nearest cache, and others have little time to
/// come in between.
const AT_A_TIME: usize = 512;

impl Rule {
    /// Updates the elements of an entry of a bucket whose weights and moments all ranks share.
    pub(crate) fn update_unlocked<G: Element>(
        &self,
        pool: &Pool,
        commons: &Commons,
        bucket: &Bucket,
        entry: &Entry,
        held: &Held<'_>,
    ) -> Result<(), ArenaError> {
        let weights = commons.words(held.span(bucket.params))?;
        let moment = |at: usize| bucket.moments.get(at).map(|&view| commons.words(held.span(view)));
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
            weights.shift(before, after);
            for (words, state) in moments.iter().zip(&state) {
                words.iter().for_each(|words| words.part(at.clone()).write(&state[..count]));
            }
        });
        Ok(())
    }

    /// Moves some weights and their moments on.
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
            // A plan whose steps depend on lengths shares no weights.
            Self::Lamb(_) | Self::Lars(_) => {}
        }
    }
}
