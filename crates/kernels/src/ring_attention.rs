//! One step of ring attention (Liu et al., 2023, arXiv 2310.01889) on sequences sharded in a
//! zigzag. A rank attends with its queries to the keys and values of another rank, and merges the
//! result into its output so far.
//!
//! A sequence is split into `2n` runs, and rank `i` of `n` holds runs `i` and `2n − 1 − i`, in this
//! order. For an earlier rank's keys, all queries see the first half. For a later rank's keys, the
//! second half of the queries sees all. Either case is half of the scores, none of them masked, so
//! every step is equal work on every rank.
//!
//! Outputs are merged by their log-sum-exp, the logarithm of the softmax denominator (Dao,
//! "FlashAttention-2", 2023, section 3.1). The backward pass computes each step's probabilities
//! from the final log-sum-exp, so the gradients of the steps simply add up.

use crate::attention::{self, for_each_in};
use crate::instruction_set::vectorised;
use crate::math::{exp, ln_f64};
use crate::matmul::{Operand, Product};
use crate::ordered_sum;
use crate::pool::{Cut, Pool, strips};
use crate::shape::expect_len;
use crate::{Element, Write};
use std::ops::Range;

/// Position of the rank that owns a step's keys and values, relative to this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Other {
    /// A rank with a lower number.
    Earlier,
    /// A rank with a higher number.
    Later,
}

impl Other {
    /// The queries of a sequence that see any key, and the keys that they see.
    fn seen(self, seq: usize) -> (Range<usize>, Range<usize>) {
        match self {
            Self::Earlier => (0..seq, 0..seq / 2),
            Self::Later => (seq / 2..seq, 0..seq),
        }
    }
}

/// Number of queries processed at a time.
const BLOCK: usize = 64;

/// Number of workspace elements that each thread needs in [`forward`].
pub fn forward_workspace(shape: attention::Shape) -> usize {
    BLOCK.min(shape.seq).saturating_mul(shape.seq.saturating_add(shape.head_dim))
}

/// Number of workspace elements that each thread needs in [`backward`].
pub fn backward_workspace(shape: attention::Shape) -> usize {
    let block = BLOCK.min(shape.seq);
    let scores = block.saturating_mul(shape.seq).saturating_mul(2);
    let rows = shape.seq.saturating_mul(2).saturating_add(block);
    scores.saturating_add(rows.saturating_mul(shape.head_dim))
}

/// Number of workspace elements that [`merge_step`] needs on `threads` threads.
pub fn forward_room<T: Element>(threads: usize, shape: attention::Shape) -> usize {
    let Sizes { qkv, kv, out } = Sizes::of(shape);
    let staged = if is_single::<T>() { 0 } else { qkv + kv + out };
    forward_workspace(shape).saturating_mul(threads).saturating_add(staged)
}

/// Number of workspace elements that [`step_gradient`] needs on `threads` threads.
pub fn backward_room<T: Element>(threads: usize, shape: attention::Shape) -> usize {
    let Sizes { qkv, kv, out } = Sizes::of(shape);
    let staged = if is_single::<T>() { 0 } else { 2 * (qkv + kv + out) };
    backward_workspace(shape).saturating_mul(threads).saturating_add(staged)
}

/// Number of elements of each tensor of a step.
struct Sizes {
    qkv: usize,
    kv: usize,
    out: usize,
}

impl Sizes {
    fn of(shape: attention::Shape) -> Self {
        let heads = |count: usize| shape.batch * shape.seq * count * shape.head_dim;
        Self {
            qkv: heads(shape.heads + 2 * shape.kv_heads),
            kv: heads(2 * shape.kv_heads),
            out: heads(shape.heads),
        }
    }
}

fn is_single<T: Element>() -> bool {
    T::singles(&[]).is_some()
}

