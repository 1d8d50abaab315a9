use super::*;
use crate::cluster::preset;
use paceline_plan::collective::Order;
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::program::{Plan, SegmentPass};
use paceline_plan::strategy::{Strategy, Zero};

fn plan(name: &str, strategy: Strategy) -> Plan {
    let model = built_in::get(name).unwrap().unwrap();
    lower(&model, &Strategy { seq: model.seq, order: Order::Free, ..strategy }).unwrap()
}

fn half(dtype: DType) -> Strategy {
    Strategy { dtype, grad_dtype: dtype, ..Strategy::default() }
}

fn pass_time(plan: &Plan, device: &Device, profile: &Profile, pass: SegmentPass) -> f64 {
    let roofline = Roofline::new(device, profile, plan.strategy.dtype);
    let blocks = plan.templates.iter().filter(|t| t.pass == pass && t.name.contains(".block."));
    blocks.map(|template| roofline.template(template).0).sum()
}

/// A layer of GPT-3 reaches what large products on an A100 are known to reach, and its backward
/// pass takes about twice as long.
#[test]
fn a_large_layer_runs_near_the_sustained_rate() {
    let device = preset::get("dgx-a100").unwrap().device;
    let plan = plan("gpt3-175b", Strategy { tp: 8, ..half(DType::Bf16) });
    let forward = pass_time(&plan, &device, &Profile::MODERN, SegmentPass::Forward);
    let blocks = plan.templates.iter().filter(|t| t.name.starts_with("F.block."));
    let flops: f64 = blocks.flat_map(|t| t.ops.iter().map(|op| t.cost(op).matrix.0)).sum();
    let rate = flops / forward / 1e12;
    assert!((180.0..265.0).contains(&rate), "{rate} TFLOP/s");
    let backward = pass_time(&plan, &device, &Profile::MODERN, SegmentPass::Backward);
    assert!((1.9..2.2).contains(&(backward / forward)), "{}", backward / forward);
}

/// Scores of 96 heads × 2048 × 2048 in f16: six and a half passes forward, nine and a half
/// backward.
#[test]
fn attention_that_writes_its_scores_moves_them_many_times() {
    let mut device = preset::get("dgx-a100").unwrap().device;
    device.launch_overhead = Seconds::ZERO;
    device.memory_bandwidth.0 *= 1e-3;
    let plan = plan("gpt3-175b", half(DType::F16));
    let written = Profile::MEGATRON_2021;
    let fused = Profile { fused_attention: true, ..written };
    let scores = 96.0 * 2048.0 * 2048.0 * 2.0 / device.sustained_memory_bandwidth().0;
    for (pass, passes) in [(SegmentPass::Forward, 6.5), (SegmentPass::Backward, 9.5)] {
        let more =
            pass_time(&plan, &device, &written, pass) - pass_time(&plan, &device, &fused, pass);
        let relative = more / scores;
        assert!((relative - passes).abs() < 0.3, "{pass:?}: {relative} passes over the scores");
    }
}

#[test]
fn every_saving_saves() {
    let device = preset::get("dgx-a100").unwrap().device;
    let plan = plan("gpt-1.7b", half(DType::F16));
    let time = |profile: Profile| {
        let roofline = Roofline::new(&device, &profile, DType::F16);
        plan.templates.iter().map(|template| roofline.template(template).0).sum::<f64>()
    };
    let worst = Profile {
        fused_attention: false,
        dropout: true,
        fused_elementwise: false,
        single_pass: false,
        ..Profile::MODERN
    };
    let all = time(worst);
    assert!(time(Profile { fused_attention: true, ..worst }) < all);
    assert!(time(Profile { dropout: false, ..worst }) < all);
    assert!(time(Profile { fused_elementwise: true, ..worst }) < all);
    assert!(time(Profile { single_pass: true, ..worst }) < all);
    assert!(time(Profile::MODERN) < time(Profile::MEGATRON_2021));
}

#[test]
fn fp8_speeds_up_products_and_costs_casts() {
    let device = preset::get("dgx-h100").unwrap().device;
    let time = |dtype| {
        let plan = plan("llama3-70b", Strategy { grad_dtype: DType::Bf16, ..half(dtype) });
        pass_time(&plan, &device, &Profile::MODERN, SegmentPass::Forward)
    };
    let faster = time(DType::Bf16) / time(DType::Fp8);
    assert!((1.3..1.95).contains(&faster), "{faster}");
}

/// Adam in mixed precision: two bytes of gradient and two of weight, and three f32 values both
/// ways.
#[test]
fn the_step_moves_gradients_weights_and_state() {
    let mut device = preset::get("dgx-a100").unwrap().device;
    device.launch_overhead = Seconds::ZERO;
    let bandwidth = device.sustained_memory_bandwidth().0;
    let bytes = |plan: &Plan, parts: u64, profile: Profile| {
        let roofline = Roofline::new(&device, &profile, plan.strategy.dtype);
        let program = &plan.programs[0];
        let step = |bucket: &Bucket| roofline.step(program, bucket, parts).0;
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
    let roofline = Roofline::new(&device, &Profile::MODERN, DType::F32);
    let block = plan.templates.iter().find(|t| t.name == "F.block.0").unwrap();
    let time = roofline.template(block);
    assert!(
        time.0 > 8.0 * device.launch_overhead.0 && time.0 < 60.0 * device.launch_overhead.0,
        "{time}"
    );
}
