//! Linear operators by cuBLASLt, and biases.

use super::super::device::{CudaError, Device, Stream};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, Source};
use super::super::product::{Epilogue, Operands, Pass, Product};
use super::norm::RowSplit;
use super::{elements, fresh, word};
use crate::arena::Span;
use crate::{Rows, Write, linear};

/// Operands of a forward pass. With `residual` it is added to the product, with `kept` the sum
/// before GELU is kept there and the output is its GELU.
#[derive(Clone, Copy, Debug)]
pub struct LinearAt {
    /// Input rows.
    pub x: Span,
    /// Weights, `[outputs, inputs]`.
    pub w: Span,
    /// Bias of the outputs.
    pub bias: Option<Span>,
    /// Rows that are added.
    pub residual: Option<Span>,
    /// Sum before GELU.
    pub kept: Option<Span>,
    /// Output rows.
    pub y: Span,
}

/// Operands of an input gradient. With `kept`, GELU's slope there is multiplied.
#[derive(Clone, Copy, Debug)]
pub struct InputGradientAt {
    /// Gradient of the output.
    pub dy: Span,
    /// Weights, `[outputs, inputs]`.
    pub w: Span,
    /// Sum before GELU.
    pub kept: Option<Span>,
    /// Gradient of the input.
    pub dx: Span,
}

fn product(pass: Pass, shape: linear::Shape, element: ElementType) -> Product {
    let [rows, inputs, outputs] = [shape.rows, shape.inputs, shape.outputs].map(|n| n as u64);
    let (accumulate, epilogue) = (false, Epilogue::None);
    Product { pass, rows, inputs, outputs, operand: element, result: element, accumulate, epilogue }
}

const fn sizes(shape: linear::Shape) -> [u64; 3] {
    let [rows, inputs, outputs] = [shape.rows as u64, shape.inputs as u64, shape.outputs as u64];
    [rows * inputs, outputs * inputs, rows * outputs]
}

