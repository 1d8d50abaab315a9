//! What computation takes: per kernel, the roofline.
//!
//! A kernel is as fast as the slower of two things: its matrix operations at the rate that its
//! shapes allow ([`product`]), and its bytes at the memory's sustained rate (Williams et al.,
//! "Roofline", 2009). Each adds the gap that a queued launch leaves. What an operator is made of is
//! the software's affair ([`Profile`]): attention is one kernel or many ([`attention`]), and so are
//! norms, element-wise operators and the loss ([`traffic`]); fp8 products cast their operands
//! first; the optimizer's step passes over memory once or often ([`update`]).
//!
//! All of it is put on its way by a host, kernel by kernel. Where kernels are so short that the
//! host cannot keep up, the segment takes as long as the host does.

mod attention;
mod measured;
mod product;
mod traffic;
mod update;

pub use measured::{KernelUse, accumulate_kernel, kernel, step_kernel};

use crate::cluster::Device;
use crate::profile::{Kernels, Profile};
use paceline_plan::DType;
use paceline_plan::graph::{Cost, LinearRole, OpKind, Part, Window};
use paceline_plan::program::{LocalOp, Template};
use paceline_plan::units::Seconds;
use product::Product;

/// Times computations on one kind of device.
#[derive(Clone, Copy, Debug)]
pub struct Roofline<'a> {
    device: &'a Device,
    profile: &'a Profile,
    /// The type of matrix products.
    dtype: DType,
    /// Microbatches among which what is done once an iteration is shared out.
    microbatches: u32,
}

/// What a run of operators takes.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    /// Time of the device.
    device: f64,
    /// Kernels, which the host puts on their way one by one.
    kernels: u32,
}

impl Work {
    fn add(&mut self, other: Self) {
        self.device += other.device;
        self.kernels = self.kernels.saturating_add(other.kernels);
    }
}

impl<'a> Roofline<'a> {
    /// For products in `dtype`, in iterations of so many microbatches.
    pub const fn new(
        device: &'a Device,
        profile: &'a Profile,
        dtype: DType,
        microbatches: u32,
    ) -> Self {
        Self { device, profile, dtype, microbatches }
    }

    /// One run of a template.
    pub fn template(&self, template: &Template) -> Seconds {
        let mut work = Work::default();
        let mut at = 0;
        while let Some(op) = template.ops.get(at) {
            let chain = self.chain(&template.ops[at..]);
            work.add(if chain > 1 {
                self.fused(template, &template.ops[at..at + chain])
            } else {
                self.operator(template, op)
            });
            at += chain;
        }
        Seconds(work.device.max(f64::from(work.kernels) * self.profile.host_issue.0))
    }

    /// How many operators from the first on are one kernel.
    fn chain(&self, ops: &[LocalOp]) -> usize {
        if self.profile.kernels == Kernels::Eager {
            return 1;
        }
        let follows = |pair: &&[LocalOp]| {
            traffic::elementwise(&pair[0])
                && traffic::elementwise(&pair[1])
                && pair[1].inputs.iter().any(|input| pair[0].outputs.contains(input))
        };
        1 + ops.windows(2).take_while(follows).count()
    }

    fn operator(&self, template: &Template, op: &LocalOp) -> Work {
        let cost = template.cost(op);
        let mut work = match op.kind {
            OpKind::Linear { role } => self.linear(template, op, role, &cost),
            OpKind::ExpertLinear { experts, regions, rows, role } => {
                let mut work = self.expert_linear(template, op, (experts, regions, rows), &cost);
                if experts > 1 && regions > 1 && !self.profile.fused_permutation {
                    work.add(self.chunks(template, op, role, rows));
                }
                work
            }
            OpKind::Conv { window } => self.conv(template, op, window, &cost),
            OpKind::Interact { tables, width, parts: _ } => {
                // A small product for every sample.
                let samples = template.operands[usize::from(op.inputs[0])].dims[0] as f64;
                let vectors = tables + 1;
                let product = Product { rows: vectors, columns: vectors, depth: width };
                let times = if op.part == Part::Forward { 1.0 } else { 2.0 };
                let bytes = cost.bytes.as_f64();
                self.product(product, samples * times, 1.0, self.activation(), bytes)
            }
            OpKind::Attention { heads, seq } => {
                let tokens = template.operands[usize::from(op.inputs[0])].dims[0];
                let shape = attention::Shape { heads, queries: seq, keys: seq, tokens };
                self.attention(&shape, op.part, &cost)
            }
            OpKind::AttentionBlock { heads, queries, keys, step: _ } => {
                let tokens = template.operands[usize::from(op.inputs[0])].dims[0];
                let shape = attention::Shape { heads, queries, keys, tokens };
                let mut work = self.attention(&shape, op.part, &cost);
                work.add(self.merge(&shape, op.part));
                work
            }
            OpKind::Embedding
            | OpKind::Position
            | OpKind::Norm { .. }
            | OpKind::Bias
            | OpKind::Rope { .. }
            | OpKind::KeysValues { .. }
            | OpKind::Activation { .. }
            | OpKind::SwiGlu
            | OpKind::Add
            | OpKind::RowMax
            | OpKind::SoftmaxStats
            | OpKind::CrossEntropy { .. }
            | OpKind::EmbeddingBag { .. }
            | OpKind::StepRows { .. }
            | OpKind::BinaryCrossEntropy { .. }
            | OpKind::BatchSums { .. }
            | OpKind::BatchNorm { .. }
            | OpKind::MaxPool { .. }
            | OpKind::AveragePool { .. }
            | OpKind::Route(_)
            | OpKind::HeadNorm { .. }
            | OpKind::LatentHeads(_)
            | OpKind::LatentValues(_)
            | OpKind::Dispatch { .. }
            | OpKind::Combine { .. }
            | OpKind::BlockSquares { .. }
            | OpKind::TensorSquares
            | OpKind::Norm2
            | OpKind::Total
            | OpKind::Compress(_)
            | OpKind::Outer(_) => self.traffic(template, op, &cost),
        };
        if work.kernels > 0 {
            work.add(self.fill(template, op));
        }
        work
    }

