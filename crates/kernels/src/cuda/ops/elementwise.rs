//! Elementwise operators.

use super::super::device::{CudaError, Device, Stream, Table};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, Source};
use super::{elements, word};
use crate::Rows;
use crate::arena::Span;

/// Activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// GELU by the tanh formula.
    Gelu,
    /// Rectifier.
    Relu,
    /// Square of the rectifier.
    SquaredRelu,
    /// `silu(gate) · up` on rows `[gate | up]`.
    SwiGlu,
    /// `gelu(gate) · up` on rows `[gate | up]`.
    GeGlu,
}

/// Rotation of the first `heads` heads of rows.
#[derive(Clone, Copy, Debug)]
pub struct RotationAt {
    /// Rows, changed in place.
    pub rows: Span,
    /// Heads that are rotated.
    pub heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Tokens of a sequence.
    pub seq: u32,
    /// Cosine and sine by position and pair, `[seq, head_dim / 2]`.
    pub table: Table,
    /// True for the gradient, which rotates back.
    pub back: bool,
}

impl Device {
    /// Queues an elementwise kernel.
    fn each(
        &self,
        stream: Stream,
        element: ElementType,
        name: &'static str,
        n: u64,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        let kernel = (Source::Elementwise, element, name);
        // SAFETY: the callers below pass the arguments that the kernel declares, with addresses of
        // spans of the lengths that it accesses.
        unsafe { self.launch(stream, kernel, Grid::over(n), args) }
    }

    /// `y = a + b`.
    pub fn add(
        &self,
        stream: Stream,
        element: ElementType,
        a: Span,
        b: Span,
        y: Span,
    ) -> Result<(), CudaError> {
        let n = y.len / element.bytes();
        let args = [
            Arg::At(self.of("a", a, n, element)?),
            Arg::At(self.of("b", b, n, element)?),
            Arg::At(self.of("y", y, n, element)?),
            Arg::Long(n),
        ];
        self.each(stream, element, "add", n, &args)
    }

    /// Activation of every element or, if gated, of every pair. `shape` is that of the output.
    pub fn activation(
        &self,
        stream: Stream,
        element: ElementType,
        (function, shape): (Function, Rows),
        (x, y): (Span, Span),
    ) -> Result<(), CudaError> {
        let n = elements(shape);
        let (name, gated) = match function {
            Function::Gelu => ("gelu_forward", false),
            Function::Relu => ("relu_forward", false),
            Function::SquaredRelu => ("squared_relu_forward", false),
            Function::SwiGlu => ("swiglu_forward", true),
            Function::GeGlu => ("geglu_forward", true),
        };
        let of_x = if gated { 2 * n } else { n };
        let x = Arg::At(self.of("x", x, of_x, element)?);
        let y = Arg::At(self.of("y", y, n, element)?);
        let args = if gated {
            vec![x, y, Arg::Word(word(shape.rows)), Arg::Word(word(shape.width))]
        } else {
            vec![x, y, Arg::Long(n)]
        };
        self.each(stream, element, name, n, &args)
    }

    /// Gradient of an activation's input. `shape` is that of the output.
    pub fn activation_gradient(
        &self,
        stream: Stream,
        element: ElementType,
        (function, shape): (Function, Rows),
        (dy, x, dx): (Span, Span, Span),
    ) -> Result<(), CudaError> {
        let n = elements(shape);
        let (name, gated) = match function {
            Function::Gelu => ("gelu_backward", false),
            Function::Relu => ("relu_backward", false),
            Function::SquaredRelu => ("squared_relu_backward", false),
            Function::SwiGlu => ("swiglu_backward", true),
            Function::GeGlu => ("geglu_backward", true),
        };
        let of_x = if gated { 2 * n } else { n };
        let dy = Arg::At(self.of("dy", dy, n, element)?);
        let x = Arg::At(self.of("x", x, of_x, element)?);
        let dx = Arg::At(self.of("dx", dx, of_x, element)?);
        let args = if gated {
            vec![dy, x, dx, Arg::Word(word(shape.rows)), Arg::Word(word(shape.width))]
        } else {
            vec![dy, x, dx, Arg::Long(n)]
        };
        self.each(stream, element, name, n, &args)
    }

    /// Rotates heads by their positions.
    pub fn rotate(
        &self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        on: &RotationAt,
    ) -> Result<(), CudaError> {
        let len = u64::from(on.seq) * u64::from(on.head_dim / 2) * 8;
        let fits = u64::from(on.heads) * u64::from(on.head_dim) <= shape.width as u64;
        if on.table.bytes != len || !fits {
            let (what, span, bytes) = ("the rotation's table", on.rows, on.table.bytes);
            return Err(CudaError::Span { what, span, len, bytes });
        }
        let args = [
            Arg::At(self.of("the rows", on.rows, elements(shape), element)?),
            Arg::At(self.table_at(on.table)),
            Arg::Word(word(shape.rows)),
            Arg::Word(word(shape.width)),
            Arg::Word(on.heads),
            Arg::Word(on.head_dim),
            Arg::Word(on.seq),
            Arg::Word(0),
            Arg::Real(if on.back { -1.0 } else { 1.0 }),
        ];
        let n = shape.rows as u64 * u64::from(on.heads) * u64::from(on.head_dim / 2) * 8;
        self.each(stream, element, "rope", n, &args)
    }
}
