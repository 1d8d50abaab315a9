//! How long gradients go between replicas as they are before compression sets in, and what is exchanged after that.
//!
//! Adam divides by the root of its second moments. Of signs, and of what arrives late and at once, those learn how
//! gradients were compressed instead of how they vary. So they are learned from gradients as they are, in a warm-up, and
//! first moments are exchanged after it (1-bit Adam; Tang et al., arXiv 2102.02888, algorithm 1).
//!
//! Momentum divides by nothing, but carries on for some ten iterations what signs send late, and they send late what
//! stands out among its neighbours. Only the start of a run suffers from it: after the same warm-up, gradients themselves
//! can be compressed (`docs/parallelism/compression.md` tells what was measured).

use crate::compress::Compression;
use crate::strategy::{OptimizerKind, Strategy};

/// One of how many iterations belongs to the warm-up where nobody says how many do: with
/// momentum and `onebit`, losses ended 1.15 % higher after a tenth and 0.69 % after a fifth, the mean of six seeds.
const SHARE: u32 = 5;

impl Strategy {
    /// Whether the first iterations exchange gradients as they are although later ones do not.
    pub fn warms_up(&self) -> bool {
        self.compress_warmup.map_or(self.needs_warm_up(), |said| said > 0)
    }

    /// The first iterations of a run of so many in which gradients go as they are: as many as were said, or else a
    /// fifth of the run, at least one, where the optimizer needs a warm-up, and none where it does not.
    pub fn warm_up(&self, iterations: u32) -> u32 {
        match self.compress_warmup {
            Some(said) => said,
            None if self.needs_warm_up() => (iterations / SHARE).max(1),
            None => 0,
        }
    }

    /// Whether replicas exchange first moments once the warm-up is over.
    pub fn exchanges_moments(&self) -> bool {
        let adam = self.optimizer == OptimizerKind::AdamW && self.local.is_none();
        adam && self.compress != Compression::None && self.warms_up()
    }

    /// Whether losses would not end where those of whole gradients do if compression set in at once.
    pub fn needs_warm_up(&self) -> bool {
        self.blinds_optimizer() || self.delays_velocities()
    }

    /// Whether velocities would be led astray by what compression sends late. Of the compressions only `onebit` takes many
    /// iterations over what stands out among its neighbours; `topk` sends that first.
    fn delays_velocities(&self) -> bool {
        let momentum = self.optimizer == OptimizerKind::Momentum && self.local.is_none();
        momentum && self.compress == Compression::OneBit
    }

    /// Whether the optimizer's second moments would learn too little of gradients from what compression leaves of them.
    /// Replicas that make steps of their own see their own gradients, and eight bits leave enough.
    pub fn blinds_optimizer(&self) -> bool {
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
    use crate::outer::{Local, Outer};

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
            assert_eq!((adam.warms_up(), adam.exchanges_moments()), (needed, needed), "{compress}");
            let lengths = [1, 4, 9, 10, 1000, u32::MAX].map(|run| adam.warm_up(run));
            let fifths = if needed { [1, 1, 1, 2, 200, u32::MAX / 5] } else { [0; 6] };
            assert_eq!(lengths, fifths, "{compress}");
            let momentum = with(OptimizerKind::Momentum, compress);
            let needed = compress == Compression::OneBit;
            assert_eq!(momentum.warms_up(), needed, "{compress}");
            assert_eq!(momentum.warm_up(1000), if needed { 200 } else { 0 }, "{compress}");
            assert!(!momentum.exchanges_moments(), "{compress}");
            assert!(!with(OptimizerKind::Sgd, compress).warms_up(), "{compress}");
            let local = Some(Local { steps: 1, outer: Outer::Average });
            for apart in [adam, momentum] {
                assert!(!Strategy { local, ..apart }.warms_up(), "{compress}");
            }
        }
        assert!(!with(OptimizerKind::AdamW, Compression::None).warms_up());
    }

    #[test]
    fn what_is_said_holds_for_runs_of_any_length() {
        for optimizer in [OptimizerKind::Momentum, OptimizerKind::AdamW] {
            let said = Strategy { compress_warmup: Some(30), ..with(optimizer, ALL[1]) };
            assert_eq!((said.warm_up(10), said.warm_up(1000)), (30, 30));
            assert_eq!(said.exchanges_moments(), optimizer == OptimizerKind::AdamW);
            let none = Strategy { compress_warmup: Some(0), ..said };
            assert!(!none.warms_up() && !none.exchanges_moments());
        }
    }
}
