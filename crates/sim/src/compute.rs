//! Compute time: a roofline model per kernel.
//!
//! A kernel takes the larger of two times. One is its matrix operations at the rate that its shapes
//! allow ([`product`]); the other is its bytes at the sustained memory bandwidth (Williams et al.,
//! "Roofline", 2009). Each kernel adds the gap of a queued launch. The software profile
//! ([`Profile`]) determines the kernels of an operator. Attention is one kernel or many
//! ([`attention`]), and so are norms, element-wise operators and the loss ([`traffic`]). fp8 GEMMs
//! cast their operands first, and the optimizer step passes over memory once or several times
//! ([`update`]).
//!
//! A host launches the kernels one by one. If kernels are too short for the host to keep up, the
//! segment takes the host's launch time.

mod attention;
mod gemm;
mod measured;
mod product;
mod roofline;
mod traffic;
mod update;

pub use gemm::{Bound, GemmShape, GemmTime, Skipped, Sparsity, gemm, gemm_bytes};
pub use measured::{KernelUse, accumulate_kernel, kernel, step_kernel};
pub use roofline::{OperatorPoint, operators};

use crate::cluster::Device;
use crate::profile::{Kernels, Profile, cast_traffic};
use paceline_plan::DType;
use paceline_plan::graph::{Cost, CostClass, LinearRole, OpPass, Product as Gemm, Window};
use paceline_plan::program::{LocalOp, Template};
use paceline_plan::units::Seconds;
use product::Product;
pub(crate) use update::StateSizes;

/// Compute-time model for one kind of device.
#[derive(Clone, Copy, Debug)]
pub struct Roofline<'a> {
    device: &'a Device,
    profile: &'a Profile,
    /// Dtype of GEMMs.
    dtype: DType,
    /// Number of microbatches over which once-per-iteration work is spread.
    microbatches: u32,
}

/// Cost of a sequence of operators.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    /// Device time.
    device: f64,
    /// Number of kernels, which the host launches one by one.
    kernels: u32,
}

impl Work {
    fn add(&mut self, other: Self) {
        self.device += other.device;
        self.kernels = self.kernels.saturating_add(other.kernels);
    }
}

impl<'a> Roofline<'a> {
    /// Creates a model for GEMMs in `dtype`, with `microbatches` microbatches per iteration.
    pub const fn new(
        device: &'a Device,
        profile: &'a Profile,
        dtype: DType,
        microbatches: u32,
    ) -> Self {
        Self { device, profile, dtype, microbatches }
    }

