//! Random legal strategies lower to valid plans.

use paceline_plan::collective::{Algorithm, SummationOrder};
use paceline_plan::ids::LaneId;
use paceline_plan::lower::lower;
use paceline_plan::model::{
    Activation, Experts, Latent, Model, ModelDims, ModelKind, Mtp, Router, built_in,
};
use paceline_plan::program::{AccumulateMode, MemoryKind, Op};
use paceline_plan::schedule::{ScheduleKind, Versions};
use paceline_plan::strategy::{
    Offload, OptimizerKind, Recompute, Split, Store, Strategy as Layout, Sync, Zero,
};
use paceline_plan::units::Bytes;
use paceline_plan::{DType, text, validate};
use proptest::prelude::*;

fn model() -> impl Strategy<Value = Model> {
    let of_tokens = ModelKind::ALL.into_iter().filter(|kind| {
        use ModelKind::{Decoder, Dlrm, Graph, Resnet};
        !matches!(kind, Resnet | Dlrm | Decoder | Graph)
    });
    let kinds = prop::sample::select(of_tokens.collect::<Vec<_>>());
    (kinds, 2u64..7, any::<bool>(), 60u64..70).prop_map(|(kind, layers, tied, vocab)| {
        let attention = kind != ModelKind::Mlp;
        let shape = ModelDims {
            kind,
            layers,
            d_model: 16,
            heads: if attention { 4 } else { 0 },
            kv_heads: if attention { 4 } else { 0 },
            head_dim: if attention { 4 } else { 0 },
            ffn: 32,
            seq: 8,
            max_positions: if kind == ModelKind::Gpt2 { 8 } else { 0 },
            vocab,
            tied,
            activation: match kind {
                ModelKind::Mlp | ModelKind::Resnet | ModelKind::Dlrm | ModelKind::Graph => {
                    Activation::Relu
                }
                ModelKind::Gpt2 => Activation::Gelu,
                ModelKind::Llama | ModelKind::Moe | ModelKind::Decoder => Activation::SwiGlu,
            },
            norm_eps: if attention { 1e-5 } else { 0.0 },
            rope_theta: if kind.is_rotary() { 1e4 } else { 0.0 },
            qk_norm: kind == ModelKind::Moe && vocab % 3 == 0,
            experts: if kind == ModelKind::Moe { experts(vocab) } else { Experts::default() },
            latent: match kind {
                ModelKind::Moe if vocab % 3 == 1 => {
                    Latent { q_lora: 8, kv_lora: 4, qk_rope: 2, v_dim: 2 }
                }
                _ => Latent::default(),
            },
            mtp: match layers % 3 {
                depth @ 1.. if kind.is_rotary() => Mtp { depth, weight: 0.3 },
                _ => Mtp::default(),
            },
        };
        Model::new("random", shape).unwrap()
    })
}

/// Varies the expert configuration by `number`.
fn experts(number: u64) -> Experts {
    Experts {
        experts: 4,
        topk: 1 + number % 2,
        shared_experts: number % 3,
        dense_layers: number / 2 % 2,
        dense_ffn: number / 2 % 2 * 16,
        router: Router::ALL[(number / 3 % 2) as usize],
        groups: 0,
        group_topk: 0,
        route_scale: 1.0,
        capacity: (number / 4 % 2) as f64,
        balance: 0.01,
    }
}

/// Adapts a strategy to a model with experts and shards the experts.
fn with_experts(model: &Model, layout: Layout, (ep, etp): (u32, u32)) -> Layout {
    if model.kind != ModelKind::Moe {
        return layout;
    }
    let ranks = layout.dp * layout.tp;
    let ep = if layout.sync == Sync::AllReduce { (1 << ep).min(ranks) } else { 1 };
    let etp = if layout.sync == Sync::AllReduce { (1 << etp).min(ranks / ep) } else { 1 };
    Layout { ep, etp, sp: layout.tp > 1, expert_buffer_factor: 1.5, ..layout }
}

