//! Kernels that compute several operators at once, in single precision.

use super::operands::Operands;
use super::{Compute, elements, over_rows};
use crate::fuse::Joined;
use paceline_kernels::linear::{self, Epilogue};
use paceline_kernels::pool::strips;
use paceline_kernels::{activation, loss, norm, reduce};
use paceline_plan::graph::{ActivationKind, NormKind};

impl Compute<'_> {
    /// Computes operators that have been joined.
    pub(super) fn run_joined(&self, joined: Joined, on: &Operands<'_>) {
        let pool = &self.pool;
        match joined {
            Joined::Linear { bias, residual, activation } => {
                let (x, w) = (on.input::<f32>(0), on.param::<f32>(0));
                let after = Epilogue {
                    bias: bias.then(|| on.param(1)),
                    residual: residual.then(|| on.input(1)),
                    active: activation.map(|function| (forward(function), on.output(1))),
                };
                linear::forward_and(pool, on.linear(), x, w, on.output(0), after);
            }
            Joined::LinearInput(function) => {
                let (dy, w) = (on.input::<f32>(0), on.param::<f32>(0));
                let before = (gradient(function), on.input::<f32>(1));
                linear::input_gradient_through(pool, on.linear(), dy, w, before, on.output(0));
            }
            Joined::AddNorm { norm, eps } => {
                let (shape, a, b) = (on.rows(0), on.input::<f32>(0), on.input::<f32>(1));
                let gain = on.param::<f32>(0);
                let (bias, width): (&[f32], _) = match norm {
                    NormKind::Layer => (on.param(1), 2),
                    NormKind::Rms => (&[], 1),
                };
                let [sum, y] = [0, 1].map(|i| strips(on.output::<f32>(i), shape.width));
                let outputs = (sum, y, strips(on.output(2), width));
                over_rows(pool, shape, outputs, |part, at, (sum, y, stats)| {
                    let at = elements(shape, &at);
                    reduce::add3(&a[at.clone()], &b[at], sum);
                    match norm {
                        NormKind::Layer => {
                            norm::layer_norm_forward(part, eps, sum, gain, bias, y, stats);
                        }
                        NormKind::Rms => norm::rms_norm_forward(part, eps, sum, gain, y, stats),
                    }
                });
            }
            Joined::NormInputAdd { norm } => {
                let (shape, dy, x) = (on.rows(0), on.input::<f32>(0), on.input::<f32>(1));
                let (gain, stats) = (on.param::<f32>(0), on.input::<f32>(2));
                let so_far = on.input::<f32>(3);
                over_rows(pool, shape, strips(on.output(0), shape.width), |part, rows, dx| {
                    let at = elements(shape, &rows);
                    let (dy, x) = (&dy[at.clone()], &x[at.clone()]);
                    match norm {
                        NormKind::Layer => {
                            let stats = &stats[2 * rows.start..2 * rows.end];
                            norm::layer_norm_input_gradient(part, dy, x, gain, stats, dx);
                        }
                        NormKind::Rms => {
                            norm::rms_norm_input_gradient(part, dy, x, gain, &stats[rows], dx);
                        }
                    }
                    reduce::add(&so_far[at], dx);
                });
            }
            Joined::RowMaxStats => {
                let (shape, logits, targets) = (on.rows(0), on.input::<f32>(0), on.ids(1));
                let columns = self.columns(shape);
                let outputs = (strips(on.output(0), 1), strips(on.output(1), 2));
                over_rows(pool, shape, outputs, |part, at, (max, stats)| {
                    let logits = &logits[elements(shape, &at)];
                    loss::row_max(part, columns, logits, max);
                    loss::softmax_stats(part, columns, logits, max, &targets[at], stats);
                });
            }
        }
    }
}

fn forward(function: ActivationKind) -> linear::Forward {
    match function {
        ActivationKind::Gelu => activation::gelu_tanh_forward,
        ActivationKind::Relu => activation::relu_forward,
        ActivationKind::SquaredRelu => activation::squared_relu_forward,
    }
}

fn gradient(function: ActivationKind) -> linear::Gradient {
    match function {
        ActivationKind::Gelu => activation::gelu_tanh_input_gradient,
        ActivationKind::Relu => activation::relu_input_gradient,
        ActivationKind::SquaredRelu => activation::squared_relu_input_gradient,
    }
}
