//! Frequencies of rotary positions, scaled for contexts longer than a model was first trained on.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::f64::consts::TAU;
use std::fmt;
use std::num::ParseFloatError;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

/// Change of the frequencies `theta^(-2i/d)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scaling {
    /// None.
    #[default]
    None,
    /// All divided by one factor (Chen et al., arXiv 2306.15595).
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Low ones divided, high ones kept, and those between interpolated (Llama 3.1).
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Rotations within the original context up to which a frequency is low.
        low: f64,
        /// Rotations from which it is high.
        high: f64,
        /// Original context in tokens.
        original: u64,
    },
    /// A linear ramp over the dimensions from kept to divided (Peng et al., YaRN, arXiv 2309.00071,
    /// section 3.2).
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Rotations within the original context from which a frequency is kept.
        fast: f64,
        /// Rotations up to which it is divided.
        slow: f64,
        /// Original context in tokens.
        original: u64,
        /// True if the ramp is not widened to whole dimensions.
        exact: bool,
    },
    /// Each divided by a factor of its own (Ding et al., LongRoPE, arXiv 2402.13753).
    Each(Factors),
}

impl Scaling {
    /// Frequencies of `dims` elements of a head, in radians per token.
    pub fn frequencies(self, theta: f64, dims: u64) -> Vec<f64> {
        let pair = |pair: u64| theta.powf(-2.0 * pair as f64 / dims as f64);
        let mut frequencies: Vec<f64> = (0..dims / 2).map(pair).collect();
        match self {
            Self::None => {}
            Self::Linear { factor } => frequencies.iter_mut().for_each(|f| *f /= factor),
            Self::Llama3 { factor, low, high, original } => {
                for frequency in &mut frequencies {
                    let rotations = original as f64 * *frequency / TAU;
                    let kept = match high > low {
                        true => ((rotations - low) / (high - low)).clamp(0.0, 1.0),
                        false => f64::from(u8::from(rotations >= low)),
                    };
                    *frequency *= kept + (1.0 - kept) / factor;
                }
            }
            Self::Yarn { factor, fast, slow, original, exact } => {
                // Dimension whose frequency makes this number of rotations: the inverse of `pair`.
                let of = |rotations: f64| {
                    dims as f64 * (original as f64 / (rotations * TAU)).ln() / (2.0 * theta.ln())
                };
                let (mut low, mut high) = (of(fast), of(slow));
                if !exact {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                for (pair, frequency) in frequencies.iter_mut().enumerate() {
                    let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    *frequency *= 1.0 - divided + divided / factor;
                }
            }
            Self::Each(factors) => {
                let all = frequencies.iter_mut().zip(factors.list());
                all.for_each(|(frequency, factor)| *frequency /= factor);
            }
        }
        frequencies
    }
}

/// A list of factors. Equal lists are stored once and for good, so that operators stay small and
/// are copied freely.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<f64>", into = "Vec<f64>")]
pub struct Factors(&'static [f64]);

static STORED: Mutex<BTreeMap<Vec<u64>, &'static [f64]>> = Mutex::new(BTreeMap::new());

impl Factors {
    /// Factors of a list.
    pub fn new(list: &[f64]) -> Self {
        let bits: Vec<u64> = list.iter().map(|factor| factor.to_bits()).collect();
        let mut stored = STORED.lock().unwrap_or_else(PoisonError::into_inner);
        Self(stored.entry(bits).or_insert_with(|| Box::leak(list.into())))
    }

    /// The list.
    pub fn list(self) -> &'static [f64] {
        self.0
    }
}

impl From<Vec<f64>> for Factors {
    fn from(list: Vec<f64>) -> Self {
        Self::new(&list)
    }
}

impl From<Factors> for Vec<f64> {
    fn from(factors: Factors) -> Self {
        factors.0.to_vec()
    }
}

impl fmt::Debug for Factors {
    /// Formats the list as in the text of a plan: `1.0,1.5`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, factor) in self.0.iter().enumerate() {
            write!(f, "{}{factor:?}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl FromStr for Factors {
    type Err = ParseFloatError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let list: Result<Vec<f64>, _> = text.split(',').map(str::parse).collect();
        Ok(Self::new(&list?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of `transformers.modeling_rope_utils` 5.23 for a base of 10 000 and 8 elements.
    #[test]
    fn scalings_equal_those_of_transformers() {
        let of = |scaling: Scaling| scaling.frequencies(10_000.0, 8);
        let close = |found: Vec<f64>, expected: [f64; 4]| {
            for (found, expected) in found.iter().zip(expected) {
                assert!((found / expected - 1.0).abs() < 1e-6, "{found} {expected}");
            }
        };
        close(of(Scaling::None), [1.0, 0.1, 0.01, 0.001]);
        close(of(Scaling::Linear { factor: 4.0 }), [0.25, 0.025, 0.0025, 0.00025]);
        let llama3 = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 64 };
        close(of(llama3), [1.0, 0.013042256, 0.00125, 0.000125]);
        let yarn = Scaling::Yarn { factor: 4.0, fast: 32.0, slow: 1.0, original: 64, exact: false };
        close(of(yarn), [1.0, 0.0625, 0.0025, 0.00025]);
        let each = Scaling::Each(Factors::new(&[1.0, 2.0, 4.0, 8.0]));
        close(of(each), [1.0, 0.05, 0.0025, 0.000125]);
    }

    #[test]
    fn equal_lists_are_stored_once_and_survive_their_text() {
        let list = Factors::new(&[1.0, 1.25]);
        assert!(std::ptr::eq(list.list(), Factors::new(&[1.0, 1.25]).list()));
        assert_eq!(format!("{list:?}").parse::<Factors>(), Ok(list));
        assert!("1.0,x".parse::<Factors>().is_err());
    }
}
