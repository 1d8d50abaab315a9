//! Cost of attention, as one fused kernel or as separate kernels.

use super::product::Product;
use super::{Roofline, Work};
use crate::profile::Attention;
use paceline_plan::graph::{Cost, Heads, OpPass};

/// Attention shape on one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Head counts of this rank.
    pub(super) heads: Heads,
    /// Query tokens of one sequence.
    pub(super) queries: u64,
    /// Key tokens that each query attends to, before masking.
    pub(super) keys: u64,
    /// Query tokens of all sequences.
    pub(super) tokens: u64,
}

/// Efficiency of a fused kernel in one pass.
struct Fused {
    /// Fraction of the peak rate for long sequences and a head size of 128.
    share: f64,
    /// Tokens lost at the ends of a sequence: blocks crossed by the causal mask are computed in
    /// full, and the first and last blocks leave the device half empty.
    ends: f64,
    /// Cost of the exponentials, in additional columns of a head.
    exponentials: f64,
    /// Fraction of the rate left with dropout, which draws a random number per score.
    dropout: f64,
    /// Fraction of the rate left with a deterministic summation order.
    deterministic: f64,
}

/// FlashAttention-2, forward and backward. `share` is for an A100 (Dao, arXiv 2307.08691, figures 5
/// and 6: up to 73 % forward and 63 % backward without a mask, less with one). All other values
/// were measured by us on an H200 with sequences of 2,048 to 32,768 tokens and heads of 64 to 128.
const FLASH2: [Fused; 2] = [
    Fused { share: 0.62, ends: 500.0, exponentials: 20.0, dropout: 0.83, deterministic: 0.98 },
    Fused { share: 0.57, ends: 900.0, exponentials: 20.0, dropout: 0.89, deterministic: 0.97 },
];

/// FlashAttention, half as fast as its second version (Dao, arXiv 2307.08691, abstract).
const FLASH1: [Fused; 2] = [
    Fused { share: 0.5 * FLASH2[0].share, ..FLASH2[0] },
    Fused { share: 0.5 * FLASH2[1].share, ..FLASH2[1] },
];

/// Kernels that use the device's native instructions: cuDNN 9, measured by us on an H200.
const NATIVE: [Fused; 2] = [
    Fused { share: 0.645, ends: 500.0, exponentials: 55.0, dropout: 0.50, deterministic: 0.95 },
    Fused { share: 0.57, ends: 800.0, exponentials: 55.0, dropout: 0.82, deterministic: 0.95 },
];

/// Peak rate of one H100 multiprocessor.
const HOPPER: f64 = 989.4e12 / 132.0;

/// Head size for which [`Fused::share`] holds.
const HEAD: f64 = 128.0;

/// Backward cost factor: a fused kernel recomputes the scores, so five GEMMs instead of four.
const RECOMPUTED: f64 = 5.0 / 4.0;

/// Fraction of memory bandwidth reached by a softmax over rows of scores: each row is read
/// completely before any of it is written.
const SOFTMAX: f64 = 0.75;

impl Roofline<'_> {
    pub(super) fn attention(&self, shape: &Shape, part: OpPass, cost: &Cost) -> Work {
        match self.kernels() {
            Some(kernels) => self.fused_attention(shape, part, cost, kernels),
            None => self.written_attention(shape, part),
        }
    }

    /// Memory traffic of a ring-attention step outside its kernel; on CPUs our kernel has it.
    pub(super) fn merge(&self, shape: &Shape, part: OpPass) -> Work {
        if !self.device.is_accelerator() {
            return Work::default();
        }
        let width = shape.heads.heads as f64 * shape.heads.head_dim as f64;
        let way = usize::from(part != OpPass::Forward);
        self.streaming(shape.tokens as f64 * width * self.profile.ring.merge[way])
    }

    /// Returns the fused kernels available on this device, or `None` if the scores are
    /// materialized.
    ///
    /// cuDNN has no backward pass on fifth-generation matrix units that supports both dropout and a
    /// deterministic summation order. Transformer Engine therefore falls back to FlashAttention-2
    /// there (`nvte_get_fused_attn_backend`).
    fn kernels(&self) -> Option<&'static [Fused; 2]> {
        let unsupported = self.profile.deterministic
            && self.profile.dropout
            && self.device.has_fifth_generation_units();
        match self.profile.attention {
            Attention::Written => None,
            Attention::Flash1 => Some(&FLASH1),
            Attention::Native if unsupported => Some(&FLASH2),
            Attention::Native if self.device.legacy_mma_efficiency < 1.0 => Some(&NATIVE),
            Attention::Native | Attention::Flash2 => Some(&FLASH2),
        }
    }

    /// Slowdown of the non-matmul work of a multiprocessor, relative to its matrix unit, compared
    /// with Hopper.
    ///
    /// From Hopper to Blackwell, matrix units became twice as fast; exponentials and shared memory
    /// did not. Kernels compensate for about half of that (Zadouri et al., "FlashAttention-4",
    /// arXiv 2603.05451: cuDNN's best forward pass reaches about 1,250 to 1,400 TFLOP/s on a B200).
    fn non_matmul_share(&self) -> f64 {
        let each = |count: u32| self.device.rate(self.activation()).0 / f64::from(count);
        self.device.multiprocessors.map_or(1.0, |count| (each(count) / HOPPER).sqrt().max(1.0))
    }

    /// Cost of one fused kernel: half of the score matrix if causal, which is never stored.
    fn fused_attention(
        &self,
        shape: &Shape,
        part: OpPass,
        cost: &Cost,
        kernels: &'static [Fused; 2],
    ) -> Work {
        let (kernel, more) = match part {
            OpPass::Forward => (&kernels[0], 1.0),
            OpPass::BackwardInput | OpPass::BackwardWeight => (&kernels[1], RECOMPUTED),
        };
        // Keys are stated as those of a causal mask, of which half are seen.
        let causal = 0.5;
        let keys = shape.keys as f64;
        let head = shape.heads.head_dim as f64;
        let mut share = kernel.share;
        if self.device.is_accelerator() {
            let exponentials = kernel.exponentials * self.non_matmul_share();
            let full = head / (head + exponentials);
            share *= keys / (keys + kernel.ends) * full * (1.0 + kernel.exponentials / HEAD);
        }
        if !std::ptr::eq(kernels, &NATIVE) {
            share *= self.device.legacy_mma_efficiency;
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

    /// Cost of attention as separate kernels that read and write whole score matrices in the
    /// activation dtype.
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
    fn written_attention(&self, shape: &Shape, part: OpPass) -> Work {
        let Shape { heads, queries, keys, tokens } = *shape;
        let sequences = tokens as f64 / queries.max(1) as f64;
        let batch = sequences * heads.heads as f64;
        let squares = batch * queries as f64 * keys as f64;
        let size = self.activation().size() as f64;
        let scores = squares * size;
        // GEMMs that produce scores and GEMMs that consume them.
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
            OpPass::Forward => {
                work.add(softmax(2.0));
                work.add(product(from));
            }
            OpPass::BackwardInput | OpPass::BackwardWeight => {
                work.add(softmax(3.0));
                (0..3).for_each(|_| work.add(product(from)));
            }
        }
        work
    }
}
