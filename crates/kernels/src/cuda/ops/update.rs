//! Norm of the gradient, and updates.

use super::super::device::{CudaError, Device, Stream, Table};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, Source, UpdateConstants};
use crate::arena::Span;

/// Update rule, with all constants computed. A step whose gradient's norm is not finite changes
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Update {
    /// Same rule as [`crate::optimizer::sgd`]; with `momentum` as [`crate::optimizer::momentum`].
    Sgd {
        /// Learning rate.
        lr: f32,
        /// Weight decay.
        decay: f32,
        /// Factor of every gradient.
        scale: f32,
        /// Factor of the old velocity.
        momentum: f32,
    },
    /// Same rule as [`crate::optimizer::adamw`], with constants for weights that decay.
    AdamW(crate::optimizer::AdamWConstants),
}

/// Operands of an update of a range of weights.
#[derive(Clone, Copy, Debug)]
pub struct UpdateAt<'a> {
    /// Weights in f32.
    pub master: Span,
    /// Their rounded copy.
    pub weights: Option<Span>,
    /// Gradients in f32.
    pub gradients: Span,
    /// Moments of the rule.
    pub moments: &'a [Span],
    /// A byte for every 1024 weights: whether they decay.
    pub decays: Table,
    /// Norm of the whole gradient, before its scale.
    pub norm: Option<Span>,
    /// Longest gradient, if it is clipped.
    pub clip: Option<f32>,
}

/// Blocks of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorBlocks {
    /// First block.
    pub first: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Index of the tensor's sum.
    pub slot: u32,
}

/// Table of the blocks of all tensors.
#[derive(Clone, Copy, Debug)]
pub struct Squares {
    table: Table,
    tensors: u32,
    /// Blocks and slots that it reaches.
    blocks: u64,
    slots: u64,
}

impl Device {
    /// Sum of squares of every block of 1024 elements.
    pub fn block_squares(&self, stream: Stream, x: Span, sums: Span) -> Result<(), CudaError> {
        let blocks = sums.len / 4;
        let args = [
            Arg::At(self.of("the gradient", x, blocks * 1024, ElementType::F32)?),
            Arg::At(self.of("its sums", sums, blocks, ElementType::F32)?),
            Arg::Long(blocks),
        ];
        let kernel = (Source::Elementwise, ElementType::F32, "block_squares");
        let grid = Grid::of(blocks.div_ceil(8) as u32, 256);
        // SAFETY: the addresses are those of spans of these lengths.
        unsafe { self.launch(stream, kernel, grid, &args) }
    }

    /// Table of tensors for [`Self::tensor_squares`].
    pub fn squares(&mut self, tensors: &[TensorBlocks]) -> Result<Squares, CudaError> {
        let rows = tensors.iter().flat_map(|of| [of.first, of.blocks, of.slot]);
        let words: Vec<u32> = rows.collect();
        let table = self.table(bytemuck::cast_slice(&words))?;
        let ends = tensors.iter().map(|of| u64::from(of.first) + u64::from(of.blocks));
        let (blocks, slots) = (ends.max(), tensors.iter().map(|of| u64::from(of.slot) + 1).max());
        let (blocks, slots) = (blocks.unwrap_or(0), slots.unwrap_or(0));
        Ok(Squares { table, tensors: tensors.len() as u32, blocks, slots })
    }

    /// Sums of tensors' blocks.
    pub fn tensor_squares(
        &self,
        stream: Stream,
        (blocks, sums): (Span, Span),
        of: &Squares,
    ) -> Result<(), CudaError> {
        self.clear(stream, sums)?;
        if blocks.len / 4 < of.blocks || sums.len / 4 < of.slots {
            let (what, len) = ("the tensors' blocks", of.blocks * 4);
            return Err(CudaError::Span { what, span: blocks, len, bytes: blocks.len });
        }
        let args = [
            Arg::At(self.of("the sums of blocks", blocks, blocks.len / 4, ElementType::F32)?),
            Arg::At(self.table_at(of.table)),
            Arg::At(self.of("the sums", sums, sums.len / 4, ElementType::F32)?),
        ];
        let kernel = (Source::Elementwise, ElementType::F32, "tensor_squares");
        // SAFETY: the table's rows are inside the spans.
        unsafe { self.launch(stream, kernel, Grid::of(of.tensors, 1024), &args) }
    }