/// [`forward`] for any storage dtype; sums are single precision.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn merge_step<T: Element>(
    pool: &Pool,
    shape: attention::Shape,
    other: Other,
    qkv: &[T],
    kv: &[T],
    out: &mut [T],
    lse: &mut [f32],
    workspace: &mut [f32],
) {
    if let (Some(qkv), Some(kv)) = (T::singles(qkv), T::singles(kv))
        && let Some(out) = T::singles_mut(out)
    {
        return forward(pool, shape, other, qkv, kv, out, lse, workspace);
    }
    let size = Sizes::of(shape);
    let (wide_qkv, rest) = workspace.split_at_mut(size.qkv);
    let (wide_kv, rest) = rest.split_at_mut(size.kv);
    let (wide_out, rest) = rest.split_at_mut(size.out);
    widen(qkv, wide_qkv);
    widen(kv, wide_kv);
    widen(out, wide_out);
    forward(pool, shape, other, wide_qkv, wide_kv, wide_out, lse, rest);
    narrow(wide_out, out);
}

/// Inputs of a step's backward pass.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, T> {
    /// The gradient of the output.
    pub dout: &'a [T],
    /// This rank's queries, keys and values.
    pub qkv: &'a [T],
    /// The final output.
    pub out: &'a [T],
    /// The final log-sum-exp of each row.
    pub lse: &'a [f32],
    /// The other rank's keys and values.
    pub kv: &'a [T],
}

/// [`backward`] for any storage dtype; sums are single precision.
pub fn step_gradient<T: Element>(
    pool: &Pool,
    shape: attention::Shape,
    other: Other,
    saved: Saved<'_, T>,
    (dqkv, dkv): (&mut [T], &mut [T]),
    mode: Write,
    workspace: &mut [f32],
) {
    let Saved { dout, qkv, out, lse, kv } = saved;
    if let (Some(dout), Some(qkv)) = (T::singles(dout), T::singles(qkv))
        && let (Some(out), Some(kv)) = (T::singles(out), T::singles(kv))
        && let (Some(dqkv), Some(dkv)) = (T::singles_mut(dqkv), T::singles_mut(dkv))
    {
        return backward(pool, shape, other, dout, qkv, kv, out, lse, dqkv, dkv, mode, workspace);
    }
    let size = Sizes::of(shape);
    let mut rest = workspace;
    let mut take = |len: usize| {
        let (taken, left) = std::mem::take(&mut rest).split_at_mut(len);
        rest = left;
        taken
    };
    let [wide_qkv, wide_dqkv] = [take(size.qkv), take(size.qkv)];
    let [wide_kv, wide_dkv] = [take(size.kv), take(size.kv)];
    let [wide_out, wide_dout] = [take(size.out), take(size.out)];
    widen(qkv, wide_qkv);
    widen(dqkv, wide_dqkv);
    widen(kv, wide_kv);
    widen(dkv, wide_dkv);
    widen(out, wide_out);
    widen(dout, wide_dout);
    backward(
        pool, shape, other, wide_dout, wide_qkv, wide_kv, wide_out, lse, wide_dqkv, wide_dkv, mode,
        rest,
    );
    narrow(wide_dqkv, dqkv);
    narrow(wide_dkv, dkv);
}

fn widen<T: Element>(from: &[T], into: &mut [f32]) {
    from.iter().zip(into).for_each(|(from, into)| *into = from.widen());
}

fn narrow<T: Element>(from: &[f32], into: &mut [T]) {
    from.iter().zip(into).for_each(|(&from, into)| *into = T::narrow(from));
}

/// Offsets into the tensors of one step.
#[derive(Clone, Copy)]
struct Layout {
    shape: attention::Shape,
    queries: (usize, usize),
    keys: usize,
}

impl Layout {
    fn new(shape: attention::Shape, other: Other) -> Self {
        let (queries, keys) = other.seen(shape.seq);
        Self { shape, queries: (queries.start, queries.end), keys: keys.end }
    }

