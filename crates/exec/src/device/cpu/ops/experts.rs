//! Expert operators: routing, dispatch of tokens, and GEMMs.

use crate::device::OpShape;
use crate::device::cpu::bind::{Bound, fallible, plain, with_workspace};
use crate::error::Fault;
use crate::rank_coords::RankCoords;
use paceline_kernels::experts::bias as biased;
use paceline_kernels::experts::dispatch::{self as tokens, Full};
use paceline_kernels::experts::product;
use paceline_kernels::experts::route::{self as router, Room};
use paceline_kernels::{Element, Rows, Write};
use paceline_plan::graph::{OpKind, OpPass, Routing};
use std::ops::Range;

/// Bias gradient of an expert that is chosen twice as often as the mean. Adam's steps do not depend
/// on it, and it is too small to matter in the gradient norm.
pub(crate) const EXCESS: f32 = 1e-3;

/// Buffers for routing.
#[derive(Debug, Default)]
pub(in crate::device::cpu) struct Routed {
    whole: Vec<u32>,
    floats: Vec<f32>,
    starts: Vec<u32>,
    /// True if an iteration whose experts overflow is finished.
    finishes_overflow: bool,
    /// Largest overflow of this iteration.
    full: Option<Full>,
}

impl Routed {
    /// Allocates buffers for the largest of the operators.
    pub(in crate::device::cpu) fn for_all(
        kinds: impl Iterator<Item = OpKind>,
        finishes_overflow: bool,
    ) -> Self {
        let (mut whole, mut floats, mut starts) = (0, 0, 0);
        for kind in kinds {
            if let OpKind::Route(routing) = kind {
                let room = routing_of(routing).room();
                (whole, floats) = (room.0.max(whole), room.1.max(floats));
            } else if let OpKind::Dispatch { experts, .. } = kind {
                starts = starts.max(experts as usize);
            }
        }
        Self {
            whole: vec![0; whole],
            floats: vec![0.0; floats],
            starts: vec![0; starts],
            finishes_overflow,
            full: None,
        }
    }

    pub(in crate::device::cpu) fn take_overflow(&mut self) -> Option<Full> {
        self.full.take()
    }

    /// Notes an overflow, or fails with it.
    fn overflows(&mut self, full: Full) -> Result<(), Fault> {
        if !self.finishes_overflow {
            return Err(Fault::Full(full));
        }
        let larger = self.full.is_none_or(|known| known.factor() < full.factor());
        self.full = if larger { Some(full) } else { self.full };
        Ok(())
    }

    fn room(&mut self) -> Room<'_> {
        Room { whole: &mut self.whole, floats: &mut self.floats }
    }
}

/// Parameters of the routing kernels.
pub(crate) fn routing_of(routing: Routing) -> router::Routing {
    let Routing { experts, topk, sigmoid, scale, seq, capacity, balance, .. } = routing;
    let [groups, kept_groups, parts] =
        [routing.groups, routing.kept_groups, routing.parts].map(|n| n as usize);
    router::Routing {
        experts: experts as usize,
        topk: topk as usize,
        sigmoid,
        scale: scale as f32,
        seq: seq as usize,
        capacity: capacity.map(|capacity| capacity as usize),
        balance: balance as f32,
        groups,
        kept_groups,
        parts,
        raw: routing.raw,
        best_of_group: routing.best_of_group,
    }
}

pub(in crate::device::cpu) fn route<T: Element, G: Element>(
    routing: Routing,
    pass: OpPass,
) -> Option<Bound> {
    let routing = routing_of(routing);
    Some(match pass {
        OpPass::Forward => plain(move |cpu, on, mode| {
            let own = own(cpu.place, routing, on.rows(0).rows, on.output_rows(0).rows);
            let bias = on.has_param(0).then(|| on.param::<T>(0));
            let (choices, gates) = (on.words_out(0), on.output(1));
            let (logits, room) = (on.input::<T>(0), cpu.routed.room());
            let dropped = router::forward(routing, own, logits, bias, choices, gates, room);
            if on.outputs() > 2 {
                let sum = &mut on.output::<f32>(2)[0];
                let before = if mode == Write::Overwrite { 0.0 } else { *sum };
                *sum = before + dropped as f32;
            }
        }),
        OpPass::BackwardInput => plain(move |cpu, on, _| {
            let own = own(cpu.place, routing, on.rows(1).rows, on.output_rows(0).rows);
            let bias = on.has_param(0).then(|| on.param::<T>(0));
            let (dgates, logits, room) = (on.input(0), on.input::<T>(1), cpu.routed.room());
            let (dlogits, scale) = (on.output(0), cpu.pass.loss_scale);
            router::input_gradient(routing, own, dgates, logits, bias, dlogits, scale, room);
        }),
        OpPass::BackwardWeight => plain(move |cpu, on, mode| {
            let equal = routing.topk as f32 * cpu.tokens / routing.experts as f32;
            let (factor, counts) = (EXCESS * cpu.pass.loss_scale / equal, routing.experts);
            let (choices, dbias) = (on.ids(0), on.gradient::<G>(0));
            router::bias_gradient(choices, factor, dbias, mode, &mut cpu.routed.whole[..counts]);
        }),
    })
}

