//! What computation takes: per kernel, the roofline.
//!
//! A kernel is as fast as the slower of two things: its matrix operations at the rate that its
//! shapes allow, and its bytes at the memory's sustained rate (Williams et al., "Roofline", 2009).
//! Each adds the gap that a queued launch leaves. An operator is one kernel, with these exceptions:
//!
//! - attention that is not fused (`attention`);
//! - neighbouring element-wise operators under [`Profile::fused_elementwise`], which are one
//!   together;
//! - biases, accumulation, the loss and the optimizer without [`Profile::single_pass`];
//! - masks that [`Profile::dropout`] adds to the residual branches;
//! - fp8 products, whose operands are cast first.

mod attention;
mod product;

use crate::cluster::Device;
use crate::profile::Profile;
use paceline_plan::DType;
use paceline_plan::graph::{Cost, LinearRole, OpKind, Part};
use paceline_plan::program::{AccumulateMode, Bucket, LocalOp, Program, Template, View};
use paceline_plan::units::Seconds;
use product::Product;

/// Times computations on one kind of device.
#[derive(Clone, Copy, Debug)]
pub struct Roofline<'a> {
    device: &'a Device,
    profile: &'a Profile,
    /// The type of matrix products.
    dtype: DType,
}

impl<'a> Roofline<'a> {
    /// For products in `dtype`.
    pub const fn new(device: &'a Device, profile: &'a Profile, dtype: DType) -> Self {
        Self { device, profile, dtype }
    }

    /// One run of a template.
    pub fn template(&self, template: &Template) -> Seconds {
        let mut time = 0.0;
        let mut at = 0;
        while let Some(op) = template.ops.get(at) {
            let chain = self.chain(&template.ops[at..]);
            time += if chain > 1 {
                self.streaming(fused_bytes(template, &template.ops[at..at + chain]))
            } else {
                self.operator(template, op)
            };
            at += chain;
        }
        Seconds(time)
    }

    /// One optimizer step on this rank's part of a bucket: gradients are read, master weights and
    /// moments read and written, weights written (and read where they are their own master).
    ///
    /// Without [`Profile::single_pass`] it is more: gradients are copied to f32, unscaled, clipped
    /// and only then read, and the master weights are read once more to be copied.
    pub fn step(&self, program: &Program, bucket: &Bucket, parts: u64) -> Seconds {
        if !bucket.updated {
            return Seconds::ZERO;
        }
        let size = |view: &View| program.buffer(view.buffer).dtype.size() as f64;
        let state = bucket.master.iter().chain(&bucket.moments);
        let weights = if bucket.master.is_some() { 1.0 } else { 2.0 };
        let per_element = size(&bucket.grads)
            + size(&bucket.params) * weights
            + state.map(|view| 2.0 * size(view)).sum::<f64>();
        // Copy: 4 written; unscale and clip: 4 read and 4 written each; then f32 is read, twice.
        let passes = if self.profile.single_pass { 0.0 } else { 4.0 + 8.0 + 8.0 + 4.0 + 4.0 };
        let elements = (bucket.elements / parts.max(1)) as f64;
        Seconds(self.streaming(elements * (per_element + passes)))
    }

    /// An element-wise sum or copy of a view.
    pub fn accumulate(&self, program: &Program, view: &View, mode: AccumulateMode) -> Seconds {
        let touched = match mode {
            AccumulateMode::Add => 3.0,
            AccumulateMode::Move => 2.0,
        };
        let bytes = view.len as f64 * program.buffer(view.buffer).dtype.size() as f64;
        Seconds(self.streaming(bytes * touched))
    }

    /// How many operators from the first on are one kernel.
    fn chain(&self, ops: &[LocalOp]) -> usize {
        if !self.profile.fused_elementwise {
            return 1;
        }
        let follows = |pair: &&[LocalOp]| {
            elementwise(&pair[0])
                && elementwise(&pair[1])
                && pair[1].inputs.iter().any(|input| pair[0].outputs.contains(input))
        };
        1 + ops.windows(2).take_while(follows).count()
    }

