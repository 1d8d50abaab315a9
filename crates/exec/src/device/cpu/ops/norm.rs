//! Norms of rows.

use crate::device::cpu::bind::{Bound, plain};
use crate::device::cpu::tiles::{elements, over_rows};
use paceline_kernels::pool::strips;
use paceline_kernels::{Element, norm};
use paceline_plan::graph::{NormKind, OpPass};

pub(in crate::device::cpu) fn bind<T: Element, G: Element>(
    kind: NormKind,
    eps: f32,
    pass: OpPass,
) -> Option<Bound> {
    Some(match (pass, kind) {
        (OpPass::Forward, NormKind::Layer) => plain(move |cpu, on, _| {
            let (shape, x, gain, bias) = (on.rows(0), on.input::<T>(0), on.param(0), on.param(1));
            let outputs = (strips(on.output(0), shape.width), strips(on.output(1), 2));
            over_rows(&cpu.pool, shape, outputs, |part, at, (y, stats)| {
                let x = &x[elements(shape, &at)];
                norm::layer_norm_forward(part, eps, x, gain, bias, y, stats);
            });
        }),
        (OpPass::Forward, NormKind::Rms) => plain(move |cpu, on, _| {
            let (shape, x, gain) = (on.rows(0), on.input::<T>(0), on.param(0));
            let outputs = (strips(on.output(0), shape.width), strips(on.output(1), 1));
            over_rows(&cpu.pool, shape, outputs, |part, at, (y, stats)| {
                norm::rms_norm_forward(part, eps, &x[elements(shape, &at)], gain, y, stats);
            });
        }),
        (OpPass::BackwardInput, _) => plain(move |cpu, on, _| {
            let (shape, dy, x) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
            let (gain, stats) = (on.param::<T>(0), on.input::<f32>(2));
            over_rows(&cpu.pool, shape, strips(on.output(0), shape.width), |part, at, dx| {
                let (dy, x) = (&dy[elements(shape, &at)], &x[elements(shape, &at)]);
                match kind {
                    NormKind::Layer => {
                        let stats = &stats[2 * at.start..2 * at.end];
                        norm::layer_norm_input_gradient(part, dy, x, gain, stats, dx);
                    }
                    NormKind::Rms => {
                        norm::rms_norm_input_gradient(part, dy, x, gain, &stats[at], dx);
                    }
                }
            });
        }),
        (OpPass::BackwardWeight, NormKind::Layer) => plain(|cpu, on, mode| {
            let (shape, dy, x, stats) = (on.rows(0), on.input::<T>(0), on.input(1), on.input(2));
            let outputs = (on.gradient::<G>(0), on.gradient(1));
            norm::layer_norm_weight_gradient(&cpu.pool, shape, dy, x, stats, outputs, mode);
        }),
        (OpPass::BackwardWeight, NormKind::Rms) => plain(|cpu, on, mode| {
            let (shape, dy, x, stats) = (on.rows(0), on.input::<T>(0), on.input(1), on.input(2));
            let dgain = on.gradient::<G>(0);
            norm::rms_norm_weight_gradient(&cpu.pool, shape, dy, x, stats, dgain, mode);
        }),
    })
}
