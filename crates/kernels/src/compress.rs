//! Gradient compression with error feedback.
//!
//! Every encoder takes gradients and an *error*, the compression error of earlier ones. It encodes
//! their sum into a message of 32-bit words, and leaves in the error what the message does not
//! represent. Decoding a message and adding the error restores the sum, up to the rounding of that
//! addition.
//!
//! A non-finite number goes into the message, so that every rank sees it, and not into the error,
//! where it would remain forever.

mod int8;
mod onebit;
mod powersgd;
mod topk;

pub use powersgd::{left, orthonormalise, product, residue, right};
pub use topk::{decode_topk, encode_topk};

use crate::Element;
use crate::shape::expect_len;

/// Encoding of the elements of a block as words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockCode {
    /// A scale, then integers from −127 to 127, four per word.
    Int8,
    /// Number of elements before the trailing zeros. Then, for every 64 of them, the mean of the
    /// non-negative values, the mean of the negative ones, and the signs.
    OneBit,
}

/// Maximum number of elements in a block.
pub const MOST: usize = 1024;

impl BlockCode {
    /// Number of words that encode `elements` elements.
    pub fn words(self, elements: usize) -> usize {
        match self {
            Self::Int8 => 1 + elements.div_ceil(4),
            Self::OneBit => 1 + elements.div_ceil(onebit::GROUP) * onebit::WORDS,
        }
    }

    /// Encodes blocks of `block` elements: gradients plus the error of earlier ones.
    pub fn encode<G: Element>(
        self,
        block: usize,
        gradients: &[G],
        error: &mut [f32],
        message: &mut [u32],
    ) {
        expect_len("error", error.len(), &[gradients.len()]);
        let mut values = [0.0f32; MOST];
        let blocks = gradients.chunks(block).zip(error.chunks_mut(block));
        for ((gradients, error), words) in blocks.zip(self.blocks(block, message)) {
            let values = &mut values[..gradients.len()];
            for (value, (gradient, error)) in values.iter_mut().zip(gradients.iter().zip(&*error)) {
                *value = gradient.widen() + error;
            }
            self.encode_block(values, error, words);
        }
    }

