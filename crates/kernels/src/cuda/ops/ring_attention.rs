//! Steps of ring attention, as in [`crate::ring_attention`], by own kernels.

use super::super::attention::AttentionShape;
use super::super::device::{CudaError, Device, Stream};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, Source, StepShape};
use super::attention::{WARPS, heads, sizes};
use super::{elements, fresh, word};
use crate::arena::Span;
use crate::ring_attention::Other;
use crate::{Rows, Write};

/// Operands of a step's forward pass, on packed rows `[queries | keys | values]`.
#[derive(Clone, Copy, Debug)]
pub struct RingStepAt {
    /// Packed rows of this rank.
    pub qkv: Span,
    /// Packed keys and values of another rank.
    pub kv: Span,
    /// Output rows of the steps so far, or of all.
    pub output: Span,
    /// Logarithms of their sums of exponentials, `[batch, heads, seq]`.
    pub lse: Span,
}

/// Operands of a step's backward pass.
#[derive(Clone, Copy, Debug)]
pub struct RingStepGradientAt {
    /// Operands of the forward pass; the output is that of all steps.
    pub forward: RingStepAt,
    /// Gradient of the output rows.
    pub doutput: Span,
    /// Gradient of the packed rows, to whose queries the step adds.
    pub dqkv: Span,
    /// Gradient of the other rank's keys and values.
    pub dkv: Span,
}

/// Queries that see any key, and the keys that they see.
fn seen(other: Other, seq: u64) -> StepShape {
    let half = seq as u32 / 2;
    match other {
        Other::Earlier => StepShape { first: 0, keys: half },
        Other::Later => StepShape { first: half, keys: seq as u32 },
    }
}

fn grid(shape: &AttentionShape, rows: u32, heads: u64) -> Grid {
    let blocks = (rows.div_ceil(WARPS), (shape.batch * heads) as u32);
    Grid { blocks, threads: 32 * WARPS, shared: 0 }
}

impl Device {
    /// Merges a step into the output.
    pub fn ring_step(
        &self,
        stream: Stream,
        shape: &AttentionShape,
        other: Other,
        on: &RingStepAt,
    ) -> Result<(), CudaError> {
        let [qkv, kv, output, lse] = self.ring_operands(shape, on)?;
        let step = seen(other, shape.seq);
        let args = [qkv, kv, output, lse, Arg::Heads(heads(shape)), Arg::Step(step)];
        let grid = grid(shape, shape.seq as u32 - step.first, shape.heads);
        let kernel = (Source::Attention, shape.element, "step_forward");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, grid, &args) }
    }

    /// Gradients of a step; those of keys and values are added or overwritten.
    pub fn ring_step_gradient(
        &mut self,
        stream: Stream,
        shape: &AttentionShape,
        other: Other,
        on: &RingStepGradientAt,
        mode: Write,
    ) -> Result<(), CudaError> {
        let [of_qkv, of_output, of_lse] = sizes(shape);
        let [qkv, kv, output, lse] = self.ring_operands(shape, &on.forward)?;
        let doutput = Arg::At(self.of("its gradient", on.doutput, of_output, shape.element)?);
        let dqkv = Arg::At(self.of("qkv's gradient", on.dqkv, of_qkv, shape.element)?);
        let dkv = self.of("kv's gradient", on.dkv, of_kv(shape), shape.element)?;
        let [sums] = self.scratch(stream, [of_lse * 4])?.map(Arg::At);
        let (step, of) = (seen(other, shape.seq), Arg::Heads(heads(shape)));
        let args = [doutput, qkv, kv, output, lse, dqkv, sums, of, Arg::Step(step)];
        let queries = grid(shape, shape.seq as u32 - step.first, shape.heads);
        let kernel = (Source::Attention, shape.element, "step_queries");
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, kernel, queries, &args) }?;
        let fresh = Arg::Word(fresh(mode));
        let args = [doutput, qkv, kv, lse, sums, Arg::At(dkv), of, Arg::Step(step), fresh];
        let keys = grid(shape, shape.seq as u32, shape.kv_heads);
        let kernel = (Source::Attention, shape.element, "step_keys");
        // SAFETY: as above; every key has a warp.
        unsafe { self.launch(stream, kernel, keys, &args) }
    }

    fn ring_operands(
        &self,
        shape: &AttentionShape,
        on: &RingStepAt,
    ) -> Result<[Arg; 4], CudaError> {
        let [of_qkv, of_output, of_lse] = sizes(shape);
        Ok([
            Arg::At(self.of("qkv", on.qkv, of_qkv, shape.element)?),
            Arg::At(self.of("kv", on.kv, of_kv(shape), shape.element)?),
            Arg::At(self.of("the output", on.output, of_output, shape.element)?),
            Arg::At(self.of("the statistics", on.lse, of_lse, ElementType::F32)?),
        ])
    }

    /// Copies the keys and values of packed rows, or adds their gradient to that of the rows.
    pub fn keys_and_values(
        &self,
        stream: Stream,
        element: ElementType,
        (packed, own): (Rows, Rows),
        (qkv, kv): (Span, Span),
        add: bool,
    ) -> Result<(), CudaError> {
        let qkv = Arg::At(self.of("qkv", qkv, elements(packed), element)?);
        let kv = Arg::At(self.of("kv", kv, elements(own), element)?);
        let [rows, width, narrow] =
            [own.rows, packed.width, own.width].map(|number| Arg::Word(word(number)));
        let (name, args) = match add {
            false => ("keys_values", [qkv, kv, rows, width, narrow]),
            true => ("add_keys_values", [kv, qkv, rows, width, narrow]),
        };
        let kernel = (Source::Attention, element, name);
        // SAFETY: the addresses are those of spans of the shapes' lengths, with equally many rows.
        unsafe { self.launch(stream, kernel, Grid::over(elements(own)), &args) }
    }
}

/// Elements of packed keys and values.
const fn of_kv(shape: &AttentionShape) -> u64 {
    2 * shape.batch * shape.seq * shape.kv_heads * shape.head_dim
}