    /// Time of one run of a template.
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
        let experts =
            |op: &LocalOp| matches!(op.kind.cost_class(), CostClass::Product(Gemm::Grouped { .. }));
        let launch = match template.ops.iter().any(experts) {
            true => self.profile.cpu_launch_time.0.max(self.profile.expert_launch_time.0),
            false => self.profile.cpu_launch_time.0,
        };
        Seconds(work.device.max(f64::from(work.kernels) * launch))
    }

    /// Device time of a template's kernels by the pass of their operators: forward, input gradient,
    /// weight gradient.
    pub fn by_pass(&self, template: &Template) -> [Seconds; 3] {
        let mut times = [Seconds::ZERO; 3];
        let mut at = 0;
        while let Some(op) = template.ops.get(at) {
            let chain = self.chain(&template.ops[at..]);
            let work = if chain > 1 {
                self.fused(template, &template.ops[at..at + chain])
            } else {
                self.operator(template, op)
            };
            let index = match op.pass {
                OpPass::Forward => 0,
                OpPass::BackwardInput => 1,
                OpPass::BackwardWeight => 2,
            };
            times[index] += Seconds(work.device);
            at += chain;
        }
        times
    }

    /// Number of leading operators that form one kernel.
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
        let mut work = match op.kind.cost_class() {
            CostClass::Product(gemm) => self.gemm(template, op, gemm, &cost),
            // The gradient of scores of no key: one pass over rows.
            CostClass::Attention { .. } if op.pass == OpPass::BackwardWeight => {
                self.roof(&cost, 1.0)
            }
            CostClass::Attention { heads, queries, keys, merged } => {
                let tokens = template.operands[usize::from(op.inputs[0])].dims[0];
                let shape = attention::Shape { heads, queries, keys, tokens };
                let mut work = self.attention(&shape, op.pass, &cost);
                if merged {
                    work.add(self.merge(&shape, op.pass));
                }
                work
            }
            CostClass::RowWise(rows) => self.row_wise(template, op, rows, &cost),
            CostClass::ElementWise(of) => self.element_wise(template, op, of, &cost),
            CostClass::Permute(of) => self.permute(template, op, of, &cost),
            CostClass::Lookup { .. } | CostClass::Reduction => self.roof(&cost, 1.0),
        };
        if work.kernels > 0 {
            work.add(self.fill(template, op));
        }
        work
    }

    /// GEMMs, with what the profile adds around them.
    fn gemm(&self, template: &Template, op: &LocalOp, of: Gemm, cost: &Cost) -> Work {
        match of {
            Gemm::Dense { role } => self.linear(template, op, role, cost),
            Gemm::Grouped { experts, regions, rows, role } => {
                let mut work = self.expert_linear(template, op, (experts, regions, rows), cost);
                if experts > 1 && regions > 1 && !self.profile.fused_permutation {
                    work.add(self.chunks(template, op, role, rows));
                }
                work
            }
            Gemm::Windows(window) => self.conv(template, op, window, cost),
            Gemm::Pairs { vectors, width } => {
                // A small GEMM for every sample.
                let samples = template.operands[usize::from(op.inputs[0])].dims[0] as f64;
                let product = Product { rows: vectors, columns: vectors, depth: width };
                let times = if op.pass == OpPass::Forward { 1.0 } else { 2.0 };
                let bytes = cost.bytes.as_f64();
                self.product(product, samples * times, 1.0, self.activation(), bytes)
            }
        }
    }

    /// A GEMM and the operations that the profile adds around it.
    fn linear(&self, template: &Template, op: &LocalOp, role: LinearRole, cost: &Cost) -> Work {
        let dims =
            |index: Option<&u16>| index.map_or([1, 1], |&i| template.operands[usize::from(i)].dims);
        let tokens = dims(op.inputs.first())[0];
        let [outputs, inputs] = dims(op.params.first());
        // Logits stay in the activation dtype: they determine the loss, and eight bits are too coarse.
        let dtype = match (self.dtype, role) {
            (narrow, LinearRole::Head | LinearRole::Router) if narrow.is_of_products() => {
                DType::Bf16
            }
            (dtype, _) => dtype,
        };
        let product = match op.pass {
            OpPass::Forward => Product { rows: tokens, columns: outputs, depth: inputs },
            OpPass::BackwardInput => Product { rows: tokens, columns: inputs, depth: outputs },
            OpPass::BackwardWeight => Product { rows: outputs, columns: inputs, depth: tokens },
        };
        // Gradients are not sparse, so a weight gradient gains nothing from zero weights.
        let sparse = self.profile.sparse_weights && op.pass != OpPass::BackwardWeight;
        let faster = if sparse { self.device.sparse_speedup } else { 1.0 };
        let aligned = if self.device.is_accelerator() {
            product::alignment([outputs, inputs], dtype)
        } else {
            1.0
        };
        let mut work = self.product(product, 1.0, faster * aligned, dtype, cost.bytes.as_f64());
        let (input, output) = (tokens as f64 * inputs as f64, tokens as f64 * outputs as f64);
        let weight = outputs as f64 * inputs as f64;
        if dtype.is_of_products() {
            work.add(self.streaming(self.casts(op.pass, input, output, weight) / CAST));
        }
        if op.pass == OpPass::BackwardWeight && !self.profile.fused_accumulation {
            // The GEMM result is read again to be added to the gradient.
            let gradient = op.params.first().map(|&i| template.operands[usize::from(i)].dtype);
            let per_element = 2 * gradient.map_or(4, DType::size) + self.activation().size();
            work.add(self.streaming(weight * per_element as f64));
        }
        let branch = matches!(role, LinearRole::AttentionOut | LinearRole::Down);
        if branch && self.profile.dropout {
            work.add(self.residual_dropout(op.pass, output));
        }
        work
    }

    /// A convolution is a GEMM whose rows are the window positions. Each pixel is read from memory
    /// only once: overlapping windows hit the caches.
    fn conv(&self, template: &Template, op: &LocalOp, window: Window, cost: &Cost) -> Work {
        let dims =
            |index: Option<&u16>| index.map_or([1, 1], |&i| template.operands[usize::from(i)].dims);
        let places = dims(op.inputs.first())[0].saturating_mul(window.places());
        let [filters, seen] = dims(op.params.first());
        let product = match op.pass {
            OpPass::Forward => Product { rows: places, columns: filters, depth: seen },
            OpPass::BackwardInput => Product { rows: places, columns: seen, depth: filters },
            OpPass::BackwardWeight => Product { rows: filters, columns: seen, depth: places },
        };
        self.product(product, 1.0, 1.0, self.activation(), cost.bytes.as_f64())
    }

    /// One GEMM per expert, each on an equal share of the tokens of the rank with the most tokens.
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
        let product = match op.pass {
            OpPass::Forward => Product { rows: each, columns: outputs, depth: inputs },
            OpPass::BackwardInput => Product { rows: each, columns: inputs, depth: outputs },
            OpPass::BackwardWeight => Product { rows: outputs, columns: inputs, depth: each },
        };
        let aligned = if self.device.is_accelerator() {
            product::alignment([outputs, inputs], self.dtype)
        } else {
            1.0
        };
        let bytes = cost.bytes.as_f64();
        let separate = self.profile.separate_experts;
        let at_once = if separate { experts.min(STREAMS) } else { experts } as f64;
        let rate = self.device.rate(self.dtype).0
            * product.efficiency(self.device, self.dtype, at_once)
            * aligned;
        let arithmetic = product.flops() * experts as f64 / rate;
        let mut work = self.kernel(arithmetic.max(self.bytes(bytes)));
        if separate {
            work.kernels = u32::try_from(experts).unwrap_or(u32::MAX);
        }
        let elements = |width: u64| rows as f64 * width as f64;
        let weights = weight[0] as f64 * weight[1] as f64;
        if self.dtype.is_of_products() {
            let moved = self.casts(op.pass, elements(inputs), elements(outputs), weights);
            let mut casts = self.streaming(moved / CAST);
            if separate && casts.kernels > 0 {
                casts.kernels = u32::try_from(experts).unwrap_or(u32::MAX).saturating_mul(CASTS);
            }
            work.add(casts);
        }
        if op.pass == OpPass::BackwardWeight && !self.profile.fused_accumulation {
            let gradient = op.params.first().map(|&i| template.operands[usize::from(i)].dtype);
            let per_element = 2 * gradient.map_or(4, DType::size) + self.activation().size();
            work.add(self.streaming(weights * per_element as f64));
        }
        work
    }

    /// Tokens from several ranks for several experts are copied into expert order before their
    /// first GEMM, and back after their last.
    fn chunks(&self, template: &Template, op: &LocalOp, role: LinearRole, rows: u64) -> Work {
        // The narrow side: the input of the first GEMM, and the gradient that leaves it.
        let last = role == LinearRole::Down;
        let leaves = last == (op.pass == OpPass::Forward);
        let operands = if leaves { &op.outputs } else { &op.inputs };
        if op.pass == OpPass::BackwardWeight {
            return Work::default();
        }
        let width = operands.first().map_or(0, |&i| template.operands[usize::from(i)].dims[1]);
        let size = self.activation().size() as f64;
        self.streaming(2.0 * rows as f64 * width as f64 * size)
    }

    /// Bytes moved to cast a GEMM's operands to the type of its units.
    fn casts(&self, part: OpPass, input: f64, output: f64, weight: f64) -> f64 {
        let casts = &self.profile.casts;
        let share =
            if casts.weights_once { 1.0 / f64::from(self.microbatches.max(1)) } else { 1.0 };
        let [tokens, weights] = cast_traffic(self.dtype);
        match part {
            OpPass::Forward => {
                casts.input * tokens * input + casts.weight * weights * weight * share
            }
            OpPass::BackwardInput => {
                casts.gradient * tokens * output + casts.weight_recast * weights * weight
            }
            OpPass::BackwardWeight => casts.input_recast * tokens * input,
        }
    }

    /// Dtype of stored activations; narrower ones are used for GEMMs only.
    fn activation(&self) -> DType {
        if self.dtype.is_of_products() { DType::Bf16 } else { self.dtype }
    }

    /// `batch` equal GEMMs in one kernel that moves `bytes` bytes; `faster` scales the rate that
    /// their shape allows.
    fn product(&self, product: Product, batch: f64, faster: f64, dtype: DType, bytes: f64) -> Work {
        let rate = self.device.rate(dtype).0 * product.efficiency(self.device, dtype, batch);
        let arithmetic = product.flops() * batch / (rate * faster);
        self.kernel(arithmetic.max(self.bytes(bytes)))
    }

    /// A kernel that takes `time` without its launch gap.
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

    /// Filling an operator's outputs before they are written, under [`Profile::deterministic`].
    fn fill(&self, template: &Template, op: &LocalOp) -> Work {
        if !self.profile.deterministic {
            return Work::default();
        }
        let written = op.outputs.iter().map(|&i| &template.operands[usize::from(i)]);
        let mut bytes: u64 = written.map(|operand| operand.elements() * operand.dtype.size()).sum();
        if op.pass == OpPass::BackwardWeight && !self.profile.fused_accumulation {
            let gradients = op.params.iter().map(|&i| template.operands[usize::from(i)].elements());
            bytes += gradients.sum::<u64>() * self.activation().size();
        }
        self.streaming(bytes as f64)
    }
}

/// Expected maximum of `count` normal values above their mean, in standard deviations,
/// approximately: √(2 ln n) − (ln ln n + ln 4π) / 2√(2 ln n).
pub(crate) fn largest_of(count: u64) -> f64 {
    if count < 2 {
        return 0.0;
    }
    let log = (count as f64).ln();
    let root = (2.0 * log).sqrt();
    let deviations = root - (log.ln() + (4.0 * std::f64::consts::PI).ln()) / (2.0 * root);
    deviations.max(0.0)
}

/// Streams on which Transformer Engine runs the GEMMs of experts.
const STREAMS: u64 = 4;

/// Kernels that cast an operand of one expert: its maximum, or the order of its scales, and the cast.
const CASTS: u32 = 2;

/// Fraction of the memory bandwidth reached by finding the maximum and casting: 3.4 and 3.8 TB/s,
/// measured by us on an H200 where a copy reaches 4.3.
const CAST: f64 = 0.88;

#[cfg(test)]
mod tests;