    fn qkv_width(&self) -> usize {
        (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim
    }

    fn kv_width(&self) -> usize {
        2 * self.shape.kv_heads * self.shape.head_dim
    }

    fn out_width(&self) -> usize {
        self.shape.heads * self.shape.head_dim
    }

    fn scale(&self) -> f32 {
        self.shape.scores.factor(self.shape.head_dim)
    }

    fn blocks(&self) -> usize {
        (self.queries.1 - self.queries.0).div_ceil(BLOCK)
    }

    /// The queries of a block.
    fn block(&self, index: usize) -> Range<usize> {
        let first = self.queries.0 + index * BLOCK;
        first..self.queries.1.min(first + BLOCK)
    }

    /// Offsets of a query head in the fused rows and in the output rows.
    fn query(&self, sequence: usize, head: usize, token: usize) -> (usize, usize) {
        let row = sequence * self.shape.seq + token;
        let at = head * self.shape.head_dim;
        (row * self.qkv_width() + at, row * self.out_width() + at)
    }

    /// Offsets of a sequence's key head and value head.
    fn keys(&self, sequence: usize, kv_head: usize) -> (usize, usize) {
        let start = sequence * self.shape.seq * self.kv_width();
        let at = |head: usize| start + head * self.shape.head_dim;
        (at(kv_head), at(self.shape.kv_heads + kv_head))
    }

    fn lse(&self, sequence: usize, head: usize, token: usize) -> usize {
        (sequence * self.shape.heads + head) * self.shape.seq + token
    }

    #[track_caller]
    fn expect(&self, qkv: usize, kv: usize, out: usize, lse: usize) {
        let attention::Shape { batch, seq, heads, kv_heads, head_dim, .. } = self.shape;
        assert!(seq.is_multiple_of(2), "{seq} tokens cannot be two runs");
        expect_len("qkv", qkv, &[batch, seq, heads + 2 * kv_heads, head_dim]);
        expect_len("kv", kv, &[batch, seq, 2 * kv_heads, head_dim]);
        expect_len("out", out, &[batch, seq, heads, head_dim]);
        expect_len("lse", lse, &[batch, heads, seq]);
    }
}

/// `kv[tokens, 2 kv_heads * head_dim] =` the keys and values of the fused rows.
pub fn keys_and_values<T: Copy>(width: usize, qkv: &[T], kv: &mut [T]) {
    let rows = kv.len().checked_div(width).unwrap_or(0);
    let fused = qkv.len().checked_div(rows).unwrap_or(0);
    for (kv, row) in kv.chunks_exact_mut(width).zip(qkv.chunks_exact(fused.max(1))) {
        kv.copy_from_slice(&row[fused - width..]);
    }
}

/// Adds key and value gradients to those of the fused rows.
pub fn add_keys_and_values<T: Element>(width: usize, dkv: &[T], dqkv: &mut [T]) {
    let rows = dkv.len().checked_div(width).unwrap_or(0);
    let fused = dqkv.len().checked_div(rows).unwrap_or(0);
    for (dkv, row) in dkv.chunks_exact(width).zip(dqkv.chunks_exact_mut(fused.max(1))) {
        crate::reduce::add(dkv, &mut row[fused - width..]);
    }
}

/// Merges a step into `out` and `lse`, which hold the result of the previous steps.
///
/// Tensors are as in [`attention::forward`], with `kv[batch, seq, 2 kv_heads * head_dim]` of
/// another rank. `workspace` has [`forward_workspace`] elements for each thread of the pool.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn forward(
    pool: &Pool,
    shape: attention::Shape,
    other: Other,
    qkv: &[f32],
    kv: &[f32],
    out: &mut [f32],
    lse: &mut [f32],
    workspace: &mut [f32],
) {
    let layout = Layout::new(shape, other);
    layout.expect(qkv.len(), kv.len(), out.len(), lse.len());
    let (own, head_dim, keys) = (forward_workspace(shape), shape.head_dim, layout.keys);
    expect_len("workspace", workspace.len(), &[pool.threads(), own]);
    let (out, lse) = (strips(out, 1), strips(lse, 1));
    let tiles = shape.batch * shape.heads * layout.blocks();
    for_each_in(pool, tiles, workspace, own, |room, own, tile| {
        let (pair, index) = (tile / layout.blocks(), tile % layout.blocks());
        let (sequence, head) = (pair / shape.heads, pair % shape.heads);
        let tokens = layout.block(index);
        let queries = tokens.len();
        let (q, first_out) = layout.query(sequence, head, tokens.start);
        let (k, v) = layout.keys(sequence, head / (shape.heads / shape.kv_heads));
        let (scores, rest) = own.split_at_mut(queries * keys);
        let attended = &mut rest[..queries * head_dim];
        Product { height: queries, width: keys, depth: head_dim }.compute_in(
            room,
            Operand::rows(&qkv[q..], layout.qkv_width()),
            Operand::transposed(&kv[k..], layout.kv_width()),
            scores,
            keys,
            Write::Overwrite,
        );
        let at = layout.lse(sequence, head, tokens.start);
        // SAFETY: the statistics of these queries of this head are inside the slice, and no other
        // tile has the same queries and head.
        let lse = unsafe { lse.piece(at..at + queries) };
        let shares = merge(layout.scale(), shape.scores, keys, scores, lse);
        Product { height: queries, width: head_dim, depth: keys }.compute_in(
            room,
            Operand::rows(scores, keys),
            Operand::rows(&kv[v..], layout.kv_width()),
            attended,
            head_dim,
            Write::Overwrite,
        );
        for (row, attended) in attended.chunks_exact(head_dim).enumerate() {
            let (before, now) = shares[row];
            let at = first_out + row * layout.out_width();
            // SAFETY: as above, for one head's part of an output row.
            let out = unsafe { out.piece(at..at + head_dim) };
            for (out, &value) in out.iter_mut().zip(attended) {
                *out = *out * before + value * now;
            }
        }
    });
}