prop_compose! {
    fn strategy()(
        axes in (0u32..3, 0u32..3, 0u32..3),
        sp in any::<bool>(),
        zero in prop_oneof![Just(Zero::None), Just(Zero::Optimizer), Just(Zero::Gradients), Just(Zero::Parameters)],
        schedule in prop_oneof![
            Just(ScheduleKind::GPipe), Just(ScheduleKind::OneFOneB), Just(ScheduleKind::Interleaved { chunks: 2 }),
            Just(ScheduleKind::ZbH1 { chunks: 1 }), Just(ScheduleKind::ZbH1 { chunks: 2 }), Just(ScheduleKind::DualPipeV)
        ],
        recompute in prop_oneof![
            Just(Recompute::None), Just(Recompute::Selective), Just(Recompute::SelectiveOp),
            Just(Recompute::Full), Just(Recompute::FullOf(1)), Just(Recompute::FullForward),
        ],
        split in prop_oneof![Just(Split::Cost), Just(Split::Count)],
        free in any::<bool>(),
        overlap in any::<bool>(),
        (rounds, micro_batch, leaves) in (0u32..3, 1u64..3, 0u32..3),
        bucket in prop_oneof![Just(0u64), Just(2048), Just(1 << 20)],
        dtype in prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::Fp8)],
        servers in prop_oneof![3 => Just(0u32), 1 => 1u32..4],
        optimizer in prop_oneof![
            Just(OptimizerKind::AdamW), Just(OptimizerKind::Sgd), Just(OptimizerKind::Lamb),
            Just(OptimizerKind::Lars)
        ],
        offload in prop_oneof![
            3 => Just(Offload::None), 1 => Just(Offload::Optimizer), 1 => Just(Offload::Activations), 1 => Just(Offload::All)
        ],
    ) -> Layout {
        let (dp, tp, pp) = (1 << axes.0, 1 << axes.1, 1 << axes.2);
        let served = servers > 0;
        let (tp, pp) = if served { (1, 1) } else { (tp, pp) };
        let schedule = if pp == 1 { ScheduleKind::OneFOneB } else { schedule };
        // DualPipe-V needs two microbatches per rank.
        let rounds = if schedule == ScheduleKind::DualPipeV { rounds.max(1) } else { rounds };
        let microbatches = pp << rounds;
        let leaves = dp * (1 << leaves.min(rounds));
        let offload = match offload {
            Offload::Optimizer | Offload::All if served => Offload::None,
            Offload::Activations | Offload::All if schedule.splits_backward() => Offload::None,
            other => other,
        };
        Layout {
            offload,
            dp,
            tp,
            pp,
            sp: sp && tp > 1,
            zero: if served { Zero::None } else { zero },
            schedule,
            micro_batch,
            global_batch: u64::from(dp * microbatches) * micro_batch,
            seq: 8,
            recompute,
            split,
            dtype,
            order: if free { SummationOrder::Free } else { SummationOrder::Canonical },
            leaves,
            sync: if served { Sync::Servers(servers) } else { Sync::AllReduce },
            collective: Algorithm::Auto,
            bucket: Bytes(bucket),
            overlap,
            optimizer,
            ..Default::default()
        }
    }
}

/// Number of random cases: `PROPTEST_CASES`, or few enough for every `cargo test`.
#[expect(clippy::disallowed_methods, reason = "a test, not the crate, reads the number of cases")]
fn cases(few: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(few)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(300)))]

    #[test]
    fn random_legal_strategies_lower_to_valid_plans(
        model in model(),
        strategy in strategy(),
        cut in (0u32..3, 0u32..2),
    ) {
        let strategy = with_experts(&model, strategy, cut);
        let stages = u64::from(strategy.pp) * u64::from(strategy.schedule.chunks());
        prop_assume!(stages <= model.layers + 2);
        let plan = lower(&model, &strategy).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let violations = validate::validate(&plan, None);
        let told: Vec<String> = violations.iter().take(4).map(ToString::to_string).collect();
        prop_assert!(violations.is_empty(), "{} violations:\n{}", violations.len(), told.join("\n"));
        let parsed = text::parse(&text::print(&plan));
        prop_assert!(parsed.as_ref() == Ok(&plan), "{:?}", parsed.err());
    }
}

/// Offloading moves a large share of bytes from the arena to the store, and loses none.
#[test]
fn offloading_empties_the_arena() {
    let model = built_in::get("gpt2-124m").unwrap().unwrap();
    let of = |offload: Offload| {
        let layout = Layout { offload, store: Store::Host, seq: 256, ..Layout::default() };
        let plan = lower(&model, &layout).unwrap();
        assert_eq!(validate::validate(&plan, None), vec![]);
        let memory = plan.programs[0].memory;
        (memory.total().as_f64(), memory.stored().as_f64())
    };
    let (whole, none) = of(Offload::None);
    assert_eq!(none, 0.0);
    // Two moments of every parameter; the arena keeps buffers for the two largest buckets.
    let (arena, stored) = of(Offload::Optimizer);
    let state = 8.0 * model.parameters() as f64;
    assert!((stored / state - 1.0).abs() < 0.01, "{stored} of {state}");
    assert!(arena < whole - 0.4 * state, "{arena} of {whole}");
    // Activations of nine of twelve blocks.
    let (arena, stored) = of(Offload::Activations);
    assert!(stored > 0.0 && arena < whole - 0.7 * stored, "{arena} of {whole}, {stored} stored");
    let (least, _) = of(Offload::All);
    assert!(least < arena);
}

