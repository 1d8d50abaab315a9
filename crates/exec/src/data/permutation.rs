//! Shuffle that is computed, not stored.

use super::corpus::mix;

/// Permutation of the numbers below `n`, chosen by a key and evaluated one number at a time.
///
/// A Feistel network over the smallest even number of bits that holds `n` (Luby and Rackoff, 1988:
/// four rounds of random functions make a random permutation). Its cycles are walked until a number
/// below `n` appears (Black and Rogaway, 2002). The power of four is less than four times `n`, so a
/// walk takes less than four steps on average.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    half: u32,
    keys: [u64; 4],
}

impl Permutation {
    /// Creates the permutation of the numbers below `n` that a key chooses.
    pub fn new(n: u64, key: u64) -> Self {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        let round = |round: u64| mix(mix(key) ^ round.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self { n, half: bits.div_ceil(2).max(1), keys: [1, 2, 3, 4].map(round) }
    }

    /// Image of a number below `n`.
    pub fn at(&self, index: u64) -> u64 {
        debug_assert!(index < self.n);
        let mut value = index;
        loop {
            value = self.round_trip(value);
            if value < self.n {
                return value;
            }
        }
    }

    fn round_trip(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let (mut left, mut right) = (value >> self.half, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_number_comes_up_once(n in 1u64..2000, key in any::<u64>()) {
            let permutation = Permutation::new(n, key);
            let mut seen = vec![false; n as usize];
            for index in 0..n {
                let at = permutation.at(index) as usize;
                prop_assert!(!std::mem::replace(&mut seen[at], true));
            }
        }

        #[test]
        fn the_largest_numbers_stay_in_range(n in (u64::MAX - 9)..=u64::MAX, key in any::<u64>()) {
            let permutation = Permutation::new(n, key);
            for index in [0, 1, n / 2, n - 1] {
                prop_assert!(permutation.at(index) < n);
            }
        }
    }

    #[test]
    fn keys_shuffle_differently_and_well() {
        let [a, b] = [1, 2].map(|key| Permutation::new(1000, key));
        let same = (0..1000).filter(|&i| a.at(i) == b.at(i)).count();
        assert!(same < 12, "{same} numbers agree, one is expected");
        // Neighbours are scattered: the mean distance of random pairs is a third of the range.
        let distance: u64 = (0..999).map(|i| a.at(i).abs_diff(a.at(i + 1))).sum();
        let mean = distance as f64 / 999.0;
        assert!((280.0..390.0).contains(&mean), "{mean}");
    }
}