    /// A product and what the profile puts around it.
    fn linear(&self, template: &Template, op: &LocalOp, role: LinearRole, cost: &Cost) -> Work {
        let dims =
            |index: Option<&u16>| index.map_or([1, 1], |&i| template.operands[usize::from(i)].dims);
        let tokens = dims(op.inputs.first())[0];
        let [outputs, inputs] = dims(op.params.first());
        // The logits stay in the activations' type: they decide the loss, and fp8 is too coarse.
        let dtype = match (self.dtype, role) {
            (DType::Fp8, LinearRole::Head | LinearRole::Router) => DType::Bf16,
            (dtype, _) => dtype,
        };
        let product = match op.part {
            Part::Forward => Product { rows: tokens, columns: outputs, depth: inputs },
            Part::InputGradient => Product { rows: tokens, columns: inputs, depth: outputs },
            Part::WeightGradient => Product { rows: outputs, columns: inputs, depth: tokens },
        };
        // Gradients are not sparse, so a weight's own gradient gains nothing from its zeros.
        let sparse = self.profile.sparse_weights && op.part != Part::WeightGradient;
        let faster = if sparse { self.device.sparse_speedup } else { 1.0 };
        let aligned = if self.device.is_accelerator() {
            product::alignment([outputs, inputs], dtype)
        } else {
            1.0
        };
        let mut work = self.product(product, 1.0, faster * aligned, dtype, cost.bytes.as_f64());
        let (input, output) = (tokens as f64 * inputs as f64, tokens as f64 * outputs as f64);
        let weight = outputs as f64 * inputs as f64;
        if dtype == DType::Fp8 {
            work.add(self.streaming(self.casts(op.part, input, output, weight) / CAST));
        }
        if op.part == Part::WeightGradient && !self.profile.fused_accumulation {
            // The product's result is read again to be added to the gradient.
            let gradient = op.params.first().map(|&i| template.operands[usize::from(i)].dtype);
            let per_element = 2 * gradient.map_or(4, DType::size) + self.activation().size();
            work.add(self.streaming(weight * per_element as f64));
        }
        let branch = matches!(role, LinearRole::AttentionOut | LinearRole::Down);
        if branch && self.profile.dropout {
            work.add(self.residual_dropout(op.part, output));
        }
        work
    }

    /// A convolution is a product whose rows are the places of the window. What it reads is each pixel
    /// once: windows overlap in the caches.
    fn conv(&self, template: &Template, op: &LocalOp, window: Window, cost: &Cost) -> Work {
        let dims =
            |index: Option<&u16>| index.map_or([1, 1], |&i| template.operands[usize::from(i)].dims);
        let places = dims(op.inputs.first())[0].saturating_mul(window.places());
        let [filters, seen] = dims(op.params.first());
        let product = match op.part {
            Part::Forward => Product { rows: places, columns: filters, depth: seen },
            Part::InputGradient => Product { rows: places, columns: seen, depth: filters },
            Part::WeightGradient => Product { rows: filters, columns: seen, depth: places },
        };
        self.product(product, 1.0, 1.0, self.activation(), cost.bytes.as_f64())
    }

