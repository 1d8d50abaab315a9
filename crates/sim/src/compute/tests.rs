use super::*;
use crate::cluster::preset;
use crate::profile::{Attention, Loss};
use paceline_plan::collective::SummationOrder;
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::program::{Bucket, ComputePass, Plan, StepPhase};
use paceline_plan::strategy::{Strategy, Zero};

fn plan(name: &str, strategy: Strategy) -> Plan {
    let model = built_in::get(name).unwrap().unwrap();
    lower(&model, &Strategy { seq: model.seq, order: SummationOrder::Free, ..strategy }).unwrap()
}

fn half(dtype: DType) -> Strategy {
    Strategy { dtype, grad_dtype: dtype, ..Strategy::default() }
}

fn roofline<'a>(plan: &Plan, device: &'a Device, profile: &'a Profile) -> Roofline<'a> {
    Roofline::new(device, profile, plan.strategy.dtype, plan.strategy.microbatches())
}

fn pass_time(plan: &Plan, device: &Device, profile: &Profile, pass: ComputePass) -> f64 {
    let roofline = roofline(plan, device, profile);
    let blocks = plan.templates.iter().filter(|t| t.pass == pass && t.name.contains(".block."));
    blocks.map(|template| roofline.template(template).0).sum()
}

/// A GPT-3 layer reaches the known rate of large GEMMs on an A100, and its backward pass takes
/// about twice as long.
#[test]
fn a_large_layer_runs_near_the_sustained_rate() {
    let device = preset::get("dgx-a100").unwrap().device;
    let plan = plan("gpt3-175b", Strategy { tp: 8, ..half(DType::Bf16) });
    let forward = pass_time(&plan, &device, &Profile::MODERN, ComputePass::Forward);
    let blocks = plan.templates.iter().filter(|t| t.name.starts_with("F.block."));
    let flops: f64 = blocks.flat_map(|t| t.ops.iter().map(|op| t.cost(op).matrix.0)).sum();
    let rate = flops / forward / 1e12;
    assert!((180.0..265.0).contains(&rate), "{rate} TFLOP/s");
    let backward = pass_time(&plan, &device, &Profile::MODERN, ComputePass::Backward);
    assert!((1.9..2.2).contains(&(backward / forward)), "{}", backward / forward);
}

/// With 2:4 sparse weights, forward GEMM time halves, and so does the input-gradient half of the
/// backward pass.
#[test]
fn sparse_weights_have_the_sparse_peak() {
    let device = preset::get("dgx-a100").unwrap().device;
    let plan = plan("gpt3-175b", Strategy { tp: 8, ..half(DType::Bf16) });
    let gain = |pass| {
        let time = |profile| pass_time(&plan, &device, profile, pass);
        time(&Profile::MODERN) / time(&Profile::MODERN_SPARSE)
    };
    let (forward, backward) = (gain(ComputePass::Forward), gain(ComputePass::Backward));
    assert!((1.6..2.0).contains(&forward), "{forward}");
    assert!((1.2..1.4).contains(&backward), "{backward}");
    let mut dense = device.clone();
    dense.sparse_speedup = 1.0;
    let time = |profile| pass_time(&plan, &dense, profile, ComputePass::Forward);
    assert_eq!(time(&Profile::MODERN), time(&Profile::MODERN_SPARSE), "no units for it");
}

/// Measured by us on an H200: one Llama-3 8B layer on 2 × 8,192 tokens with FlashAttention-2, in
/// milliseconds forward and backward, without recomputation.
#[test]
fn a_layer_takes_what_was_measured() {
    let device = preset::get("dgx-h200").unwrap().device;
    let measured = [
        (DType::Bf16, Profile::TORCHTITAN_EAGER, 16.6, 36.5),
        (DType::Bf16, Profile::TORCHTITAN, 14.9, 32.3),
        (DType::Fp8, Profile::TORCHTITAN, 10.9, 24.2),
    ];
    for (dtype, profile, forward, backward) in measured {
        let grad_dtype = DType::Bf16;
        let strategy = Strategy { micro_batch: 2, global_batch: 2, grad_dtype, ..half(dtype) };
        let plan = plan("llama3-8b", strategy);
        for (pass, expected) in [(ComputePass::Forward, forward), (ComputePass::Backward, backward)]
        {
            let ratio = pass_time(&plan, &device, &profile, pass) * 1e3 / expected;
            assert!((0.93..1.07).contains(&ratio), "{profile} {dtype} {pass:?}: {ratio}");
        }
    }
}