    /// Encodes the sum of messages of equal length, plus the error of earlier sums.
    pub fn merge<'m>(
        self,
        block: usize,
        terms: impl Iterator<Item = &'m [u32]> + Clone,
        error: &mut [f32],
        message: &mut [u32],
    ) {
        let (words, mut values) = (self.words(block), [0.0f32; MOST]);
        for (at, error) in error.chunks_mut(block).enumerate() {
            let values = &mut values[..error.len()];
            values.copy_from_slice(error);
            let place = at * words..(at + 1) * words;
            for term in terms.clone() {
                self.add_block(&term[place.clone()], values);
            }
            self.encode_block(values, error, &mut message[place]);
        }
    }

    /// Decodes a message.
    pub fn decode<G: Element>(self, block: usize, message: &[u32], gradients: &mut [G]) {
        let mut values = [0.0f32; MOST];
        let words = message.chunks(self.words(block));
        for (gradients, words) in gradients.chunks_mut(block).zip(words) {
            let values = &mut values[..gradients.len()];
            values.fill(0.0);
            self.add_block(words, values);
            for (gradient, value) in gradients.iter_mut().zip(&*values) {
                *gradient = G::narrow(*value);
            }
        }
    }

    fn blocks(self, block: usize, message: &mut [u32]) -> impl Iterator<Item = &mut [u32]> {
        assert!(
            block.is_multiple_of(onebit::GROUP) && block <= MOST,
            "a block of {block} elements"
        );
        message.chunks_mut(self.words(block))
    }

    fn encode_block(self, values: &[f32], error: &mut [f32], words: &mut [u32]) {
        match self {
            Self::Int8 => int8::encode(values, error, words),
            Self::OneBit => onebit::encode(values, error, words),
        }
    }

    fn add_block(self, words: &[u32], values: &mut [f32]) {
        match self {
            Self::Int8 => int8::add(words, values),
            Self::OneBit => onebit::add(words, values),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: usize = 64;

    fn encoded(code: BlockCode, gradients: &[f32], error: &mut [f32]) -> Vec<u32> {
        let blocks = gradients.len().div_ceil(BLOCK);
        let mut message = vec![0; blocks * code.words(BLOCK)];
        code.encode(BLOCK, gradients, error, &mut message);
        message
    }

    fn near(a: f32, b: f32, scale: f32) -> bool {
        (a - b).abs() <= 1e-5 * scale.max(1e-30)
    }

    proptest! {
        #[test]
        fn what_is_said_and_what_is_kept_make_up_the_whole(
            values in prop::collection::vec((-1e3f32..1e3, -1.0f32..1.0), 3 * BLOCK),
        ) {
            let gradients: Vec<f32> = values.iter().map(|v| v.0).collect();
            for code in [BlockCode::Int8, BlockCode::OneBit] {
                let mut error: Vec<f32> = values.iter().map(|v| v.1).collect();
                let whole: Vec<f32> = values.iter().map(|v| v.0 + v.1).collect();
                let message = encoded(code, &gradients, &mut error);
                let mut said = vec![f32::NAN; gradients.len()];
                code.decode(BLOCK, &message, &mut said);
                for (at, whole) in whole.iter().enumerate() {
                    prop_assert!(near(said[at] + error[at], *whole, 1e3), "{code:?} at {at}");
                }
            }
        }

        #[test]
        fn whole_numbers_are_off_by_half_a_step_at_most(
            gradients in prop::collection::vec(-1e3f32..1e3, BLOCK),
        ) {
            let mut error = vec![0.0; BLOCK];
            encoded(BlockCode::Int8, &gradients, &mut error);
            let step = gradients.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
            prop_assert!(error.iter().all(|e| e.abs() <= 0.501 * step));
        }

        #[test]
        fn a_sum_of_messages_is_the_sum_of_what_they_say(
            terms in prop::collection::vec(prop::collection::vec(-10.0f32..10.0, 2 * BLOCK), 1..5),
        ) {
            for code in [BlockCode::Int8, BlockCode::OneBit] {
                let (mut received, mut sum) = (Vec::new(), vec![0.0f32; 2 * BLOCK]);
                for term in &terms {
                    let message = encoded(code, term, &mut vec![0.0; 2 * BLOCK]);
                    let mut said = vec![0.0f32; 2 * BLOCK];
                    code.decode(BLOCK, &message, &mut said);
                    sum.iter_mut().zip(&said).for_each(|(sum, said)| *sum += said);
                    received.extend(message);
                }
                let (mut error, mut message) =
                    (vec![0.0; 2 * BLOCK], vec![0; 2 * code.words(BLOCK)]);
                let received = received.chunks_exact(message.len());
                code.merge(BLOCK, received, &mut error, &mut message);
                let mut said = vec![0.0f32; 2 * BLOCK];
                code.decode(BLOCK, &message, &mut said);
                for at in 0..2 * BLOCK {
                    prop_assert!(near(said[at] + error[at], sum[at], 50.0), "{code:?} at {at}");
                }
            }
        }
    }

    #[test]
    fn zeros_at_the_end_stay_zero() {
        let mut gradients = vec![1.0f32; BLOCK];
        gradients[10..].fill(0.0);
        for code in [BlockCode::Int8, BlockCode::OneBit] {
            let mut error = vec![0.0; BLOCK];
            let message = encoded(code, &gradients, &mut error);
            let mut said = vec![f32::NAN; BLOCK];
            code.decode(BLOCK, &message, &mut said);
            assert_eq!(said, gradients, "{code:?}");
            assert_eq!(error, [0.0; BLOCK]);
        }
    }

    #[test]
    fn what_is_not_finite_is_said_and_not_kept() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut gradients = vec![1.0f32; BLOCK];
            gradients[3] = bad;
            for code in [BlockCode::Int8, BlockCode::OneBit] {
                let mut error = vec![0.25; BLOCK];
                let message = encoded(code, &gradients, &mut error);
                let mut said = vec![0.0f32; BLOCK];
                code.decode(BLOCK, &message, &mut said);
                assert!(said.iter().any(|x| !x.is_finite()), "{code:?} hides {bad}");
                assert!(error.iter().all(|x| x.is_finite()), "{code:?} keeps {bad}");
            }
        }
    }
}