    /// One product for each expert, in one kernel, on an equal share of the tokens of the rank that
    /// has most of them.
    fn expert_linear(
        &self,
        template: &Template,
        op: &LocalOp,
        (experts, regions, rows): (u64, u64, u64),
        cost: &Cost,
    ) -> Work {
        let spread = self.profile.expert_spread / (experts.max(1) as f64).sqrt();
        let fullest = 1.0 + spread * largest_of(regions);
        let rows = (rows as f64 * fullest).round() as u64;
        let weight = op.params.first().map_or([1, 1], |&i| template.operands[usize::from(i)].dims);
        let experts = experts.max(1);
        let (each, outputs, inputs) = (rows.div_ceil(experts), weight[0] / experts, weight[1]);
        let product = match op.part {
            Part::Forward => Product { rows: each, columns: outputs, depth: inputs },
            Part::InputGradient => Product { rows: each, columns: inputs, depth: outputs },
            Part::WeightGradient => Product { rows: outputs, columns: inputs, depth: each },
        };
        let aligned = if self.device.is_accelerator() {
            product::alignment([outputs, inputs], self.dtype)
        } else {
            1.0
        };
        let bytes = cost.bytes.as_f64();
        let mut work = self.product(product, experts as f64, aligned, self.dtype, bytes);
        let elements = |width: u64| rows as f64 * width as f64;
        let weights = weight[0] as f64 * weight[1] as f64;
        if self.dtype == DType::Fp8 {
            let moved = self.casts(op.part, elements(inputs), elements(outputs), weights);
            work.add(self.streaming(moved / CAST));
        }
        if op.part == Part::WeightGradient && !self.profile.fused_accumulation {
            let gradient = op.params.first().map(|&i| template.operands[usize::from(i)].dtype);
            let per_element = 2 * gradient.map_or(4, DType::size) + self.activation().size();
            work.add(self.streaming(weights * per_element as f64));
        }
        work
    }

    /// Tokens that come from several ranks for several experts are copied into the experts' order
    /// before their first product, and back after their last.
    fn chunks(&self, template: &Template, op: &LocalOp, role: LinearRole, rows: u64) -> Work {
        // The narrow side: what comes to the first product, and the gradient that leaves it.
        let last = role == LinearRole::Down;
        let leaves = last == (op.part == Part::Forward);
        let operands = if leaves { &op.outputs } else { &op.inputs };
        if op.part == Part::WeightGradient {
            return Work::default();
        }
        let width = operands.first().map_or(0, |&i| template.operands[usize::from(i)].dims[1]);
        let size = self.activation().size() as f64;
        self.streaming(2.0 * rows as f64 * width as f64 * size)
    }

    /// Bytes that making a product's fp8 operands moves.
    fn casts(&self, part: Part, input: f64, output: f64, weight: f64) -> f64 {
        let casts = &self.profile.casts;
        let share =
            if casts.weights_once { 1.0 / f64::from(self.microbatches.max(1)) } else { 1.0 };
        match part {
            Part::Forward => casts.input * input + casts.weight * weight * share,
            Part::InputGradient => casts.gradient * output + casts.weight_again * weight,
            Part::WeightGradient => casts.input_again * input,
        }
    }

    /// The type in which activations are stored: fp8 is for products only.
    fn activation(&self) -> DType {
        match self.dtype {
            DType::Fp8 => DType::Bf16,
            dtype @ (DType::F32 | DType::Bf16 | DType::F16 | DType::U32 | DType::U8) => dtype,
        }
    }

    /// `batch` equal products in one kernel that moves so many bytes, `faster` than their shape
    /// alone would have it.
    fn product(&self, product: Product, batch: f64, faster: f64, dtype: DType, bytes: f64) -> Work {
        let rate = self.device.rate(dtype).0 * product.efficiency(self.device, dtype, batch);
        let arithmetic = product.flops() * batch / (rate * faster);
        self.kernel(arithmetic.max(self.bytes(bytes)))
    }

    /// A kernel that takes so long by itself.
    fn kernel(&self, time: f64) -> Work {
        Work { device: time + self.device.launch_overhead.0, kernels: 1 }
    }

    /// A kernel that only moves bytes.
    fn streaming(&self, bytes: f64) -> Work {
        if bytes > 0.0 { self.kernel(self.bytes(bytes)) } else { Work::default() }
    }

    fn bytes(&self, bytes: f64) -> f64 {
        bytes / self.device.sustained_memory_bandwidth().0
    }

    /// Under [`Profile::deterministic`], filling what an operator is about to write.
    fn fill(&self, template: &Template, op: &LocalOp) -> Work {
        if !self.profile.deterministic {
            return Work::default();
        }
        let written = op.outputs.iter().map(|&i| &template.operands[usize::from(i)]);
        let mut bytes: u64 = written.map(|operand| operand.elements() * operand.dtype.size()).sum();
        if op.part == Part::WeightGradient && !self.profile.fused_accumulation {
            let gradients = op.params.iter().map(|&i| template.operands[usize::from(i)].elements());
            bytes += gradients.sum::<u64>() * self.activation().size();
        }
        self.streaming(bytes as f64)
    }
}

/// How many standard deviations the largest of so many normal values lies above their mean, about:
/// √(2 ln n) − (ln ln n + ln 4π) / 2√(2 ln n).
pub(crate) fn largest_of(count: u64) -> f64 {
    if count < 2 {
        return 0.0;
    }
    let log = (count as f64).ln();
    let root = (2.0 * log).sqrt();
    let deviations = root - (log.ln() + (4.0 * std::f64::consts::PI).ln()) / (2.0 * root);
    deviations.max(0.0)
}

/// Of the memory's rate, what finding the largest value and casting reach: 3.4 and 3.8 TB/s measured
/// by us on an H200 where a copy has 4.3.
const CAST: f64 = 0.88;

#[cfg(test)]
mod tests;
