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
        (OpPass::Forward, NormKind::Layer | NormKind::LayerGain) => plain(move |cpu, on, _| {
            let (shape, x, gain) = (on.rows(0), on.input::<T>(0), on.param(0));
            let bias: &[T] = if on.has_param(1) { on.param(1) } else { &[] };
            let outputs = (strips(on.output(0), shape.width), strips(on.output(1), 2));
            over_rows(&cpu.pool, shape, outputs, |part, at, (y, stats)| {
                let x = &x[elements(shape, &at)];
                norm::layer_norm_forward(part, eps, x, gain, bias, y, stats);
            });
        }),
        (OpPass::Forward, NormKind::Rms | NormKind::RmsUnit) => plain(move |cpu, on, _| {
            let (shape, x, gain) = (on.rows(0), on.input::<T>(0), on.param(0));
            let outputs = (strips(on.output(0), shape.width), strips(on.output(1), 1));
            over_rows(&cpu.pool, shape, outputs, |part, at, (y, stats)| {
                let x = &x[elements(shape, &at)];
                norm::rms_norm_forward_from(part, eps, least(kind), x, gain, y, stats);
            });
        }),
        (OpPass::BackwardInput, _) => plain(move |cpu, on, _| {
            let (shape, dy, x) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
            let (gain, stats) = (on.param::<T>(0), on.input::<f32>(2));
            over_rows(&cpu.pool, shape, strips(on.output(0), shape.width), |part, at, dx| {
                let (dy, x) = (&dy[elements(shape, &at)], &x[elements(shape, &at)]);
                match kind {
                    NormKind::Layer | NormKind::LayerGain => {
                        let stats = &stats[2 * at.start..2 * at.end];
                        norm::layer_norm_input_gradient(part, dy, x, gain, stats, dx);
                    }
                    NormKind::Rms | NormKind::RmsUnit => {
                        let (least, stats) = (least(kind), &stats[at]);
                        norm::rms_norm_input_gradient_from(part, least, dy, x, gain, stats, dx);
                    }
                }
            });
        }),
        (OpPass::BackwardWeight, NormKind::Layer) => plain(|cpu, on, mode| {
            let (shape, dy, x, stats) = (on.rows(0), on.input::<T>(0), on.input(1), on.input(2));
            let outputs = (on.gradient::<G>(0), on.gradient(1));
            norm::layer_norm_weight_gradient(&cpu.pool, shape, dy, x, stats, outputs, mode);
        }),
        (OpPass::BackwardWeight, NormKind::LayerGain) => plain(|cpu, on, mode| {
            let (shape, dy, x, stats) = (on.rows(0), on.input::<T>(0), on.input(1), on.input(2));
            let dgain = on.gradient::<G>(0);
            norm::layer_norm_gain_gradient(&cpu.pool, shape, dy, x, stats, dgain, mode);
        }),
        (OpPass::BackwardWeight, NormKind::Rms | NormKind::RmsUnit) => plain(|cpu, on, mode| {
            let (shape, dy, x, stats) = (on.rows(0), on.input::<T>(0), on.input(1), on.input(2));
            let dgain = on.gradient::<G>(0);
            norm::rms_norm_weight_gradient(&cpu.pool, shape, dy, x, stats, dgain, mode);
        }),
    })
}

/// Gain to which a norm's parameters are added.
pub(crate) const fn least(kind: NormKind) -> f32 {
    match kind {
        NormKind::RmsUnit => 1.0,
        NormKind::Rms | NormKind::Layer | NormKind::LayerGain => 0.0,
    }
}
