//! Device memory footprint of a run under a software profile.
//!
//! A plan's arena is laid out in advance: every buffer has a fixed address, and a virtual stage has
//! as many copies of its activations as it ever has microbatches in flight. Software with an
//! allocator holds only live tensors. The two differ if stages are busy at different times, if the
//! software saves more or less than the plan, and if an allocator reserves more than it hands out.

use crate::cluster::Device;
use crate::profile::{Attention, Kernels, Profile};
use paceline_plan::DType;
use paceline_plan::graph::{LinearRole, OpKind, OpPass};
use paceline_plan::ids::RoleId;
use paceline_plan::program::{
    Access, Buffer, ComputePass, LocalOp, MemoryKind, Op, Plan, Program, Segment, Template,
};
use paceline_plan::strategy::Recompute;
use paceline_plan::units::Bytes;
use std::collections::BTreeSet;

/// Returns the peak memory that the profile's software would report for a role's ranks.
///
/// It is the sum of three parts: weights, gradients, optimizer state and communication buffers as
/// planned; the peak of live activations; and the larger of a layer pass's working memory and the
/// loss's. Full gradients that exist only until they are reduced count when they exist: those of
/// blocks or the head with their pass, the embedding's not at all, because by then all activations
/// are freed. The sum is multiplied by [`Profile::allocator_overhead`].
pub fn footprint(plan: &Plan, role: RoleId, profile: &Profile, device: &Device) -> Bytes {
    let program = &plan.programs[role.index()];
    let frames = Frames::new(plan, program, profile);
    let of = |kind: MemoryKind| program.memory.of(kind).as_f64();
    let transient = transient_gradients(plan, program);
    let state = of(MemoryKind::Parameters)
        + of(MemoryKind::Gradients)
        + of(MemoryKind::Optimizer)
        + of(MemoryKind::Communication)
        - transient.iter().sum::<f64>()
        + cast_weights(plan, program, profile, device);
    let planned: f64 =
        (program.frames.iter().flatten()).map(|&id| program.buffer(id).extent().as_f64()).sum();
    let pass = (of(MemoryKind::Activations) - planned).max(0.0);
    let [blocks, head, _] = transient;
    let working = (pass + blocks.max(head)).max(loss(plan, program, profile));
    Bytes(((state + frames.peak(program, plan) + working) * profile.allocator_overhead) as u64)
}

/// Activations that live from the forward to the backward pass, by virtual stage (frame).
struct Frames {
    /// Frame of each buffer.
    of: Vec<Option<usize>>,
    /// Bytes of one microbatch.
    bytes: Vec<f64>,
}

impl Frames {
    fn new(plan: &Plan, program: &Program, profile: &Profile) -> Self {
        let mut of = vec![None; program.buffers.len()];
        for (frame, buffers) in program.frames.iter().enumerate() {
            buffers.iter().for_each(|id| of[id.index()] = Some(frame));
        }
        let uses = Uses::new(plan, program, profile);
        let mut bytes: Vec<f64> = (program.frames.iter())
            .map(|ids| ids.iter().map(|&id| uses.kept(program.buffer(id), id.index())).sum())
            .collect();
        let beyond = branches(plan, program, profile, &of);
        for (frame, more) in beyond.into_iter().chain(scores(plan, program, profile, &of)) {
            bytes[frame] += more;
        }
        Self { of, bytes }
    }

    /// Peak of live bytes: a microbatch's activations live from the first computation that writes
    /// them until they are freed.
    fn peak(&self, program: &Program, plan: &Plan) -> f64 {
        let of_segment: Vec<Vec<usize>> =
            (program.segments.iter()).map(|segment| self.written(segment, plan)).collect();
        let mut alive = BTreeSet::new();
        let (mut now, mut peak) = (0.0f64, 0.0f64);
        for node in &program.body.nodes {
            match node.op {
                Op::Compute { segment, microbatch, .. } => {
                    for &frame in &of_segment[segment.index()] {
                        if alive.insert((frame, microbatch)) {
                            now += self.bytes[frame];
                            peak = peak.max(now);
                        }
                    }
                }
                Op::Free { frame, microbatch } => {
                    if alive.remove(&(frame as usize, microbatch)) {
                        now -= self.bytes[frame as usize];
                    }
                }
                Op::Load { .. }
                | Op::Send { .. }
                | Op::Recv { .. }
                | Op::Collective { .. }
                | Op::Accumulate { .. }
                | Op::Step { .. }
                | Op::Stash { .. }
                | Op::Restore { .. }
                | Op::Serve { .. } => {}
            }
        }
        peak
    }

