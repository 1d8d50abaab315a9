//! Scaling and bounding of rows and elements.

use crate::device::cpu::bind::{Bound, plain};
use crate::device::cpu::tiles::{elements, over_elements, over_rows};
use paceline_kernels::pool::strips;
use paceline_kernels::{Element, scaling as kernels};
use paceline_plan::graph::{Heads, OpPass};

pub(in crate::device::cpu) fn scale<T: Element>(factor: f32, pass: OpPass) -> Option<Bound> {
    match pass {
        // A multiple's gradient is the same multiple.
        OpPass::Forward | OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let x = on.input::<T>(0);
            over_elements(&cpu.pool, on.output(0), |at, y| kernels::scale(factor, &x[at], y));
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn softcap<T: Element>(cap: f32, pass: OpPass) -> Option<Bound> {
    bounded(cap, kernels::softcap::<T>, kernels::softcap_input_gradient, pass)
}

pub(in crate::device::cpu) fn clamp<T: Element>(limit: f32, pass: OpPass) -> Option<Bound> {
    bounded(limit, kernels::clamp::<T>, kernels::clamp_input_gradient, pass)
}

fn bounded<T: Element>(
    bound: f32,
    forward: fn(f32, &[T], &mut [T]),
    gradient: fn(f32, &[T], &[T], &mut [T]),
    pass: OpPass,
) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let x = on.input::<T>(0);
            over_elements(&cpu.pool, on.output(0), |at, y| forward(bound, &x[at], y));
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (dy, x) = (on.input::<T>(0), on.input::<T>(1));
            over_elements(&cpu.pool, on.output(0), |at, dx| {
                gradient(bound, &dy[at.clone()], &x[at], dx);
            });
        })),
        OpPass::BackwardWeight => None,
    }
}

/// Rows times a number each, of type `S`.
pub(in crate::device::cpu) fn rows<T: Element, S: Element>(
    logits: bool,
    pass: OpPass,
) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let (shape, x, by) = (on.rows(0), on.input::<T>(0), on.input::<S>(1));
            over_rows(&cpu.pool, shape, strips(on.output(0), shape.width), |part, at, y| {
                kernels::rows(part, logits, &x[elements(shape, &at)], &by[at], y);
            });
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (shape, dy, x) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
            let by = on.input::<S>(2);
            let outputs = (strips(on.output(0), shape.width), strips(on.output::<S>(1), 1));
            over_rows(&cpu.pool, shape, outputs, |part, at, (dx, dby)| {
                let of = elements(shape, &at);
                kernels::rows_gradient(part, logits, &dy[of.clone()], &x[of], &by[at], dx, dby);
            });
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn temperature<T: Element>(
    heads: Heads,
    growth: (f64, f64),
    pass: OpPass,
) -> Option<Bound> {
    let queries = (heads.heads * heads.head_dim) as usize;
    match pass {
        // A multiple's gradient is the same multiple.
        OpPass::Forward | OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (rows, positions, x) = (on.rows(0), cpu.sequence(), on.input::<T>(0));
            kernels::temperature(rows, queries, growth, positions, x, on.output(0));
        })),
        OpPass::BackwardWeight => None,
    }
}