    fn operator(&self, template: &Template, op: &LocalOp) -> f64 {
        let cost = template.cost(op);
        match op.kind {
            OpKind::Linear { role } => self.linear(template, op, role, &cost),
            OpKind::ExpertLinear { role, experts: _ } => self.linear(template, op, role, &cost),
            OpKind::Attention { heads, seq } => {
                let tokens = template.operands[usize::from(op.inputs[0])].dims[0];
                let shape = attention::Shape { heads, queries: seq, keys: seq, tokens };
                self.attention(&shape, op.part, &cost)
            }
            OpKind::AttentionBlock { heads, queries, keys } => {
                let tokens = template.operands[usize::from(op.inputs[0])].dims[0];
                let shape = attention::Shape { heads, queries, keys, tokens };
                self.attention(&shape, op.part, &cost)
            }
            OpKind::Bias if self.profile.single_pass => 0.0,
            OpKind::CrossEntropy { .. } if !self.profile.single_pass => {
                let logits =
                    op.inputs.get(1).map(|&i| template.operands[usize::from(i)].elements());
                self.kernel(&cost)
                    + self.streaming(logits.unwrap_or(0) as f64 * loss_bytes(op.part))
            }
            OpKind::Position if self.profile.dropout => {
                // The embedding's dropout follows.
                let elements = elements_of(template, op);
                self.kernel(&cost) + self.streaming(elements * self.mask_bytes())
            }
            OpKind::Embedding
            | OpKind::Position
            | OpKind::Norm { .. }
            | OpKind::Bias
            | OpKind::Rope { .. }
            | OpKind::Activation { .. }
            | OpKind::SwiGlu
            | OpKind::Add
            | OpKind::RowMax
            | OpKind::SoftmaxStats
            | OpKind::CrossEntropy { .. }
            | OpKind::Route { .. }
            | OpKind::Dispatch { .. }
            | OpKind::Combine { .. }
            | OpKind::BlockSquares { .. }
            | OpKind::TensorSquares
            | OpKind::Norm2 => self.kernel(&cost),
        }
    }

    /// A product and what the profile puts around it.
    fn linear(&self, template: &Template, op: &LocalOp, role: LinearRole, cost: &Cost) -> f64 {
        let dims =
            |index: Option<&u16>| index.map_or([1, 1], |&i| template.operands[usize::from(i)].dims);
        let tokens = dims(op.inputs.first())[0];
        let [outputs, inputs] = dims(op.params.first());
        // The logits stay in the activations' type: they decide the loss, and fp8 is too coarse.
        let (dtype, cast) = match (self.dtype, role) {
            (DType::Fp8, LinearRole::Head) => (DType::Bf16, false),
            (DType::Fp8, _) => (DType::Fp8, true),
            (dtype, _) => (dtype, false),
        };
        let product = match op.part {
            Part::Forward => Product { rows: tokens, columns: outputs, depth: inputs },
            Part::InputGradient => Product { rows: tokens, columns: inputs, depth: outputs },
            Part::WeightGradient => Product { rows: outputs, columns: inputs, depth: tokens },
        };
        let mut time = self.product(product, 1.0, dtype, cost.bytes.as_f64());
        if cast {
            // Read for the largest value, read again, written in one byte.
            let all = op.inputs.iter().chain(&op.params).map(|i| dims(Some(i)));
            let cast = if op.part == Part::WeightGradient { op.inputs.len() } else { usize::MAX };
            let elements: f64 =
                all.take(cast).map(|[rows, width]| rows as f64 * width as f64).sum();
            time += self.streaming(elements * 5.0);
        }
        if op.part == Part::WeightGradient && !self.profile.single_pass {
            // The product's result is read again to be added to the gradient.
            let gradient = op.params.first().map(|&i| template.operands[usize::from(i)].dtype);
            let per_element = 2 * gradient.map_or(4, DType::size) + self.activation().size();
            time += self.streaming(outputs as f64 * inputs as f64 * per_element as f64);
        }
        let branch = matches!(role, LinearRole::AttentionOut | LinearRole::Down);
        if branch && self.profile.dropout {
            let elements = tokens as f64 * outputs as f64;
            time += match op.part {
                // Together with bias and addition only the mask is new.
                Part::Forward if self.profile.fused_elementwise => self.bytes(elements),
                Part::Forward | Part::InputGradient => self.streaming(elements * self.mask_bytes()),
                Part::WeightGradient => 0.0,
            };
        }
        time
    }

