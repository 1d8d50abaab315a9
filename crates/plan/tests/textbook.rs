//! Textbook figures, reproduced from real plans.

use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, CollectiveKind, Pattern, SummationOrder};
use paceline_plan::lower::lower;
use paceline_plan::model::{
    Activation, Experts, Latent, Model, ModelDims, ModelKind, Mtp, built_in,
};
use paceline_plan::program::MemoryKind;
use paceline_plan::schedule::{self, ScheduleKind, Slots};
use paceline_plan::strategy::{Strategy, Sync, Zero};
use paceline_plan::summary::summarize;
use paceline_plan::units::Bytes;

/// A model whose tensors are whole numbers of blocks, so that padding does not affect the sums.
fn even_model(layers: u64) -> Model {
    let shape = ModelDims {
        kind: ModelKind::Llama,
        layers,
        d_model: 1024,
        heads: 8,
        kv_heads: 8,
        head_dim: 128,
        ffn: 4096,
        seq: 128,
        max_positions: 0,
        vocab: 2048,
        tied: false,
        activation: Activation::SwiGlu,
        norm_eps: 1e-5,
        rope_theta: 10000.0,
        qk_norm: false,
        experts: Experts::default(),
        latent: Latent::default(),
        mtp: Mtp::default(),
    };
    Model::new("even", shape).unwrap()
}

#[test]
fn bubbles_of_plans_are_those_of_the_papers() {
    // Huang et al. (arXiv 1811.06965) and Narayanan et al. (arXiv 2104.04473): (p−1)/(m+p−1), and
    // (p−1)/(V·m+p−1) interleaved.
    for (p, m) in [(2, 4), (4, 4), (4, 8), (8, 32)] {
        for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
            let plan = lower(
                &even_model(16),
                &Strategy {
                    pp: p,
                    global_batch: m,
                    seq: 128,
                    schedule: kind,
                    ..Default::default()
                },
            )
            .unwrap();
            let expected = f64::from(p - 1) / (m as f64 + f64::from(p - 1));
            let got = summarize(&plan).bubble_fraction;
            assert!((got - expected).abs() < 1e-12, "{kind} {p} {m}: {got} {expected}");
        }
        let chunks = 2;
        let schedule = ScheduleKind::Interleaved { chunks };
        let strategy =
            Strategy { pp: p, global_batch: m, seq: 128, schedule, ..Default::default() };
        let plan = lower(&even_model(16), &strategy).unwrap();
        let expected = f64::from(p - 1) / (f64::from(chunks) * m as f64 + f64::from(p - 1));
        let got = summarize(&plan).bubble_fraction;
        assert!((got - expected).abs() < 1e-12, "{p} {m}: {got} {expected}");
    }
}

#[test]
fn three_stages_and_three_microbatches_are_busy_sixty_percent_of_the_time() {
    let order = schedule::order(ScheduleKind::GPipe, 3, 3).unwrap();
    let bubble = schedule::bubble(&order, Slots::new(1, 1)).unwrap();
    assert!((1.0 - bubble.fraction - 0.6).abs() < 1e-12);
}

#[test]
fn ring_all_reduce_takes_2p_minus_2_rounds_and_sends_2n_p_minus_1_over_p() {
    for p in [2_u32, 4, 8, 16, 256] {
        let n = 1_u64 << 20;
        let ring =
            Pattern::new(CollectiveKind::AllReduce, Algorithm::Ring, SummationOrder::Free, p, 0)
                .unwrap();
        let counts = ring.counts(Bytes(n));
        assert_eq!(counts.rounds, 2 * (p - 1));
        assert_eq!(counts.bytes_sent_per_rank_max, Bytes(2 * n * u64::from(p - 1) / u64::from(p)));
    }
}

#[test]
fn one_parameter_server_takes_p_times_n() {
    // ResNet-50: 97.5 MiB of f32 gradients, 256 ranks, 3 iterations/s: 73.1 GiB/s each way.
    let mebibyte = f64::from(1 << 20);
    let n = (97.5 * mebibyte) as u64;
    let (ranks, per_second) = (256, 3.0);
    let pattern = Pattern::new(
        CollectiveKind::AllReduce,
        Algorithm::ParameterServer { servers: 1 },
        SummationOrder::Canonical,
        // The server is a rank of the group and has gradients of its own.
        ranks + 1,
        0,
    )
    .unwrap();
    let counts = pattern.counts(Bytes(n));
    let gibibytes = |b: Bytes| b.as_f64() * per_second / f64::from(1 << 30);
    assert!((gibibytes(counts.bytes_received_per_rank_max) - 73.1).abs() < 0.05);
    assert!((gibibytes(counts.bytes_sent_per_rank_max) - 73.1).abs() < 0.05);
    assert_eq!(counts.fan_in_max, ranks);
}

