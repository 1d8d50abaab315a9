//! Attention, as one kernel or as many.

use super::Roofline;
use super::product::Product;
use paceline_plan::graph::{Cost, Heads, Part};

/// One rank's attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Head counts of this rank.
    pub(super) heads: Heads,
    /// Query tokens of one sequence.
    pub(super) queries: u64,
    /// Key tokens that they meet.
    pub(super) keys: u64,
    /// Query tokens of all sequences.
    pub(super) tokens: u64,
}

/// The share of a plain product's rate that fused kernels reach, forward and backward.
/// FlashAttention-2 (Dao, arXiv 2307.08691) reports 50 to 73 % of an A100's peak, FlashAttention-3
/// (Shah et al., arXiv 2407.08608) up to 75 % of an H100's; causal masks and backward passes are
/// towards the lower end. Of what products sustain, that is about this much.
const FUSED: [f64; 2] = [0.7, 0.6];

/// A fused kernel computes scores again in the backward pass: five products in place of four.
const RECOMPUTED: f64 = 5.0 / 4.0;

impl Roofline<'_> {
    pub(super) fn attention(&self, shape: &Shape, part: Part, cost: &Cost) -> f64 {
        if self.profile.fused_attention {
            self.fused_attention(shape, part, cost)
        } else {
            self.written_attention(shape, part)
        }
    }

    /// One kernel: half of the square, nothing of it in memory.
    fn fused_attention(&self, shape: &Shape, part: Part, cost: &Cost) -> f64 {
        let (share, more) = match part {
            Part::Forward => (FUSED[0], 1.0),
            Part::InputGradient | Part::WeightGradient => (FUSED[1], RECOMPUTED),
        };
        let causal = if shape.queries == shape.keys { 0.5 } else { 1.0 };
        let rate = self.device.sustained(self.activation()).0 * share;
        let arithmetic = cost.matrix.0 * causal * more / rate;
        arithmetic.max(self.bytes(cost.bytes.as_f64())) + self.device.launch_overhead.0
    }

    /// Every step a kernel that reads and writes whole squares of scores, in the activations' type.
    ///
    /// | forward | scores read | written |
    /// |---|---|---|
    /// | Q·Kᵀ | | 1 |
    /// | scale, mask and softmax | 1 | 1 |
    /// | dropout | 1 | 1 and a mask |
    /// | P·V | 1 | |
    ///
    /// | backward | scores read | written |
    /// |---|---|---|
    /// | dV = Pᵀ·dY | 1 | |
    /// | dP = dY·Vᵀ | | 1 |
    /// | dropout | 1 and a mask | 1 |
    /// | softmax | 2 | 1 |
    /// | dQ = dS·K and dK = dSᵀ·Q | 1 each | |
    fn written_attention(&self, shape: &Shape, part: Part) -> f64 {
        let Shape { heads, queries, keys, tokens } = *shape;
        let sequences = tokens as f64 / queries.max(1) as f64;
        let batch = sequences * heads.heads as f64;
        let squares = batch * queries as f64 * keys as f64;
        let size = self.activation().size() as f64;
        let scores = squares * size;
        let dropout =
            if self.profile.dropout { self.streaming(squares * self.mask_bytes()) } else { 0.0 };
        // Into scores, and out of them.
        let into = Product { rows: queries, columns: keys, depth: heads.head_dim };
        let from = Product { rows: queries, columns: heads.head_dim, depth: keys };
        let product = |product: Product| {
            let narrow = batch * (queries + keys) as f64 * heads.head_dim as f64 * size;
            self.product(product, batch, self.activation(), scores + narrow)
        };
        match part {
            Part::Forward => product(into) + self.streaming(2.0 * scores) + dropout + product(from),
            Part::InputGradient | Part::WeightGradient => {
                product(into) + dropout + self.streaming(3.0 * scores) + 3.0 * product(from)
            }
        }
    }
}