pub(in crate::device::cpu) fn dispatch<T: Element>(
    experts: usize,
    topk: usize,
    regions: usize,
    pass: OpPass,
) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(fallible(move |cpu, on, _| {
            let region_rows = on.output_rows(0).rows / regions;
            let shape = tokens::Shape { tokens: on.rows(0), topk, experts, regions, region_rows };
            let (slots, counts) = (on.words_out(1), on.words_out(2));
            let starts = &mut cpu.routed.starts[..experts];
            tokens::places(shape, on.ids(1), slots, counts, starts)
                .or_else(|full| cpu.routed.overflows(full))?;
            tokens::scatter(&cpu.pool, shape, on.input::<T>(0), slots, on.output(0));
            Ok(())
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let shape = all_of(on.output_rows(0), topk, on.rows(0).rows);
            let dx = on.output::<T>(0);
            tokens::gather(&cpu.pool, shape, on.input(0), on.ids(1), dx);
            if cpu.routed.full.is_some() {
                // Tells all ranks, by the gradient norm, that this iteration does not count.
                dx[0] = T::narrow(f32::NAN);
            }
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn combine<T: Element>(topk: usize, pass: OpPass) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let shape = all_of(on.output_rows(0), topk, on.rows(0).rows);
            let (rows, gates) = (on.input::<T>(0), on.input(2));
            tokens::combine(&cpu.pool, shape, rows, on.ids(1), gates, on.output(0));
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (shape, dy) = (all_of(on.rows(0), topk, on.rows(1).rows), on.input::<T>(0));
            let (rows, slots, gates) = (on.input(1), on.ids(2), on.input(3));
            let (pool, drows, dgates) = (&cpu.pool, on.output(0), on.output(1));
            tokens::combine_gradient(pool, shape, dy, rows, slots, gates, drows, dgates);
        })),
        OpPass::BackwardWeight => None,
    }
}

/// Sums of the experts' outputs of each token.
pub(in crate::device::cpu) fn give_back<T: Element>(topk: usize, pass: OpPass) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let shape = all_of(on.output_rows(0), topk, on.rows(0).rows);
            tokens::gather(&cpu.pool, shape, on.input::<T>(0), on.ids(1), on.output(0));
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let shape = all_of(on.rows(0), topk, on.output_rows(0).rows);
            tokens::scatter(&cpu.pool, shape, on.input::<T>(0), on.ids(1), on.output(0));
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn bias<T: Element, G: Element>(
    regions: usize,
    parts: u64,
    pass: OpPass,
) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(move |_, on, _| {
            let (x, biases, share) =
                (on.input::<T>(0), (on.ids(1), on.param(0)), 1.0 / parts as f32);
            biased::forward(on.rows(0), regions, biases, share, x, on.output(0));
        })),
        OpPass::BackwardInput => None,
        OpPass::BackwardWeight => Some(plain(move |_, on, mode| {
            let (dy, counts, dbiases) = (on.input::<T>(0), on.ids(1), on.gradient::<G>(0));
            biased::weight_gradient(on.rows(0), regions, dy, counts, dbiases, mode);
        })),
    }
}

pub(in crate::device::cpu) fn linear<T: Element, G: Element>(
    experts: usize,
    regions: usize,
    pass: OpPass,
) -> Option<Bound> {
    // The weights are `[experts · outputs, inputs]`.
    let of = move |on: &OpShape<'_>| {
        let [outputs, inputs] = on.param_dims(0).map(|n| n as usize);
        let (region_rows, outputs) = (on.rows(0).rows / regions.max(1), outputs / experts.max(1));
        product::Shape { experts, regions, region_rows, inputs, outputs }
    };
    let need = move |on: &OpShape<'_>, _: usize| of(on).workspace::<T, G>();
    Some(match pass {
        OpPass::Forward => with_workspace(need, move |cpu, on, _| {
            let (pool, room) = (&cpu.pool, &mut cpu.workspace[..need(on, 0)]);
            let (x, w) = (on.input::<T>(0), on.param(0));
            product::forward(pool, of(on), x, on.ids(1), w, on.output(0), room);
        }),
        OpPass::BackwardInput => with_workspace(need, move |cpu, on, _| {
            let (pool, room) = (&cpu.pool, &mut cpu.workspace[..need(on, 0)]);
            let (dy, w) = (on.input::<T>(0), on.param(0));
            product::input_gradient(pool, of(on), dy, on.ids(1), w, on.output(0), room);
        }),
        OpPass::BackwardWeight => with_workspace(need, move |cpu, on, mode| {
            let (pool, room) = (&cpu.pool, &mut cpu.workspace[..need(on, 0)]);
            let (dy, x, counts) = (on.input::<T>(0), on.input(1), on.ids(2));
            let dw = on.gradient::<G>(0);
            product::weight_gradient(pool, of(on), dy, x, counts, dw, mode, room);
        }),
    })
}

/// Rows that this rank has, of all rows of a microbatch's sequences: in its context-parallel part,
/// those of its tensor-parallel part.
fn own(place: RankCoords, routing: router::Routing, all: usize, rows: usize) -> Range<usize> {
    let of_part = all / routing.parts.max(1);
    let part = if routing.parts > 1 { place.context.index as usize * of_part } else { 0 };
    let first = part + if rows < of_part { place.tensor.index as usize * rows } else { 0 };
    first..first + rows
}

/// Shape for access to tokens by slot, regardless of expert.
fn all_of(tokens: Rows, topk: usize, rows: usize) -> tokens::Shape {
    tokens::Shape { tokens, topk, experts: 1, regions: 1, region_rows: rows }
}