/// Measured by us on an H200, forward and backward, in TFLOP/s of the unmasked half: sequences,
/// sequence length, head size, with and without dropout plus determinism.
#[test]
fn attention_runs_as_measured() {
    let device = preset::get("dgx-h200").unwrap().device;
    let plain = Profile::MODERN;
    let flash = Profile { attention: Attention::Flash2, ..plain };
    let both = |profile: Profile| Profile { dropout: true, deterministic: true, ..profile };
    let measured = [
        (plain, 2, 8192, 128, [598.0, 517.0]),
        (plain, 4, 2048, 128, [500.0, 403.0]),
        (plain, 4, 2048, 64, [377.0, 313.0]),
        (both(plain), 1, 8192, 128, [275.0, 399.0]),
        (flash, 2, 8192, 128, [333.0, 287.0]),
        (flash, 4, 2048, 128, [276.0, 217.0]),
        (flash, 4, 2048, 64, [243.0, 190.0]),
        (both(flash), 1, 8192, 128, [256.0, 246.0]),
    ];
    for (profile, batch, seq, head_dim, expected) in measured {
        let roofline = Roofline::new(&device, &profile, DType::Bf16, 1);
        let heads = paceline_plan::graph::Heads { heads: 32, kv_heads: 32, head_dim };
        let shape = attention::Shape { heads, queries: seq, keys: seq, tokens: batch * seq };
        let squares = (batch * 32 * seq * seq * head_dim) as f64;
        for (part, expected) in [OpPass::Forward, OpPass::BackwardInput].into_iter().zip(expected) {
            let (whole, counted) = if part == OpPass::Forward { (4.0, 2.0) } else { (8.0, 5.0) };
            let cost =
                Cost { matrix: paceline_plan::units::Flops(whole * squares), ..Cost::default() };
            let time = roofline.attention(&shape, part, &cost).device;
            let ratio = counted * squares / time / 1e12 / expected;
            assert!((0.88..1.12).contains(&ratio), "{shape:?} {part:?}: {ratio}");
        }
    }
}

/// cuDNN has no deterministic backward pass with dropout on Blackwell.
#[test]
fn what_a_library_lacks_falls_back() {
    let device = preset::get("gb200-nvl72").unwrap().device;
    let plan = plan("llama3-8b", half(DType::Bf16));
    let time = |profile: &Profile| pass_time(&plan, &device, profile, ComputePass::Backward);
    let deterministic = Profile { deterministic: true, ..Profile::MODERN };
    let both = Profile { dropout: true, ..deterministic };
    assert!(time(&deterministic) < 1.3 * time(&Profile::MODERN));
    assert!(time(&both) > 1.5 * time(&deterministic));
}

/// Scores of 96 heads × 2048 × 2048 in f16. Besides the GEMMs, they move 4.5 times forward (softmax
/// 2, dropout 2.5) and 5.5 times backward (softmax 3, dropout 2.5), at a reduced rate.
#[test]
fn attention_that_writes_its_scores_moves_them_many_times() {
    let mut device = preset::get("dgx-a100").unwrap().device;
    device.launch_overhead = Seconds::ZERO;
    device.memory_bandwidth.0 *= 1e-3;
    let plan = plan("gpt3-175b", half(DType::F16));
    let written = Profile { cpu_launch_time: Seconds::ZERO, ..Profile::MEGATRON_2021 };
    let fused = Profile { attention: Attention::Flash2, ..written };
    let scores = 96.0 * 2048.0 * 2048.0 * 2.0 / device.sustained_memory_bandwidth().0;
    let dropout = 2.5 / 0.75;
    for (pass, passes) in [
        (ComputePass::Forward, 2.0 + 2.0 / 0.75 + dropout),
        (ComputePass::Backward, 4.0 + 3.0 / 0.75 + dropout),
    ] {
        let more =
            pass_time(&plan, &device, &written, pass) - pass_time(&plan, &device, &fused, pass);
        let relative = more / scores;
        assert!((relative - passes).abs() < 0.4, "{pass:?}: {relative} for {passes} passes");
    }
}