impl Device {
    /// `y = x · wᵀ`, with what [`LinearAt`] adds.
    pub fn linear(
        &mut self,
        stream: Stream,
        element: ElementType,
        shape: linear::Shape,
        on: &LinearAt,
    ) -> Result<(), CudaError> {
        let [of_x, of_w, of_y] = sizes(shape);
        let epilogue = match (on.bias, on.kept) {
            (Some(_), Some(_)) => Epilogue::BiasGelu,
            (Some(_), None) => Epilogue::Bias,
            (None, _) => Epilogue::None,
        };
        let optional = |what, span: Option<Span>, elements| {
            span.map_or(Ok(0), |span| self.of(what, span, elements, element))
        };
        let at = Operands {
            left: self.of("x", on.x, of_x, element)?,
            right: self.of("the weights", on.w, of_w, element)?,
            addend: optional("the residual", on.residual, of_y)?,
            result: self.of("y", on.y, of_y, element)?,
            bias: optional("the bias", on.bias, shape.outputs as u64)?,
            kept: optional("the kept sum", on.kept, of_y)?,
        };
        let accumulate = on.residual.is_some();
        let of = product(Pass::Forward, shape, element);
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.product(stream, Product { accumulate, epilogue, ..of }, &at) }
    }

    /// `dx = dy · w`, with what [`InputGradientAt`] multiplies.
    pub fn linear_input(
        &mut self,
        stream: Stream,
        element: ElementType,
        shape: linear::Shape,
        on: &InputGradientAt,
    ) -> Result<(), CudaError> {
        let [of_x, of_w, of_y] = sizes(shape);
        let kept = on.kept.map_or(Ok(0), |kept| self.of("the kept sum", kept, of_x, element))?;
        let at = Operands {
            left: self.of("dy", on.dy, of_y, element)?,
            right: self.of("the weights", on.w, of_w, element)?,
            result: self.of("dx", on.dx, of_x, element)?,
            kept,
            ..Operands::default()
        };
        let epilogue = if on.kept.is_some() { Epilogue::GeluGradient } else { Epilogue::None };
        let of = product(Pass::InputGradient, shape, element);
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.product(stream, Product { epilogue, ..of }, &at) }
    }

    /// `dw (+)= dyᵀ · x`, in f32.
    pub fn linear_weight(
        &mut self,
        stream: Stream,
        element: ElementType,
        shape: linear::Shape,
        (dy, x, dw): (Span, Span, Span),
        mode: Write,
    ) -> Result<(), CudaError> {
        let [of_x, of_w, of_y] = sizes(shape);
        let result = self.of("dw", dw, of_w, ElementType::F32)?;
        let at = Operands {
            left: self.of("x", x, of_x, element)?,
            right: self.of("dy", dy, of_y, element)?,
            addend: result,
            result,
            ..Operands::default()
        };
        let accumulate = mode == Write::Accumulate;
        let of = product(Pass::WeightGradient, shape, element);
        let of = Product { result: ElementType::F32, accumulate, ..of };
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.product(stream, of, &at) }
    }

    /// `y = x + bias`.
    pub fn bias(
        &self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        (x, bias, y): (Span, Span, Span),
    ) -> Result<(), CudaError> {
        let n = elements(shape);
        let args = [
            Arg::At(self.of("x", x, n, element)?),
            Arg::At(self.of("the bias", bias, shape.width as u64, element)?),
            Arg::At(self.of("y", y, n, element)?),
            Arg::Word(word(shape.rows)),
            Arg::Word(word(shape.width)),
        ];
        let kernel = (Source::Elementwise, element, "bias_forward");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, Grid::over(n), &args) }
    }

    /// `db (+)= column sums of dy`, in f32.
    pub fn bias_weight(
        &mut self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        (dy, db): (Span, Span),
        mode: Write,
    ) -> Result<(), CudaError> {
        let width = shape.width as u64;
        let dy = self.of("dy", dy, elements(shape), element)?;
        let db = self.of("db", db, width, ElementType::F32)?;
        let RowSplit { blocks, groups } = RowSplit::of(shape);
        let [partial] = self.scratch(stream, [u64::from(blocks) * width * 4])?;
        let (rows, wide) = (word(shape.rows), word(shape.width));
        let columns = 8 * 256 / groups;
        let grid = Grid { blocks: (blocks, wide.div_ceil(columns)), threads: 256, shared: 0 };
        let kernel = (Source::Elementwise, element, "column_sums");
        let [rows, wide_arg, groups] = [rows, wide, groups].map(Arg::Word);
        let args = [Arg::At(dy), Arg::At(partial), rows, wide_arg, groups];
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, kernel, grid, &args) }?;
        self.fold(stream, element, partial, db, (blocks, wide), mode)
    }

    /// Folds rows of partial sums into a gradient.
    pub(super) fn fold(
        &self,
        stream: Stream,
        element: ElementType,
        partial: u64,
        to: u64,
        (parts, width): (u32, u32),
        mode: Write,
    ) -> Result<(), CudaError> {
        let from = (partial, u64::from(width));
        self.fold_strided(stream, element, from, to, (parts, width), mode)
    }

    /// The same for rows at a distance of so many elements.
    pub(super) fn fold_strided(
        &self,
        stream: Stream,
        element: ElementType,
        (partial, stride): (u64, u64),
        to: u64,
        (parts, width): (u32, u32),
        mode: Write,
    ) -> Result<(), CudaError> {
        let args = [
            Arg::At(partial),
            Arg::At(to),
            Arg::Word(parts),
            Arg::Long(stride),
            Arg::Word(width),
            Arg::Word(fresh(mode)),
        ];
        let kernel = (Source::Elementwise, element, "fold_partials");
        let grid = Grid::of(width.div_ceil(32), 256);
        // SAFETY: the callers pass `parts` rows of `width` numbers and a gradient of `width`.
        unsafe { self.launch(stream, kernel, grid, &args) }
    }
}
