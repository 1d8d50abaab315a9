//! Built-in corpus: an endless text from a small stochastic grammar with known entropy.
//!
//! It needs no download and no storage, and a run can show its loss beside the loss floor. The
//! grammar has one thing to learn for each part of a transformer:
//!
//! | place in the sentence | token | nats | what predicts it |
//! |---|---|---|---|
//! | 0 | the full stop, token 0 | 0 | position |
//! | 1 | any of the A words, equally likely | ln A | nothing |
//! | 2–10 | a successor of the word before: 1/2, 1/4, 1/8, 1/8 | 1.75 ln 2 | the token before |
//! | 11–15 | the words of places 1–5 again | 0 | attention, ten back |
//!
//! The A = min(vocabulary − 1, 255) words are tokens 1 to A; higher tokens never occur. Arithmetic
//! alone gives the successors of a word: counting words from 0, successor k of word w is a·w + 1 +
//! k modulo A, with a coprime to A. The four are distinct as soon as A ≥ 4, and every word is a
//! k-th successor of exactly one word. So all words are equally frequent everywhere: counting words
//! gains nothing, a model has to learn the successions.
//!
//! A sentence depends only on the seed and its own number. Any rank can compute any token in
//! constant time, in any order. Another seed gives another text of the same language: held-out
//! data.

use thiserror::Error;

/// Tokens in a sentence.
pub const SENTENCE: u64 = 16;

/// Maximum number of words in the grammar; small, so that a short run sees each succession often.
pub(super) const MOST_WORDS: u32 = 255;
/// Place of the first word, after the full stop.
const FIRST_WORD: usize = 1;
/// Place of the first repeated word.
const FIRST_REPEAT: usize = 11;
/// Successors of a word.
const SUCCESSORS: usize = 4;
/// Successor chosen by three uniform bits: four, two, one and one of the eight values.
const CHOICE: [u8; 8] = [0, 0, 0, 0, 1, 1, 2, 3];
/// Entropy of that choice: 1/2·1 + 1/4·2 + 1/8·3 + 1/8·3 bits.
const CHOICE_NATS: f64 = 1.75 * std::f64::consts::LN_2;

/// Text of a seed.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// Keys of the two independent streams of random numbers, from the seed.
    first_word_key: u64,
    choices_key: u64,
    /// Successors of each word; the first entry is for the full stop and unused.
    successors: Vec<[u32; SUCCESSORS]>,
}

/// Reason why a corpus cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CorpusError {
    /// Too few tokens for a sentence.
    #[error(
        "the built-in corpus needs a vocabulary of at least 5 tokens (a full stop and four words), \
         the model has {vocab}"
    )]
    Vocabulary {
        /// Number of tokens in the model's vocabulary.
        vocab: u32,
    },
}

impl Corpus {
    /// Creates the text for a model with `vocab` tokens.
    pub fn new(vocab: u32, seed: u64) -> Result<Self, CorpusError> {
        let words = vocab.saturating_sub(1).min(MOST_WORDS);
        if words < SUCCESSORS as u32 {
            return Err(CorpusError::Vocabulary { vocab });
        }
        let multiplier = multiplier(words);
        let successors = |token: u32| {
            let word = token.saturating_sub(1);
            std::array::from_fn(|k| 1 + (multiplier * word + 1 + k as u32) % words)
        };
        Ok(Self {
            first_word_key: mix(seed.wrapping_add(GOLDEN_RATIO)),
            choices_key: mix(seed.wrapping_add(GOLDEN_RATIO.wrapping_mul(2))),
            successors: (0..=words).map(successors).collect(),
        })
    }

    /// Token at a position, in constant time.
    pub fn token(&self, position: u64) -> u32 {
        self.sentence(position / SENTENCE)[place(position)]
    }

    /// Fills in the tokens from a position on. Positions wrap around after 2⁶⁴ tokens.
    pub fn fill(&self, position: u64, tokens: &mut [u32]) {
        let mut position = position;
        let mut rest = tokens;
        while !rest.is_empty() {
            let sentence = &self.sentence(position / SENTENCE)[place(position)..];
            let (now, later) = rest.split_at_mut(sentence.len().min(rest.len()));
            now.copy_from_slice(&sentence[..now.len()]);
            position = position.wrapping_add(now.len() as u64);
            rest = later;
        }
    }

