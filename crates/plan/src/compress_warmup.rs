//! Compression warm-up: iterations with uncompressed gradients, and the data exchanged afterwards.
//!
//! Adam divides by the root of its second moments. With one-bit gradients, or gradients that arrive
//! late and in bursts, the moments reflect the compression instead of the gradient variance. They
//! are therefore learned from uncompressed gradients in a warm-up, and first moments are exchanged
//! after it (1-bit Adam; Tang et al., arXiv 2102.02888, algorithm 1).
//!
//! Momentum does not divide, but retains for about ten iterations the updates that one-bit encoding
//! delays: elements that stand out among their neighbours. Only the start of a run suffers from it.
//! After the same warm-up, gradients themselves can be compressed (measurements in
//! `docs/parallelism/compression.md`).

use crate::compress::Compression;
use crate::strategy::{OptimizerKind, Strategy};

/// Default warm-up is 1/`SHARE` of the iterations. With momentum and `onebit`, final losses were
/// 1.15 % higher after a tenth and 0.69 % after a fifth, the mean of six seeds.
const SHARE: u32 = 5;

impl Strategy {
    /// Returns true if the first iterations exchange uncompressed gradients and later ones do not.
    pub fn has_compress_warmup(&self) -> bool {
        self.compress_warmup.map_or(self.needs_compress_warmup(), |said| said > 0)
    }

    /// Number of initial iterations with uncompressed gradients in a run of `iterations`. It is the
    /// configured number, else a fifth of the run (at least one) if the strategy needs a warm-up,
    /// else none.
    pub fn compress_warmup(&self, iterations: u32) -> u32 {
        match self.compress_warmup {
            Some(said) => said,
            None if self.needs_compress_warmup() => (iterations / SHARE).max(1),
            None => 0,
        }
    }

    /// Returns true if replicas exchange first moments after the warm-up.
    pub fn exchanges_moments(&self) -> bool {
        let adam = self.optimizer == OptimizerKind::AdamW && self.local.is_none();
        adam && self.compress != Compression::None && self.has_compress_warmup()
    }

    /// Returns true if compression from the first iteration would worsen the final loss.
    pub fn needs_compress_warmup(&self) -> bool {
        self.corrupts_second_moment() || self.delays_velocities()
    }

    /// Returns true if delayed gradients would distort velocities. Only `onebit` spreads elements
    /// that stand out among their neighbours over many iterations; `topk` sends them first.
    fn delays_velocities(&self) -> bool {
        let momentum = self.optimizer == OptimizerKind::Momentum && self.local.is_none();
        momentum && self.compress == Compression::OneBit
    }

    /// Returns true if compressed gradients are too inaccurate for the optimizer's second moments.
    /// With local steps replicas use their own uncompressed gradients, and eight bits are accurate
    /// enough.
    pub fn corrupts_second_moment(&self) -> bool {
        let divides = match self.optimizer {
            OptimizerKind::AdamW | OptimizerKind::Lamb => self.local.is_none(),
            OptimizerKind::Sgd | OptimizerKind::Momentum | OptimizerKind::Lars => false,
        };
        let opaque = match self.compress {
            Compression::OneBit | Compression::TopK(_) | Compression::PowerSgd(_) => true,
            Compression::None | Compression::Int8 => false,
        };
        divides && opaque
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outer_optimizer::{LocalSgd, OuterOptimizer};

    const ALL: [Compression; 4] =
        [Compression::Int8, Compression::OneBit, Compression::TopK(0.1), Compression::PowerSgd(2)];

    fn with(optimizer: OptimizerKind, compress: Compression) -> Strategy {
        Strategy { dp: 2, optimizer, compress, ..Strategy::default() }
    }

    #[test]
    fn a_fifth_of_the_run_where_optimizers_need_it() {
        for compress in ALL {
            let adam = with(OptimizerKind::AdamW, compress);
            let needed = compress != Compression::Int8;
            assert_eq!(
                (adam.has_compress_warmup(), adam.exchanges_moments()),
                (needed, needed),
                "{compress}"
            );
            let lengths = [1, 4, 9, 10, 1000, u32::MAX].map(|run| adam.compress_warmup(run));
            let fifths = if needed { [1, 1, 1, 2, 200, u32::MAX / 5] } else { [0; 6] };
            assert_eq!(lengths, fifths, "{compress}");
            let momentum = with(OptimizerKind::Momentum, compress);
            let needed = compress == Compression::OneBit;
            assert_eq!(momentum.has_compress_warmup(), needed, "{compress}");
            assert_eq!(momentum.compress_warmup(1000), if needed { 200 } else { 0 }, "{compress}");
            assert!(!momentum.exchanges_moments(), "{compress}");
            assert!(!with(OptimizerKind::Sgd, compress).has_compress_warmup(), "{compress}");
            let local = Some(LocalSgd { steps: 1, outer: OuterOptimizer::Average });
            for apart in [adam, momentum] {
                assert!(!Strategy { local, ..apart }.has_compress_warmup(), "{compress}");
            }
        }
        assert!(!with(OptimizerKind::AdamW, Compression::None).has_compress_warmup());
    }

    #[test]
    fn what_is_said_holds_for_runs_of_any_length() {
        for optimizer in [OptimizerKind::Momentum, OptimizerKind::AdamW] {
            let said = Strategy { compress_warmup: Some(30), ..with(optimizer, ALL[1]) };
            assert_eq!((said.compress_warmup(10), said.compress_warmup(1000)), (30, 30));
            assert_eq!(said.exchanges_moments(), optimizer == OptimizerKind::AdamW);
            let none = Strategy { compress_warmup: Some(0), ..said };
            assert!(!none.has_compress_warmup() && !none.exchanges_moments());
        }
    }
}
