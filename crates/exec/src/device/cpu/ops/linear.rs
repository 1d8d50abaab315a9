//! Linear operators and biases.

use crate::device::cpu::bind::{Bound, plain, with_workspace};
use crate::device::cpu::tiles::{elements, over_rows};
use paceline_kernels::pool::strips;
use paceline_kernels::{Element, bias as kernels, mixed_precision};
use paceline_plan::graph::OpPass;

pub(in crate::device::cpu) fn bind<T: Element, G: Element>(pass: OpPass) -> Option<Bound> {
    let need = mixed_precision::linear_workspace::<T, G>;
    Some(match pass {
        OpPass::Forward => with_workspace(
            move |shape, _| need(shape.linear()),
            move |cpu, on, _| {
                let (shape, x, w) = (on.linear(), on.input::<T>(0), on.param(0));
                let room = &mut cpu.workspace[..need(shape)];
                mixed_precision::linear_forward(&cpu.pool, shape, x, w, on.output(0), room);
            },
        ),
        OpPass::BackwardInput => with_workspace(
            move |shape, _| need(shape.linear()),
            move |cpu, on, _| {
                let (shape, dy, w) = (on.linear(), on.input::<T>(0), on.param(0));
                let room = &mut cpu.workspace[..need(shape)];
                let dx = on.output(0);
                mixed_precision::linear_input_gradient(&cpu.pool, shape, dy, w, dx, room);
            },
        ),
        OpPass::BackwardWeight => with_workspace(
            move |shape, _| need(shape.linear()),
            move |cpu, on, mode| {
                let (shape, dy, x) = (on.linear(), on.input::<T>(0), on.input(1));
                let room = &mut cpu.workspace[..need(shape)];
                let (pool, dw) = (&cpu.pool, on.gradient::<G>(0));
                mixed_precision::linear_weight_gradient(pool, shape, dy, x, dw, mode, room);
            },
        ),
    })
}

pub(in crate::device::cpu) fn bias<T: Element, G: Element>(pass: OpPass) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(|cpu, on, _| {
            let (shape, x, b) = (on.rows(0), on.input::<T>(0), on.param::<T>(0));
            over_rows(&cpu.pool, shape, strips(on.output(0), shape.width), |part, at, y| {
                kernels::forward(part, &x[elements(shape, &at)], b, y);
            });
        })),
        OpPass::BackwardInput => None,
        OpPass::BackwardWeight => Some(plain(|cpu, on, mode| {
            let (shape, dy, db) = (on.rows(0), on.input::<T>(0), on.gradient::<G>(0));
            kernels::weight_gradient(&cpu.pool, shape, dy, db, mode);
        })),
    }
}