/// Replaces scores by exponentials, and extends each row's log-sum-exp by these keys. Returns the
/// factors for the output so far and for the product of exponentials and values.
fn merge(
    scale: f32,
    rule: attention::Scores,
    keys: usize,
    scores: &mut [f32],
    lse: &mut [f32],
) -> [(f32, f32); BLOCK] {
    let mut shares = [(0.0, 0.0); BLOCK];
    vectorised(
        #[inline(always)]
        || {
            for (row, (scores, lse)) in scores.chunks_exact_mut(keys).zip(lse).enumerate() {
                let mut factor = scale;
                if !rule.is_linear() {
                    scores.iter_mut().for_each(|score| *score = rule.bounded(*score * scale));
                    factor = 1.0;
                }
                let max = ordered_sum::max(scores) * factor;
                for score in scores.iter_mut() {
                    *score = exp(*score * factor - max);
                }
                let sum = ordered_sum::sum([&*scores], |[p]| p);
                let here = (f64::from(max) + ln_f64(f64::from(sum))) as f32;
                let (low, high) = if *lse < here { (*lse, here) } else { (here, *lse) };
                let more = 1.0 + f64::from(exp(low - high));
                let both = (f64::from(high) + ln_f64(more)) as f32;
                shares[row] = (exp(*lse - both), exp(here - both) / sum);
                *lse = both;
            }
        },
    );
    shares
}

