//! Multi-head and grouped-query attention on the fused output of the query, key and value
//! projections.
//!
//! `softmax(q k^T / sqrt(head_dim)) v` (Vaswani et al., 2017, equation 1), where a row of `qkv` is
//! `[query heads | key heads | value heads]` and each key head serves `heads / kv_heads`
//! consecutive query heads (Ainslie et al., 2023). Only the scores of one block of queries of one
//! head exist at a time. The forward pass saves the logarithm of each softmax's denominator; the
//! backward pass recomputes the scores from it (Dao, "FlashAttention-2", 2023, algorithm 2).
//!
//! [`Scores`] states what models add to that: other masks, bounded scores, biases by distance, and a
//! learned score of no key per head (Xiao et al., arXiv 2309.17453, as in gpt-oss).
//!
//! Scores, sums and statistics are single precision. Operands of 16 bits are multiplied as they
//! are; probabilities and the gradients of scores are rounded to their type before they are
//! multiplied, on every processor.

use crate::element::narrow;
use crate::instruction_set::vectorised;
use crate::math::{exp, ln_f64, tanh};
use crate::matmul::{Operand, PackBuffer, Product};
use crate::ordered_sum;
use crate::pool::{Cut, Pool, Strips, strips};
use crate::shape::expect_len;
use crate::{Element, Write};
use std::ops::Range;

/// Keys that a query attends to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mask {
    /// Its own and earlier ones.
    #[default]
    Causal,
    /// The last so many, its own included.
    Window(usize),
    /// Its own and earlier ones of its chunk of so many tokens.
    Chunk(usize),
    /// All.
    Full,
}

impl Mask {
    /// Keys that a query attends to.
    #[inline(always)]
    pub fn keys(self, query: usize, seq: usize) -> Range<usize> {
        match self {
            Self::Causal => 0..query + 1,
            Self::Window(window) => (query + 1).saturating_sub(window)..query + 1,
            Self::Chunk(chunk) => query / chunk.max(1) * chunk..query + 1,
            Self::Full => 0..seq,
        }
    }
}

/// Scores of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// Keys that a query attends to.
    pub mask: Mask,
    /// Factor of the scores; 0 for `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Bound c of the scores, `c tanh(score / c)`; 0 for none.
    pub softcap: f32,
    /// Biases linear in the distance (Press et al., ALiBi, arXiv 2108.12409), if there are any.
    pub alibi: Option<Alibi>,
}

/// Heads with biases linear in the distance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alibi {
    /// Number of heads of the model.
    pub heads: usize,
    /// Number of the first of these heads.
    pub first: usize,
    /// Factor of the biases.
    pub scale: f32,
}

impl Alibi {
    /// Slope of a head's biases: powers of `2^(-8/n)` for the first n heads, n a power of two, and
    /// every second one of twice as many heads for the rest.
    fn slope(self, head: usize) -> f32 {
        let (head, whole) = (self.first + head, 1 << self.heads.max(1).ilog2());
        let exponent = match head < whole {
            true => 8.0 * (head + 1) as f64 / whole as f64,
            false => 4.0 * (2 * (head - whole) + 1) as f64 / whole as f64,
        };
        self.scale * (-exponent).exp2() as f32
    }
}

/// A query of one head.
#[derive(Clone, Copy, Debug)]
pub struct Query {
    /// Number of the head.
    pub head: usize,
    /// Width of the head.
    pub head_dim: usize,
    /// Position of the token.
    pub position: usize,
}

impl Scores {
    /// Attention to all keys.
    pub const FULL: Self = Self { mask: Mask::Full, scale: 0.0, softcap: 0.0, alibi: None };

    /// Converts the products of a query with keys from `first` on to attention weights. `sink` is the
    /// head's score of no key.
    pub fn soften(&self, query: Query, first: usize, sink: Option<f32>, weights: &mut [f32]) {
        let (scale, at) = (self.factor(query.head_dim), query.position as f32);
        let slope = self.alibi.map_or(0.0, |alibi| alibi.slope(query.head));
        for (key, weight) in (first..).zip(weights.iter_mut()) {
            *weight = self.bounded(*weight * scale) + slope * (key as f32 - at);
        }
        let none = sink.unwrap_or(f32::NEG_INFINITY);
        let most = weights.iter().copied().fold(none, f32::max);
        weights.iter_mut().for_each(|weight| *weight = exp(*weight - most));
        let sum = weights.iter().sum::<f32>() + sink.map_or(0.0, |sink| exp(sink - most));
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }

