//! Counter-based random numbers, computed from their logical coordinates.
//!
//! A number is a function of a seed, the name of a stream ("the initial values of this tensor") and
//! an index in it, never of earlier draws. Any rank can produce its shard of a tensor, in any
//! order, and a model starts from the same weights in every layout.
//!
//! The generator is Philox4x32 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random
//! numbers: as easy as 1, 2, 3", SC 2011, section 3.3), which passes BigCrush. The key is the seed,
//! half of the counter is a hash of the name, the other half is the index. The functions of real
//! numbers are the crate's own and use only operations that IEEE 754 defines to the bit, so the
//! numbers are the same on every platform.

use crate::instruction_set::vectorised;
use crate::math::{ln_of_normal, sin_cos_cycles};

/// Sequence of 2^64 random numbers with constant-time random access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    seed: u64,
    name: u64,
}

impl Stream {
    /// Stream called `name` among those of `seed`.
    pub fn new(seed: u64, name: &str) -> Self {
        // The name is hashed by the generator itself, eight bytes at a time; the length in the
        // first block distinguishes names that differ only in trailing zero bytes.
        let mut hash = name.len() as u64;
        for chunk in name.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            hash = philox(seed, [u64::from_le_bytes(word), hash])[0];
        }
        Stream { seed, name: hash }
    }

    /// 64 uniform bits.
    #[inline(always)]
    pub fn bits(&self, index: u64) -> u64 {
        philox(self.seed, [index, self.name])[0]
    }

    /// Uniform number in [0, 1), a multiple of 2^-53.
    #[inline(always)]
    pub fn uniform(&self, index: u64) -> f64 {
        unit(self.bits(index))
    }

    /// Standard normal number (Box and Muller, "A note on the generation of random normal
    /// deviates", 1958), computed in double precision and rounded once.
    #[inline(always)]
    pub fn normal(&self, index: u64) -> f32 {
        let [radius, angle] = philox(self.seed, [index, self.name]);
        // One minus a number in [0, 1) is at least 2^-53.
        let radius = (-2.0 * ln_of_normal(1.0 - unit(radius))).sqrt();
        (radius * sin_cos_cycles(unit(angle)).1) as f32
    }

    /// Fills `out` with normal numbers of the given mean and standard deviation, starting with
    /// number `first` of the stream: used to initialise one shard of a tensor.
    pub fn fill_normal(&self, first: u64, mean: f32, deviation: f32, out: &mut [f32]) {
        vectorised(
            #[inline(always)]
            || {
                for (offset, value) in out.iter_mut().enumerate() {
                    *value = mean + deviation * self.normal(first.wrapping_add(offset as u64));
                }
            },
        );
    }
}

/// The top 53 bits as a number in [0, 1).
#[inline(always)]
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Philox4x32-10: a bijection of the 128-bit counter for each key.
#[inline(always)]
fn philox(key: u64, counter: [u64; 2]) -> [u64; 2] {
    let mut key = [key as u32, (key >> 32) as u32];
    let mut c = [
        counter[0] as u32,
        (counter[0] >> 32) as u32,
        counter[1] as u32,
        (counter[1] >> 32) as u32,
    ];
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xD251_1F53;
        let b = u64::from(c[2]) * 0xCD9E_8D57;
        c = [
            (b >> 32) as u32 ^ c[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ c[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    let join = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    [join(c[0], c[1]), join(c[2], c[3])]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers that the authors publish with Random123.
    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(philox(0, [0, 0]), [0xe169c58d_6627e8d5, 0x9b00dbd8_bc57ac4c]);
        assert_eq!(
            philox(u64::MAX, [u64::MAX, u64::MAX]),
            [0x41c83b0e_408f276d, 0x6d5451fd_a20bc7c6]
        );
        assert_eq!(
            philox(0x299f31d0_a4093822, [0x85a308d3_243f6a88, 0x03707344_13198a2e]),
            [0x94fdcceb_d16cfe09, 0x24126ea1_5001e420]
        );
    }

    /// Checkpoints and published loss curves depend on these values: they must never change.
    #[test]
    fn a_stream_is_pinned_to_the_bit() {
        let stream = Stream::new(42, "layers.0.attention.weight");
        assert_eq!(stream.bits(0), 0x3fd7_497a_19ad_a588);
        assert_eq!(stream.normal(1).to_bits(), 0xbdc4_ba78); // about -0.096059
    }

    fn moments(x: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
        let n = x.clone().count() as f64;
        let mean = x.clone().sum::<f64>() / n;
        (mean, x.map(|v| (v - mean) * (v - mean)).sum::<f64>() / n)
    }

    #[test]
    fn uniform_and_normal_numbers_have_their_moments() {
        let stream = Stream::new(1, "moments");
        let n = 100_000;
        let (mean, variance) = moments((0..n).map(|i| stream.uniform(i)));
        assert!((mean - 0.5).abs() < 0.004 && (variance - 1.0 / 12.0).abs() < 0.002);
        let normal = || (0..n).map(|i| f64::from(stream.normal(i)));
        let (mean, variance) = moments(normal());
        assert!(mean.abs() < 0.013 && (variance - 1.0).abs() < 0.02);
        let kurtosis = normal().map(|v| v.powi(4)).sum::<f64>() / n as f64;
        assert!((kurtosis - 3.0).abs() < 0.15, "fourth moment {kurtosis}");
        // About 5 % of normal numbers are beyond two standard deviations: exactly 4.55 %.
        let tail = normal().filter(|v| v.abs() > 2.0).count() as f64 / n as f64;
        assert!((tail - 0.0455).abs() < 0.003, "tail {tail}");
    }

    #[test]
    fn streams_and_neighbours_are_uncorrelated() {
        let n = 50_000u64;
        let correlation = |a: &dyn Fn(u64) -> f32, b: &dyn Fn(u64) -> f32| {
            (0..n).map(|i| f64::from(a(i)) * f64::from(b(i))).sum::<f64>() / n as f64
        };
        let streams: Vec<Stream> = [(1, "a"), (1, "b"), (2, "a"), (1, "a\0"), (1, "")]
            .map(|(seed, name)| Stream::new(seed, name))
            .to_vec();
        for (i, a) in streams.iter().enumerate() {
            assert!(correlation(&|k| a.normal(k), &|k| a.normal(k + 1)).abs() < 0.025);
            for b in &streams[..i] {
                assert_ne!(a, b);
                assert!(correlation(&|k| a.normal(k), &|k| b.normal(k)).abs() < 0.025);
            }
        }
    }

    #[test]
    fn a_shard_is_a_window_of_the_whole() {
        let stream = Stream::new(3, "w");
        let mut whole = [0.0; 20];
        stream.fill_normal(0, 0.5, 0.02, &mut whole);
        let mut part = [0.0; 7];
        stream.fill_normal(9, 0.5, 0.02, &mut part);
        assert_eq!(part, whole[9..16]);
        assert!(stream.normal(u64::MAX).is_finite());
    }

    #[test]
    fn the_extremes_of_the_bits_stay_in_range() {
        assert_eq!(unit(0), 0.0);
        assert!(unit(u64::MAX) < 1.0);
        assert_eq!(1.0 - unit(u64::MAX), f64::EPSILON / 2.0);
        assert!(ln_of_normal(f64::EPSILON / 2.0).is_finite());
    }
}
