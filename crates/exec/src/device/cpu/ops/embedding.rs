//! Tables of tokens and positions.

use crate::device::cpu::bind::{Bound, plain};
use crate::device::cpu::tiles::over_rows;
use paceline_kernels::pool::strips;
use paceline_kernels::{Element, embedding};
use paceline_plan::graph::OpPass;

pub(in crate::device::cpu) fn table<T: Element, G: Element>(pass: OpPass) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(|cpu, on, _| {
            let first = cpu.first(on.param_dims(0)[0]);
            let (shape, ids, table) = (on.output_rows(0), on.ids(0), on.param::<T>(0));
            over_rows(&cpu.pool, shape, strips(on.output(0), shape.width), |part, at, y| {
                embedding::forward(part, first, &ids[at], table, y);
            });
        })),
        OpPass::BackwardInput => None,
        OpPass::BackwardWeight => Some(plain(|cpu, on, mode| {
            let first = cpu.first(on.param_dims(0)[0]);
            let (shape, ids, dtable) = (on.rows(0), on.ids(1), on.gradient::<G>(0));
            let (dy, order) = (on.input::<T>(0), &mut cpu.order[..shape.rows]);
            embedding::weight_gradient(shape, first, ids, dy, dtable, mode, order);
        })),
    }
}

pub(in crate::device::cpu) fn position<T: Element, G: Element>(pass: OpPass) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(|cpu, on, _| {
            let (shape, x, table) = (on.rows(0), on.input::<T>(0), on.param(0));
            let positions = cpu.positions(shape.rows);
            embedding::position_forward(shape, positions, x, table, on.output(0));
        })),
        OpPass::BackwardInput => None,
        OpPass::BackwardWeight => Some(plain(|cpu, on, mode| {
            let (shape, dy, dtable) = (on.rows(0), on.input::<T>(0), on.gradient::<G>(0));
            let positions = cpu.positions(shape.rows);
            embedding::position_weight_gradient(shape, positions, dy, dtable, mode);
        })),
    }
}
