//! Norms of heads, and latent attention.

use super::super::device::{CudaError, Device, Stream, Table};
use super::super::element_type::ElementType;
use super::super::jit::{Arg, Grid, Source};
use super::{elements, word};
use crate::arena::Span;
use crate::{Rows, Write, head_norm, latent};

/// Operands of the gradients of a norm of heads.
#[derive(Clone, Copy, Debug)]
pub struct HeadNormGradientAt {
    /// Gradient of the output.
    pub dy: Span,
    /// Packed rows.
    pub x: Span,
    /// Gains of queries and keys; not needed for their gradients alone.
    pub gains: Option<[Span; 2]>,
    /// Statistics of the heads.
    pub stats: Span,
    /// Gradient of the packed rows.
    pub dx: Option<Span>,
    /// Gradients of the gains, f32.
    pub dgains: Option<([Span; 2], Write)>,
}

/// Operands of latent attention's heads, or their gradients.
#[derive(Clone, Copy, Debug)]
pub struct LatentAt {
    /// Queries.
    pub q: Span,
    /// Unrotated keys and values by head.
    pub kv: Span,
    /// Rotated parts of the keys.
    pub turned: Span,
    /// Packed rows.
    pub qkv: Span,
    /// Cosine and sine by position and pair, `[seq, rope / 2]`.
    pub table: Table,
    /// Tokens of a sequence.
    pub seq: usize,
}

/// Blocks of the backward pass: a fixed number, so that sums do not depend on the GPU.
const BLOCKS: u32 = 264;
/// Widest head.
const WIDEST: u64 = 256;

impl Device {
    /// Returns true if heads of a width can be normalised.
    pub const fn has_head_norm(head_dim: u64) -> bool {
        head_dim <= WIDEST
    }