#[test]
fn every_saving_saves() {
    let device = preset::get("dgx-a100").unwrap().device;
    for model in ["gpt-1.7b", "llama3-8b"] {
        let plan = plan(model, half(DType::F16));
        let time = |profile: Profile| {
            let roofline = roofline(&plan, &device, &profile);
            plan.templates.iter().map(|template| roofline.template(template).0).sum::<f64>()
        };
        let worst = Profile {
            attention: Attention::Written,
            dropout: true,
            kernels: Kernels::Eager,
            fused_bias: false,
            fused_accumulation: false,
            loss: Loss::MEGATRON,
            deterministic: true,
            ..Profile::MODERN
        };
        let all = time(worst);
        assert!(time(Profile { attention: Attention::Flash2, ..worst }) < all);
        assert!(time(Profile { dropout: false, ..worst }) < all);
        assert!(time(Profile { kernels: Kernels::Fused, ..worst }) < all);
        assert!(time(Profile { fused_bias: true, ..worst }) <= all);
        assert!(time(Profile { fused_accumulation: true, ..worst }) < all);
        assert!(time(Profile { loss: Loss::FUSED, ..worst }) < all);
        assert!(time(Profile { deterministic: false, ..worst }) < all);
        assert!(time(Profile::MODERN) < time(Profile::MEGATRON_2021));
        assert!(time(Profile::MODERN_SPARSE) < time(Profile::MODERN));
    }
}

#[test]
fn fp8_speeds_up_products_and_costs_casts() {
    let device = preset::get("dgx-h100").unwrap().device;
    let time = |dtype, profile| {
        let plan = plan("llama3-70b", Strategy { grad_dtype: DType::Bf16, ..half(dtype) });
        pass_time(&plan, &device, &profile, ComputePass::Forward)
    };
    let faster = time(DType::Bf16, Profile::MODERN) / time(DType::Fp8, Profile::MODERN);
    assert!((1.3..1.95).contains(&faster), "{faster}");
    let once = Profile { casts: crate::profile::Casts::TORCHAO, ..Profile::MODERN };
    assert!(time(DType::Fp8, once) < time(DType::Bf16, once));
}

/// Weights cast once per iteration cost less per microbatch the more microbatches there are.
#[test]
fn casts_of_weights_are_shared_out() {
    let device = preset::get("dgx-h100").unwrap().device;
    let time = |global_batch| {
        let strategy = Strategy { grad_dtype: DType::Bf16, global_batch, ..half(DType::Fp8) };
        let plan = plan("llama3-8b", strategy);
        pass_time(&plan, &device, &Profile::MODERN, ComputePass::Forward)
    };
    assert!(time(8) < time(2) && time(2) < time(1));
}

