//! Data sources of tokens, images and clicks, and their division into samples.
//!
//! This module is independent of ranks: the iteration and the index in the global batch determine a
//! sample, so every layout of the same run reads the same data in the same order.

mod clicks;
mod clients;
pub mod corpus;
mod digits;
mod images;
mod permutation;
mod source;
mod text;
mod token_cache;
mod tokenizer;
mod words;

pub use clicks::Clicks;
pub use clients::{ClientSplit, Federated};
pub use corpus::{Corpus, CorpusError};
pub use images::Images;
pub use paceline_plan::samples::SampleKind;
pub use permutation::Permutation;
pub use source::{BUILTIN, Data, DataError, DataSource};
pub use text::{Text, TextError};
pub use tokenizer::{Tokenizer, TokenizerError, is_guarded};

/// Position of a sample's first token.
///
/// Samples are consecutive, non-overlapping windows of `seq` tokens rounded up to whole sentences.
/// Each begins with a sentence, so no model has to guess its place in one, and
/// [`Corpus::floor_for`] is exact. Its inputs are the tokens `0..seq` of the window, its targets
/// the tokens `1..=seq`. Iterations and samples count from 0.
///
/// Positions wrap around after 2⁶⁴ tokens, on a sentence boundary.
pub fn sample_start(
    iteration: u64,
    sample_in_global_batch: u64,
    global_batch: u64,
    seq: u64,
) -> u64 {
    let sentences = seq.div_ceil(corpus::SENTENCE).max(1);
    let sample = iteration.wrapping_mul(global_batch).wrapping_add(sample_in_global_batch);
    sample.wrapping_mul(sentences).wrapping_mul(corpus::SENTENCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_follow_each_other_without_overlap() {
        for (seq, window) in [(1, 16), (15, 16), (16, 16), (17, 32), (1024, 1024)] {
            let mut expected = 0;
            for iteration in 0..3 {
                for sample in 0..4 {
                    assert_eq!(sample_start(iteration, sample, 4, seq), expected);
                    expected += window;
                }
            }
        }
    }

    #[test]
    fn the_order_of_samples_does_not_depend_on_the_batch() {
        // Twice the batch in half the iterations reads the same windows.
        assert_eq!(sample_start(7, 3, 8, 64), sample_start(3, 11, 16, 64));
    }

    #[test]
    fn every_sample_opens_a_sentence_whatever_the_numbers() {
        let corpus = Corpus::new(100, 1).unwrap();
        for number in [0, 1, 7, u64::MAX / 3, u64::MAX - 1, u64::MAX] {
            for seq in [0, 1, 100, u64::MAX] {
                let start = sample_start(number, number, number, seq);
                assert_eq!(start % corpus::SENTENCE, 0);
                assert_eq!(corpus.token(start), 0);
            }
        }
    }
}
