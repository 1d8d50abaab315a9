//! Softmax cross entropy, and sums.

use super::super::device::{CudaError, Device, Stream};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, Source};
use super::{elements, fresh, word};
use crate::arena::Span;
use crate::loss::Columns;
use crate::{Rows, Write};

/// Operands of a loss.
#[derive(Clone, Copy, Debug)]
pub struct LossAt {
    /// Rows of logits.
    pub logits: Span,
    /// Target of every row.
    pub targets: Span,
    /// Maximum and sum of exponentials of every row.
    pub stats: Span,
}

/// Operands of a loss whose logits are shared out over ranks.
#[derive(Clone, Copy, Debug)]
pub struct ShardLossAt {
    /// Rows of the logits that this rank has.
    pub logits: Span,
    /// Largest logit of every row.
    pub max: Span,
    /// Sum of exponentials and logit of the target of every row.
    pub stats: Span,
    /// Target of every row.
    pub targets: Span,
}

/// Widest row of which a block holds all logits in registers.
const HELD: usize = 51200;
const THREADS: u32 = 1024;

fn source(shape: Rows, words: u32) -> Source {
    let held = shape.width.is_multiple_of(8) && shape.width <= HELD;
    Source::CrossEntropy { width: word(shape.width), words, threads: THREADS, blocks: 1, held }
}