/// Adam in mixed precision: two bytes of gradient, two of weight, and three f32 values read and
/// written.
#[test]
fn the_step_moves_gradients_weights_and_state() {
    let mut device = preset::get("dgx-a100").unwrap().device;
    device.launch_overhead = Seconds::ZERO;
    let bandwidth = device.sustained_memory_bandwidth().0;
    let bytes = |plan: &Plan, parts: u64, profile: Profile| {
        let roofline = roofline(plan, &device, &profile);
        let program = &plan.programs[0];
        let step = |bucket: &Bucket| roofline.step(program, bucket, StepPhase::Apply, parts).0;
        let elements: u64 = program.buckets.iter().map(|bucket| bucket.elements).sum();
        program.buckets.iter().map(step).sum::<f64>() * bandwidth / elements as f64
    };
    let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} bytes in place of {b}");
    let mixed = plan("gpt2-124m", half(DType::F16));
    close(bytes(&mixed, 1, Profile::MODERN), 28.0);
    close(bytes(&mixed, 1, Profile::MEGATRON_2021), 56.0);
    close(bytes(&plan("gpt2-124m", Strategy::default()), 1, Profile::MODERN), 28.0);
    let dealt = Strategy { dp: 4, global_batch: 4, zero: Zero::Optimizer, ..half(DType::F16) };
    close(bytes(&plan("gpt2-124m", dealt), 4, Profile::MODERN), 7.0);
}

#[test]
fn tiny_kernels_cost_their_launch() {
    let device = preset::get("dgx-a100").unwrap().device;
    let plan = plan("mini", Strategy::default());
    let block = plan.templates.iter().find(|t| t.name == "F.block.0").unwrap();
    let time = |profile: &Profile| roofline(&plan, &device, profile).template(block);
    let launch = device.launch_overhead.0;
    let alone = time(&Profile::MODERN);
    assert!(alone.0 > 6.0 * launch && alone.0 < 60.0 * launch, "{alone}");
    // A host that launches too slowly determines the time, and only then.
    let slow = Profile { cpu_launch_time: Seconds(1e-3), ..Profile::MODERN };
    assert!(time(&slow).0 > 6e-3);
    let quick = Profile { cpu_launch_time: Seconds(1e-9), ..Profile::MODERN };
    assert_eq!(time(&quick), alone);
}

/// Time of one run of every template of a pass.
fn layers_time(plan: &Plan, device: &Device, profile: &Profile, pass: ComputePass) -> f64 {
    let roofline = roofline(plan, device, profile);
    let templates = plan.templates.iter().filter(|template| template.pass == pass);
    templates.map(|template| roofline.template(template).0).sum()
}

/// Uneven expert load makes the most loaded rank the bottleneck, but only with expert parallelism.
#[test]
fn the_fullest_rank_paces_a_layer_of_experts() {
    let device = preset::get("dgx-h100").unwrap().device;
    let even = Profile { expert_spread: 0.0, ..Profile::MEGATRON_CORE };
    let gain = |ep: u32| {
        let batch = Strategy { dp: 8, ep, global_batch: 8, leaves: 8, ..half(DType::Bf16) };
        let plan = plan("mixtral-8x7b", batch);
        let time = |profile| layers_time(&plan, &device, profile, ComputePass::Forward);
        time(&Profile::MEGATRON_CORE) / time(&even)
    };
    assert_eq!(gain(1), 1.0, "every rank has all experts");
    let (two_each, one_each) = (gain(4), gain(8));
    assert!(1.01 < two_each && two_each < one_each && one_each < 1.08, "{two_each} {one_each}");
}

#[test]
fn tensor_expressions_permute_tokens_more_slowly_than_kernels_made_for_it() {
    let device = preset::get("dgx-h100").unwrap().device;
    let fused = Profile { fused_permutation: true, ..Profile::MEGATRON_CORE };
    let plan = plan(
        "mixtral-8x7b",
        Strategy { dp: 4, ep: 4, global_batch: 4, leaves: 4, ..half(DType::Bf16) },
    );
    for (pass, bytes) in [(ComputePass::Forward, 5.0 + 34.0), (ComputePass::Backward, 37.0 + 25.0)]
    {
        let time = |profile| layers_time(&plan, &device, profile, pass);
        let longer = time(&Profile::MEGATRON_CORE) - time(&fused);
        // Two experts × 4,096 tokens × width 4,096, plus two copies, less unavoidable traffic.
        let most = 2.0 * 4096.0 * 4096.0 * (bytes + 8.0) / device.sustained_memory_bandwidth().0;
        assert!((0.5..1.05).contains(&(longer / most)), "{pass:?}: {longer} {most}");
    }
}
