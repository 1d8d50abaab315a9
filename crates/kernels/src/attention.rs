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

mod scores;

pub use scores::{Alibi, Mask, Query, Scores};

use crate::element::narrow;
use crate::instruction_set::vectorised;
use crate::math::{exp, ln_f64};
use crate::matmul::{Operand, PackBuffer, Product};
use crate::ordered_sum;
use crate::pool::{Cut, Pool, Strips, strips};
use crate::shape::expect_len;
use crate::{Element, Write};
use std::ops::Range;

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
mod tests;
