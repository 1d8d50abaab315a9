//! Computations on images.

use crate::device::cpu::kernel::{BatchNorm, Images};
use crate::device::cpu::operands::Operands;
use paceline_kernels::pool::Pool;
use paceline_kernels::{Element, Rows, Window, Write, batch_norm, conv, pooling};
use paceline_plan::program::{LocalOp, Template};

/// Runs a kernel on its operands.
pub(in crate::device::cpu) fn run<T: Element, G: Element>(
    kernel: Images,
    pool: &Pool,
    on: &Operands<'_>,
    mode: Write,
    workspace: &mut [f32],
) {
    let convolution = |window: Window| {
        let filters = on.param_dims(0)[0] as usize;
        conv::Shape { images: on.rows(0).rows, window, filters }
    };
    match kernel {
        Images::Conv(window) => {
            let shape = convolution(window);
            let room = &mut workspace[..conv::workspace::<T, G>(shape)];
            conv::forward(pool, shape, on.input::<T>(0), on.param(0), on.output(0), room);
        }
        Images::ConvInput(window) => {
            let shape = convolution(window);
            let room = &mut workspace[..conv::workspace::<T, G>(shape)];
            conv::input_gradient(pool, shape, on.input::<T>(0), on.param(0), on.output(0), room);
        }
        Images::ConvWeight(window) => {
            let shape = convolution(window);
            let room = &mut workspace[..conv::workspace::<T, G>(shape)];
            let (dy, x, dw) = (on.input::<T>(0), on.input(1), on.gradient::<G>(0));
            conv::weight_gradient(pool, shape, dy, x, dw, mode, room);
        }
        Images::BatchSums { channels } => {
            let shape = pixels(on.rows(0), channels);
            let room = &mut workspace[..batch_norm::workspace(shape)];
            batch_norm::sums(pool, shape, on.input::<T>(0), on.param(0), on.output(0), room);
        }
        Images::BatchSumsInput { channels } => {
            let shape = pixels(on.rows(0), channels);
            let room = &mut workspace[..batch_norm::workspace(shape)];
            let (dy, x, statistics) = (on.input::<T>(0), on.input(1), on.input(2));
            batch_norm::gradient_sums(pool, shape, dy, x, statistics, on.output(0), room);
        }
        Images::BatchNorm(BatchNorm { channels, eps, count, .. }) => {
            let shape = pixels(on.rows(0), channels);
            let (x, sums) = (on.input::<T>(0), on.input(1));
            let params = (on.param(0), on.param(1), on.param(2));
            let (y, statistics) = (on.output(0), on.output(1));
            batch_norm::forward(pool, shape, count, eps, x, sums, params, y, statistics);
        }
        Images::BatchNormInput(BatchNorm { channels, count, .. }) => {
            let shape = pixels(on.rows(0), channels);
            let (dy, x, gain) = (on.input::<T>(0), on.input(1), on.param(0));
            let (statistics, sums) = (on.input(2), on.input(3));
            let dx = on.output(0);
            batch_norm::input_gradient(pool, shape, count, dy, x, gain, statistics, sums, dx);
        }
        Images::BatchNormWeight(BatchNorm { eps, count, shares, .. }) => {
            let gradients = [0, 1, 2, 3].map(|i| on.gradient::<G>(i));
            let (sums, statistics) = (on.input(0), on.input(1));
            batch_norm::weight_gradient(count, eps, shares, sums, statistics, gradients, mode);
        }
        Images::MaxPool(window) => {
            pooling::max_forward(pool, on.rows(0).rows, window, on.input::<T>(0), on.output(0));
        }
        Images::MaxPoolInput(window) => {
            let (dy, x) = (on.input::<T>(0), on.input(1));
            pooling::max_input_gradient(pool, on.rows(0).rows, window, dy, x, on.output(0));
        }
        Images::AveragePool { channels } => {
            let sizes = planes(on.rows(0), channels);
            pooling::mean_forward(pool, sizes, on.input::<T>(0), on.output(0));
        }
        Images::AveragePoolInput { channels } => {
            let sizes = planes(on.output_rows(0), channels);
            pooling::mean_input_gradient(pool, sizes, on.input::<T>(0), on.output(0));
        }
    }
}

/// Workspace, in elements, that a kernel needs.
pub(in crate::device::cpu) fn workspace<T: Element, G: Element>(
    kernel: Images,
    template: &Template,
    op: &LocalOp,
) -> usize {
    let dims = |operand: u16| template.operands[usize::from(operand)].dims.map(|n| n as usize);
    match kernel {
        Images::Conv(window) | Images::ConvInput(window) | Images::ConvWeight(window) => {
            let (images, filters) = (dims(op.inputs[0])[0], dims(op.params[0])[0]);
            conv::workspace::<T, G>(conv::Shape { images, window, filters })
        }
        Images::BatchSums { channels } | Images::BatchSumsInput { channels } => {
            let [rows, width] = dims(op.inputs[0]);
            batch_norm::workspace(pixels(Rows { rows, width }, channels))
        }
        Images::BatchNorm(_)
        | Images::BatchNormInput(_)
        | Images::BatchNormWeight(_)
        | Images::MaxPool(_)
        | Images::MaxPoolInput(_)
        | Images::AveragePool { .. }
        | Images::AveragePoolInput { .. } => 0,
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