#[test]
fn a_server_of_a_plan_receives_every_replicas_gradients() {
    let model = even_model(2);
    let (dp, gradients) = (4, 4 * model.parameters());
    for servers in [1_u32, 2] {
        let strategy = Strategy {
            dp,
            leaves: dp,
            global_batch: u64::from(dp),
            seq: 128,
            sync: Sync::Servers(servers),
            ..Default::default()
        };
        let plan = lower(&model, &strategy).unwrap();
        assert_eq!(plan.mesh.world(), dp + servers);
        let traffic = summarize(&plan).traffic["ps"];
        // A server sends back as much as it receives: P·N divided by the number of servers. Several
        // servers also sum the norm among themselves.
        let expected = f64::from(dp) * gradients as f64 / f64::from(servers);
        assert!((traffic.bytes.as_f64() / expected - 1.0).abs() < 1e-3, "{traffic:?} {expected}");
    }
}

/// Rajbhandari et al. (arXiv 1910.02054, figure 1) with 2-byte gradients: 16ψ, 4ψ + 12ψ/N,
/// 2ψ + 14ψ/N, 16ψ/N.
#[test]
fn zero_divides_the_model_state_as_published() {
    let model = even_model(2);
    let psi = model.parameters() as f64;
    let n = 8;
    let state = |zero: Zero| {
        let strategy = Strategy {
            dp: n,
            leaves: n,
            zero,
            global_batch: u64::from(n),
            seq: 128,
            dtype: DType::Bf16,
            grad_dtype: DType::Bf16,
            order: SummationOrder::Free,
            bucket: Bytes(0),
            ..Default::default()
        };
        let plan = lower(&model, &strategy).unwrap();
        let memory = plan.programs[0].memory;
        let kinds = [MemoryKind::Parameters, MemoryKind::Gradients, MemoryKind::Optimizer];
        kinds.into_iter().map(|k| memory.of(k).as_f64()).sum::<f64>()
    };
    let n = f64::from(n);
    let expected = [
        (Zero::None, 16.0 * psi),
        (Zero::Optimizer, 4.0 * psi + 12.0 * psi / n),
        (Zero::Gradients, 2.0 * psi + 14.0 * psi / n),
        (Zero::Parameters, 16.0 * psi / n),
    ];
    for (zero, bytes) in expected {
        let got = state(zero);
        // Only the loss and, with ZeRO, the padding of the last bucket may differ.
        assert!((got / bytes - 1.0).abs() < 1e-3, "ZeRO-{zero}: {got} bytes, published {bytes}");
    }
}

#[test]
fn sixty_five_thousand_ranks_share_eight_programs() {
    let model = built_in::get("gpt3-175b").unwrap().unwrap();
    let strategy = Strategy {
        tp: 8,
        pp: 8,
        dp: 1024,
        leaves: 1024,
        global_batch: 98304,
        seq: model.seq,
        schedule: ScheduleKind::Interleaved { chunks: 3 },
        dtype: DType::Bf16,
        ..Default::default()
    };
    let plan = lower(&model, &strategy).unwrap();
    assert_eq!((plan.mesh.world(), plan.programs.len()), (65536, 8));
    let bubble = summarize(&plan).bubble_fraction;
    assert!((bubble - 7.0 / (3.0 * 96.0 + 7.0)).abs() < 1e-12, "{bubble}");
}