    /// Norm of every query and key head.
    pub fn head_norm(
        &self,
        stream: Stream,
        element: ElementType,
        (shape, rows, eps): (head_norm::Shape, usize, f32),
        (x, gains, y, stats): (Span, [Span; 2], Span, Span),
    ) -> Result<(), CudaError> {
        let (n, dim) = ((rows * shape.width()) as u64, shape.head_dim as u64);
        let of_stats = (rows * shape.stats()) as u64;
        let all = shape.heads + 2 * shape.kv_heads;
        let args = [
            Arg::At(self.of("x", x, n, element)?),
            Arg::At(self.of("the gain", gains[0], dim, element)?),
            Arg::At(self.of("the gain", gains[1], dim, element)?),
            Arg::At(self.of("y", y, n, element)?),
            Arg::At(self.of("the statistics", stats, of_stats, ElementType::F32)?),
            Arg::Word(word(rows)),
            Arg::Word(word(shape.heads)),
            Arg::Word(word(shape.kv_heads)),
            Arg::Word(word(shape.head_dim)),
            Arg::Real(eps),
        ];
        let grid = Grid::of(word((rows * all).div_ceil(8)), 256);
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, (Source::Heads, element, "head_norm_forward"), grid, &args) }
    }

    /// Gradients of a norm of heads.
    pub fn head_norm_gradient(
        &mut self,
        stream: Stream,
        element: ElementType,
        (shape, rows): (head_norm::Shape, usize),
        on: &HeadNormGradientAt,
    ) -> Result<(), CudaError> {
        let (n, dim) = ((rows * shape.width()) as u64, shape.head_dim as u64);
        let of_stats = (rows * shape.stats()) as u64;
        let [partial] = self.scratch(stream, [u64::from(BLOCKS) * 2 * dim * 4])?;
        let dy = self.of("dy", on.dy, n, element)?;
        let x = self.of("x", on.x, n, element)?;
        let stats = self.of("the statistics", on.stats, of_stats, ElementType::F32)?;
        // Without the gradient of the rows, any numbers serve as gains.
        let [q, k] = match on.gains {
            Some([q, k]) => {
                [self.of("the gain", q, dim, element)?, self.of("the gain", k, dim, element)?]
            }
            None => [x, x],
        };
        let dx = on.dx.map_or(Ok(0), |dx| self.of("dx", dx, n, element))?;
        let sizes = [rows, shape.heads, shape.kv_heads, shape.head_dim];
        let args = [dy, x, q, k, stats, dx, partial].map(Arg::At);
        let args: Vec<Arg> =
            args.into_iter().chain(sizes.map(|size| Arg::Word(word(size)))).collect();
        let kernel = (Source::Heads, element, "head_norm_backward");
        // SAFETY: the addresses are those of spans of the shape's lengths and of scratch.
        unsafe { self.launch(stream, kernel, Grid::of(BLOCKS, 256), &args) }?;
        let Some((gains, mode)) = on.dgains else { return Ok(()) };
        for (which, gain) in (0..).zip(gains) {
            let to = self.of("the gain's gradient", gain, dim, ElementType::F32)?;
            let from = partial + which * dim * 4;
            let parts = (BLOCKS, word(shape.head_dim));
            self.fold_strided(stream, element, (from, 2 * dim), to, parts, mode)?;
        }
        Ok(())
    }

    fn latent_args(
        &self,
        element: ElementType,
        (shape, rows): (latent::Shape, usize),
        on: &LatentAt,
        forward: bool,
    ) -> Result<Vec<Arg>, CudaError> {
        let latent::Shape { heads, head_dim, rope, v_dim, .. } = shape;
        let own = heads * (head_dim - rope + v_dim);
        let len = (on.seq * (rope / 2) * 8) as u64;
        if on.table.bytes != len {
            let (what, span, bytes) = ("the rotation's table", on.q, on.table.bytes);
            return Err(CudaError::Span { what, span, len, bytes });
        }
        let of = |what, span, width: usize| self.of(what, span, (rows * width) as u64, element);
        let q = of("the queries", on.q, heads * head_dim)?;
        let kv = of("keys and values", on.kv, own)?;
        let turned = of("the rotated keys", on.turned, rope)?;
        let qkv = of("the packed rows", on.qkv, 3 * heads * head_dim)?;
        let mut args: Vec<Arg> = match forward {
            true => [q, kv, turned, qkv],
            false => [qkv, q, kv, turned],
        }
        .into_iter()
        .map(Arg::At)
        .collect();
        args.push(Arg::At(self.table_at(on.table)));
        args.extend([rows, heads, head_dim, rope, v_dim, on.seq].map(|n| Arg::Word(word(n))));
        Ok(args)
    }

    /// Packed rows of latent attention from its inputs, or with `forward` false the gradients of
    /// those from the rows'.
    pub fn latent_heads(
        &self,
        stream: Stream,
        element: ElementType,
        (shape, rows): (latent::Shape, usize),
        on: &LatentAt,
        forward: bool,
    ) -> Result<(), CudaError> {
        let args = self.latent_args(element, (shape, rows), on, forward)?;
        let name = if forward { "latent_heads" } else { "latent_heads_gradient" };
        let grid = Grid::over((rows * shape.heads * shape.head_dim * 8) as u64);
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, (Source::Heads, element, name), grid, &args) }
    }

    /// Values without their padding, or with `back` gradients with it.
    pub fn latent_values(
        &self,
        stream: Stream,
        element: ElementType,
        (shape, rows): (latent::Shape, usize),
        (x, y): (Span, Span),
        back: bool,
    ) -> Result<(), CudaError> {
        let of = |dim: usize| Rows { rows, width: shape.heads * dim };
        let (wide, narrow) = (elements(of(shape.head_dim)), elements(of(shape.v_dim)));
        let (of_x, of_y) = if back { (narrow, wide) } else { (wide, narrow) };
        let args = [
            Arg::At(self.of("x", x, of_x, element)?),
            Arg::At(self.of("y", y, of_y, element)?),
            Arg::Word(word(rows)),
            Arg::Word(word(shape.heads)),
            Arg::Word(word(shape.head_dim)),
            Arg::Word(word(shape.v_dim)),
            Arg::Word(u32::from(back)),
        ];
        let kernel = (Source::Heads, element, "latent_values");
        // SAFETY: the addresses are those of spans of the shape's lengths.
        unsafe { self.launch(stream, kernel, Grid::over(of_y * 8), &args) }
    }
}