    /// Factor of the scores of heads of a width.
    pub(crate) fn factor(&self, head_dim: usize) -> f32 {
        if self.scale > 0.0 { self.scale } else { 1.0 / (head_dim as f32).sqrt() }
    }

    /// Returns true if scores are only scaled.
    pub(crate) fn is_linear(&self) -> bool {
        self.softcap == 0.0 && self.alibi.is_none()
    }

    /// A scaled score within its bound.
    #[inline(always)]
    pub(crate) fn bounded(&self, score: f32) -> f32 {
        if self.softcap > 0.0 { self.softcap * tanh(score / self.softcap) } else { score }
    }

    /// Derivative of [`Self::bounded`] at its value.
    #[inline(always)]
    pub(crate) fn slope(&self, bounded: f32) -> f32 {
        let share = if self.softcap > 0.0 { bounded / self.softcap } else { 0.0 };
        1.0 - share * share
    }
}

/// Sizes of an attention operator on one microbatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Number of sequences.
    pub batch: usize,
    /// Number of tokens per sequence.
    pub seq: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key heads, equal to the number of value heads: a divisor of `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Scores.
    pub scores: Scores,
}

impl Shape {
    /// Number of workspace elements that each thread needs in [`forward`]. It grows with the length
    /// of a sequence, not with its square.
    pub fn forward_workspace<T: Element>(&self) -> usize {
        let block = BLOCK.min(self.seq);
        let rows = block.saturating_mul(self.seq.saturating_add(self.head_dim));
        rows.saturating_add(self.rounded::<T>())
    }

    /// Number of workspace elements for a block of scores in the type of the operands.
    fn rounded<T: Element>(&self) -> usize {
        let scores = BLOCK.min(self.seq).saturating_mul(self.seq);
        if T::singles(&[]).is_some() {
            0
        } else {
            scores.div_ceil(size_of::<f32>() / size_of::<T>())
        }
    }

    /// Number of workspace elements that each thread needs in [`backward`].
    pub fn backward_workspace<T: Element>(&self) -> usize {
        let block = BLOCK.min(self.seq);
        let scores = block.saturating_mul(self.seq).saturating_add(self.rounded::<T>());
        let rows = self.seq.saturating_mul(2).saturating_add(block);
        scores.saturating_mul(2).saturating_add(rows.saturating_mul(self.head_dim))
    }

    /// Width of a fused row.
    fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Scale factor of the scores.
    fn scale(&self) -> f32 {
        self.scores.factor(self.head_dim)
    }

    /// Number of query blocks per sequence.
    fn blocks(&self) -> usize {
        self.seq.div_ceil(BLOCK)
    }

    /// Block of queries of one head, and its offsets in the tensors.
    fn block(self, sequence: usize, head: usize, index: usize) -> Block {
        let Shape { seq, heads, kv_heads, head_dim, .. } = self;
        let first = index * BLOCK;
        let queries = BLOCK.min(seq - first);
        let kv_head = head / (heads / kv_heads);
        let start = sequence * seq * self.width();
        let mask = self.scores.mask;
        // The first query sees the earliest keys, the last one the latest.
        let from = mask.keys(first, seq).start;
        let to = mask.keys(first + queries - 1, seq).end;
        let early = start + from * self.width();
        Block {
            head,
            first,
            queries,
            from,
            keys: to - from,
            q: start + first * self.width() + head * head_dim,
            k: early + (heads + kv_head) * head_dim,
            v: early + (heads + kv_heads + kv_head) * head_dim,
            out: ((sequence * seq + first) * heads + head) * head_dim,
            lse: (sequence * heads + head) * seq + first,
        }
    }

    /// Panics on invalid sizes, or on tensors that do not have these sizes.
    #[track_caller]
    fn expect<T: Element>(&self, qkv: &[T], out: &[T], lse: &[f32]) {
        let Shape { batch, seq, heads, kv_heads, head_dim, .. } = *self;
        assert!(
            kv_heads > 0 && heads.is_multiple_of(kv_heads),
            "{heads} query heads cannot share {kv_heads} key heads equally"
        );
        assert!(head_dim > 0, "a head has at least one element");
        expect_len("qkv", qkv.len(), &[batch, seq, heads + 2 * kv_heads, head_dim]);
        expect_len("out", out.len(), &[batch, seq, heads, head_dim]);
        expect_len("lse", lse.len(), &[batch, heads, seq]);
    }
}

/// `out[batch, seq, heads * head_dim]` from `qkv[batch, seq, (heads + 2 kv_heads) * head_dim]`.
///
/// Saves `lse[batch, heads, seq]`, the logarithm of the sum of the exponentials of each query's
/// scores. `workspace` has [`Shape::forward_workspace`] elements for each thread of the pool; its
/// contents do not matter. `sinks` has each head's score of no key, if there are any.
pub fn forward<T: Element>(
    pool: &Pool,
    shape: Shape,
    qkv: &[T],
    sinks: Option<&[T]>,
    out: &mut [T],
    lse: &mut [f32],
    workspace: &mut [f32],
) {
    shape.expect(qkv, out, lse);
    let own = shape.forward_workspace::<T>();
    expect_len("workspace", workspace.len(), &[pool.threads(), own]);
    let (width, head_dim, stride) = (shape.width(), shape.head_dim, shape.heads * shape.head_dim);
    let (out, lse) = (strips(out, 1), strips(lse, 1));
    for_each_in(
        pool,
        shape.batch * shape.heads * shape.blocks(),
        workspace,
        own,
        |room, own, tile| {
            let (pair, index) = (tile / shape.blocks(), tile % shape.blocks());
            let block = shape.block(pair / shape.heads, pair % shape.heads, index);
            let Block { queries, keys, .. } = block;
            let (scores, rest) = own.split_at_mut(queries * keys);
            let (attended, rest) = rest.split_at_mut(queries * head_dim);
            block.scores(room, shape, qkv, scores);
            // SAFETY: the statistics of this block of this head are inside the slice, and no other
            // tile has the same.
            let lse = unsafe { lse.piece(block.lse..block.lse + queries) };
            let sink = sinks.map(|sinks| sinks[block.head].widen());
            let sums = softmax_rows(&block, shape, scores, sink, lse);
            Product { height: queries, width: head_dim, depth: keys }.compute_in(
                room,
                Operand::rows(rounded::<T>(scores, rest), keys),
                Operand::rows(&qkv[block.v..], width),
                attended,
                head_dim,
                Write::Overwrite,
            );
            for (row, attended) in attended.chunks_exact(head_dim).enumerate() {
                let share = 1.0 / sums[row];
                let at = block.out + row * stride;
                // SAFETY: as above, for one head's part of a row of the output.
                let out = unsafe { out.piece(at..at + head_dim) };
                for (out, &value) in out.iter_mut().zip(attended) {
                    *out = T::narrow(value * share);
                }
            }
        },
    );
}

/// `dqkv` from the gradient of the output and from the inputs and saved values of the forward pass.
///
/// `workspace` has [`Shape::backward_workspace`] elements for each thread of the pool; its contents
/// do not matter. The gradients of a key or value head are summed over the query heads that share
/// it, in their order. Within a head they are summed over the blocks of queries, from the first
/// token to the last.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn backward<T: Element>(
    pool: &Pool,
    shape: Shape,
    dout: &[T],
    qkv: &[T],
    out: &[T],
    lse: &[f32],
    dqkv: &mut [T],
    workspace: &mut [f32],
) {
    shape.expect(qkv, out, lse);
    expect_len("dout", dout.len(), &[out.len()]);
    expect_len("dqkv", dqkv.len(), &[qkv.len()]);
    let own = shape.backward_workspace::<T>();
    expect_len("workspace", workspace.len(), &[pool.threads(), own]);
    let saved = Saved { dout, qkv, out, lse };
    let dqkv = strips(dqkv, 1);
    for_each_in(pool, shape.batch * shape.kv_heads, workspace, own, |room, own, tile| {
        let (sequence, kv_head) = (tile / shape.kv_heads, tile % shape.kv_heads);
        saved.backward_of(shape, sequence, kv_head, room, own, &dqkv);
    });
}

/// `dsinks (+)=` minus each head's sum over tokens of the softmax's share of no key times the
/// gradient of that row, `dot(dout, out)`.
pub fn sink_gradient<T: Element, G: Element>(
    shape: Shape,
    dout: &[T],
    out: &[T],
    lse: &[f32],
    sinks: &[f32],
    dsinks: &mut [G],
    mode: Write,
) {
    let Shape { batch, seq, heads, head_dim, .. } = shape;
    expect_len("dout", dout.len(), &[out.len()]);
    expect_len("lse", lse.len(), &[batch, heads, seq]);
    for (head, (sink, dsink)) in sinks.iter().zip(dsinks).enumerate() {
        let mut sum = mode.start(*dsink);
        for sequence in 0..batch {
            for token in 0..seq {
                let at = ((sequence * seq + token) * heads + head) * head_dim;
                let row = at..at + head_dim;
                let dot = ordered_sum::sum([&dout[row.clone()], &out[row]], |[d, o]| d * o);
                let lse = lse[(sequence * heads + head) * seq + token];
                sum -= exp(sink - lse) * dot;
            }
        }
        *dsink = G::narrow(sum);
    }
}

/// Inputs of the backward pass.
#[derive(Clone, Copy)]
struct Saved<'a, T> {
    dout: &'a [T],
    qkv: &'a [T],
    out: &'a [T],
    lse: &'a [f32],
}

impl<T: Element> Saved<'_, T> {
    /// Gradients of one key and value head of a sequence, and of the query heads it serves.
    fn backward_of(
        self,
        shape: Shape,
        sequence: usize,
        kv_head: usize,
        room: &mut PackBuffer,
        own: &mut [f32],
        dqkv: &Strips<'_, T>,
    ) {
        let Shape { seq, head_dim, .. } = shape;
        let (width, stride) = (shape.width(), shape.heads * head_dim);
        let group = shape.heads / shape.kv_heads;
        let (probabilities, own) = own.split_at_mut(BLOCK.min(seq) * seq);
        let (gradients, own) = own.split_at_mut(BLOCK.min(seq) * seq);
        let (of_p, own) = own.split_at_mut(shape.rounded::<T>());
        let (of_ds, own) = own.split_at_mut(shape.rounded::<T>());
        let (dk, own) = own.split_at_mut(seq * head_dim);
        let (dv, dq) = own.split_at_mut(seq * head_dim);
        dk.fill(0.0);
        dv.fill(0.0);
        let write = |rows: &[f32], at: usize| {
            for (row, values) in rows.chunks_exact(head_dim).enumerate() {
                let at = at + row * width;
                // SAFETY: `at` is an offset of this key head, or of a query head that it serves, in
                // the rows of this sequence: inside the slice, and no other tile writes there.
                let part = unsafe { dqkv.piece(at..at + head_dim) };
                narrow(values, part);
            }
        };
        // Offsets of the first token's key and value.
        let start = sequence * seq * width;
        let of = |head: usize| start + (shape.heads + head) * head_dim;
        let places = (of(kv_head), of(shape.kv_heads + kv_head));
        for head in kv_head * group..(kv_head + 1) * group {
            for index in 0..shape.blocks() {
                let block = shape.block(sequence, head, index);
                let Block { queries, keys, .. } = block;
                let p = &mut probabilities[..queries * keys];
                let ds = &mut gradients[..queries * keys];
                let dout = &self.dout[block.out..];
                let early = block.from * head_dim;

                block.scores(room, shape, self.qkv, p);
                Product { height: queries, width: keys, depth: head_dim }.compute_in(
                    room,
                    Operand::rows(dout, stride),
                    Operand::transposed(&self.qkv[block.v..], width),
                    ds,
                    keys,
                    Write::Overwrite,
                );
                score_gradients(&block, shape, (dout, &self.out[block.out..]), self.lse, p, ds);
                let (p, ds) = (rounded::<T>(p, of_p), rounded::<T>(ds, of_ds));

                let to_keys = Product { height: keys, width: head_dim, depth: queries };
                for (by, rows, apart, gradient) in
                    [(p, dout, stride, &mut *dv), (ds, &self.qkv[block.q..], width, &mut *dk)]
                {
                    to_keys.compute_in(
                        room,
                        Operand::transposed(by, keys),
                        Operand::rows(rows, apart),
                        &mut gradient[early..],
                        head_dim,
                        Write::Accumulate,
                    );
                }
                let dq = &mut dq[..queries * head_dim];
                Product { height: queries, width: head_dim, depth: keys }.compute_in(
                    room,
                    Operand::rows(ds, keys),
                    Operand::rows(&self.qkv[block.k..], width),
                    dq,
                    head_dim,
                    Write::Overwrite,
                );
                write(dq, block.q);
            }
        }
        if seq > 0 {
            write(dk, places.0);
            write(dv, places.1);
        }
    }
}

/// Numbers in the type of the operands: themselves, or rounded into a workspace.
fn rounded<'a, T: Element>(x: &'a [f32], room: &'a mut [f32]) -> &'a [T] {
    if T::singles(&[]).is_some() {
        return bytemuck::cast_slice(x);
    }
    let y = &mut bytemuck::cast_slice_mut(room)[..x.len()];
    narrow(x, y);
    y
}

/// Calls `body` for each tile with a pack buffer for GEMMs and `own` elements of the workspace.
pub(crate) fn for_each_in(
    pool: &Pool,
    tiles: usize,
    workspace: &mut [f32],
    own: usize,
    body: impl Fn(&mut PackBuffer, &mut [f32], usize) + Sync,
) {
    let rooms = &mut *pool.pack_buffers();
    let (rooms, workspace) = (strips(&mut rooms.own, 1), strips(workspace, own));
    pool.for_each_slot(tiles, |slot, tile| {
        // SAFETY: there is a pack buffer, and a part of the workspace, for every thread of the
        // pool, and no two calls have the same slot at the same time.
        let (room, own) = unsafe { (rooms.piece(slot..slot + 1), workspace.piece(slot..slot + 1)) };
        body(&mut room[0], own, tile);
    });
}

/// Number of queries processed at a time: enough to keep a GEMM busy, few enough that little work
/// is wasted on the masked half of the diagonal block.
const BLOCK: usize = 64;

/// Block of queries of one head. Queries `first..first + queries` of a sequence attend to keys among
/// `from..from + keys`; the other fields are offsets of its first element in the tensors.
#[derive(Clone, Copy, Debug)]
struct Block {
    head: usize,
    first: usize,
    queries: usize,
    from: usize,
    keys: usize,
    q: usize,
    k: usize,
    v: usize,
    out: usize,
    lse: usize,
}

impl Block {
    /// `scores[queries, keys] = q k^T`, not yet scaled or masked.
    fn scores<T: Element>(
        &self,
        room: &mut PackBuffer,
        shape: Shape,
        qkv: &[T],
        scores: &mut [f32],
    ) {
        Product { height: self.queries, width: self.keys, depth: shape.head_dim }.compute_in(
            room,
            Operand::rows(&qkv[self.q..], shape.width()),
            Operand::transposed(&qkv[self.k..], shape.width()),
            scores,
            self.keys,
            Write::Overwrite,
        );
    }

    /// Keys of the block that the query in row `row` attends to.
    #[inline(always)]
    fn visible(&self, shape: Shape, row: usize) -> Range<usize> {
        let keys = shape.scores.mask.keys(self.first + row, shape.seq);
        keys.start - self.from..keys.end - self.from
    }

    /// Bias of the first key of the block for the query in row `row`, and its growth per key.
    #[inline(always)]
    fn bias(&self, shape: Shape, row: usize) -> (f32, f32) {
        match shape.scores.alibi {
            Some(alibi) => {
                let slope = alibi.slope(self.head);
                (slope * (self.from as f32 - (self.first + row) as f32), slope)
            }
            None => (0.0, 0.0),
        }
    }
}

/// Replaces scores by exponentials, writes the log-sum-exp of each row and returns the row sums.
/// The output is divided by the sums instead of the scores, because it is narrower.
fn softmax_rows(
    block: &Block,
    shape: Shape,
    scores: &mut [f32],
    sink: Option<f32>,
    lse: &mut [f32],
) -> [f32; BLOCK] {
    let (scale, rule) = (shape.scale(), shape.scores);
    let mut sums = [0.0; BLOCK];
    vectorised(
        #[inline(always)]
        || {
            for (row, (scores, lse)) in scores.chunks_exact_mut(block.keys).zip(lse).enumerate() {
                let visible = block.visible(shape, row);
                let (seen, hidden) = scores.split_at_mut(visible.end);
                let (early, seen) = seen.split_at_mut(visible.start);
                let mut factor = scale;
                if !rule.is_linear() {
                    let (bias, growth) = block.bias(shape, row);
                    for (key, score) in (visible.start..).zip(seen.iter_mut()) {
                        *score = rule.bounded(*score * scale) + (bias + growth * key as f32);
                    }
                    factor = 1.0;
                }
                let mut max = ordered_sum::max(&*seen) * factor;
                if let Some(sink) = sink {
                    max = max.max(sink);
                }
                for score in seen.iter_mut() {
                    *score = exp(*score * factor - max);
                }
                early.fill(0.0);
                hidden.fill(0.0);
                let mut sum = ordered_sum::sum([&*seen], |[p]| p);
                if let Some(sink) = sink {
                    sum += exp(sink - max);
                }
                *lse = (f64::from(max) + ln_f64(f64::from(sum))) as f32;
                sums[row] = sum;
            }
        },
    );
    sums
}

/// Converts scores `p` to probabilities, and the gradients `ds` of the probabilities to those of
/// the unscaled scores: `ds = p * (ds - dot(dout, out)) * scale`.
fn score_gradients<T: Element>(
    block: &Block,
    shape: Shape,
    (dout, out): (&[T], &[T]),
    lse: &[f32],
    p: &mut [f32],
    ds: &mut [f32],
) {
    let (scale, stride, rule) = (shape.scale(), shape.heads * shape.head_dim, shape.scores);
    vectorised(
        #[inline(always)]
        || {
            let rows = p.chunks_exact_mut(block.keys).zip(ds.chunks_exact_mut(block.keys));
            for (row, (p, ds)) in rows.enumerate() {
                let head = row * stride..row * stride + shape.head_dim;
                let dot = ordered_sum::sum([&dout[head.clone()], &out[head]], |[d, o]| d * o);
                let lse = lse[block.lse + row];
                let visible = block.visible(shape, row);
                let seen = p[visible.clone()].iter_mut().zip(&mut ds[visible.clone()]);
                if rule.is_linear() {
                    for (p, ds) in seen {
                        *p = exp(*p * scale - lse);
                        *ds = *p * (*ds - dot) * scale;
                    }
                } else {
                    let (bias, growth) = block.bias(shape, row);
                    for (key, (p, ds)) in (visible.start..).zip(seen) {
                        let bounded = rule.bounded(*p * scale);
                        *p = exp(bounded + (bias + growth * key as f32) - lse);
                        *ds = *p * (*ds - dot) * scale * rule.slope(bounded);
                    }
                }
                for outside in [0..visible.start, visible.end..block.keys] {
                    p[outside.clone()].fill(0.0);
                    ds[outside].fill(0.0);
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, bits, numeric_gradient, random, widen};
    use proptest::prelude::*;

    fn reference(s: Shape, qkv: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (d, width) = (s.head_dim, s.width());
        let mut out = vec![0.0; s.batch * s.seq * s.heads * d];
        let mut lse = vec![0.0; s.batch * s.heads * s.seq];
        for b in 0..s.batch {
            for h in 0..s.heads {
                let kv = h * s.kv_heads / s.heads;
                let at = |t: usize, head: usize| &qkv[(b * s.seq + t) * width + head * d..][..d];
                for t in 0..s.seq {
                    let seen = s.scores.mask.keys(t, s.seq);
                    let score = |u: usize| {
                        let (q, k) = (at(t, h), at(u, s.heads + kv));
                        let dot = q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                        let (scale, cap) = (f64::from(s.scale()), f64::from(s.scores.softcap));
                        let slope = s.scores.alibi.map_or(0.0, |alibi| f64::from(alibi.slope(h)));
                        let score = dot * scale;
                        let bounded = if cap > 0.0 { cap * (score / cap).tanh() } else { score };
                        bounded + slope * (u as f64 - t as f64)
                    };
                    let sum: f64 = seen.clone().map(|u| score(u).exp()).sum();
                    lse[(b * s.heads + h) * s.seq + t] = sum.ln();
                    for u in seen {
                        let p = score(u).exp() / sum;
                        let v = at(u, s.heads + s.kv_heads + kv);
                        for i in 0..d {
                            out[((b * s.seq + t) * s.heads + h) * d + i] += p * v[i];
                        }
                    }
                }
            }
        }
        (out, lse)
    }

    struct Run {
        out: Vec<f32>,
        lse: Vec<f32>,
        dqkv: Vec<f32>,
    }

    fn run(s: Shape, qkv: &[f32], dout: &[f32]) -> Run {
        run_on(1, s, qkv, dout)
    }

    fn run_on(threads: usize, s: Shape, qkv: &[f32], dout: &[f32]) -> Run {
        let mut out = vec![f32::NAN; dout.len()];
        let mut lse = vec![f32::NAN; s.batch * s.heads * s.seq];
        let mut dqkv = vec![f32::NAN; qkv.len()];
        let pool = Pool::new(threads.try_into().unwrap()).unwrap();
        let mut workspace = vec![f32::NAN; threads * s.forward_workspace::<f32>()];
        forward(&pool, s, qkv, None, &mut out, &mut lse, &mut workspace);
        let mut workspace = vec![f32::NAN; threads * s.backward_workspace::<f32>()];
        backward(&pool, s, dout, qkv, &out, &lse, &mut dqkv, &mut workspace);
        Run { out, lse, dqkv }
    }

    fn inputs(s: Shape) -> (Vec<f32>, Vec<f32>) {
        let tokens = s.batch * s.seq;
        (random("qkv", tokens * s.width()), random("dout", tokens * s.heads * s.head_dim))
    }

    /// Scores of every kind.
    fn scores() -> impl Strategy<Value = Scores> {
        let masks = prop_oneof![
            Just(Mask::Causal),
            Just(Mask::Full),
            (1usize..5).prop_map(Mask::Window),
            (1usize..5).prop_map(Mask::Chunk),
        ];
        let alibi =
            prop::option::of((4usize..9).prop_map(|heads| Alibi { heads, first: 1, scale: 0.5 }));
        (masks, any::<bool>(), any::<bool>(), alibi).prop_map(|(mask, scaled, capped, alibi)| {
            let scale = if scaled { 0.4 } else { 0.0 };
            Scores { mask, scale, softcap: if capped { 1.5 } else { 0.0 }, alibi }
        })
    }

    #[test]
    fn slopes_are_those_of_the_paper_and_of_bloom() {
        let of = |heads| {
            (0..heads).map(|h| Alibi { heads, first: 0, scale: 1.0 }.slope(h)).collect::<Vec<_>>()
        };
        assert_eq!(of(4), [0.25, 0.0625, 0.015625, 0.00390625]);
        assert_eq!(of(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
    }

    /// A score of no key is one more key whose value is zero.
    #[test]
    fn sinks_take_part_in_the_softmax_and_learn() {
        let s = Shape {
            batch: 2,
            seq: 5,
            heads: 2,
            kv_heads: 1,
            head_dim: 3,
            scores: Scores::default(),
        };
        let (qkv, dout) = inputs(s);
        let sinks = [0.3f32, -0.7];
        let (lens, pool) = ((dout.len(), s.batch * s.heads * s.seq), Pool::single());
        let run = |sinks: &[f32]| {
            let (mut out, mut lse) = (vec![0.0; lens.0], vec![0.0; lens.1]);
            let mut room = vec![0.0; s.forward_workspace::<f32>()];
            forward(&pool, s, &qkv, Some(sinks), &mut out, &mut lse, &mut room);
            (out, lse)
        };
        let (out, lse) = run(&sinks);
        let (plain, plain_lse) = reference(s, &widen(&qkv));
        let shared: Vec<f64> = plain
            .iter()
            .enumerate()
            .map(|(at, value)| {
                let (row, head) = (at / 6, at / 3 % 2);
                let lse = plain_lse[(row / 5 * 2 + head) * 5 + row % 5];
                value / (1.0 + (f64::from(sinks[head]) - lse).exp())
            })
            .collect();
        assert_close(&out, &shared);
        let mut dsinks = [f32::NAN; 2];
        sink_gradient(s, &dout, &out, &lse, &sinks, &mut dsinks, Write::Overwrite);
        for head in 0..2 {
            let moved = |by: f32| {
                let mut sinks = sinks;
                sinks[head] += by;
                let (out, _) = run(&sinks);
                out.iter().zip(&dout).map(|(o, d)| f64::from(*o) * f64::from(*d)).sum::<f64>()
            };
            let slope = (moved(0.01) - moved(-0.01)) / 0.02;
            assert!((f64::from(dsinks[head]) - slope).abs() < 1e-3, "{dsinks:?} {slope}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn forward_and_backward_agree_with_the_reference(
            batch in 0usize..3, seq in 0usize..7, groups in 1usize..3, kv_heads in 1usize..3,
            head_dim in 1usize..6, scores in scores(),
        ) {
            let s = Shape { batch, seq, heads: groups * kv_heads, kv_heads, head_dim, scores };
            let (qkv, dout) = inputs(s);
            let Run { out, lse, dqkv } = run(s, &qkv, &dout);
            let (expected_out, expected_lse) = reference(s, &widen(&qkv));
            assert_close(&out, &expected_out);
            assert_close(&lse, &expected_lse);
            let expected = numeric_gradient(&widen(&qkv), &widen(&dout), |x| reference(s, x).0);
            assert_close(&dqkv, &expected);
        }
    }

    /// Several blocks of queries, the last one short: gradients are checked along one direction.
    #[test]
    fn sequences_longer_than_a_block_agree_with_the_reference() {
        for mask in [Mask::Causal, Mask::Full, Mask::Window(70), Mask::Chunk(50)] {
            let seq = 2 * BLOCK + 9;
            let alibi = (mask == Mask::Causal).then_some(Alibi { heads: 6, first: 2, scale: 1.0 });
            let scores = Scores { mask, softcap: 3.0, alibi, ..Scores::default() };
            let s = Shape { batch: 1, seq, heads: 4, kv_heads: 2, head_dim: 5, scores };
            let (qkv, dout) = inputs(s);
            let Run { out, lse, dqkv } = run(s, &qkv, &dout);
            let wide = widen(&qkv);
            let (expected_out, expected_lse) = reference(s, &wide);
            assert_close(&out, &expected_out);
            assert_close(&lse, &expected_lse);

            for name in ["a", "b", "c"] {
                let direction = widen(&random(name, qkv.len()));
                let along = |t: &[f64]| {
                    let x: Vec<f64> =
                        wide.iter().zip(&direction).map(|(x, d)| x + t[0] * d).collect();
                    reference(s, &x).0
                };
                let expected = numeric_gradient(&[0.0], &widen(&dout), along)[0];
                let actual: f64 = dqkv.iter().zip(&direction).map(|(&g, d)| f64::from(g) * d).sum();
                assert!(
                    (actual - expected).abs() < 1e-4 * expected.abs().max(1.0),
                    "{actual} {expected}"
                );
            }
        }
    }

    #[test]
    fn a_sequence_does_not_depend_on_the_batch_around_it() {
        let s = Shape {
            batch: 3,
            seq: 70,
            heads: 2,
            kv_heads: 1,
            head_dim: 8,
            scores: Scores::default(),
        };
        let (qkv, dout) = inputs(s);
        let all = run(s, &qkv, &dout);
        let one = Shape { batch: 1, ..s };
        let (n, m) = (70 * s.width(), 70 * 16);
        let second = run(one, &qkv[n..2 * n], &dout[m..2 * m]);
        assert_eq!(bits(&second.out), bits(&all.out[m..2 * m]));
        assert_eq!(bits(&second.lse), bits(&all.lse[2 * 70..4 * 70]));
        assert_eq!(bits(&second.dqkv), bits(&all.dqkv[n..2 * n]));
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        for kv_heads in [1, 3] {
            let s = Shape {
                batch: 2,
                seq: 90,
                heads: 3,
                kv_heads,
                head_dim: 8,
                scores: Scores::default(),
            };
            let (qkv, dout) = inputs(s);
            let alone = run(s, &qkv, &dout);
            let shared = run_on(3, s, &qkv, &dout);
            assert_eq!(bits(&shared.out), bits(&alone.out));
            assert_eq!(bits(&shared.lse), bits(&alone.lse));
            assert_eq!(bits(&shared.dqkv), bits(&alone.dqkv));
        }
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let s = Shape {
            batch: 1,
            seq: 5,
            heads: 1,
            kv_heads: 1,
            head_dim: 2,
            scores: Scores::default(),
        };
        let (mut qkv, dout) = inputs(s);
        qkv.iter_mut().for_each(|x| *x *= 300.0);
        let Run { out, lse, dqkv } = run(s, &qkv, &dout);
        assert!(out.iter().chain(&lse).chain(&dqkv).all(|v| v.is_finite()));
    }

    #[test]
    #[should_panic(expected = "3 query heads cannot share 2 key heads equally")]
    fn uneven_groups_are_refused() {
        let s = Shape {
            batch: 0,
            seq: 0,
            heads: 3,
            kv_heads: 2,
            head_dim: 1,
            scores: Scores::default(),
        };
        forward::<f32>(&Pool::single(), s, &[], None, &mut [], &mut [], &mut []);
    }
}
