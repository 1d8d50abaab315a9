//! Norms of rows.

use super::super::device::{CudaError, Device, Stream};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, Source};
use super::{elements, fresh, word};
use crate::arena::Span;
use crate::{Rows, Write};

/// Operands of a norm. With `added`, the norm is that of the sum of `x` and its first span, which is
/// stored in its second.
#[derive(Clone, Copy, Debug)]
pub struct NormAt {
    /// Input rows.
    pub x: Span,
    /// Rows that are added, and their sum.
    pub added: Option<(Span, Span)>,
    /// Gain.
    pub gain: Span,
    /// Bias, of a layer norm; an RMS norm has none.
    pub bias: Option<Span>,
    /// Output rows.
    pub y: Span,
    /// Statistics of the rows.
    pub stats: Span,
}

/// Operands of a norm's gradients.
#[derive(Clone, Copy, Debug)]
pub struct NormGradientAt {
    /// True for layer norm.
    pub layer: bool,
    /// Gradient of the output.
    pub dy: Span,
    /// Input rows.
    pub x: Span,
    /// Statistics of the rows.
    pub stats: Span,
    /// Gain; not needed for the gradients of the weights alone.
    pub gain: Option<Span>,
    /// Rows that are added to the gradient of the input.
    pub added: Option<Span>,
    /// Gradient of the input.
    pub dx: Option<Span>,
    /// Gradients of gain and bias, f32.
    pub weights: Option<(Span, Option<Span>, Write)>,
}

/// Widest row: its sums take as many bytes of shared memory as a block has without asking.
const WIDEST: usize = 8192;
/// Blocks of the backward pass: a fixed number, so that sums do not depend on the GPU.
const BLOCKS: u32 = 528;

/// Split of rows over the blocks of a sum of columns, and over groups of threads in a block. Column
/// sums have equal bits in whatever kernel they are computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowSplit {
    pub(super) blocks: u32,
    pub(super) groups: u32,
}

impl RowSplit {
    pub(super) fn of(shape: Rows) -> Self {
        let groups = if shape.width <= 768 { 2 } else { 1 };
        Self { blocks: BLOCKS.min(word(shape.rows).div_ceil(groups)).max(1), groups }
    }
}

impl Device {
    /// Returns true if norms of rows of a width can be computed.
    pub const fn has_norm(width: u64) -> bool {
        width <= WIDEST as u64
    }

    /// Norm of every row.
    pub fn norm(
        &self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        eps: f32,
        on: &NormAt,
    ) -> Result<(), CudaError> {
        let (n, width, rows) = (elements(shape), shape.width as u64, shape.rows as u64);
        let layer = on.bias.is_some();
        let (add, sum) = match on.added {
            Some((add, sum)) => {
                (self.of("what is added", add, n, element)?, self.of("the sum", sum, n, element)?)
            }
            None => (0, 0),
        };
        let bias = on.bias.map_or(Ok(0), |bias| self.of("the bias", bias, width, element))?;
        let per_row = if layer { 2 } else { 1 };
        let args = [
            Arg::At(self.of("x", on.x, n, element)?),
            Arg::At(add),
            Arg::At(self.of("the gain", on.gain, width, element)?),
            Arg::At(bias),
            Arg::At(sum),
            Arg::At(self.of("y", on.y, n, element)?),
            Arg::At(self.of("the statistics", on.stats, per_row * rows, ElementType::F32)?),
            Arg::Word(word(shape.rows)),
            Arg::Real(eps),
        ];
        let warps = match shape.width {
            0..=1024 => 1,
            1025..=2048 => 2,
            2049..=4096 => 4,
            _ => 8,
        };
        let source = Source::Norm { width: word(shape.width), layer, warps };
        let grid = Grid::of(word(shape.rows).div_ceil(8 / warps), 256);
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, (source, element, "norm_forward"), grid, &args) }
    }

    /// Gradients of a norm, in one pass. Returns true if it also left the column sums of `dx` for
    /// [`Self::column_sums`].
    pub fn norm_gradient(
        &mut self,
        stream: Stream,
        element: ElementType,
        shape: Rows,
        on: &NormGradientAt,
    ) -> Result<(), CudaError> {
        let (n, width, rows) = (elements(shape), shape.width as u64, shape.rows as u64);
        let optional = |device: &Self, what, span: Option<Span>, elements, element| {
            span.map_or(Ok(0), |span| device.of(what, span, elements, element))
        };
        let RowSplit { blocks, groups } = RowSplit::of(shape);
        let warps = 8 / groups;
        let dy = self.of("dy", on.dy, n, element)?;
        let x = self.of("x", on.x, n, element)?;
        let per_row = if on.layer { 2 } else { 1 };
        let stats = self.of("the statistics", on.stats, per_row * rows, ElementType::F32)?;
        // Without the gradient of the input, any number serves as gain.
        let gain = match on.gain {
            Some(gain) => self.of("the gain", gain, width, element)?,
            None => x,
        };
        let add = optional(self, "what is added", on.added, n, element)?;
        let dx = optional(self, "dx", on.dx, n, element)?;
        let partial_bytes = u64::from(blocks) * 3 * width * 4;
        let sums = self.column_sums_at(stream, width)?;
        let [partial] = self.scratch(stream, [partial_bytes])?;
        let args = [dy, x, gain, stats, add, dx, partial].map(Arg::At);
        let args: Vec<Arg> = args.into_iter().chain([Arg::Word(word(shape.rows))]).collect();
        let source = Source::Norm { width: word(shape.width), layer: on.layer, warps };
        let kernel = (source, element, "norm_backward");
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, kernel, Grid::of(blocks, 256), &args) }?;
        let (mut dgain, mut dbias, mut overwrite) = (0, 0, 0b100);
        if let Some((gain, bias, mode)) = on.weights {
            dgain = self.of("the gain's gradient", gain, width, ElementType::F32)?;
            dbias = optional(self, "the bias's gradient", bias, width, ElementType::F32)?;
            overwrite |= fresh(mode) * 0b011;
        }
        let sums = if on.dx.is_some() { sums } else { 0 };
        let args = [
            Arg::At(partial),
            Arg::At(dgain),
            Arg::At(dbias),
            Arg::At(sums),
            Arg::Word(blocks),
            Arg::Word(word(shape.width)),
            Arg::Word(overwrite),
        ];
        let grid = Grid { blocks: (word(shape.width).div_ceil(32), 3), threads: 256, shared: 0 };
        let kernel = (Source::Elementwise, element, "fold_norm");
        // SAFETY: the partial sums have been queued before; the gradients are as wide as rows.
        unsafe { self.launch(stream, kernel, grid, &args) }
    }

    /// `db (+)= column sums of dx` of the last [`Self::norm_gradient`] on the stream, in f32.
    pub fn column_sums(
        &mut self,
        stream: Stream,
        element: ElementType,
        db: Span,
        mode: Write,
    ) -> Result<(), CudaError> {
        let width = db.len / 4;
        let to = self.of("db", db, width, ElementType::F32)?;
        let sums = self.column_sums_at(stream, width)?;
        self.fold(stream, element, sums, to, (1, word(width as usize)), mode)
    }
}