    /// Entropy of the text in nats per token: the loss floor that no model goes below.
    ///
    /// (ln A + 9 · 1.75 · ln 2) / 16; 1.0286 for a vocabulary of 256 or more.
    pub fn floor(&self) -> f64 {
        self.floor_for(SENTENCE)
    }

    /// Lowest expected loss, in nats per token, over the `seq` targets of one sample.
    ///
    /// A sample begins with a sentence (see [`sample_start`](super::sample_start)) and its targets
    /// are the places 1 to `seq` from there, each predicted from the true tokens before it. A
    /// sample without targets has no loss; its floor is 0.
    pub fn floor_for(&self, seq: u64) -> f64 {
        if seq == 0 {
            return 0.0;
        }
        let nats = |places: usize| (1..=places).map(|place| self.nats(place)).sum::<f64>();
        let whole = (seq / SENTENCE) as f64 * nats(SENTENCE as usize);
        (whole + nats(place(seq))) / seq as f64
    }

    /// Words that may follow a word, most likely first (1/2, 1/4, 1/8, 1/8). `None` for tokens that
    /// are not words.
    pub fn successors(&self, token: u32) -> Option<[u32; SUCCESSORS]> {
        let index = usize::try_from(token).ok().filter(|&index| index > 0)?;
        self.successors.get(index).copied()
    }

    /// Number of words in the grammar, A.
    pub fn words(&self) -> u32 {
        self.successors.len() as u32 - 1
    }

    /// Entropy of a place, given all earlier tokens; place 16 begins the next sentence.
    fn nats(&self, place: usize) -> f64 {
        match place {
            FIRST_WORD => f64::from(self.words()).ln(),
            place if place > FIRST_WORD && place < FIRST_REPEAT => CHOICE_NATS,
            _ => 0.0,
        }
    }

    fn sentence(&self, number: u64) -> [u32; SENTENCE as usize] {
        let counter = mix(number.wrapping_mul(GOLDEN_RATIO));
        let uniform = mix(self.first_word_key ^ counter);
        let mut choices = mix(self.choices_key ^ counter);

        let mut sentence = [0; SENTENCE as usize];
        // The high half of a product scales 64 uniform bits to 0..A, with an error below A/2⁶⁴.
        let word = (u128::from(uniform) * u128::from(self.words())) >> 64;
        sentence[FIRST_WORD] = 1 + word as u32;
        for place in FIRST_WORD + 1..FIRST_REPEAT {
            let before = self.successors[sentence[place - 1] as usize];
            sentence[place] = before[usize::from(CHOICE[(choices & 7) as usize])];
            choices >>= 3;
        }
        sentence.copy_within(FIRST_WORD..FIRST_WORD + 5, FIRST_REPEAT);
        sentence
    }
}

/// Place of a position within its sentence.
fn place(position: u64) -> usize {
    (position % SENTENCE) as usize
}