    /// Frames whose activations a segment writes, each once. Received data is live from its first
    /// reader on.
    fn written(&self, segment: &Segment, plan: &Plan) -> Vec<usize> {
        let template = &plan.templates[segment.template as usize];
        let forward = template.pass == ComputePass::Forward;
        let operands = template.operands.iter().zip(&segment.operands);
        let written = operands.filter(|(operand, _)| forward || operand.access == Access::Write);
        let frames = written.filter_map(|(_, view)| self.of[view.buffer.index()]);
        frames.collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// Readers of each buffer in the backward pass.
struct Uses {
    /// True if the weight gradient of a GEMM reads the buffer.
    product: Vec<bool>,
    /// True if any other op reads the buffer.
    other: Vec<bool>,
    /// Size of a saved input of a GEMM relative to the activation dtype's, if GEMMs save what they
    /// have cast.
    cast: Option<f64>,
}

impl Uses {
    fn new(plan: &Plan, program: &Program, profile: &Profile) -> Self {
        let s = &plan.strategy;
        let cast = (s.dtype.is_of_products() && profile.casts.input_recast == 0.0)
            .then(|| s.dtype.scaled_bits() / s.activation_dtype().bits() as f64);
        let none = vec![false; program.buffers.len()];
        let mut uses = Self { product: none.clone(), other: none, cast };
        for segment in program.segments.iter().filter(|_| cast.is_some()) {
            let template = &plan.templates[segment.template as usize];
            if template.pass == ComputePass::Forward {
                continue;
            }
            for op in &template.ops {
                let product = matches!(op.kind, OpKind::Linear { role } if role != LinearRole::Head)
                    && op.pass == OpPass::BackwardWeight;
                for (at, &input) in op.inputs.iter().enumerate() {
                    let buffer = segment.operands[usize::from(input)].buffer.index();
                    let of = if product && at == 1 { &mut uses.product } else { &mut uses.other };
                    of[buffer] = true;
                }
            }
        }
        uses
    }

    /// Bytes saved of one copy: the GEMMs' dtype only if just they read it, both dtypes if other ops
    /// read it too.
    fn kept(&self, buffer: &Buffer, at: usize) -> f64 {
        let whole = buffer.stride().as_f64();
        let cast = self.cast.filter(|_| buffer.dtype == DType::Bf16);
        match (cast, self.product[at], self.other[at]) {
            (Some(share), true, false) => whole * share,
            (Some(share), true, true) => whole * (1.0 + share),
            (_, _, _) => whole,
        }
    }
}

/// Bytes of full gradients that exist only until they are reduced: blocks, head and embedding.
fn transient_gradients(plan: &Plan, program: &Program) -> [f64; 3] {
    let mut seen = BTreeSet::new();
    let mut bytes = [0.0; 3];
    for segment in &program.segments {
        let template = &plan.templates[segment.template as usize];
        let of = |found: fn(&OpKind) -> bool| template.ops.iter().any(|op| found(&op.kind));
        let place = if of(|kind| matches!(kind, OpKind::Linear { role: LinearRole::Head })) {
            1
        } else if of(|kind| matches!(kind, OpKind::Embedding)) {
            2
        } else {
            0
        };
        for (operand, view) in template.operands.iter().zip(&segment.operands) {
            let buffer = program.buffer(view.buffer);
            let transient = buffer.kind == MemoryKind::Communication;
            let adds = matches!(operand.access, Access::Accumulate | Access::Add);
            if adds && transient && seen.insert(view.buffer) {
                bytes[place] += buffer.extent().as_f64();
            }
        }
    }
    bytes
}

/// Bytes that branches to the residual stream save beyond the plan, by frame.
///
/// Dropout saves a byte of mask per element, unless the layer is recomputed with the same random
/// numbers. Software without a compiler saves what [`Recompute::SelectiveOp`] names, although
/// nothing reads the last GEMM's result.
fn branches(
    plan: &Plan,
    program: &Program,
    profile: &Profile,
    of: &[Option<usize>],
) -> Vec<(usize, f64)> {
    let (masks, unread) = match plan.strategy.recompute {
        Recompute::None | Recompute::Selective | Recompute::FullOf(_) => (profile.dropout, false),
        Recompute::SelectiveOp => (false, profile.kernels == Kernels::Eager),
        Recompute::Full | Recompute::FullForward => (false, false),
    };
    let size = plan.strategy.activation_dtype().size() as f64;
    let segments = program.segments.iter().filter_map(|segment| {
        let template = &plan.templates[segment.template as usize];
        let frame = segment.operands.iter().find_map(|view| of[view.buffer.index()])?;
        let forward = template.ops.iter().filter(|_| template.pass == ComputePass::Forward);
        let is = |op: &LocalOp, role: LinearRole| op.kind == OpKind::Linear { role };
        let bytes = forward.map(|op| {
            let (out, down) = (is(op, LinearRole::AttentionOut), is(op, LinearRole::Down));
            let per_element = match (masks && (out || down), unread && down) {
                (_, true) => size,
                (true, false) => 1.0,
                (false, false) => 0.0,
            };
            elements(template, op, 0) * per_element
        });
        Some((frame, bytes.sum()))
    });
    segments.collect()
}

/// Bytes that attention saves if its scores are materialized, by frame: their softmax, and with
/// dropout the mask and the masked scores, the 5as²b of Korthikanti et al. (arXiv 2205.05198,
/// section 4.1). Zero for recomputed attention, whose denominators are not saved either.
fn scores(
    plan: &Plan,
    program: &Program,
    profile: &Profile,
    of: &[Option<usize>],
) -> Vec<(usize, f64)> {
    if profile.attention != Attention::Written {
        return Vec::new();
    }
    let size = plan.strategy.activation_dtype().size() as f64;
    let each = if profile.dropout { 2.0 * size + 1.0 } else { size };
    let mut kept = Vec::new();
    for segment in &program.segments {
        let template = &plan.templates[segment.template as usize];
        for op in template.ops.iter().filter(|_| template.pass == ComputePass::Forward) {
            let OpKind::Attention { seq, .. } = op.kind else { continue };
            let denominators = op.outputs.get(1).map(|&i| segment.operands[usize::from(i)].buffer);
            if let Some(frame) = denominators.and_then(|buffer| of[buffer.index()]) {
                kept.push((frame, elements(template, op, 1) * seq as f64 * each));
            }
        }
    }
    kept
}

/// Number of elements of an operator's output.
fn elements(template: &Template, op: &LocalOp, output: usize) -> f64 {
    op.outputs.get(output).map_or(0.0, |&i| template.operands[usize::from(i)].elements() as f64)
}

/// Bytes that the loss holds beyond the logits.
fn loss(plan: &Plan, program: &Program, profile: &Profile) -> f64 {
    let live = if plan.strategy.tp > 1 { profile.loss.live_when_cut } else { profile.loss.live };
    let of_segment = program.segments.iter().map(|segment| {
        let template = &plan.templates[segment.template as usize];
        let losses = template.ops.iter().filter(|op| {
            matches!(op.kind, OpKind::CrossEntropy { .. }) && op.pass != OpPass::Forward
        });
        losses.map(|op| elements(template, op, 0)).sum::<f64>()
    });
    let size = plan.strategy.activation_dtype().size() as f64;
    of_segment.sum::<f64>() * (live - 2.0) * size / 2.0
}

/// Bytes of cast weights beyond the plan's weights of the activation dtype: one copy for each
/// orientation that GEMMs read. Before Blackwell, fp8 units read operands in one orientation only.
/// Negative if fp8 weights replace those of the activation dtype; four-bit ones are kept beside them.
fn cast_weights(plan: &Plan, program: &Program, profile: &Profile, device: &Device) -> f64 {
    let dtype = plan.strategy.dtype;
    if !dtype.is_of_products() || !profile.casts.weights_once {
        return 0.0;
    }
    let weights = program.memory.of(MemoryKind::Parameters).as_f64();
    if dtype != DType::Fp8 {
        return 2.0 * weights * dtype.scaled_bits()
            / plan.strategy.activation_dtype().bits() as f64;
    }
    match (profile.fp8_weights, device.has_fifth_generation_units()) {
        (false, _) => weights,
        (true, false) => 0.0,
        (true, true) => -0.5 * weights,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::preset;
    use crate::profile::Loss;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::schedule::ScheduleKind;
    use paceline_plan::strategy::{Strategy, Zero};

    fn plan(name: &str, strategy: Strategy) -> Plan {
        let model = built_in::get(name).unwrap().unwrap();
        lower(&model, &Strategy { seq: model.seq, ..strategy }).unwrap()
    }

    fn half(dtype: DType) -> Strategy {
        Strategy { dtype, grad_dtype: DType::Bf16, ..Strategy::default() }
    }

    fn bytes(plan: &Plan, profile: &Profile) -> u64 {
        footprint(plan, RoleId(0), profile, &preset::get("dgx-h100").unwrap().device).0
    }

    /// With a single microbatch in flight and no additions, the footprint equals the arena, except
    /// that frameworks do not let a gradient reuse its operand's memory.
    #[test]
    fn a_plain_run_holds_its_arena() {
        let plan = plan("llama3-8b", half(DType::Bf16));
        let (held, arena) = (bytes(&plan, &Profile::MODERN), plan.programs[0].memory.total().0);
        assert!(held >= arena && (held - arena) * 100 < arena, "{held} against {arena}");
    }

    #[test]
    fn interleaved_stages_are_not_all_full_at_once() {
        let strategy = Strategy {
            pp: 4,
            schedule: ScheduleKind::Interleaved { chunks: 4 },
            global_batch: 16,
            ..half(DType::Bf16)
        };
        let plan = plan("llama3-8b", strategy);
        let arena = plan.programs[0].memory.total().0;
        let held = bytes(&plan, &Profile::MODERN);
        assert!(held < arena && held > arena / 2, "{held} of {arena}");
    }

    #[test]
    fn software_adds_masks_logits_casts_and_reserves() {
        let bf16 = plan("gpt2-1.5b", half(DType::Bf16));
        let fp8 = plan("gpt2-1.5b", half(DType::Fp8));
        let plain = bytes(&bf16, &Profile::MODERN);
        let with = |profile: Profile| bytes(&bf16, &profile) as f64 - plain as f64;
        // Two branches in each of 48 layers, 1,024 tokens of width 1,600.
        let masks = with(Profile { dropout: true, ..Profile::MODERN });
        assert_eq!(masks, 2.0 * 48.0 * 1024.0 * 1600.0);
        // 48 layers of 25 heads, each with a score matrix; with dropout a second one and a mask.
        let written = Profile { attention: Attention::Written, ..Profile::MODERN };
        let squares = 48.0 * 25.0 * 1024.0 * 1024.0;
        assert_eq!(with(written), 2.0 * squares);
        assert_eq!(with(Profile { dropout: true, ..written }) - masks, 5.0 * squares);
        assert!(with(Profile { loss: Loss::EAGER, ..Profile::MODERN }) > 0.0);
        let reserved = with(Profile { allocator_overhead: 1.5, ..Profile::MODERN });
        assert!((reserved / plain as f64 - 0.5).abs() < 1e-6);
        // Transformer Engine saves GEMM inputs in one byte; torchao saves them unchanged.
        let again = Profile { casts: crate::profile::Casts::TORCHAO, ..Profile::MODERN };
        assert_eq!(bytes(&fp8, &again), plain);
        let weights = fp8.programs[0].memory.of(MemoryKind::Parameters).0;
        assert!(bytes(&fp8, &Profile::MODERN) < plain + weights);
    }

    #[test]
    fn gradients_that_are_reduced_at_once_are_not_all_there() {
        let dealt = Strategy {
            dp: 8,
            leaves: 8,
            global_batch: 8,
            zero: Zero::Parameters,
            recompute: Recompute::SelectiveOp,
            ..half(DType::Bf16)
        };
        let plan = plan("llama3-8b", dealt);
        let compiled = bytes(&plan, &Profile::MODERN);
        assert!(compiled < plan.programs[0].memory.total().0);
        let eager = Profile { kernels: Kernels::Eager, ..Profile::MODERN };
        // Result of the last GEMM: 32 layers, 8,192 tokens of width 4,096.
        assert_eq!(bytes(&plan, &eager) - compiled, 2 * 32 * 8192 * 4096);
    }
}
