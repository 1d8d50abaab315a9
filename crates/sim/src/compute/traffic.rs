//! Memory-bound operators: bytes moved and number of kernels.

use super::{Roofline, Work};
use crate::profile::Kernels;
use paceline_plan::DType;
use paceline_plan::graph::{Cost, CostClass, ElementWise, NormKind, OpPass, Permute, RowWise};
use paceline_plan::program::{LocalOp, Template};

/// Fraction of memory bandwidth reached by norms: each row is read completely before it is written.
const NORM: f64 = 0.75;

/// Fraction of memory bandwidth reached by kernels that draw random numbers or compute exponentials
/// per element: on an H200, 0.65 of peak in GELU and 0.63 in dropout, against 0.89 for copies.
const HEAVY: f64 = 0.75;

/// Bytes per element of an RMS norm in eager PyTorch, forward and backward. Forward, in f32: cast
/// (6), square (8), mean (4), multiply (8), cast back (6), multiply (4). Backward: the gradients of
/// the same expressions, plus the sums at branches.
const EAGER_NORM: [f64; 2] = [36.0, 98.0];

/// Bytes per element of queries, keys and values in eager PyTorch: their rotation as complex f32
/// numbers, the copies of keys and values for every query head, and the transposes to head-first
/// layout and back.
const EAGER_ROPE: [f64; 2] = [23.0, 29.0];

/// Bytes per element of gate and up projections in eager PyTorch: the sigmoid and the product.
const EAGER_GATED: [f64; 2] = [5.0, 9.0];

/// Bytes per element of the tokens routed to experts, forward and backward, for permuting them into
/// expert order with PyTorch's `index_select`. Measured by us on an H200 with 8,192 and 16,384
/// tokens. Backward, two gradients per token are added with atomic operations.
const EAGER_DISPATCH: [f64; 2] = [5.0, 37.0];

/// Bytes per element for weighting expert outputs and summing them per token with `scatter_add_`.
const EAGER_COMBINE: [f64; 2] = [34.0, 25.0];

