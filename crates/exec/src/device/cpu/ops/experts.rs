//! Execution of expert operators: routing, dispatch of tokens, and GEMMs.

use crate::device::cpu::kernel::ExpertKernel;
use crate::device::cpu::operands::Operands;
use crate::device::cpu::{Compute, Write};
use crate::error::Fault;
use crate::rank_coords::RankCoords;
use paceline_kernels::experts::route::{self, Room, Routing};
use paceline_kernels::experts::{dispatch, product};
use paceline_kernels::{Element, Rows};
use paceline_plan::program::{LocalOp, Template};
use std::ops::Range;

/// Bias gradient of an expert that is chosen twice as often as the mean. Adam's steps do not depend
/// on it, and it is too small to matter in the gradient norm.
const EXCESS: f32 = 1e-3;

/// Buffers for routing.
#[derive(Debug, Default)]
pub(in crate::device::cpu) struct Routed {
    whole: Vec<u32>,
    floats: Vec<f32>,
    starts: Vec<u32>,
}

impl Routed {
    /// Allocates buffers for the largest of the kernels.
    pub(in crate::device::cpu) fn for_all(kernels: impl Iterator<Item = ExpertKernel>) -> Self {
        let (mut whole, mut floats, mut starts) = (0, 0, 0);
        for kernel in kernels {
            match kernel {
                ExpertKernel::Route(routing)
                | ExpertKernel::RouteInput(routing)
                | ExpertKernel::RouteWeight(routing) => {
                    let room = routing.room();
                    (whole, floats) = (room.0.max(whole), room.1.max(floats));
                }
                ExpertKernel::Dispatch { experts, .. } => starts = starts.max(experts),
                ExpertKernel::DispatchInput { .. }
                | ExpertKernel::Combine { .. }
                | ExpertKernel::CombineInput { .. }
                | ExpertKernel::Linear { .. }
                | ExpertKernel::LinearInput { .. }
                | ExpertKernel::LinearWeight { .. } => {}
            }
        }
        Self { whole: vec![0; whole], floats: vec![0.0; floats], starts: vec![0; starts] }
    }
}

impl Compute<'_> {
    pub(in crate::device::cpu) fn run_expert<T: Element, G: Element>(
        &mut self,
        kernel: ExpertKernel,
        on: &Operands<'_>,
        mode: Write,
    ) -> Result<(), Fault> {
        let pool = &self.pool;
        let routed = &mut self.routed;
        let room = Room { whole: &mut routed.whole, floats: &mut routed.floats };
        match kernel {
            ExpertKernel::Route(routing) => {
                let own = own(self.place, routing, on.rows(0).rows, on.output_rows(0).rows);
                let bias = on.has_param(0).then(|| on.param::<T>(0));
                let (choices, gates) = (on.output_ids(0), on.output(1));
                let logits = on.input::<T>(0);
                let dropped = route::forward(routing, own, logits, bias, choices, gates, room);
                if on.outputs() > 2 {
                    let sum = &mut on.output::<f32>(2)[0];
                    let before = if mode == Write::Overwrite { 0.0 } else { *sum };
                    *sum = before + dropped as f32;
                }
            }
            ExpertKernel::RouteInput(routing) => {
                let own = own(self.place, routing, on.rows(1).rows, on.output_rows(0).rows);
                let bias = on.has_param(0).then(|| on.param::<T>(0));
                let (dgates, logits) = (on.input(0), on.input::<T>(1));
                let (dlogits, scale) = (on.output(0), self.loss_scale);
                route::input_gradient(routing, own, dgates, logits, bias, dlogits, scale, room);
            }
            ExpertKernel::RouteWeight(routing) => {
                let tokens = self.plan.strategy.tokens() as f32;
                let equal = routing.topk as f32 * tokens / routing.experts as f32;
                let (factor, counts) = (EXCESS * self.loss_scale / equal, routing.experts);
                let (choices, dbias) = (on.ids(0), on.gradient::<G>(0));
                route::bias_gradient(choices, factor, dbias, mode, &mut room.whole[..counts]);
            }
            ExpertKernel::Dispatch { experts, topk, regions } => {
                let shape = dispatch::Shape {
                    tokens: on.rows(0),
                    topk,
                    experts,
                    regions,
                    region_rows: on.output_rows(0).rows / regions,
                };
                let (slots, counts) = (on.output_ids(1), on.output_ids(2));
                let starts = &mut routed.starts[..experts];
                dispatch::places(shape, on.ids(1), slots, counts, starts).map_err(Fault::Full)?;
                dispatch::scatter(pool, shape, on.input::<T>(0), slots, on.output(0));
            }
            ExpertKernel::DispatchInput { topk } => {
                let shape = all_of(on.output_rows(0), topk, on.rows(0).rows);
                dispatch::gather(pool, shape, on.input::<T>(0), on.ids(1), on.output(0));
            }
            ExpertKernel::Combine { topk } => {
                let shape = all_of(on.output_rows(0), topk, on.rows(0).rows);
                let (rows, gates) = (on.input::<T>(0), on.input(2));
                dispatch::combine(pool, shape, rows, on.ids(1), gates, on.output(0));
            }
            ExpertKernel::CombineInput { topk } => {
                let shape = all_of(on.rows(0), topk, on.rows(1).rows);
                let (dy, rows, slots, gates) =
                    (on.input::<T>(0), on.input(1), on.ids(2), on.input(3));
                let (drows, dgates) = (on.output(0), on.output(1));
                dispatch::combine_gradient(pool, shape, dy, rows, slots, gates, drows, dgates);
            }
            ExpertKernel::Linear { experts, regions } => {
                let shape = on.experts(experts, regions);
                let workspace = &mut self.workspace[..shape.workspace::<T, G>()];
                let (x, w) = (on.input::<T>(0), on.param(0));
                product::forward(pool, shape, x, on.ids(1), w, on.output(0), workspace);
            }
            ExpertKernel::LinearInput { experts, regions } => {
                let shape = on.experts(experts, regions);
                let workspace = &mut self.workspace[..shape.workspace::<T, G>()];
                let (dy, w) = (on.input::<T>(0), on.param(0));
                product::input_gradient(pool, shape, dy, on.ids(1), w, on.output(0), workspace);
            }
            ExpertKernel::LinearWeight { experts, regions } => {
                let shape = on.experts(experts, regions);
                let workspace = &mut self.workspace[..shape.workspace::<T, G>()];
                let (dy, x, counts) = (on.input::<T>(0), on.input(1), on.ids(2));
                let dw = on.gradient::<G>(0);
                product::weight_gradient(pool, shape, dy, x, counts, dw, mode, workspace);
            }
        }
        Ok(())
    }
}