impl Device {
    /// Loss of every row, of whose logits the first `words` count. With `scale`, the logits are
    /// replaced by their gradient (softmax - one-hot) · scale.
    pub fn cross_entropy(
        &self,
        stream: Stream,
        element: ElementType,
        (shape, words): (Rows, u32),
        on: &LossAt,
        losses: Span,
        scale: Option<f32>,
    ) -> Result<(), CudaError> {
        let (n, rows) = (elements(shape), shape.rows as u64);
        let logits = self.of("the logits", on.logits, n, element)?;
        let args = [
            Arg::At(logits),
            Arg::At(self.of("the targets", on.targets, rows, ElementType::F32)?),
            Arg::At(self.of("the statistics", on.stats, 2 * rows, ElementType::F32)?),
            Arg::At(self.of("the losses", losses, rows, ElementType::F32)?),
            Arg::At(if scale.is_some() { logits } else { 0 }),
            Arg::Real(scale.unwrap_or(0.0)),
        ];
        let kernel = (source(shape, words), element, "cross_entropy");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, Grid::of(word(shape.rows), THREADS), &args) }
    }

    /// Gradient of the logits alone, which may replace them.
    pub fn cross_entropy_gradient(
        &self,
        stream: Stream,
        element: ElementType,
        (shape, words): (Rows, u32),
        on: &LossAt,
        dlogits: Span,
        scale: f32,
    ) -> Result<(), CudaError> {
        let (n, rows) = (elements(shape), shape.rows as u64);
        let args = [
            Arg::At(self.of("the logits", on.logits, n, element)?),
            Arg::At(self.of("the targets", on.targets, rows, ElementType::F32)?),
            Arg::At(self.of("the statistics", on.stats, 2 * rows, ElementType::F32)?),
            Arg::At(self.of("their gradient", dlogits, n, element)?),
            Arg::Real(scale),
        ];
        let kernel = (source(shape, words), element, "cross_entropy_gradient");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, Grid::of(word(shape.rows), THREADS), &args) }
    }

    /// Largest logit of every row among the first `words`.
    pub fn row_max(
        &self,
        stream: Stream,
        element: ElementType,
        (shape, words): (Rows, u32),
        (logits, max): (Span, Span),
    ) -> Result<(), CudaError> {
        let args = [
            Arg::At(self.of("the logits", logits, elements(shape), element)?),
            Arg::At(self.of("the maxima", max, shape.rows as u64, ElementType::F32)?),
        ];
        let kernel = (source(shape, words), element, "row_max");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, Grid::of(word(shape.rows), THREADS), &args) }
    }

    /// Statistics of the rows of a shard, whose columns are `words` words from `first` on.
    pub fn softmax_stats(
        &self,
        stream: Stream,
        element: ElementType,
        (shape, columns): (Rows, Columns),
        on: &ShardLossAt,
    ) -> Result<(), CudaError> {
        let (n, rows) = (elements(shape), shape.rows as u64);
        let args = [
            Arg::At(self.of("the logits", on.logits, n, element)?),
            Arg::At(self.of("the maxima", on.max, rows, ElementType::F32)?),
            Arg::At(self.of("the targets", on.targets, rows, ElementType::F32)?),
            Arg::At(self.of("the statistics", on.stats, 2 * rows, ElementType::F32)?),
            Arg::Word(columns.first),
        ];
        let kernel = (source(shape, word(columns.valid)), element, "softmax_stats");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, Grid::of(word(shape.rows), THREADS), &args) }
    }

    /// `total (+)=` the losses of rows whose statistics have been reduced over all shards.
    pub fn loss_of_stats(
        &mut self,
        stream: Stream,
        rows: usize,
        (stats, total): (Span, Span),
        mode: Write,
    ) -> Result<(), CudaError> {
        let (n, float) = (rows as u64, ElementType::F32);
        let stats = self.of("the statistics", stats, 2 * n, float)?;
        let total = self.of("the loss", total, 1, float)?;
        let [losses] = self.scratch(stream, [4 * n])?;
        let args = [Arg::At(stats), Arg::At(losses), Arg::Word(word(rows))];
        let shape = Rows { rows, width: 8 };
        let kernel = (source(shape, 8), float, "loss_of_stats");
        // SAFETY: the addresses are those of a span and of scratch of these lengths.
        unsafe { self.launch(stream, kernel, Grid::over(8 * n), &args) }?;
        let args = [Arg::At(losses), Arg::At(total), Arg::Long(n), Arg::Word(fresh(mode))];
        let kernel = (Source::Elementwise, float, "sum_all");
        // SAFETY: as above.
        unsafe { self.launch(stream, kernel, Grid::of(1, 1024), &args) }
    }

    /// Gradient of the logits of a shard, which may replace them.
    pub fn shard_gradient(
        &self,
        stream: Stream,
        element: ElementType,
        (shape, columns): (Rows, Columns),
        on: &ShardLossAt,
        (dlogits, scale): (Span, f32),
    ) -> Result<(), CudaError> {
        let (n, rows) = (elements(shape), shape.rows as u64);
        let args = [
            Arg::At(self.of("the logits", on.logits, n, element)?),
            Arg::At(self.of("the maxima", on.max, rows, ElementType::F32)?),
            Arg::At(self.of("the statistics", on.stats, 2 * rows, ElementType::F32)?),
            Arg::At(self.of("the targets", on.targets, rows, ElementType::F32)?),
            Arg::At(self.of("their gradient", dlogits, n, element)?),
            Arg::Word(columns.first),
            Arg::Real(scale),
        ];
        let kernel = (source(shape, word(columns.valid)), element, "shard_gradient");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, Grid::of(word(shape.rows), THREADS), &args) }
    }

    /// `y (+)= sum of x`, both f32.
    pub fn sum(&self, stream: Stream, x: Span, y: Span, mode: Write) -> Result<(), CudaError> {
        let n = x.len / 4;
        let args = [
            Arg::At(self.of("the numbers", x, n, ElementType::F32)?),
            Arg::At(self.of("their sum", y, 1, ElementType::F32)?),
            Arg::Long(n),
            Arg::Word(fresh(mode)),
        ];
        let kernel = (Source::Elementwise, ElementType::F32, "sum_all");
        // SAFETY: the addresses are those of spans of these lengths.
        unsafe { self.launch(stream, kernel, Grid::of(1, 1024), &args) }
    }
}
