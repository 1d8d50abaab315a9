//! Element-wise operators.

use crate::device::cpu::bind::{Bound, forward_only, plain};
use crate::device::cpu::tiles::{elements, over_elements, over_rows};
use paceline_kernels::pool::strips;
use paceline_kernels::{Element, Rows, activation, reduce};
use paceline_plan::graph::{ActivationKind, OpPass};

pub(in crate::device::cpu) fn bind<T: Element>(
    function: ActivationKind,
    pass: OpPass,
) -> Option<Bound> {
    match pass {
        OpPass::Forward => {
            let forward = match function {
                ActivationKind::Gelu => activation::gelu_tanh_forward::<T>,
                ActivationKind::Relu => activation::relu_forward::<T>,
                ActivationKind::SquaredRelu => activation::squared_relu_forward::<T>,
                ActivationKind::GeluErf => activation::gelu_erf_forward::<T>,
            };
            Some(plain(move |cpu, on, _| {
                let x = on.input(0);
                over_elements(&cpu.pool, on.output(0), |at, y| forward(&x[at], y));
            }))
        }
        OpPass::BackwardInput => {
            let gradient = match function {
                ActivationKind::Gelu => activation::gelu_tanh_input_gradient::<T>,
                ActivationKind::Relu => activation::relu_input_gradient::<T>,
                ActivationKind::SquaredRelu => activation::squared_relu_input_gradient::<T>,
                ActivationKind::GeluErf => activation::gelu_erf_input_gradient::<T>,
            };
            Some(plain(move |cpu, on, _| {
                let (dy, x) = (on.input(0), on.input(1));
                over_elements(&cpu.pool, on.output(0), |at, dx| {
                    gradient(&dy[at.clone()], &x[at], dx);
                });
            }))
        }
        OpPass::BackwardWeight => None,
    }
}

/// A gated activation, which halves the width of a row.
pub(in crate::device::cpu) fn gated<T: Element>(
    forward: fn(Rows, &[T], &mut [T]),
    input_gradient: fn(Rows, &[T], &[T], &mut [T]),
    pass: OpPass,
) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let (shape, x) = (on.output_rows(0), on.input::<T>(0));
            over_rows(&cpu.pool, shape, strips(on.output(0), shape.width), |part, at, y| {
                forward(part, &x[elements(twice(shape), &at)], y);
            });
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (shape, dy, x) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
            let both = twice(shape);
            over_rows(&cpu.pool, shape, strips(on.output(0), both.width), |part, at, dx| {
                let (dy, x) = (&dy[elements(shape, &at)], &x[elements(both, &at)]);
                input_gradient(part, dy, x, dx);
            });
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn add<T: Element>(pass: OpPass) -> Option<Bound> {
    let forward = plain(|cpu, on, _| {
        let (a, b) = (on.input::<T>(0), on.input(1));
        over_elements(&cpu.pool, on.output(0), |at, y| reduce::add3(&a[at.clone()], &b[at], y));
    });
    forward_only(pass, forward)
}

/// Shape of rows with two halves, each of the given width.
fn twice(shape: Rows) -> Rows {
    Rows { width: 2 * shape.width, ..shape }
}