/// Computes the gradients of one step; adds to the queries' part of `dqkv`, and adds to or
/// overwrites `dkv`.
///
/// `out` and `lse` are the final ones. `workspace` has [`backward_workspace`] elements for each
/// thread of the pool.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn backward(
    pool: &Pool,
    shape: attention::Shape,
    other: Other,
    dout: &[f32],
    qkv: &[f32],
    kv: &[f32],
    out: &[f32],
    lse: &[f32],
    dqkv: &mut [f32],
    dkv: &mut [f32],
    mode: Write,
    workspace: &mut [f32],
) {
    let layout = Layout::new(shape, other);
    layout.expect(qkv.len(), kv.len(), out.len(), lse.len());
    expect_len("dout", dout.len(), &[out.len()]);
    expect_len("dqkv", dqkv.len(), &[qkv.len()]);
    expect_len("dkv", dkv.len(), &[kv.len()]);
    let (own, head_dim, keys) = (backward_workspace(shape), shape.head_dim, layout.keys);
    expect_len("workspace", workspace.len(), &[pool.threads(), own]);
    let group = shape.heads / shape.kv_heads;
    let (dqkv, dkv) = (strips(dqkv, 1), strips(dkv, 1));
    for_each_in(pool, shape.batch * shape.kv_heads, workspace, own, |room, own, tile| {
        let (sequence, kv_head) = (tile / shape.kv_heads, tile % shape.kv_heads);
        let (k, v) = layout.keys(sequence, kv_head);
        let (probabilities, own) = own.split_at_mut(BLOCK.min(shape.seq) * shape.seq);
        let (gradients, own) = own.split_at_mut(BLOCK.min(shape.seq) * shape.seq);
        let (dk, own) = own.split_at_mut(shape.seq * head_dim);
        let (dv, dq) = own.split_at_mut(shape.seq * head_dim);
        dk.fill(0.0);
        dv.fill(0.0);
        for head in kv_head * group..(kv_head + 1) * group {
            for index in 0..layout.blocks() {
                let tokens = layout.block(index);
                let queries = tokens.len();
                let (q, first_out) = layout.query(sequence, head, tokens.start);
                let p = &mut probabilities[..queries * keys];
                let ds = &mut gradients[..queries * keys];
                let (dout, out) = (&dout[first_out..], &out[first_out..]);
                let scores = Product { height: queries, width: keys, depth: head_dim };
                for (from, apart, at, into) in [
                    (&qkv[q..], layout.qkv_width(), k, &mut *p),
                    (dout, layout.out_width(), v, &mut *ds),
                ] {
                    scores.compute_in(
                        room,
                        Operand::rows(from, apart),
                        Operand::transposed(&kv[at..], layout.kv_width()),
                        into,
                        keys,
                        Write::Overwrite,
                    );
                }
                let at = layout.lse(sequence, head, tokens.start);
                score_gradients(&layout, (dout, out), &lse[at..at + queries], p, ds);
                let to_keys = Product { height: keys, width: head_dim, depth: queries };
                for (by, rows, apart, gradient) in [
                    (&*p, dout, layout.out_width(), &mut *dv),
                    (&*ds, &qkv[q..], layout.qkv_width(), &mut *dk),
                ] {
                    to_keys.compute_in(
                        room,
                        Operand::transposed(by, keys),
                        Operand::rows(rows, apart),
                        gradient,
                        head_dim,
                        Write::Accumulate,
                    );
                }
                let dq = &mut dq[..queries * head_dim];
                Product { height: queries, width: head_dim, depth: keys }.compute_in(
                    room,
                    Operand::rows(ds, keys),
                    Operand::rows(&kv[k..], layout.kv_width()),
                    dq,
                    head_dim,
                    Write::Overwrite,
                );
                for (row, values) in dq.chunks_exact(head_dim).enumerate() {
                    let at = q + row * layout.qkv_width();
                    // SAFETY: this is a query head of this key head's group, in the rows of this
                    // sequence: inside the slice, and no other tile writes there.
                    let part = unsafe { dqkv.piece(at..at + head_dim) };
                    crate::reduce::add(values, part);
                }
            }
        }
        for (rows, at) in [(&*dk, k), (&*dv, v)] {
            for (row, values) in rows.chunks_exact(head_dim).enumerate() {
                let at = at + row * layout.kv_width();
                // SAFETY: this key or value head in the rows of this sequence, as above.
                let part = unsafe { dkv.piece(at..at + head_dim) };
                match mode {
                    Write::Overwrite => part.copy_from_slice(values),
                    Write::Accumulate => crate::reduce::add(values, part),
                }
            }
        }
    });
}

/// As in [`attention::backward`], without a mask.
fn score_gradients(
    layout: &Layout,
    (dout, out): (&[f32], &[f32]),
    lse: &[f32],
    p: &mut [f32],
    ds: &mut [f32],
) {
    let (scale, stride, keys) = (layout.scale(), layout.out_width(), layout.keys);
    let (head_dim, rule) = (layout.shape.head_dim, layout.shape.scores);
    vectorised(
        #[inline(always)]
        || {
            let rows = p.chunks_exact_mut(keys).zip(ds.chunks_exact_mut(keys)).zip(lse);
            for (row, ((p, ds), &lse)) in rows.enumerate() {
                let head = row * stride..row * stride + head_dim;
                let dot = ordered_sum::sum([&dout[head.clone()], &out[head]], |[d, o]| d * o);
                if rule.is_linear() {
                    for (p, ds) in p.iter_mut().zip(ds) {
                        *p = exp(*p * scale - lse);
                        *ds = *p * (*ds - dot) * scale;
                    }
                } else {
                    for (p, ds) in p.iter_mut().zip(ds) {
                        let bounded = rule.bounded(*p * scale);
                        *p = exp(bounded - lse);
                        *ds = *p * (*ds - dot) * scale * rule.slope(bounded);
                    }
                }
            }
        },
    );
}

#[cfg(test)]
mod tests;