#[test]
fn what_cannot_be_offloaded_is_refused() {
    let model = built_in::get("mini-llama").unwrap().unwrap();
    let told = |layout: Layout| lower(&model, &layout).unwrap_err().to_string();
    let base = Layout { seq: 8, pp: 2, global_batch: 4, ..Layout::default() };
    let schedule = ScheduleKind::ZbH1 { chunks: 1 };
    let halves = told(Layout { schedule, offload: Offload::Activations, ..base.clone() });
    assert!(
        halves.contains("--offload: zb-h1 reads activations in two separate passes"),
        "{halves}"
    );
    let schedule = ScheduleKind::PipeDream { versions: Versions::Two };
    let flows = told(Layout { schedule, offload: Offload::Optimizer, ..base.clone() });
    assert!(flows.contains("has no idle time"), "{flows}");
    let served = Layout { pp: 1, sync: Sync::Servers(1), offload: Offload::All, ..base };
    assert!(told(served).contains("the servers hold the optimizer's state"));
}

/// Both legs of a V pass the same ranks; neither may block the other.
#[test]
fn a_long_v_does_not_wait_for_itself() {
    let shape = ModelDims {
        kind: ModelKind::Gpt2,
        layers: 14,
        d_model: 16,
        heads: 4,
        kv_heads: 4,
        head_dim: 4,
        ffn: 32,
        seq: 8,
        max_positions: 8,
        vocab: 64,
        tied: true,
        activation: Activation::Gelu,
        norm_eps: 1e-5,
        rope_theta: 0.0,
        qk_norm: false,
        experts: Experts::default(),
        latent: Latent::default(),
        mtp: Mtp::default(),
    };
    let model = Model::new("long", shape).unwrap();
    for (pp, microbatches) in [(8, 16), (8, 17), (8, 40), (7, 20), (5, 12)] {
        let schedule = ScheduleKind::DualPipeV;
        let layout =
            Layout { pp, schedule, global_batch: microbatches, seq: 8, ..Layout::default() };
        let plan = lower(&model, &layout).unwrap();
        let found = validate::validate(&plan, None);
        let told: String = found.iter().map(|v| format!("{v}\n")).collect();
        assert!(found.is_empty(), "{pp} ranks, {microbatches} microbatches\n{told}");
    }
}

/// Overlapping iterations in combination with other options.
#[test]
fn pipelines_without_flush_lower_to_valid_plans() {
    let shape = ModelDims {
        kind: ModelKind::Llama,
        layers: 4,
        d_model: 16,
        heads: 4,
        kv_heads: 4,
        head_dim: 4,
        ffn: 32,
        seq: 8,
        max_positions: 0,
        vocab: 64,
        tied: false,
        activation: Activation::SwiGlu,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        qk_norm: false,
        experts: Experts::default(),
        latent: Latent::default(),
        mtp: Mtp::default(),
    };
    let model = Model::new("random", shape).unwrap();
    let batches = [(Versions::Stashed, 1), (Versions::Two, 4), (Versions::Two, 7)];
    for (versions, microbatches) in batches {
        for (pp, tp, dp) in [(1, 1, 1), (2, 1, 1), (4, 1, 2), (3, 2, 1)] {
            for recompute in [Recompute::None, Recompute::Full] {
                for overlap in [true, false] {
                    let layout = Layout {
                        pp,
                        tp,
                        dp,
                        leaves: dp,
                        sp: tp > 1,
                        schedule: ScheduleKind::PipeDream { versions },
                        global_batch: microbatches * u64::from(dp),
                        seq: 8,
                        recompute,
                        overlap,
                        ..Layout::default()
                    };
                    let plan = lower(&model, &layout).unwrap_or_else(|p| panic!("{layout:?}: {p}"));
                    let found = validate::validate(&plan, None);
                    let told: String = found.iter().map(|v| format!("{v}\n")).collect();
                    assert!(found.is_empty(), "{layout:?}\n{told}");
                    let written = text::print(&plan);
                    assert_eq!(text::parse(&written).unwrap(), plan);
                }
            }
        }
    }
    let tied = Model::new("tied", ModelDims { tied: true, ..shape }).unwrap();
    let schedule = ScheduleKind::PipeDream { versions: Versions::Stashed };
    let layout = Layout { pp: 2, seq: 8, schedule, zero: Zero::Optimizer, ..Layout::default() };
    let told = lower(&tied, &layout).unwrap_err().to_string();
    assert!(told.contains("share one table") && told.contains("--zero 0"), "{told}");
    let layout = Layout { zero: Zero::None, global_batch: 6, ..layout };
    let told = lower(&model, &layout).unwrap_err().to_string();
    assert!(told.contains("there are 6: ") && told.contains("use --micro-batch 6"), "{told}");
    let schedule = ScheduleKind::PipeDream { versions: Versions::Two };
    let told = lower(&model, &Layout { pp: 4, schedule, global_batch: 2, ..layout }).unwrap_err();
    assert!(told.to_string().contains("raise --global-batch to 4"), "{told}");
}