    /// Root of a sum.
    pub fn root_of_sum(&self, stream: Stream, x: Span, y: Span) -> Result<(), CudaError> {
        let n = x.len / 4;
        let args = [
            Arg::At(self.of("the sums", x, n, ElementType::F32)?),
            Arg::At(self.of("the norm", y, 1, ElementType::F32)?),
            Arg::Long(n),
        ];
        let kernel = (Source::Elementwise, ElementType::F32, "root_of_sum");
        // SAFETY: the addresses are those of spans of these lengths.
        unsafe { self.launch(stream, kernel, Grid::of(1, 1024), &args) }
    }

    /// `into (+)= from`, both f32.
    pub fn accumulate(&self, stream: Stream, from: Span, into: Span) -> Result<(), CudaError> {
        let n = from.len / 4;
        let args = [
            Arg::At(self.of("what is added", from, n, ElementType::F32)?),
            Arg::At(self.of("the sum", into, n, ElementType::F32)?),
            Arg::Long(n),
        ];
        let kernel = (Source::Elementwise, ElementType::F32, "accumulate");
        // SAFETY: the addresses are those of spans of these lengths.
        unsafe { self.launch(stream, kernel, Grid::over(n), &args) }
    }

    /// Updates weights whose rounded copy has the type `element`.
    pub fn update(
        &self,
        stream: Stream,
        element: ElementType,
        update: &Update,
        on: &UpdateAt<'_>,
    ) -> Result<(), CudaError> {
        let (n, float) = (on.master.len / 4, ElementType::F32);
        if on.decays.bytes < n.div_ceil(1024) {
            let (what, span, bytes) = ("the flags of decay", on.master, on.decays.bytes);
            return Err(CudaError::Span { what, span, len: n.div_ceil(1024), bytes });
        }
        let moment = |i: usize| match on.moments.get(i) {
            Some(moment) => self.of("a moment", *moment, n, float).map(Arg::At),
            None => Ok(Arg::At(0)),
        };
        let weights =
            on.weights.map_or(Ok(0), |weights| self.of("the weights", weights, n, element))?;
        let norm = on.norm.map_or(Ok(0), |norm| self.of("the norm", norm, 1, float))?;
        let clip = on.clip.unwrap_or(0.0);
        let mut args = vec![
            Arg::At(self.of("the master weights", on.master, n, float)?),
            Arg::At(self.of("the gradient", on.gradients, n, float)?),
            moment(0)?,
        ];
        let (name, constants) = match *update {
            Update::AdamW(of) => {
                args.push(moment(1)?);
                let crate::optimizer::AdamWConstants {
                    keep,
                    rate,
                    correction,
                    towards,
                    beta2,
                    fresh,
                    epsilon,
                    scale,
                } = of;
                let constants = UpdateConstants {
                    keep,
                    rate,
                    correction,
                    towards,
                    beta2,
                    fresh,
                    epsilon,
                    scale,
                    clip,
                };
                ("adamw", constants)
            }
            Update::Sgd { lr, decay, scale, momentum } => {
                let constants = UpdateConstants {
                    keep: decay,
                    rate: lr,
                    beta2: momentum,
                    scale,
                    clip,
                    ..UpdateConstants::default()
                };
                ("sgd", constants)
            }
        };
        args.extend([
            Arg::At(weights),
            Arg::At(self.table_at(on.decays)),
            Arg::Long(n),
            Arg::Update(constants),
            Arg::At(norm),
        ]);
        let kernel = (Source::Elementwise, element, name);
        // SAFETY: the addresses are those of spans of these lengths, and the table covers them.
        unsafe { self.launch(stream, kernel, Grid::over(n), &args) }
    }
}
