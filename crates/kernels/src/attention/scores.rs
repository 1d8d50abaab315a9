//! Rules by which scores of queries and keys become attention weights.

use crate::math::{exp, tanh};
use std::ops::Range;

/// Keys that a query attends to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mask {
    /// Its own and earlier ones.
    #[default]
    Causal,
    /// The last so many, its own included.
    Window(usize),
    /// Its own and earlier ones of its chunk of so many tokens.
    Chunk(usize),
    /// All.
    Full,
}

impl Mask {
    /// Keys that a query attends to.
    #[inline(always)]
    pub fn keys(self, query: usize, seq: usize) -> Range<usize> {
        match self {
            Self::Causal => 0..query + 1,
            Self::Window(window) => (query + 1).saturating_sub(window)..query + 1,
            Self::Chunk(chunk) => query / chunk.max(1) * chunk..query + 1,
            Self::Full => 0..seq,
        }
    }
}

/// Scores of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// Keys that a query attends to.
    pub mask: Mask,
    /// Factor of the scores; 0 for `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Bound c of the scores, `c tanh(score / c)`; 0 for none.
    pub softcap: f32,
    /// Biases linear in the distance (Press et al., ALiBi, arXiv 2108.12409), if there are any.
    pub alibi: Option<Alibi>,
}

/// Heads with biases linear in the distance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alibi {
    /// Number of heads of the model.
    pub heads: usize,
    /// Number of the first of these heads.
    pub first: usize,
    /// Factor of the biases.
    pub scale: f32,
}

impl Alibi {
    /// Slope of a head's biases: powers of `2^(-8/n)` for the first n heads, n a power of two, and
    /// every second one of twice as many heads for the rest.
    pub(super) fn slope(self, head: usize) -> f32 {
        let (head, whole) = (self.first + head, 1 << self.heads.max(1).ilog2());
        let exponent = match head < whole {
            true => 8.0 * (head + 1) as f64 / whole as f64,
            false => 4.0 * (2 * (head - whole) + 1) as f64 / whole as f64,
        };
        self.scale * (-exponent).exp2() as f32
    }
}

/// A query of one head.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    /// Number of the head.
    pub head: usize,
    /// Width of the head.
    pub head_dim: usize,
    /// Position of the token.
    pub position: usize,
}

impl Scores {
    /// Attention to all keys.
    pub const FULL: Self = Self { mask: Mask::Full, scale: 0.0, softcap: 0.0, alibi: None };

    /// Converts the products of a query with keys from `first` on to attention weights. `sink` is the
    /// head's score of no key.
    pub fn soften(&self, query: Query, first: usize, sink: Option<f32>, weights: &mut [f32]) {
        let (scale, at) = (self.factor(query.head_dim), query.position as f32);
        let slope = self.alibi.map_or(0.0, |alibi| alibi.slope(query.head));
        for (key, weight) in (first..).zip(weights.iter_mut()) {
            *weight = self.bounded(*weight * scale) + slope * (key as f32 - at);
        }
        let none = sink.unwrap_or(f32::NEG_INFINITY);
        let most = weights.iter().copied().fold(none, f32::max);
        weights.iter_mut().for_each(|weight| *weight = exp(*weight - most));
        let sum = weights.iter().sum::<f32>() + sink.map_or(0.0, |sink| exp(sink - most));
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }

    /// Factor of the scores of heads of a width.
    pub(crate) fn factor(&self, head_dim: usize) -> f32 {
        if self.scale > 0.0 { self.scale } else { 1.0 / (head_dim as f32).sqrt() }
    }

    /// Returns true if scores are only scaled.
    pub(crate) fn is_linear(&self) -> bool {
        self.softcap == 0.0 && self.alibi.is_none()
    }

    /// A scaled score within its bound.
    #[inline(always)]
    pub(crate) fn bounded(&self, score: f32) -> f32 {
        if self.softcap > 0.0 { self.softcap * tanh(score / self.softcap) } else { score }
    }

    /// Derivative of [`Self::bounded`] at its value.
    #[inline(always)]
    pub(crate) fn slope(&self, bounded: f32) -> f32 {
        let share = if self.softcap > 0.0 { bounded / self.softcap } else { 0.0 };
        1.0 - share * share
    }
}