/// Rows that this rank has, of all rows of a microbatch's sequences: in its context-parallel part,
/// those of its tensor-parallel part.
fn own(place: RankCoords, routing: Routing, all: usize, rows: usize) -> Range<usize> {
    let of_part = all / routing.parts.max(1);
    let part = if routing.parts > 1 { place.context.index as usize * of_part } else { 0 };
    let first = part + if rows < of_part { place.tensor.index as usize * rows } else { 0 };
    first..first + rows
}

/// Workspace, in elements, that an expert's GEMM needs.
pub(in crate::device::cpu) fn workspace<T: Element, G: Element>(
    template: &Template,
    op: &LocalOp,
    kernel: ExpertKernel,
) -> usize {
    match kernel {
        ExpertKernel::Linear { experts, regions }
        | ExpertKernel::LinearInput { experts, regions }
        | ExpertKernel::LinearWeight { experts, regions } => {
            expert_shape(template, op, experts, regions).workspace::<T, G>()
        }
        ExpertKernel::Route(_)
        | ExpertKernel::RouteInput(_)
        | ExpertKernel::RouteWeight(_)
        | ExpertKernel::Dispatch { .. }
        | ExpertKernel::DispatchInput { .. }
        | ExpertKernel::Combine { .. }
        | ExpertKernel::CombineInput { .. } => 0,
    }
}

/// Shape of the experts' GEMMs, whose weights are `[experts · outputs, inputs]`.
pub(in crate::device::cpu) fn expert_shape(
    template: &Template,
    op: &LocalOp,
    experts: usize,
    regions: usize,
) -> product::Shape {
    let dims = |operand: u16| template.operands[usize::from(operand)].dims;
    let ([rows, _], [outputs, inputs]) = (dims(op.inputs[0]), dims(op.params[0]));
    product::Shape {
        experts,
        regions,
        region_rows: rows as usize / regions.max(1),
        inputs: inputs as usize,
        outputs: outputs as usize / experts.max(1),
    }
}

/// Shape for access to tokens by slot, regardless of expert.
fn all_of(tokens: Rows, topk: usize, rows: usize) -> dispatch::Shape {
    dispatch::Shape { tokens, topk, experts: 1, regions: 1, region_rows: rows }
}
