//! Operators of a program, queued on a stream: GEMMs, elementwise operators, and updates.

#![expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]

use super::device::{CudaError, Device, Stream, failed};
use crate::arena::Span;
use crate::{Rows, Write, linear};
use cudarc::cublas::{result, sys};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{LaunchConfig, PushKernelArg};

/// Threads per block; the kernels' sums rely on it.
const THREADS: u32 = 256;
/// Maximum number of blocks of an elementwise kernel, which strides over the rest.
const MOST_BLOCKS: u64 = 4096;

/// Argument of a kernel.
#[derive(Clone, Copy)]
pub(super) enum Arg {
    At(CUdeviceptr),
    Count(u64),
    Word(u32),
    Real(f32),
}

/// Update rule of a range of parameters, with all constants computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Update {
    /// Same rule as [`crate::optimizer::sgd`].
    Sgd {
        /// Learning rate.
        lr: f32,
        /// Weight decay.
        decay: f32,
        /// Factor of every gradient.
        scale: f32,
    },
    /// Same rule as [`crate::optimizer::momentum`], without Nesterov's lookahead.
    Momentum {
        /// Learning rate.
        lr: f32,
        /// Momentum: the factor of the old velocity.
        keep: f32,
        /// Weight decay.
        decay: f32,
        /// Factor of every gradient.
        scale: f32,
    },
    /// Same rule as [`crate::optimizer::adamw`].
    AdamW(crate::optimizer::AdamWConstants),
}

pub(super) fn elements(shape: Rows) -> u64 {
    shape.rows as u64 * shape.width as u64
}

pub(super) fn fresh(mode: Write) -> Arg {
    Arg::Word(u32::from(mode == Write::Overwrite))
}

impl Device {
    pub(super) fn launch(
        &self,
        stream: Stream,
        name: &'static str,
        blocks: u64,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        if blocks == 0 {
            return Ok(());
        }
        let mut builder = self.stream(stream).launch_builder(self.function(name));
        for arg in args {
            match arg {
                Arg::At(address) => builder.arg(address),
                Arg::Count(count) => builder.arg(count),
                Arg::Word(word) => builder.arg(word),
                Arg::Real(real) => builder.arg(real),
            };
        }
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let config = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the callers below pass the arguments that the kernel declares, with addresses
        // that `at` has found to be inside the arena with the lengths that the kernel accesses.
        unsafe { builder.launch(config) }.map(drop).map_err(failed(name))
    }

    /// Launches a kernel over `count` elements.
    pub(super) fn over(
        &self,
        stream: Stream,
        name: &'static str,
        count: u64,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        let blocks = count.div_ceil(u64::from(THREADS)).min(MOST_BLOCKS);
        self.launch(stream, name, blocks, args)
    }

    pub(super) fn arg(
        &self,
        what: &'static str,
        span: Span,
        elements: u64,
    ) -> Result<Arg, CudaError> {
        self.at(what, span, elements).map(Arg::At)
    }

    /// `y = a + b`.
    pub fn add3(&self, stream: Stream, a: Span, b: Span, y: Span) -> Result<(), CudaError> {
        let n = y.len / 4;
        let args =
            [self.arg("a", a, n)?, self.arg("b", b, n)?, self.arg("y", y, n)?, Arg::Count(n)];
        self.over(stream, "add3", n, &args)
    }

    /// `y += a`.
    pub fn add(&self, stream: Stream, a: Span, y: Span) -> Result<(), CudaError> {
        let n = y.len / 4;
        let args = [self.arg("a", a, n)?, self.arg("y", y, n)?, Arg::Count(n)];
        self.over(stream, "add", n, &args)
    }

    /// Sets every element to `value`.
    pub fn fill(&self, stream: Stream, y: Span, value: f32) -> Result<(), CudaError> {
        let n = y.len / 4;
        self.over(stream, "fill", n, &[self.arg("y", y, n)?, Arg::Real(value), Arg::Count(n)])
    }

    /// Same as [`crate::linear::forward`].
    pub fn linear(
        &self,
        stream: Stream,
        shape: linear::Shape,
        x: Span,
        w: Span,
        y: Span,
    ) -> Result<(), CudaError> {
        let [x, w, y] = self.linear_operands(shape, x, w, y)?;
        let (n, k) = (shape.outputs, shape.inputs);
        // Column-major: yᵀ[n, m] = w[n, k] xᵀ[k, m].
        self.product(
            stream,
            (true, false),
            [n, shape.rows, k],
            (w, k),
            (x, k),
            (y, n),
            Write::Overwrite,
        )
    }

    /// Same as [`crate::linear::input_gradient`].
    pub fn linear_input(
        &self,
        stream: Stream,
        shape: linear::Shape,
        dy: Span,
        w: Span,
        dx: Span,
    ) -> Result<(), CudaError> {
        let [dx, w, dy] = self.linear_operands(shape, dx, w, dy)?;
        let (n, k) = (shape.outputs, shape.inputs);
        // Column-major: dxᵀ[k, m] = wᵀ[k, n] dyᵀ[n, m].
        self.product(
            stream,
            (false, false),
            [k, shape.rows, n],
            (w, k),
            (dy, n),
            (dx, k),
            Write::Overwrite,
        )
    }

