//! Top-k compression: the largest elements and their indices.

use crate::Element;
use crate::shape::expect_len;

/// Writes the indices, counted from `first`, and the values of the largest elements of gradients
/// plus error, in index order. Their number is the length of `places`; of equal elements the first
/// are taken. Elements that are not written stay in the error.
pub fn encode_topk<G: Element>(
    first: u32,
    gradients: &[G],
    error: &mut [f32],
    places: &mut [u32],
    values: &mut [u32],
) {
    expect_len("error", error.len(), &[gradients.len()]);
    expect_len("values", values.len(), &[places.len()]);
    for (error, gradient) in error.iter_mut().zip(gradients) {
        *error += gradient.widen();
    }
    let (threshold, mut ties) = threshold(error, places.len());
    let mut room = places.iter_mut().zip(values.iter_mut());
    for (at, error) in error.iter_mut().enumerate() {
        let size = size(*error);
        if size < threshold || size == threshold && ties == 0 {
            continue;
        }
        ties -= usize::from(size == threshold);
        let Some((place, value)) = room.next() else { break };
        (*place, *value) = (first + at as u32, error.to_bits());
        *error = 0.0;
    }
    // With fewer elements than slots, the remaining slots are marked as empty.
    room.for_each(|(place, value)| (*place, *value) = (u32::MAX, 0));
}

/// Decodes the sum of `terms` messages of equal length.
pub fn decode_topk<G: Element>(terms: usize, messages: &[u32], gradients: &mut [G]) {
    gradients.fill(G::ZERO);
    for message in messages.chunks_exact((messages.len() / terms.max(1)).max(1)) {
        let (places, values) = message.split_at(message.len() / 2);
        for (place, value) in places.iter().zip(values) {
            if let Some(gradient) = gradients.get_mut(*place as usize) {
                *gradient = G::narrow(gradient.widen() + f32::from_bits(*value));
            }
        }
    }
}

/// Magnitude of a number as an integer of the same order. NaN is the largest.
fn size(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

/// Magnitude of the `count`-th largest element, and the number of elements of that magnitude among
/// the largest. Radix selection from the most significant digit: three passes, however long `x` is.
fn threshold(x: &[f32], count: usize) -> (u32, usize) {
    const DIGITS: [(u32, u32); 3] = [(20, 11), (10, 10), (0, 10)];
    let mut wanted = count.min(x.len());
    if wanted == 0 {
        return (u32::MAX, 0);
    }
    let mut prefix = 0;
    let mut known = 31;
    for (shift, bits) in DIGITS {
        let mut histogram = [0usize; 1 << 11];
        for size in x.iter().map(|x| size(*x)) {
            if size >> known == prefix {
                histogram[(size >> shift & ((1 << bits) - 1)) as usize] += 1;
            }
        }
        let mut digit = (1usize << bits) - 1;
        while histogram[digit] < wanted {
            wanted -= histogram[digit];
            digit -= 1;
        }
        prefix = prefix << bits | digit as u32;
        known = shift;
    }
    (prefix, wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_largest_are_sent_and_the_rest_is_kept(
            gradients in prop::collection::vec(prop_oneof![-1.0f32..1.0, Just(0.5f32)], 1..200),
            fraction in 0.0f64..1.0,
        ) {
            let count = (gradients.len() as f64 * fraction) as usize;
            let mut error = vec![0.0; gradients.len()];
            let mut message = vec![0; 2 * count];
            let (places, values) = message.split_at_mut(count);
            encode_topk(0, &gradients, &mut error, places, values);
            let mut said = vec![f32::NAN; gradients.len()];
            decode_topk(1, &message, &mut said);
            let mut sizes: Vec<f32> = gradients.iter().map(|x| x.abs()).collect();
            sizes.sort_by(|a, b| b.total_cmp(a));
            let expected: f32 = sizes[..count].iter().sum();
            let sent: f32 = said.iter().map(|x| x.abs()).sum();
            prop_assert!((sent - expected).abs() <= 1e-4 * expected.max(1.0));
            for at in 0..gradients.len() {
                prop_assert_eq!(said[at] + error[at], gradients[at]);
                prop_assert!(said[at] == 0.0 || error[at] == 0.0);
            }
        }
    }

    #[test]
    fn messages_add_up_and_what_points_beyond_the_end_is_nothing() {
        let bits = |x: f32| x.to_bits();
        let messages = [1, 3, bits(2.0), bits(1.0), 1, 900, bits(-0.5), bits(7.0)];
        let mut sum = [f32::NAN; 4];
        decode_topk(2, &messages, &mut sum);
        assert_eq!(sum, [0.0, 1.5, 0.0, 1.0]);
    }

    #[test]
    fn what_is_not_finite_is_sent_first() {
        let mut error = [0.0; 4];
        let (mut places, mut values) = ([0], [0]);
        let gradients = [1.0f32, f32::NAN, 3.0, -4.0];
        encode_topk(100, &gradients, &mut error, &mut places, &mut values);
        assert_eq!(places, [101]);
        assert_eq!(error, [1.0, 0.0, 3.0, -4.0]);
    }
}