    /// Bytes per element of a dropout kernel: values read and written, and a byte of mask.
    fn mask_bytes(&self) -> f64 {
        2.0 * self.activation().size() as f64 + 1.0
    }

    /// The type in which activations are stored: fp8 is for products only.
    fn activation(&self) -> DType {
        match self.dtype {
            DType::Fp8 => DType::Bf16,
            dtype @ (DType::F32 | DType::Bf16 | DType::F16 | DType::U32 | DType::U8) => dtype,
        }
    }

    /// `batch` equal products in one kernel that moves so many bytes.
    fn product(&self, product: Product, batch: f64, dtype: DType, bytes: f64) -> f64 {
        let rate = self.device.sustained(dtype).0 * product.efficiency(self.device, dtype, batch);
        let arithmetic = product.flops() * batch / rate;
        arithmetic.max(self.bytes(bytes)) + self.device.launch_overhead.0
    }

    /// A kernel without products.
    fn kernel(&self, cost: &Cost) -> f64 {
        let vector = cost.vector.0 / self.device.sustained(DType::F32).0;
        vector.max(self.bytes(cost.bytes.as_f64())) + self.device.launch_overhead.0
    }

    /// A kernel that only moves bytes.
    fn streaming(&self, bytes: f64) -> f64 {
        self.bytes(bytes) + self.device.launch_overhead.0
    }

    fn bytes(&self, bytes: f64) -> f64 {
        bytes / self.device.sustained_memory_bandwidth().0
    }
}

/// Bytes per logit that a loss of many kernels moves beyond the least: logits are cast to f32 (2
/// read, 4 written), lowered by the maximum, raised to powers, summed and divided (8, 8, 4 and 8);
/// their gradient is scaled in place (8) and cast back (2 more than the least).
fn loss_bytes(part: Part) -> f64 {
    match part {
        Part::Forward => 34.0,
        Part::InputGradient | Part::WeightGradient => 10.0,
    }
}

/// Whether an operator treats every element by itself, so that it can share a kernel with another.
fn elementwise(op: &LocalOp) -> bool {
    match op.kind {
        OpKind::Bias
        | OpKind::Add
        | OpKind::Activation { .. }
        | OpKind::SwiGlu
        | OpKind::Rope { .. }
        | OpKind::Position => op.part != Part::WeightGradient,
        OpKind::Embedding
        | OpKind::Norm { .. }
        | OpKind::Linear { .. }
        | OpKind::Attention { .. }
        | OpKind::AttentionBlock { .. }
        | OpKind::RowMax
        | OpKind::SoftmaxStats
        | OpKind::CrossEntropy { .. }
        | OpKind::Route { .. }
        | OpKind::Dispatch { .. }
        | OpKind::ExpertLinear { .. }
        | OpKind::Combine { .. }
        | OpKind::BlockSquares { .. }
        | OpKind::TensorSquares
        | OpKind::Norm2 => false,
    }
}

/// Bytes of operators that are one kernel: what passes from one to the next stays in registers.
fn fused_bytes(template: &Template, ops: &[LocalOp]) -> f64 {
    let all: f64 = ops.iter().map(|op| template.cost(op).bytes.as_f64()).sum();
    let passed = ops
        .windows(2)
        .flat_map(|pair| pair[0].outputs.iter().filter(|output| pair[1].inputs.contains(output)));
    let saved: f64 = passed
        .map(|&i| {
            let operand = &template.operands[usize::from(i)];
            2.0 * operand.elements() as f64 * operand.dtype.size() as f64
        })
        .sum();
    (all - saved).max(0.0)
}

fn elements_of(template: &Template, op: &LocalOp) -> f64 {
    let first = op.outputs.first().or(op.inputs.first());
    first.map_or(0.0, |&i| template.operands[usize::from(i)].elements() as f64)
}

#[cfg(test)]
mod tests;
