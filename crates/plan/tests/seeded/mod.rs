//! Seeded strategies for regression baselines: the same list on every machine.

use paceline_plan::lower::lower;
use paceline_plan::mesh::AxisOrder;
use paceline_plan::model::built_in;
use paceline_plan::outer_optimizer::{LocalSgd, OuterOptimizer};
use paceline_plan::program::Plan;
use paceline_plan::strategy::{Strategy, Zero};
use paceline_plan::units::Bytes;
use std::fmt::Debug;
use std::str::FromStr;

const MODELS: [&str; 7] =
    ["mini", "mini-llama", "mini-moe", "mini-moe-mtp", "mlp", "resnet-mini", "dlrm-mini"];

/// Calls `visit` with the seed and the plan of the first `count` seeds whose strategy is legal.
pub(crate) fn plans(count: usize, mut visit: impl FnMut(u64, &Plan)) {
    let legal = (0..).filter_map(|seed| {
        let (name, strategy) = Draw(seed).strategy();
        let model = built_in::get(name).expect("a built-in model").expect("a valid file");
        Some((seed, lower(&model, &strategy).ok()?))
    });
    legal.take(count).for_each(|(seed, plan)| visit(seed, &plan));
}

/// FNV-1a.
pub(crate) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[(self.next() % all.len() as u64) as usize]
    }

    /// Returns the first value three times out of four, so that most strategies stay legal.
    fn rare<T: Copy>(&mut self, all: &[T]) -> T {
        if !self.next().is_multiple_of(4) { all[0] } else { self.pick(all) }
    }

    fn word<T: FromStr<Err: Debug>>(&mut self, words: &[&str]) -> T {
        self.rare(words).parse().expect("a known name")
    }

    fn strategy(&mut self) -> (&'static str, Strategy) {
        let model = self.pick(&MODELS);
        let (dp, tp, pp) =
            (self.pick(&[1, 2, 4]), self.pick(&[1, 1, 2, 4]), self.pick(&[1, 1, 2, 4]));
        let micro_batch = self.pick(&[1, 2]);
        let rounds = self.pick(&[1, 2, 4]);
        let schedules = [
            "1f1b",
            "gpipe",
            "interleaved:2",
            "zb-h1",
            "zb-h1:2",
            "dualpipev",
            "pipedream",
            "pipedream:2bw",
        ];
        let leaves = u32::from(self.pick(&[1u8, 1, 2])) * dp;
        let strategy = Strategy {
            dp,
            tp,
            pp,
            cp: self.rare(&[1, 2, 4]),
            ep: self.rare(&[1, 2, 4]),
            etp: self.rare(&[1, 2]),
            axis_order: AxisOrder::default(),
            sp: tp > 1 && self.pick(&[true, false]),
            zero: self.rare(&[Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Parameters]),
            schedule: if pp > 1 {
                self.pick(&schedules).parse().expect("a known schedule")
            } else {
                "1f1b".parse().expect("a known schedule")
            },
            global_batch: u64::from(dp * pp * rounds) * micro_batch,
            micro_batch,
            seq: if model == "resnet-mini" || model == "dlrm-mini" {
                1
            } else {
                self.pick(&[16, 32, 64])
            },
            recompute: self.word(&["none", "selective", "selective-op", "full", "full:1"]),
            split: self.word(&["cost", "count"]),
            sync_batch_norm: self.rare(&[false, true]),
            expert_buffer_factor: self.pick(&[1.0, 2.0]),
            table_sharding: self.word(&["auto", "replicate", "table", "row"]),
            dtype: self.word(&["f32", "bf16", "f16", "fp8"]),
            grad_dtype: self.word(&["f32", "bf16"]),
            order: self.word(&["canonical", "free"]),
            leaves,
            sync: self.word(&["all-reduce", "ps:1", "ps:2", "async-ps:1", "ssp:1:2", "hogwild"]),
            collective: self.word(&[
                "auto",
                "direct",
                "tree",
                "ring",
                "halving-doubling",
                "ps",
                "naive",
            ]),
            bucket: Bytes(self.pick(&[0, 64 << 10, 25 << 20])),
            overlap: self.rare(&[true, false]),
            optimizer: self.word(&["adamw", "sgd", "momentum", "lamb", "lars"]),
            offload: self.word(&["none", "optimizer", "activations", "all"]),
            store: self.word(&["disk", "host"]),
            compress: self.word(&["none", "int8", "onebit", "topk:0.1", "powersgd:2"]),
            compress_warmup: self.rare(&[None, Some(0), Some(3)]),
            local: self.rare(&[
                None,
                Some(LocalSgd { steps: 1, outer: OuterOptimizer::Average }),
                Some(LocalSgd { steps: 2, outer: OuterOptimizer::Nesterov }),
            ]),
        };
        (model, strategy)
    }
}
