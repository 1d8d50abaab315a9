//! Expert operators: routing, dispatch of tokens, products and combination.

use crate::device::OpShape;
use crate::device::cpu::ops::experts::{EXCESS, routing_of};
use crate::device::cuda::bind::{Bound, kernel};
use crate::device::cuda::{Cuda, Operands};
use crate::error::Fault;
use paceline_kernels::arena::Span;
use paceline_kernels::cuda::{Device as Gpu, DispatchAt, DispatchShape, Pass};
use paceline_kernels::experts::dispatch::Full;
use paceline_kernels::experts::product;
use paceline_plan::graph::{OpPass, Routing};

pub(in crate::device::cuda) fn route(routing: Routing, pass: OpPass) -> Bound {
    if routing.parts > 1 || !Gpu::has_routing(routing.experts, routing.groups) {
        return None;
    }
    let routing = routing_of(routing);
    match pass {
        OpPass::Forward => kernel(move |cuda, on, mode| {
            let bias = on.has_param(0).then(|| on.param(0));
            let dropped = (on.outputs() > 2).then(|| (on.output(2), mode));
            let (of, at) = ((routing, on.rows(0).rows), (on.input(0), bias));
            let to = (on.output(0), on.output(1), dropped);
            Ok(cuda.gpu.route(on.on, cuda.element, of, at, to)?)
        }),
        OpPass::BackwardInput => kernel(move |cuda, on, _| {
            let bias = on.has_param(0).then(|| on.param(0));
            let of = (routing, on.rows(1).rows, cuda.pass.loss_scale);
            let (at, to) = ((on.input(1), bias), (on.input(0), on.output(0)));
            Ok(cuda.gpu.route_gradient(on.on, cuda.element, of, at, to)?)
        }),
        OpPass::BackwardWeight => kernel(move |cuda, on, mode| {
            let equal = routing.topk as f32 * cuda.tokens / routing.experts as f32;
            let factor = EXCESS * cuda.pass.loss_scale / equal;
            Ok(cuda.gpu.router_bias(on.on, (on.input(0), on.param(0)), factor, mode)?)
        }),
    }
}

pub(in crate::device::cuda) fn dispatch(
    (experts, topk, regions): (u64, u64, u64),
    pass: OpPass,
    shape: OpShape<'_>,
) -> Bound {
    let width = shape.rows(0).width;
    if !width.is_multiple_of(8) || !Gpu::has_routing(experts, 1) {
        return None;
    }
    let [experts, topk, regions] = [experts, topk, regions].map(|n| n as usize);
    match pass {
        OpPass::Forward => kernel(move |cuda, on, _| {
            let slots = on.output_rows(0).rows;
            let shape = DispatchShape { tokens: on.rows(0), topk, experts, regions, slots };
            let at = DispatchAt {
                x: on.input(0),
                choices: on.input(1),
                rows: on.output(0),
                slots: on.output(1),
                counts: on.output(2),
            };
            cuda.gpu.dispatch(on.on, cuda.element, shape, &at)?;
            let counts = cuda.count(on, at.counts)?;
            let (each, rows) = (experts / regions, slots / regions);
            let choices = on.rows(0).rows * topk;
            for (region, counts) in counts.chunks(each.max(1)).enumerate() {
                let tokens = counts.iter().map(|&count| count as usize).sum();
                if tokens > rows {
                    return Err(Fault::Full(Full { region, tokens, rows, choices, regions }));
                }
            }
            Ok(())
        }),
        OpPass::BackwardInput => kernel(move |cuda, on, _| {
            let at = (on.input(0), on.input(1), None, on.output(0));
            Ok(cuda.gpu.combine(on.on, cuda.element, (on.output_rows(0), topk), at)?)
        }),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cuda) fn combine(topk: u64, pass: OpPass, shape: OpShape<'_>) -> Bound {
    if !shape.rows(0).width.is_multiple_of(8) {
        return None;
    }
    let topk = topk as usize;
    match pass {
        OpPass::Forward => kernel(move |cuda, on, _| {
            let at = (on.input(0), on.input(1), Some(on.input(2)), on.output(0));
            Ok(cuda.gpu.combine(on.on, cuda.element, (on.output_rows(0), topk), at)?)
        }),
        OpPass::BackwardInput => kernel(move |cuda, on, _| {
            let of = (on.rows(0), topk, on.rows(1).rows);
            let at = (on.input(0), on.input(1), on.input(2), on.input(3));
            let to = (on.output(0), on.output(1));
            Ok(cuda.gpu.combine_gradient(on.on, cuda.element, of, at, to)?)
        }),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cuda) fn linear(experts: u64, regions: u64, pass: OpPass) -> Bound {
    let [experts, regions] = [experts, regions].map(|n| n as usize);
    // The weights are `[experts · outputs, inputs]`.
    let of = move |on: &OpShape<'_>| {
        let [outputs, inputs] = on.param_dims(0).map(|n| n as usize);
        let (region_rows, outputs) = (on.rows(0).rows / regions.max(1), outputs / experts.max(1));
        product::Shape { experts, regions, region_rows, inputs, outputs }
    };
    kernel(move |cuda, on, mode| {
        let (pass, counts, at) = match pass {
            OpPass::Forward => {
                (Pass::Forward, on.input(1), (on.input(0), on.param(0), on.output(0)))
            }
            OpPass::BackwardInput => {
                (Pass::InputGradient, on.input(1), (on.input(0), on.param(0), on.output(0)))
            }
            OpPass::BackwardWeight => {
                (Pass::WeightGradient, on.input(2), (on.input(1), on.input(0), on.param(0)))
            }
        };
        let counts = match cuda.counted.get(&counts.offset) {
            Some(known) => known.clone(),
            None => cuda.count(on, counts)?,
        };
        let of = (pass, of(on), mode);
        Ok(cuda.gpu.expert_linear(on.on, cuda.element, of, &counts, at)?)
    })
}

impl Cuda {
    /// Reads the tokens of every expert, which sizes the products that follow.
    fn count(&mut self, on: &Operands<'_>, counts: Span) -> Result<Vec<u32>, Fault> {
        let mut bytes = vec![0u8; counts.len as usize];
        self.gpu.download(on.on, counts, &mut bytes)?;
        let words = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
        let words: Vec<u32> = words.collect();
        self.counted.insert(counts.offset, words.clone());
        Ok(words)
    }
}