    /// Same as [`crate::linear::weight_gradient`].
    pub fn linear_weight(
        &self,
        stream: Stream,
        shape: linear::Shape,
        dy: Span,
        x: Span,
        dw: Span,
        mode: Write,
    ) -> Result<(), CudaError> {
        let [x, dw, dy] = self.linear_operands(shape, x, dw, dy)?;
        let (n, k) = (shape.outputs, shape.inputs);
        // Column-major: dwᵀ[k, n] = xᵀ[k, m] dy[m, n].
        self.product(stream, (false, true), [k, n, shape.rows], (x, k), (dy, n), (dw, k), mode)
    }

    fn linear_operands(
        &self,
        shape: linear::Shape,
        x: Span,
        w: Span,
        y: Span,
    ) -> Result<[CUdeviceptr; 3], CudaError> {
        let [m, k, n] = [shape.rows, shape.inputs, shape.outputs].map(|size| size as u64);
        Ok([self.at("x", x, m * k)?, self.at("w", w, n * k)?, self.at("y", y, m * n)?])
    }

    /// `c (+)= op(a) op(b)` in column-major order, each operand with its leading dimension.
    fn product(
        &self,
        stream: Stream,
        (transpose_a, transpose_b): (bool, bool),
        sizes: [usize; 3],
        a: (CUdeviceptr, usize),
        b: (CUdeviceptr, usize),
        c: (CUdeviceptr, usize),
        mode: Write,
    ) -> Result<(), CudaError> {
        if sizes.contains(&0) {
            return Ok(());
        }
        let int = |size: usize| {
            let what = || format!("{size} is more than it can count");
            i32::try_from(size).map_err(|_| CudaError::Call { call: "cuBLAS".into(), what: what() })
        };
        let [m, n, k] = sizes;
        let op = |transpose| {
            if transpose {
                sys::cublasOperation_t::CUBLAS_OP_T
            } else {
                sys::cublasOperation_t::CUBLAS_OP_N
            }
        };
        let beta = if mode == Write::Accumulate { 1.0f32 } else { 0.0 };
        // SAFETY: the operands are inside the arena with the lengths that the sizes imply, and
        // alpha and beta live until the call returns, as the host pointer mode requires.
        unsafe {
            result::sgemm(
                *self.blas(stream).handle(),
                op(transpose_a),
                op(transpose_b),
                int(m)?,
                int(n)?,
                int(k)?,
                &1.0f32,
                a.0 as *const f32,
                int(a.1)?,
                b.0 as *const f32,
                int(b.1)?,
                &beta,
                c.0 as *mut f32,
                int(c.1)?,
            )
        }
        .map_err(failed("cuBLAS"))
    }

    /// Same as [`crate::bias::forward`].
    pub fn bias(
        &self,
        stream: Stream,
        shape: Rows,
        x: Span,
        b: Span,
        y: Span,
    ) -> Result<(), CudaError> {
        let n = elements(shape);
        let args = [
            self.arg("x", x, n)?,
            self.arg("b", b, shape.width as u64)?,
            self.arg("y", y, n)?,
            Arg::Count(shape.rows as u64),
            Arg::Count(shape.width as u64),
        ];
        self.over(stream, "bias_forward", n, &args)
    }

    /// Same as [`crate::bias::weight_gradient`].
    pub fn bias_weight(
        &self,
        stream: Stream,
        shape: Rows,
        dy: Span,
        db: Span,
        mode: Write,
    ) -> Result<(), CudaError> {
        let args = [
            self.arg("dy", dy, elements(shape))?,
            self.arg("db", db, shape.width as u64)?,
            Arg::Count(shape.rows as u64),
            Arg::Count(shape.width as u64),
            fresh(mode),
        ];
        self.over(stream, "bias_gradient", shape.width as u64, &args)
    }

    /// Applies an activation function.
    pub fn activation(
        &self,
        stream: Stream,
        function: Function,
        x: Span,
        y: Span,
    ) -> Result<(), CudaError> {
        let n = y.len / 4;
        let args = [self.arg("x", x, n)?, self.arg("y", y, n)?, Arg::Count(n)];
        self.over(stream, function.kernels().0, n, &args)
    }

    /// Input gradient of an activation function.
    pub fn activation_input(
        &self,
        stream: Stream,
        function: Function,
        dy: Span,
        x: Span,
        dx: Span,
    ) -> Result<(), CudaError> {
        let n = dx.len / 4;
        let args =
            [self.arg("dy", dy, n)?, self.arg("x", x, n)?, self.arg("dx", dx, n)?, Arg::Count(n)];
        self.over(stream, function.kernels().1, n, &args)
    }

