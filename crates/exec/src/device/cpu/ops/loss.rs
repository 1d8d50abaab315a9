//! Losses.

use crate::device::cpu::Cpu;
use crate::device::cpu::bind::{Bound, forward_only, plain, with_workspace};
use crate::device::cpu::operands::Operands;
use crate::device::cpu::tiles::{elements, over_rows};
use paceline_kernels::pool::strips;
use paceline_kernels::{Element, Write, loss};
use paceline_plan::graph::OpPass;

pub(in crate::device::cpu) fn row_max<T: Element>(pass: OpPass) -> Option<Bound> {
    let forward = plain(|cpu, on, _| {
        let (shape, logits) = (on.rows(0), on.input::<T>(0));
        let columns = cpu.columns(shape);
        over_rows(&cpu.pool, shape, strips(on.output(0), 1), |part, at, max| {
            loss::row_max(part, columns, &logits[elements(shape, &at)], max);
        });
    });
    forward_only(pass, forward)
}

pub(in crate::device::cpu) fn softmax_stats<T: Element>(pass: OpPass) -> Option<Bound> {
    let forward = plain(|cpu, on, _| {
        let (shape, logits) = (on.rows(0), on.input::<T>(0));
        let (columns, max, targets) = (cpu.columns(shape), on.input(1), on.ids(2));
        over_rows(&cpu.pool, shape, strips(on.output(0), 2), |part, at, stats| {
            let (logits, max) = (&logits[elements(shape, &at)], &max[at.clone()]);
            loss::softmax_stats(part, columns, logits, max, &targets[at], stats);
        });
    });
    forward_only(pass, forward)
}

pub(in crate::device::cpu) fn cross_entropy<T: Element>(scale: f32, pass: OpPass) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(summed(|on, losses| loss::cross_entropy(on.input(0), losses))),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (shape, stats) = (on.rows(1), on.input::<f32>(0));
            let (columns, max, targets) = (cpu.columns(shape), on.input(2), on.ids(3));
            let scale = scale * cpu.pass.loss_scale;
            let logits = on.output::<T>(0);
            if !on.input::<T>(1).is_empty() {
                logits.copy_from_slice(on.input(1));
            }
            over_rows(&cpu.pool, shape, strips(logits, shape.width), |part, at, logits| {
                let (max, targets) = (&max[at.clone()], &targets[at.clone()]);
                let stats = &stats[2 * at.start..2 * at.end];
                loss::input_gradient_in_place(part, columns, scale, max, stats, targets, logits);
            });
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn binary<T: Element>(scale: f32, pass: OpPass) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(summed(|on, losses| {
            loss::binary_cross_entropy(on.input::<T>(0), on.ids(1), losses);
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (scale, logits) = (scale * cpu.pass.loss_scale, on.input::<T>(0));
            loss::binary_input_gradient(scale, logits, on.ids(1), on.output(0));
        })),
        OpPass::BackwardWeight => None,
    }
}

/// Kernel that adds the sum of the losses of all rows to the iteration's loss.
fn summed(each: impl Fn(&Operands<'_>, &mut [f32]) + Send + Sync + 'static) -> Bound {
    with_workspace(
        |shape, _| shape.rows(0).rows,
        move |cpu: &mut Cpu, on, mode| {
            let losses = &mut cpu.workspace[..on.rows(0).rows];
            each(on, losses);
            let (sum, total) = (loss::sum(losses), &mut on.output::<f32>(0)[0]);
            *total = if mode == Write::Overwrite { sum } else { *total + sum };
        },
    )
}