/// Largest number not above 0.618·words that is coprime to it, to scatter neighbours.
fn multiplier(words: u32) -> u32 {
    let coprime = |&candidate: &u32| gcd(candidate, words) == 1;
    (1..=words * 618 / 1000).rev().find(coprime).unwrap_or(1)
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// 2⁶⁴ divided by the golden ratio: odd, so that multiples of it visit every 64-bit number.
const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection in which every input bit
/// flips about half of the output bits.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENTENCES: usize = 20_000;

    fn text(corpus: &Corpus) -> Vec<u32> {
        let mut tokens = vec![0; SENTENCES * SENTENCE as usize];
        corpus.fill(0, &mut tokens);
        tokens
    }

    /// Checks Pearson's statistic against the expected shares, within five standard deviations.
    fn assert_shares(counts: &[usize], shares: impl Fn(usize) -> f64, what: &str) {
        let total: usize = counts.iter().sum();
        let statistic: f64 = counts
            .iter()
            .enumerate()
            .map(|(index, &count)| {
                let expected = total as f64 * shares(index);
                (count as f64 - expected).powi(2) / expected
            })
            .sum();
        let freedom = (counts.len() - 1) as f64;
        assert!(statistic < freedom + 5.0 * (2.0 * freedom).sqrt(), "{what}: chi² = {statistic}");
    }

    #[test]
    fn the_text_follows_the_grammar() {
        let corpus = Corpus::new(1000, 7).unwrap();
        assert_eq!(corpus.words(), 255);
        for sentence in text(&corpus).chunks_exact(SENTENCE as usize) {
            assert_eq!(sentence[0], 0);
            assert!(sentence[1..].iter().all(|token| (1..=255).contains(token)));
            for pair in sentence[1..11].windows(2) {
                assert!(corpus.successors(pair[0]).unwrap().contains(&pair[1]));
            }
            assert_eq!(sentence[1..6], sentence[11..16]);
        }
    }

    #[test]
    fn the_measured_surprise_is_the_floor() {
        for (vocab, seed) in [(5, 1), (17, 2), (256, 3), (50_257, 4)] {
            let corpus = Corpus::new(vocab, seed).unwrap();
            let words = f64::from(corpus.words());
            let nats: f64 = text(&corpus)
                .chunks_exact(SENTENCE as usize)
                .map(|sentence| {
                    let chain = sentence[1..11].windows(2).map(|pair| {
                        let successors = corpus.successors(pair[0]).unwrap();
                        let k = successors.iter().position(|&token| token == pair[1]).unwrap();
                        -[0.5f64, 0.25, 0.125, 0.125][k].ln()
                    });
                    words.ln() + chain.sum::<f64>()
                })
                .sum();
            let measured = nats / (SENTENCES as f64 * SENTENCE as f64);
            // A choice has a variance of 0.6875 bits²; allow four deviations of the mean.
            let choices = 9.0 * SENTENCES as f64;
            let deviation = (0.6875 / choices).sqrt() * std::f64::consts::LN_2 * 9.0 / 16.0;
            let floor = corpus.floor();
            assert!((measured - floor).abs() < 4.0 * deviation, "{vocab}: {measured}, {floor}");
        }
    }

    /// The test above takes the probabilities as given; this one counts them.
    #[test]
    fn the_probabilities_are_as_stated_at_every_place() {
        let corpus = Corpus::new(256, 11).unwrap();
        let text = text(&corpus);
        for place in 1..11 {
            let mut words = vec![0; 255];
            let mut choices = [0; 4];
            for sentence in text.chunks_exact(SENTENCE as usize) {
                words[sentence[place] as usize - 1] += 1;
                if place > 1 {
                    let successors = corpus.successors(sentence[place - 1]).unwrap();
                    choices[successors.iter().position(|&t| t == sentence[place]).unwrap()] += 1;
                }
            }
            assert_shares(&words, |_| 1.0 / 255.0, &format!("words at place {place}"));
            if place > 1 {
                let share = |k| [0.5, 0.25, 0.125, 0.125][k];
                assert_shares(&choices, share, &format!("choices at place {place}"));
            }
        }
    }

    /// If neighbouring draws were correlated, a model could go below the floor.
    #[test]
    fn draws_are_independent_of_their_neighbours() {
        let corpus = Corpus::new(5, 3).unwrap();
        let text = text(&corpus);
        let sentences: Vec<_> = text.chunks_exact(SENTENCE as usize).collect();
        let mut across = vec![0; 16];
        let mut within = vec![0; 16];
        for pair in sentences.windows(2) {
            across[(pair[0][1] - 1) as usize * 4 + (pair[1][1] - 1) as usize] += 1;
            let k = |place: usize| {
                let successors = corpus.successors(pair[0][place - 1]).unwrap();
                successors.iter().position(|&token| token == pair[0][place]).unwrap()
            };
            within[k(2) * 4 + k(3)] += 1;
        }
        assert_shares(&across, |_| 1.0 / 16.0, "first words of neighbouring sentences");
        let share = |k: usize| [0.5, 0.25, 0.125, 0.125][k];
        assert_shares(&within, |pair| share(pair / 4) * share(pair % 4), "neighbouring choices");
    }

    #[test]
    fn the_floor_is_the_closed_form() {
        let corpus = Corpus::new(50_257, 0).unwrap();
        let (first, choice) = (255f64.ln(), 1.75 * 2f64.ln());
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} is not {b}");
        close(corpus.floor(), (first + 9.0 * choice) / 16.0);
        close(corpus.floor(), 1.028_645_727_436_097_6);
        close(corpus.floor_for(1), first);
        close(corpus.floor_for(2), (first + choice) / 2.0);
        close(corpus.floor_for(10), (first + 9.0 * choice) / 10.0);
        close(corpus.floor_for(15), (first + 9.0 * choice) / 15.0);
        close(corpus.floor_for(16), corpus.floor());
        close(corpus.floor_for(17), (2.0 * first + 9.0 * choice) / 17.0);
        close(corpus.floor_for(1024), corpus.floor());
        close(corpus.floor_for(u64::MAX), corpus.floor());
        assert_eq!(corpus.floor_for(0), 0.0);
    }

    #[test]
    fn any_token_is_found_by_itself() {
        let corpus = Corpus::new(300, 42).unwrap();
        for start in [0, 1, 15, 16, 1_000_003, u64::MAX - 20] {
            for length in [0, 1, 15, 16, 17, 100] {
                let mut tokens = vec![u32::MAX; length];
                corpus.fill(start, &mut tokens);
                for (offset, &token) in tokens.iter().enumerate() {
                    assert_eq!(corpus.token(start.wrapping_add(offset as u64)), token);
                }
            }
        }
    }

    /// A changed text would change every loss ever reported on it.
    #[test]
    fn the_text_is_pinned() {
        let mut tokens = [0; 20];
        Corpus::new(50_257, 1).unwrap().fill(0, &mut tokens);
        assert_eq!(
            tokens,
            [
                0, 221, 118, 11, 43, 221, 118, 14, 4, 218, 156, 221, 118, 11, 43, 221, 0, 142, 209,
                21
            ]
        );
    }

    #[test]
    fn seeds_make_different_texts_of_one_language() {
        let [a, b] = [1, 2].map(|seed| Corpus::new(256, seed).unwrap());
        assert_eq!(a.successors, b.successors);
        let same = text(&a)
            .chunks_exact(SENTENCE as usize)
            .zip(text(&b).chunks_exact(SENTENCE as usize))
            .filter(|(a, b)| a == b)
            .count();
        // Two sentences are equal with a probability of about 1/255 · 0.34⁹.
        assert!(same < 3, "{same} equal sentences");
    }

    #[test]
    fn successors_are_distinct_and_every_word_is_one_of_each_kind() {
        for words in 4..=255 {
            let corpus = Corpus::new(words + 1, 0).unwrap();
            assert_eq!(corpus.words(), words);
            let mut kinds = vec![[0; SUCCESSORS]; words as usize];
            for word in 1..=words {
                let mut successors = corpus.successors(word).unwrap();
                for (k, &successor) in successors.iter().enumerate() {
                    assert!((1..=words).contains(&successor));
                    kinds[successor as usize - 1][k] += 1;
                }
                successors.sort_unstable();
                assert!(successors.windows(2).all(|pair| pair[0] < pair[1]), "{words}: {word}");
            }
            assert!(kinds.iter().all(|&kind| kind == [1; SUCCESSORS]), "{words} words");
            assert_eq!(corpus.successors(0), None);
            assert_eq!(corpus.successors(words + 1), None);
        }
    }

    #[test]
    fn a_vocabulary_too_small_is_refused() {
        for vocab in 0..5 {
            assert_eq!(Corpus::new(vocab, 0).unwrap_err(), CorpusError::Vocabulary { vocab });
        }
        assert!(Corpus::new(5, u64::MAX).is_ok());
        assert_eq!(Corpus::new(u32::MAX, 0).unwrap().words(), 255);
    }
}
