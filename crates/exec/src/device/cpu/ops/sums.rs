//! Sums of squares for the gradient norm, and totals.

use crate::device::cpu::bind::{Bound, forward_only, plain};
use crate::device::cpu::step;
use paceline_kernels::Element;
use paceline_plan::graph::OpPass;

pub(in crate::device::cpu) fn block_squares<G: Element>(
    parts: u32,
    experts: bool,
    pass: OpPass,
) -> Option<Bound> {
    let forward = plain(move |cpu, on, _| {
        let part = cpu.place.part_of(parts, experts);
        step::block_squares::<G>(&cpu.pool, part, on.input(0), on.output(0));
    });
    forward_only(pass, forward)
}

pub(in crate::device::cpu) fn tensor_squares(pass: OpPass) -> Option<Bound> {
    let forward = plain(|cpu, on, _| {
        step::tensor_squares(cpu.place, on.program, on.input(0), on.output(0));
    });
    forward_only(pass, forward)
}

pub(in crate::device::cpu) fn norm(pass: OpPass) -> Option<Bound> {
    forward_only(pass, plain(|_, on, _| on.output::<f32>(0)[0] = step::norm(on.input(0))))
}

pub(in crate::device::cpu) fn total(pass: OpPass) -> Option<Bound> {
    let forward = plain(|_, on, _| {
        let numbers: &[f32] = if on.inputs() > 0 { on.input(0) } else { &[] };
        on.output::<f32>(0)[0] = numbers.iter().sum();
    });
    forward_only(pass, forward)
}
