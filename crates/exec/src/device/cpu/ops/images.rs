//! Operators on images; the operands give the number of images.

use crate::device::OpShape;
use crate::device::cpu::bind::{Bound, plain, with_workspace};
use paceline_kernels::batch_norm::{self as kernels, Shares};
use paceline_kernels::{Element, Rows, Window, conv as convolution, pooling};
use paceline_plan::graph::{self, OpPass};

/// Window of a kernel.
pub(crate) fn window_of(window: graph::Window) -> Window {
    Window {
        side: window.side as usize,
        channels: window.channels as usize,
        kernel: window.kernel as usize,
        stride: window.stride as usize,
        padding: window.padding as usize,
    }
}

pub(in crate::device::cpu) fn conv<T: Element, G: Element>(
    window: graph::Window,
    pass: OpPass,
) -> Option<Bound> {
    let window = window_of(window);
    let of = move |on: &OpShape<'_>| {
        let filters = on.param_dims(0)[0] as usize;
        convolution::Shape { images: on.rows(0).rows, window, filters }
    };
    let need = move |on: &OpShape<'_>, _: usize| convolution::workspace::<T, G>(of(on));
    Some(match pass {
        OpPass::Forward => with_workspace(need, move |cpu, on, _| {
            let (pool, room) = (&cpu.pool, &mut cpu.workspace[..need(on, 0)]);
            let (x, w, y) = (on.input::<T>(0), on.param(0), on.output(0));
            convolution::forward(pool, of(on), x, w, y, room);
        }),
        OpPass::BackwardInput => with_workspace(need, move |cpu, on, _| {
            let (pool, room) = (&cpu.pool, &mut cpu.workspace[..need(on, 0)]);
            let (dy, w, dx) = (on.input::<T>(0), on.param(0), on.output(0));
            convolution::input_gradient(pool, of(on), dy, w, dx, room);
        }),
        OpPass::BackwardWeight => with_workspace(need, move |cpu, on, mode| {
            let (pool, room) = (&cpu.pool, &mut cpu.workspace[..need(on, 0)]);
            let (dy, x, dw) = (on.input::<T>(0), on.input(1), on.gradient::<G>(0));
            convolution::weight_gradient(pool, of(on), dy, x, dw, mode, room);
        }),
    })
}

pub(in crate::device::cpu) fn batch_sums<T: Element>(
    channels: usize,
    pass: OpPass,
) -> Option<Bound> {
    let need = move |on: &OpShape<'_>, _: usize| kernels::workspace(pixels(on.rows(0), channels));
    match pass {
        OpPass::Forward => Some(with_workspace(need, move |cpu, on, _| {
            let (shape, room) = (pixels(on.rows(0), channels), &mut cpu.workspace[..need(on, 0)]);
            let (x, mean, sums) = (on.input::<T>(0), on.param(0), on.output(0));
            kernels::sums(&cpu.pool, shape, x, mean, sums, room);
        })),
        OpPass::BackwardInput => Some(with_workspace(need, move |cpu, on, _| {
            let (shape, room) = (pixels(on.rows(0), channels), &mut cpu.workspace[..need(on, 0)]);
            let (dy, x, statistics) = (on.input::<T>(0), on.input(1), on.input(2));
            kernels::gradient_sums(&cpu.pool, shape, dy, x, statistics, on.output(0), room);
        })),
        OpPass::BackwardWeight => None,
    }
}

/// Parameters of a batch norm besides its operands.
#[derive(Clone, Copy, Debug)]
pub(in crate::device::cpu) struct BatchNorm {
    channels: usize,
    eps: f32,
    /// Number of pixels in the sums.
    count: f32,
    /// Share of this rank in the gradients, and of the microbatch in the running averages.
    shares: Shares,
}

impl BatchNorm {
    pub(in crate::device::cpu) fn new(
        channels: u64,
        eps: f64,
        pixels: u64,
        over: u32,
        share: f64,
    ) -> Self {
        Self {
            channels: channels as usize,
            eps: eps as f32,
            count: pixels as f32 * over as f32,
            shares: Shares { gradients: 1.0 / over as f32, averages: share as f32 },
        }
    }
}

pub(in crate::device::cpu) fn batch_norm<T: Element, G: Element>(
    norm: BatchNorm,
    pass: OpPass,
) -> Option<Bound> {
    let BatchNorm { channels, eps, count, shares } = norm;
    Some(match pass {
        OpPass::Forward => plain(move |cpu, on, _| {
            let shape = pixels(on.rows(0), channels);
            let (x, sums) = (on.input::<T>(0), on.input(1));
            let params = (on.param(0), on.param(1), on.param(2));
            let (y, statistics) = (on.output(0), on.output(1));
            kernels::forward(&cpu.pool, shape, count, eps, x, sums, params, y, statistics);
        }),
        OpPass::BackwardInput => plain(move |cpu, on, _| {
            let shape = pixels(on.rows(0), channels);
            let (dy, x, gain) = (on.input::<T>(0), on.input(1), on.param(0));
            let (statistics, sums, dx) = (on.input(2), on.input(3), on.output(0));
            let pool = &cpu.pool;
            kernels::input_gradient(pool, shape, count, dy, x, gain, statistics, sums, dx);
        }),
        OpPass::BackwardWeight => plain(move |_, on, mode| {
            let gradients = [0, 1, 2, 3].map(|i| on.gradient::<G>(i));
            let (sums, statistics) = (on.input(0), on.input(1));
            kernels::weight_gradient(count, eps, shares, sums, statistics, gradients, mode);
        }),
    })
}

pub(in crate::device::cpu) fn max_pool<T: Element>(
    window: graph::Window,
    pass: OpPass,
) -> Option<Bound> {
    let window = window_of(window);
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let (images, x) = (on.rows(0).rows, on.input::<T>(0));
            pooling::max_forward(&cpu.pool, images, window, x, on.output(0));
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (images, dy, x) = (on.rows(0).rows, on.input::<T>(0), on.input(1));
            pooling::max_input_gradient(&cpu.pool, images, window, dy, x, on.output(0));
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn average_pool<T: Element>(
    channels: usize,
    pass: OpPass,
) -> Option<Bound> {
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let sizes = planes(on.rows(0), channels);
            pooling::mean_forward(&cpu.pool, sizes, on.input::<T>(0), on.output(0));
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let sizes = planes(on.output_rows(0), channels);
            pooling::mean_input_gradient(&cpu.pool, sizes, on.input::<T>(0), on.output(0));
        })),
        OpPass::BackwardWeight => None,
    }
}

/// Images as rows of pixels.
fn pixels(images: Rows, channels: usize) -> Rows {
    Rows { rows: images.rows * images.width / channels.max(1), width: channels }
}

/// Numbers of images, of pixels per image and of channels.
fn planes(images: Rows, channels: usize) -> (usize, usize, usize) {
    (images.rows, images.width / channels.max(1), channels)
}
