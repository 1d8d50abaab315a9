//! Attention, as one kernel or as many.

use super::product::Product;
use super::{Roofline, Work};
use crate::profile::Attention;
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

/// What a fused kernel reaches one way.
struct Fused {
    /// The share of the peak rate in long sequences and heads of 128.
    share: f64,
    /// Tokens that a sequence loses at its ends: blocks that the causal mask cuts are computed
    /// whole, and the first and last blocks find the device half empty.
    ends: f64,
    /// Exponentials cost as much as this many more columns of a head.
    exponentials: f64,
    /// What dropout leaves of the rate: a random number for every score.
    dropout: f64,
    /// What a fixed order of sums leaves of it.
    deterministic: f64,
}

/// FlashAttention-2, forward and backward. Shares are of an A100 (Dao, arXiv 2307.08691, figures 5
/// and 6: up to 73 % forward and 63 % backward without a mask, less with one); all else was
/// measured by us on an H200, sequences of 2,048 to 32,768 tokens and heads of 64 to 128.
const FLASH2: [Fused; 2] = [
    Fused { share: 0.62, ends: 500.0, exponentials: 20.0, dropout: 0.83, deterministic: 0.98 },
    Fused { share: 0.57, ends: 900.0, exponentials: 20.0, dropout: 0.89, deterministic: 0.97 },
];

/// Kernels in the device's own instructions: cuDNN 9 measured by us on an H200.
const NATIVE: [Fused; 2] = [
    Fused { share: 0.645, ends: 500.0, exponentials: 55.0, dropout: 0.50, deterministic: 0.95 },
    Fused { share: 0.57, ends: 800.0, exponentials: 55.0, dropout: 0.82, deterministic: 0.95 },
];

/// Peak rate of one of an H100's multiprocessors.
const HOPPER: f64 = 989.4e12 / 132.0;

/// Heads that the shares above are for.
const HEAD: f64 = 128.0;

/// A fused kernel computes scores again in the backward pass: five products in place of four.
const RECOMPUTED: f64 = 5.0 / 4.0;

/// Of the memory's rate, what a softmax over rows of scores reaches: each row is read to its end
/// before any of it is written.
const SOFTMAX: f64 = 0.75;

impl Roofline<'_> {
    pub(super) fn attention(&self, shape: &Shape, part: Part, cost: &Cost) -> Work {
        match self.kernels() {
            Some(kernels) => self.fused_attention(shape, part, cost, kernels),
            None => self.written_attention(shape, part),
        }
    }

    /// What a step of a ring moves beside its kernel. On CPUs our own kernel does that too.
    pub(super) fn merge(&self, shape: &Shape, part: Part) -> Work {
        if !self.device.is_accelerator() {
            return Work::default();
        }
        let width = shape.heads.heads as f64 * shape.heads.head_dim as f64;
        let way = usize::from(part != Part::Forward);
        self.streaming(shape.tokens as f64 * width * self.profile.ring.merge[way])
    }

    /// The kernels that the software has for this device, unless it writes scores.
    ///
    /// cuDNN has no backward pass for the fifth generation of matrix units that both drops at
    /// random and fixes the order of sums, so Transformer Engine falls back to FlashAttention-2
    /// there (`nvte_get_fused_attn_backend`). That generation is told by how little it leaves of
    /// older instructions.
    fn kernels(&self) -> Option<&'static [Fused; 2]> {
        let unsupported = self.profile.deterministic
            && self.profile.dropout
            && self.device.older_instructions < 0.5;
        match self.profile.attention {
            Attention::Written => None,
            Attention::Native if unsupported => Some(&FLASH2),
            Attention::Native if self.device.older_instructions < 1.0 => Some(&NATIVE),
            Attention::Native | Attention::Flash2 => Some(&FLASH2),
        }
    }

    /// How much more the rest of a multiprocessor is in the way of its matrix unit than on Hopper.
    ///
    /// From there to Blackwell matrix units became twice as fast, exponentials and shared memory did
    /// not; kernels make up for about half of it (Zadouri et al., "FlashAttention-4", arXiv
    /// 2603.05451: cuDNN's best forward pass is some 1,250 to 1,400 TFLOP/s on a B200).
    fn crowding(&self) -> f64 {
        let each = |count: u32| self.device.rate(self.activation()).0 / f64::from(count);
        self.device.multiprocessors.map_or(1.0, |count| (each(count) / HOPPER).sqrt().max(1.0))
    }

    /// One kernel: half of the square, nothing of it in memory.
    fn fused_attention(
        &self,
        shape: &Shape,
        part: Part,
        cost: &Cost,
        kernels: &'static [Fused; 2],
    ) -> Work {
        let (kernel, more) = match part {
            Part::Forward => (&kernels[0], 1.0),
            Part::InputGradient | Part::WeightGradient => (&kernels[1], RECOMPUTED),
        };
        let causal = if shape.queries == shape.keys { 0.5 } else { 1.0 };
        let keys = shape.keys as f64;
        let head = shape.heads.head_dim as f64;
        let mut share = kernel.share;
        if self.device.is_accelerator() {
            let exponentials = kernel.exponentials * self.crowding();
            let full = head / (head + exponentials);
            share *= keys / (keys + kernel.ends) * full * (1.0 + kernel.exponentials / HEAD);
        }
        if std::ptr::eq(kernels, &FLASH2) {
            share *= self.device.older_instructions;
        }
        if self.profile.dropout {
            share *= kernel.dropout;
        }
        if self.profile.deterministic {
            share *= kernel.deterministic;
        }
        let rate = self.device.rate(self.activation()).0 * share.min(1.0) * self.device.throttle();
        let arithmetic = cost.matrix.0 * causal * more / rate;
        self.kernel(arithmetic.max(self.bytes(cost.bytes.as_f64())))
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
    fn written_attention(&self, shape: &Shape, part: Part) -> Work {
        let Shape { heads, queries, keys, tokens } = *shape;
        let sequences = tokens as f64 / queries.max(1) as f64;
        let batch = sequences * heads.heads as f64;
        let squares = batch * queries as f64 * keys as f64;
        let size = self.activation().size() as f64;
        let scores = squares * size;
        // Into scores, and out of them.
        let into = Product { rows: queries, columns: keys, depth: heads.head_dim };
        let from = Product { rows: queries, columns: heads.head_dim, depth: keys };
        let product = |product: Product| {
            let narrow = batch * (queries + keys) as f64 * heads.head_dim as f64 * size;
            self.product(product, batch, 1.0, self.activation(), scores + narrow)
        };
        let softmax = |times: f64| self.streaming(times * scores / SOFTMAX);
        let mut work = product(into);
        if self.profile.dropout {
            work.add(self.dropout(squares));
        }
        match part {
            Part::Forward => {
                work.add(softmax(2.0));
                work.add(product(from));
            }
            Part::InputGradient | Part::WeightGradient => {
                work.add(softmax(3.0));
                (0..3).for_each(|_| work.add(product(from)));
            }
        }
        work
    }
}