/// ZeRO-2 with four replicas keeps (2 + 14/4) bytes of bf16 training state per parameter of a replica.
/// If these are divided over model-parallel devices of 80 GiB, 16 hold GPT-3's and 128 hold those of a
/// trillion parameters; 8 and 64 do not.
#[test]
fn sixteen_devices_hold_gpt_3_and_128_a_trillion() {
    let state = |name: &str, tp: u32, pp: u32| {
        let model = built_in::get(name).unwrap().unwrap();
        let strategy = Strategy {
            dp: 4,
            tp,
            pp,
            zero: Zero::Gradients,
            global_batch: 4 * u64::from(pp),
            leaves: 4,
            seq: model.seq,
            dtype: DType::Bf16,
            grad_dtype: DType::Bf16,
            order: SummationOrder::Free,
            ..Default::default()
        };
        let plan = lower(&model, &strategy).unwrap();
        let kinds = [MemoryKind::Parameters, MemoryKind::Gradients, MemoryKind::Optimizer];
        let of = |memory: &paceline_plan::program::Memory| {
            kinds.into_iter().map(|kind| memory.of(kind).0).sum::<u64>()
        };
        plan.programs.iter().map(|program| of(&program.memory)).max().unwrap()
    };
    const DEVICE: u64 = 80 << 30;
    assert!(state("gpt3-175b", 8, 2) < DEVICE);
    assert!(state("gpt3-175b", 8, 1) > DEVICE);
    assert!(state("gpt-1008b", 8, 16) < DEVICE);
    assert!(state("gpt-1008b", 8, 8) > DEVICE);
}

/// 12 MB on 2 × 2 × 3 devices, one dimension after the other: a rank's sums shrink to 6, 3 and 1 MB
/// and grow back.
#[test]
fn chunks_on_a_torus_halve_halve_and_third() {
    let megabyte = 1_000_000;
    let shape = paceline_plan::collective::TorusShape::new(&[2, 2, 3]).unwrap();
    let pattern = Pattern::new(
        CollectiveKind::AllReduce,
        Algorithm::Torus { shape },
        SummationOrder::Free,
        12,
        0,
    )
    .unwrap();
    // Rounds of each dimension: (2 − 1), (2 − 1), (3 − 1), and the same backwards.
    let phases = [0..1, 1..2, 2..4, 4..6, 6..7, 7..8];
    assert_eq!(pattern.rounds(), 8);
    let cut = paceline_plan::collective::Chunking {
        elements: 12 * megabyte,
        chunks: pattern.chunks(),
        block: 1,
    };
    for rank in 0..12 {
        let sent = |rounds: &std::ops::Range<u32>| -> u64 {
            let steps = pattern.steps(rank).into_iter();
            let sends = steps.filter_map(|step| match step.action {
                paceline_plan::collective::Action::Send { chunks, .. }
                    if rounds.contains(&step.round) =>
                {
                    Some(cut.elements_in(chunks))
                }
                _ => None,
            });
            sends.sum()
        };
        let mut held = vec![12];
        for (index, rounds) in phases.iter().enumerate() {
            let (before, moved) = (held[index], sent(rounds) / megabyte);
            held.push(if index < 3 { before - moved } else { before + moved });
        }
        assert_eq!(held, [12, 6, 3, 1, 3, 6, 12], "rank {rank}");
    }
}

/// P devices share a layer's output of width d for B samples. With tensor parallelism a device sends
/// its d·B/P values to the P−1 others; with a pipeline of P microbatches it sends d·B/P values, one
/// microbatch's, to the next stage.
#[test]
fn tensor_parallelism_sends_p_minus_1_times_what_a_pipeline_sends() {
    let model = even_model(4);
    for p in [2_u32, 4] {
        let batch = u64::from(p);
        let whole = 1024 * batch * 128;
        let gather =
            Pattern::new(CollectiveKind::AllGather, Algorithm::Direct, SummationOrder::Free, p, 0)
                .unwrap();
        let part = whole / u64::from(p);
        assert_eq!(
            gather.counts(Bytes(whole)).bytes_sent_per_rank_max,
            Bytes(part * u64::from(p - 1))
        );
        let strategy = Strategy { pp: p, global_batch: batch, seq: 128, ..Default::default() };
        let plan = lower(&model, &strategy).unwrap();
        let sends = plan.programs[0].body.nodes.iter().filter_map(|node| match node.op {
            paceline_plan::program::Op::Send { view, .. } => Some(view.len),
            _ => None,
        });
        let sends: Vec<u64> = sends.collect();
        assert_eq!(sends, vec![part; p as usize], "one message per microbatch");
    }
}

/// 120 layers of the estimated 1.8 trillion parameters, in f32.
#[test]
fn a_layer_of_the_largest_model_takes_60_gigabytes() {
    let model = built_in::get("gpt4-1.8t").unwrap().unwrap();
    let trillions = model.parameters() as f64 / 1e12;
    assert!((1.75..1.9).contains(&trillions), "{trillions}");
    let gigabytes = 4.0 * model.layer_parameters() as f64 / 1e9;
    assert!((59.0..62.0).contains(&gigabytes), "{gigabytes}");
}
