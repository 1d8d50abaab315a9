//! Block encoded as signs, and the mean of each sign in every group of [`GROUP`] elements (Seide et
//! al., Interspeech 2014, section 3.1). The paper uses the columns of a matrix as groups.
//!
//! The first word is the number of elements before the trailing zeros. For each group follow a word
//! with both means in 16 bits each (the upper half of an f32), and the signs, 32 per word.

/// Number of elements that share their means.
pub(super) const GROUP: usize = 64;

/// Number of words per group.
pub(super) const WORDS: usize = 1 + GROUP / 32;

/// Writes the words; leaves in `error` the difference between each value and its decoded value.
/// Trailing zeros, such as the padding of a tensor, do not count in the means.
pub(super) fn encode(values: &[f32], error: &mut [f32], words: &mut [u32]) {
    let count = values.iter().rposition(|x| *x != 0.0).map_or(0, |last| last + 1);
    words.fill(0);
    words[0] = count as u32;
    error[count..].fill(0.0);
    let groups = values[..count].chunks(GROUP).zip(error.chunks_mut(GROUP));
    for ((values, error), words) in groups.zip(words[1..].chunks_exact_mut(WORDS)) {
        let (mut sums, mut counts) = ([0.0f32; 2], [0.0f32; 2]);
        for (at, value) in values.iter().enumerate() {
            let below = usize::from(*value < 0.0);
            sums[below] += value;
            counts[below] += 1.0;
            words[1 + at / 32] |= (below as u32) << (at % 32);
        }
        let mean = |side: usize| if counts[side] > 0.0 { sums[side] / counts[side] } else { 0.0 };
        words[0] = mean(0).to_bits() >> 16 | mean(1).to_bits() & 0xffff_0000;
        let means = means(words[0]);
        if means.iter().all(|mean| mean.is_finite()) {
            for (error, value) in error.iter_mut().zip(values) {
                *error = value - means[usize::from(*value < 0.0)];
            }
        }
    }
}

/// Adds the decoded values.
pub(super) fn add(words: &[u32], values: &mut [f32]) {
    let count = (words[0] as usize).min(values.len());
    let groups = values[..count].chunks_mut(GROUP).zip(words[1..].chunks_exact(WORDS));
    for (values, words) in groups {
        let means = means(words[0]);
        for (values, signs) in values.chunks_mut(32).zip(&words[1..]) {
            for (at, value) in values.iter_mut().enumerate() {
                *value += means[(signs >> at & 1) as usize];
            }
        }
    }
}

/// Both means of a group.
fn means(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}