/// Context parallelism in combination with other options. With ring attention, a sequence eight
/// times as long on eight ranks needs about the same memory per rank.
#[test]
fn sequences_that_are_shared_lower_to_valid_plans() {
    let model = built_in::get("mini-llama").unwrap().unwrap();
    let base = Layout { seq: 64, ..Layout::default() };
    for (cp, tp, pp, dp) in [(2, 1, 1, 1), (4, 1, 1, 1), (3, 1, 1, 2), (2, 2, 2, 1), (8, 1, 2, 1)] {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            for zero in [Zero::None, Zero::Parameters] {
                for overlap in [true, false] {
                    let schedule = ScheduleKind::ZbH1 { chunks: 1 };
                    let layout = Layout {
                        cp,
                        tp,
                        pp,
                        dp,
                        leaves: dp,
                        sp: tp > 1,
                        schedule: if pp > 1 { schedule } else { ScheduleKind::OneFOneB },
                        seq: 96,
                        global_batch: u64::from(4 * dp),
                        micro_batch: 2,
                        recompute,
                        zero,
                        overlap,
                        ..base.clone()
                    };
                    let plan = lower(&model, &layout).unwrap_or_else(|p| panic!("{layout:?}: {p}"));
                    let found = validate::validate(&plan, None);
                    let told: String = found.iter().map(|v| format!("{v}\n")).collect();
                    assert!(found.is_empty(), "{layout:?}\n{told}");
                    assert_eq!(text::parse(&text::print(&plan)).unwrap(), plan);
                }
            }
        }
    }
    let peak = |layout: &Layout| lower(&model, layout).unwrap().programs[0].memory.total().as_f64();
    let long = Layout { cp: 8, seq: 8 * 1024, ..base.clone() };
    let (one, eight) = (peak(&Layout { seq: 1024, ..base.clone() }), peak(&long));
    assert!(eight < 1.1 * one, "{one} bytes become {eight}");
    assert!(peak(&Layout { cp: 1, ..long }) > 4.0 * one);
    let uneven = Layout { cp: 3, seq: 64, ..base };
    let told = lower(&model, &uneven).unwrap_err().to_string();
    assert!(told.contains("--seq as a multiple of 6"), "{told}");
}

/// Shared weights may only be copied and stepped; any other access is a violation.
#[test]
fn what_all_ranks_share_is_only_restored_from_and_stepped() {
    let model = built_in::get("mini").unwrap().unwrap();
    let layout = Layout {
        dp: 3,
        sync: Sync::Hogwild,
        order: SummationOrder::Free,
        global_batch: 6,
        seq: model.seq,
        ..Layout::default()
    };
    let plan = lower(&model, &layout).unwrap();
    assert!(validate::validate(&plan, None).is_empty());
    assert_eq!(text::parse(&text::print(&plan)).unwrap(), plan);
    let said = |plan: &paceline_plan::program::Plan| {
        let all = validate::validate(plan, None);
        all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    };
    let bucket = plan.programs[0].buckets[0].clone();
    let mut reaches = plan.clone();
    let mode = AccumulateMode::Move;
    let op = Op::Accumulate { from: bucket.params, into: bucket.grads, mode };
    reaches.programs[0].body.push(LaneId(0), op, &[]);
    assert!(said(&reaches).contains("is shared by all ranks"), "{}", said(&reaches));
    let mut own = plan.clone();
    own.programs[0].buffers[bucket.moments[0].buffer.index()].kind = MemoryKind::Optimizer;
    assert!(said(&own).contains("its weights or its moments, and not both"), "{}", said(&own));
    let mut narrow = plan.clone();
    narrow.programs[0].buffers[bucket.params.buffer.index()].dtype = DType::Bf16;
    assert!(said(&narrow).contains("not in f32"), "{}", said(&narrow));
}
