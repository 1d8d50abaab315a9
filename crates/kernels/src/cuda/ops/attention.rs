//! Causal attention: by cuDNN, or by own kernels where it has none.

use super::super::attention::{AttentionShape, BackwardAt, ForwardAt};
use super::super::device::{CudaError, Device, Stream};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, HeadShape, Source};
use crate::arena::Span;

/// Operands of a forward pass, on packed rows `[queries | keys | values]`.
#[derive(Clone, Copy, Debug)]
pub struct AttentionAt {
    /// Packed rows.
    pub qkv: Span,
    /// Output rows.
    pub output: Span,
    /// Logarithms of the sums of exponentials, `[batch, heads, seq]`.
    pub lse: Span,
}

/// Operands of a backward pass.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGradientAt {
    /// Operands of the forward pass.
    pub forward: AttentionAt,
    /// Gradient of the output rows.
    pub doutput: Span,
    /// Gradient of the packed rows.
    pub dqkv: Span,
}

/// Widest head of the own kernels.
const WIDEST: u64 = 256;
/// Rows of a block of the own kernels.
pub(super) const WARPS: u32 = 8;

/// Elements of packed rows, output rows and statistics.
pub(super) const fn sizes(shape: &AttentionShape) -> [u64; 3] {
    let AttentionShape { batch, seq, heads, kv_heads, head_dim, .. } = *shape;
    let rows = batch * seq;
    [rows * (heads + 2 * kv_heads) * head_dim, rows * heads * head_dim, rows * heads]
}

pub(super) fn heads(shape: &AttentionShape) -> HeadShape {
    let [seq, heads, kv_heads, dim] =
        [shape.seq, shape.heads, shape.kv_heads, shape.head_dim].map(|n| n as u32);
    HeadShape { seq, heads, kv_heads, dim, scale: (shape.head_dim as f32).sqrt().recip() }
}

fn grid(shape: &AttentionShape, heads: u64) -> Grid {
    let blocks = ((shape.seq as u32).div_ceil(WARPS), (shape.batch * heads) as u32);
    Grid { blocks, threads: 32 * WARPS, shared: 0 }
}

/// Blocks of 128 keys of all heads that occupy a GPU well: more need more workspace, not less time.
const ENOUGH: u64 = 1024;

/// Sequences of a shape that the backward pass computes at once: its workspace has a gradient of the
/// queries for every block of keys.
fn part_of(shape: &AttentionShape) -> AttentionShape {
    let blocks = shape.heads * shape.seq.div_ceil(128).max(1);
    let enough = |batch: &u64| shape.batch.is_multiple_of(*batch) && batch * blocks >= ENOUGH;
    let batch = (1..shape.batch).find(enough).unwrap_or(shape.batch);
    AttentionShape { batch, ..*shape }
}

impl Device {
    /// Returns true if attention with heads of a width can be computed.
    pub const fn has_attention(head_dim: u64) -> bool {
        head_dim <= WIDEST
    }

    /// Weighted values of every row.
    pub fn attention_forward(
        &mut self,
        stream: Stream,
        shape: &AttentionShape,
        on: &AttentionAt,
    ) -> Result<(), CudaError> {
        let [of_qkv, of_output, of_lse] = sizes(shape);
        let qkv = self.of("qkv", on.qkv, of_qkv, shape.element)?;
        let output = self.of("the output", on.output, of_output, shape.element)?;
        let stats = self.of("the statistics", on.lse, of_lse, ElementType::F32)?;
        if let Some([workspace, _]) = self.attention_workspace(stream, *shape)? {
            let [workspace] = self.scratch(stream, [workspace])?;
            let at = ForwardAt { qkv, output, stats, workspace };
            let Some((cudnn, attention)) = self.attention(stream, shape) else { return Ok(()) };
            // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
            return unsafe { attention.forward(cudnn, &at) };
        }
        let args = [Arg::At(qkv), Arg::At(output), Arg::At(stats), Arg::Heads(heads(shape))];
        let kernel = (Source::Attention, shape.element, "attention_forward");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, grid(shape, shape.heads), &args) }
    }

    /// Gradient of the packed rows.
    pub fn attention_gradient(
        &mut self,
        stream: Stream,
        shape: &AttentionShape,
        on: &AttentionGradientAt,
    ) -> Result<(), CudaError> {
        let [of_qkv, of_output, of_lse] = sizes(shape);
        let AttentionAt { qkv, output, lse } = on.forward;
        let qkv = self.of("qkv", qkv, of_qkv, shape.element)?;
        let output = self.of("the output", output, of_output, shape.element)?;
        let stats = self.of("the statistics", lse, of_lse, ElementType::F32)?;
        let output_gradient = self.of("its gradient", on.doutput, of_output, shape.element)?;
        let qkv_gradient = self.of("qkv's gradient", on.dqkv, of_qkv, shape.element)?;
        let part = part_of(shape);
        if let Some([_, workspace]) = self.attention_workspace(stream, part)? {
            let [workspace] = self.scratch(stream, [workspace])?;
            let Some((cudnn, attention)) = self.attention(stream, &part) else { return Ok(()) };
            let sizes = sizes(&part);
            for number in 0..shape.batch / part.batch {
                let [of_qkv, of_output] = [0, 1].map(|i| number * sizes[i] * shape.element.bytes());
                let forward = ForwardAt {
                    qkv: qkv + of_qkv,
                    output: output + of_output,
                    stats: stats + number * sizes[2] * 4,
                    workspace,
                };
                let (output_gradient, qkv_gradient) =
                    (output_gradient + of_output, qkv_gradient + of_qkv);
                let at = BackwardAt { forward, output_gradient, qkv_gradient };
                // SAFETY: the addresses are those of the part's rows in spans of the shape's
                // lengths, and of scratch.
                unsafe { attention.backward(cudnn, &at) }?;
            }
            return Ok(());
        }
        let [sums] = self.scratch(stream, [of_lse * 4])?;
        let shape_of = Arg::Heads(heads(shape));
        let args = [output_gradient, qkv, output, stats, qkv_gradient, sums].map(Arg::At);
        let args: Vec<Arg> = args.into_iter().chain([shape_of]).collect();
        let kernel = (Source::Attention, shape.element, "attention_queries");
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, kernel, grid(shape, shape.heads), &args) }?;
        let args = [output_gradient, qkv, stats, sums, qkv_gradient].map(Arg::At);
        let args: Vec<Arg> = args.into_iter().chain([shape_of]).collect();
        let kernel = (Source::Attention, shape.element, "attention_keys");
        // SAFETY: as above.
        unsafe { self.launch(stream, kernel, grid(shape, shape.kv_heads), &args) }
    }
}