impl Roofline<'_> {
    /// Cost of statistics over rows, and of what they are used for.
    pub(super) fn row_wise(
        &self,
        template: &Template,
        op: &LocalOp,
        of: RowWise,
        cost: &Cost,
    ) -> Work {
        match of {
            // The sums are by-products of the kernel that computes the input gradient.
            RowWise::Norm(_) if op.pass == OpPass::BackwardWeight => Work::default(),
            RowWise::Norm(NormKind::Rms) if self.is_eager() => {
                self.many(elements(template, op, 0) * EAGER_NORM[way(op)], 6)
            }
            RowWise::Norm(_) | RowWise::BatchNorm => self.roof(cost, self.share(NORM)),
            // The whole loss is charged at once; only exchanges remain here.
            RowWise::LossPart if self.device.is_accelerator() => Work::default(),
            RowWise::Loss if self.device.is_accelerator() => {
                let loss = &self.profile.loss;
                let bytes = [loss.forward, loss.backward][way(op)];
                self.many(elements(template, op, 1) * bytes * self.size() / 2.0, 4)
            }
            RowWise::LossPart | RowWise::Loss | RowWise::Short => self.roof(cost, 1.0),
        }
    }

    /// Cost of an element-wise operator in a kernel of its own.
    pub(super) fn element_wise(
        &self,
        template: &Template,
        op: &LocalOp,
        of: ElementWise,
        cost: &Cost,
    ) -> Work {
        match of {
            ElementWise::Bias if self.profile.fused_bias => Work::default(),
            ElementWise::Rotation if self.is_eager() => {
                self.many(elements(template, op, 0) * EAGER_ROPE[way(op)], 8)
            }
            ElementWise::Gated if self.is_eager() => {
                // In the backward pass, the first input is the gradient of the product.
                let way = way(op);
                self.many(elements(template, op, way) * EAGER_GATED[way], 2)
            }
            ElementWise::Function | ElementWise::Gated => self.roof(cost, self.share(HEAVY)),
            ElementWise::Position if self.profile.dropout => {
                let mut work = self.roof(cost, 1.0);
                work.add(self.dropout(elements(template, op, 0)));
                work
            }
            ElementWise::Bias
            | ElementWise::Position
            | ElementWise::Sum
            | ElementWise::Rotation => self.roof(cost, 1.0),
        }
    }

    /// Cost of moving rows or columns.
    pub(super) fn permute(
        &self,
        template: &Template,
        op: &LocalOp,
        of: Permute,
        cost: &Cost,
    ) -> Work {
        let (bytes, kernels) = match of {
            Permute::ToExperts if !self.profile.fused_permutation => (EAGER_DISPATCH, 3),
            Permute::FromExperts if !self.profile.fused_permutation => (EAGER_COMBINE, 6),
            Permute::ToExperts | Permute::FromExperts | Permute::Copy => {
                return self.roof(cost, 1.0);
            }
        };
        self.many(routed(template, op) * bytes[way(op)] * self.size() / 2.0, kernels)
    }

    fn is_eager(&self) -> bool {
        self.profile.kernels == Kernels::Eager
    }

    /// Cost of operators fused into one kernel: intermediates stay in registers.
    pub(super) fn fused(&self, template: &Template, ops: &[LocalOp]) -> Work {
        let bias = CostClass::ElementWise(ElementWise::Bias);
        let counted = |op: &&LocalOp| !(self.profile.fused_bias && op.kind.cost_class() == bias);
        let all: f64 = ops.iter().map(|op| template.cost(op).bytes.as_f64()).sum();
        let passed = ops.windows(2).flat_map(|pair| {
            pair[0].outputs.iter().filter(|output| pair[1].inputs.contains(output))
        });
        let saved: f64 = passed
            .map(|&i| {
                let operand = &template.operands[usize::from(i)];
                2.0 * operand.elements() as f64 * operand.dtype.size() as f64
            })
            .sum();
        let heavy = ops.iter().any(|op| {
            let class = op.kind.cost_class();
            matches!(class, CostClass::ElementWise(ElementWise::Function | ElementWise::Gated))
        });
        if ops.iter().filter(counted).count() == 0 {
            return Work::default();
        }
        let mut work =
            self.streaming((all - saved).max(0.0) / if heavy { self.share(HEAVY) } else { 1.0 });
        // Only the output at the end of a chain is materialized as a tensor.
        if let Some(last) = ops.last() {
            work.add(self.fill(template, last));
        }
        work
    }

    /// Cost of dropout on `elements` elements: values read and written, plus one byte of mask each.
    pub(super) fn dropout(&self, elements: f64) -> Work {
        self.streaming(elements * (2.0 * self.size() + 1.0) / HEAVY)
    }

    /// Cost of dropout on a branch's contribution to the residual stream.
    pub(super) fn residual_dropout(&self, part: OpPass, elements: f64) -> Work {
        match (part, self.profile.kernels) {
            // Fused with bias and addition, only the mask is additional.
            (OpPass::Forward, Kernels::Fused) => {
                Work { device: self.bytes(elements / HEAVY), kernels: 0 }
            }
            (OpPass::Forward, Kernels::Eager) | (OpPass::BackwardInput, _) => {
                self.dropout(elements)
            }
            (OpPass::BackwardWeight, _) => Work::default(),
        }
    }

    /// Returns `share` on accelerators and 1 on CPUs, which do not lose bandwidth this way.
    fn share(&self, share: f64) -> f64 {
        if self.device.is_accelerator() { share } else { 1.0 }
    }

    fn size(&self) -> f64 {
        self.activation().size() as f64
    }

    /// Cost of one kernel at a fraction of the memory bandwidth.
    pub(super) fn roof(&self, cost: &Cost, share: f64) -> Work {
        let vector = cost.vector.0 / self.device.sustained(DType::F32).0;
        self.kernel(vector.max(self.bytes(cost.bytes.as_f64()) / share))
    }

    /// Cost of `kernels` kernels that move `bytes` bytes in total.
    fn many(&self, bytes: f64, kernels: u32) -> Work {
        let launches = self.device.launch_overhead.0 * f64::from(kernels);
        Work { device: self.bytes(bytes) + launches, kernels }
    }
}

/// Index of a pass in pairs of constants: 0 forward, 1 backward.
fn way(op: &LocalOp) -> usize {
    usize::from(op.pass != OpPass::Forward)
}

/// Number of elements of an input.
fn elements(template: &Template, op: &LocalOp, index: usize) -> f64 {
    let operand = op.inputs.get(index).map(|&i| &template.operands[usize::from(i)]);
    operand.map_or(0.0, |operand| operand.elements() as f64)
}

/// Number of elements routed to experts, counted once per expert of a token: the largest operand of
/// such an operator.
fn routed(template: &Template, op: &LocalOp) -> f64 {
    let all = op.inputs.iter().chain(&op.outputs);
    all.map(|&i| template.operands[usize::from(i)].elements()).max().unwrap_or(0) as f64
}

/// Returns true if an operator is element-wise, so that it can be fused with another.
pub(super) fn elementwise(op: &LocalOp) -> bool {
    let alone = matches!(op.kind.cost_class(), CostClass::ElementWise(_));
    alone && op.pass != OpPass::BackwardWeight
}