    /// Same as [`crate::activation::swiglu_forward`].
    pub fn swiglu(&self, stream: Stream, shape: Rows, x: Span, y: Span) -> Result<(), CudaError> {
        let n = elements(shape);
        let args = [
            self.arg("x", x, 2 * n)?,
            self.arg("y", y, n)?,
            Arg::Count(shape.rows as u64),
            Arg::Count(shape.width as u64),
        ];
        self.over(stream, "swiglu_forward", n, &args)
    }

    /// Same as [`crate::activation::swiglu_input_gradient`].
    pub fn swiglu_input(
        &self,
        stream: Stream,
        shape: Rows,
        dy: Span,
        x: Span,
        dx: Span,
    ) -> Result<(), CudaError> {
        let n = elements(shape);
        let args = [
            self.arg("dy", dy, n)?,
            self.arg("x", x, 2 * n)?,
            self.arg("dx", dx, 2 * n)?,
            Arg::Count(shape.rows as u64),
            Arg::Count(shape.width as u64),
        ];
        self.over(stream, "swiglu_gradient", n, &args)
    }

    /// Same as [`crate::embedding::forward`], for an unsharded table.
    pub fn embedding(
        &self,
        stream: Stream,
        shape: Rows,
        ids: Span,
        table: Span,
        y: Span,
    ) -> Result<(), CudaError> {
        let (n, words) = (elements(shape), words(shape, table));
        let args = [
            self.arg("ids", ids, shape.rows as u64)?,
            self.arg("table", table, words * shape.width as u64)?,
            self.arg("y", y, n)?,
            Arg::Count(shape.rows as u64),
            Arg::Count(shape.width as u64),
            Arg::Word(u32::try_from(words).unwrap_or(u32::MAX)),
        ];
        self.over(stream, "embedding_forward", n, &args)
    }

    /// Same as [`crate::embedding::weight_gradient`], for an unsharded table.
    pub fn embedding_weight(
        &self,
        stream: Stream,
        shape: Rows,
        ids: Span,
        dy: Span,
        dtable: Span,
        mode: Write,
    ) -> Result<(), CudaError> {
        let words = words(shape, dtable);
        if mode == Write::Overwrite {
            self.fill(stream, dtable, 0.0)?;
        }
        let args = [
            self.arg("dy", dy, elements(shape))?,
            self.arg("ids", ids, shape.rows as u64)?,
            self.arg("dtable", dtable, words * shape.width as u64)?,
            Arg::Count(shape.rows as u64),
            Arg::Count(shape.width as u64),
            Arg::Word(u32::try_from(words).unwrap_or(u32::MAX)),
        ];
        self.over(stream, "embedding_gradient", shape.width as u64, &args)
    }

    /// One optimizer step on a range of parameters; `moments` are as many as the rule has.
    pub fn update(
        &self,
        stream: Stream,
        rule: Update,
        params: Span,
        grads: Span,
        moments: &[Span],
    ) -> Result<(), CudaError> {
        let n = params.len / 4;
        let moment = |i: usize| {
            let span = moments.get(i).copied().unwrap_or(Span { offset: 0, len: 0 });
            self.arg("moment", span, n)
        };
        let (p, g, count) =
            (self.arg("params", params, n)?, self.arg("grads", grads, n)?, Arg::Count(n));
        match rule {
            Update::Sgd { lr, decay, scale } => {
                let args = [p, g, count, Arg::Real(lr), Arg::Real(decay), Arg::Real(scale)];
                self.over(stream, "sgd", n, &args)
            }
            Update::Momentum { lr, keep, decay, scale } => {
                let reals = [lr, keep, decay, scale].map(Arg::Real);
                let args = [p, g, moment(0)?, count, reals[0], reals[1], reals[2], reals[3]];
                self.over(stream, "momentum", n, &args)
            }
            Update::AdamW(with) => {
                let mut args = vec![p, g, moment(0)?, moment(1)?, count];
                args.extend(
                    [
                        with.keep,
                        with.rate,
                        with.correction,
                        with.towards,
                        with.beta2,
                        with.fresh,
                        with.epsilon,
                        with.scale,
                    ]
                    .map(Arg::Real),
                );
                self.over(stream, "adamw", n, &args)
            }
        }
    }
}

/// Activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// Same as [`crate::activation::relu_forward`].
    Relu,
    /// Same as [`crate::activation::squared_relu_forward`].
    SquaredRelu,
    /// Same as [`crate::activation::gelu_tanh_forward`].
    Gelu,
}

impl Function {
    fn kernels(self) -> (&'static str, &'static str) {
        match self {
            Self::Relu => ("relu_forward", "relu_gradient"),
            Self::SquaredRelu => ("squared_relu_forward", "squared_relu_gradient"),
            Self::Gelu => ("gelu_forward", "gelu_gradient"),
        }
    }
}

/// Number of rows of a table.
fn words(shape: Rows, table: Span) -> u64 {
    (table.len / 4).checked_div(shape.width as u64).unwrap_or(0)
}
