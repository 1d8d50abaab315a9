//! Columns of tensors beside each other, and taken apart.

use crate::device::cpu::bind::{Bound, plain};
use crate::device::cpu::tiles::{elements, over_rows};
use paceline_kernels::pool::strips;
use paceline_kernels::{Element, Rows, concat as kernels};
use paceline_plan::graph::OpPass;

pub(in crate::device::cpu) fn concat<T: Element>(parts: u64, pass: OpPass) -> Option<Bound> {
    let parts = parts as usize;
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let y = on.output_rows(0);
            let inputs: Vec<(&[T], Rows)> =
                (0..parts).map(|at| (on.input::<T>(at), on.rows(at))).collect();
            over_rows(&cpu.pool, y, strips(on.output(0), y.width), |part, at, y| {
                let of: Vec<(&[T], usize)> = inputs
                    .iter()
                    .map(|&(x, shape)| (&x[elements(shape, &at)], shape.width))
                    .collect();
                kernels::concat(part.rows, &of, y);
            });
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (shape, dy) = (on.rows(0), on.input::<T>(0));
            let mut first = 0;
            for at in 0..parts {
                let width = on.output_rows(at).width;
                over_rows(&cpu.pool, shape, strips(on.output(at), width), |part, at, dx| {
                    kernels::slice(part, first, width, &dy[elements(shape, &at)], dx);
                });
                first += width;
            }
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn slice<T: Element>(
    first: u64,
    width: u64,
    pass: OpPass,
) -> Option<Bound> {
    let (first, width) = (first as usize, width as usize);
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let (shape, x) = (on.rows(0), on.input::<T>(0));
            over_rows(&cpu.pool, shape, strips(on.output(0), width), |part, at, y| {
                kernels::slice(part, first, width, &x[elements(shape, &at)], y);
            });
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (shape, dx, dy) = (on.rows(0), on.output_rows(0), on.input::<T>(0));
            over_rows(&cpu.pool, dx, strips(on.output(0), dx.width), |part, at, dx| {
                kernels::slice_gradient(part, first, width, &dy[elements(shape, &at)], dx);
            });
        })),
        OpPass::BackwardWeight => None,
    }
}
