//! Multi-head and grouped-query attention on the fused output of the query, key and value
//! projections.
//!
//! `softmax(q k^T / sqrt(head_dim)) v` (Vaswani et al., 2017, equation 1), where a row of `qkv` is
//! `[query heads | key heads | value heads]` and each key head serves `heads / kv_heads`
//! consecutive query heads (Ainslie et al., 2023). Only the scores of one block of queries of one
//! head exist at a time. The forward pass saves the logarithm of each softmax's denominator; the
//! backward pass recomputes the scores from it (Dao, "FlashAttention-2", 2023, algorithm 2).
//!
//! Scores, sums and statistics are single precision. Operands of 16 bits are multiplied as they
//! are; probabilities and the gradients of scores are rounded to their type before they are
//! multiplied, on every processor.

use crate::element::narrow;
use crate::instruction_set::vectorised;
use crate::math::{exp, ln_f64};
use crate::matmul::{Operand, PackBuffer, Product};
use crate::ordered_sum;
use crate::pool::{Cut, Pool, Strips, strips};
use crate::shape::expect_len;
use crate::{Element, Write};

/// Sizes of an attention operator on one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// True if a token attends only to itself and earlier tokens.
    pub causal: bool,
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
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Number of query blocks per sequence.
    fn blocks(&self) -> usize {
        self.seq.div_ceil(BLOCK)
    }

    /// Block of queries of one head, and its offsets in the tensors.
    fn block(self, sequence: usize, head: usize, index: usize) -> Block {
        let Shape { seq, heads, kv_heads, head_dim, causal, .. } = self;
        let first = index * BLOCK;
        let queries = BLOCK.min(seq - first);
        let kv_head = head / (heads / kv_heads);
        let start = sequence * seq * self.width();
        Block {
            first,
            queries,
            keys: if causal { first + queries } else { seq },
            q: start + first * self.width() + head * head_dim,
            k: start + (heads + kv_head) * head_dim,
            v: start + (heads + kv_heads + kv_head) * head_dim,
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
/// contents do not matter.
pub fn forward<T: Element>(
    pool: &Pool,
    shape: Shape,
    qkv: &[T],
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
            let sums = softmax_rows(&block, shape, scores, lse);
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
        let mut places = (0, 0);
        for head in kv_head * group..(kv_head + 1) * group {
            for index in 0..shape.blocks() {
                let block = shape.block(sequence, head, index);
                let Block { queries, keys, .. } = block;
                let p = &mut probabilities[..queries * keys];
                let ds = &mut gradients[..queries * keys];
                let dout = &self.dout[block.out..];
                places = (block.k, block.v);

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
                        gradient,
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

/// Block of queries of one head. Queries `first..first + queries` of a sequence attend to keys up
/// to `keys`; the other fields are offsets of its first element in the tensors.
#[derive(Clone, Copy, Debug)]
struct Block {
    first: usize,
    queries: usize,
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

    /// Number of keys that the query in row `row` attends to.
    #[inline(always)]
    fn visible(&self, shape: Shape, row: usize) -> usize {
        if shape.causal { self.first + row + 1 } else { self.keys }
    }
}

/// Replaces scores by exponentials, writes the log-sum-exp of each row and returns the row sums.
/// The output is divided by the sums instead of the scores, because it is narrower.
fn softmax_rows(block: &Block, shape: Shape, scores: &mut [f32], lse: &mut [f32]) -> [f32; BLOCK] {
    let scale = shape.scale();
    let mut sums = [0.0; BLOCK];
    vectorised(
        #[inline(always)]
        || {
            for (row, (scores, lse)) in scores.chunks_exact_mut(block.keys).zip(lse).enumerate() {
                let (seen, hidden) = scores.split_at_mut(block.visible(shape, row));
                let max = ordered_sum::max(seen) * scale;
                for score in seen.iter_mut() {
                    *score = exp(*score * scale - max);
                }
                hidden.fill(0.0);
                let sum = ordered_sum::sum([seen], |[p]| p);
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
    let (scale, stride) = (shape.scale(), shape.heads * shape.head_dim);
    vectorised(
        #[inline(always)]
        || {
            let rows = p.chunks_exact_mut(block.keys).zip(ds.chunks_exact_mut(block.keys));
            for (row, (p, ds)) in rows.enumerate() {
                let head = row * stride..row * stride + shape.head_dim;
                let dot = ordered_sum::sum([&dout[head.clone()], &out[head]], |[d, o]| d * o);
                let lse = lse[block.lse + row];
                let visible = block.visible(shape, row);
                for (p, ds) in p[..visible].iter_mut().zip(&mut ds[..visible]) {
                    *p = exp(*p * scale - lse);
                    *ds = *p * (*ds - dot) * scale;
                }
                p[visible..].fill(0.0);
                ds[visible..].fill(0.0);
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
                    let seen = if s.causal { t + 1 } else { s.seq };
                    let score = |u: usize| {
                        let (q, k) = (at(t, h), at(u, s.heads + kv));
                        q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt()
                    };
                    let sum: f64 = (0..seen).map(|u| score(u).exp()).sum();
                    lse[(b * s.heads + h) * s.seq + t] = sum.ln();
                    for u in 0..seen {
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
        forward(&pool, s, qkv, &mut out, &mut lse, &mut workspace);
        let mut workspace = vec![f32::NAN; threads * s.backward_workspace::<f32>()];
        backward(&pool, s, dout, qkv, &out, &lse, &mut dqkv, &mut workspace);
        Run { out, lse, dqkv }
    }

    fn inputs(s: Shape) -> (Vec<f32>, Vec<f32>) {
        let tokens = s.batch * s.seq;
        (random("qkv", tokens * s.width()), random("dout", tokens * s.heads * s.head_dim))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn forward_and_backward_agree_with_the_reference(
            batch in 0usize..3, seq in 0usize..7, groups in 1usize..3, kv_heads in 1usize..3,
            head_dim in 1usize..6, causal in any::<bool>(),
        ) {
            let s = Shape { batch, seq, heads: groups * kv_heads, kv_heads, head_dim, causal };
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
        for causal in [true, false] {
            let seq = 2 * BLOCK + 9;
            let s = Shape { batch: 1, seq, heads: 4, kv_heads: 2, head_dim: 5, causal };
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
        let s = Shape { batch: 3, seq: 70, heads: 2, kv_heads: 1, head_dim: 8, causal: true };
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
            let s = Shape { batch: 2, seq: 90, heads: 3, kv_heads, head_dim: 8, causal: true };
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
        let s = Shape { batch: 1, seq: 5, heads: 1, kv_heads: 1, head_dim: 2, causal: true };
        let (mut qkv, dout) = inputs(s);
        qkv.iter_mut().for_each(|x| *x *= 300.0);
        let Run { out, lse, dqkv } = run(s, &qkv, &dout);
        assert!(out.iter().chain(&lse).chain(&dqkv).all(|v| v.is_finite()));
    }

    #[test]
    #[should_panic(expected = "3 query heads cannot share 2 key heads equally")]
    fn uneven_groups_are_refused() {
        let s = Shape { batch: 0, seq: 0, heads: 3, kv_heads: 2, head_dim: 1, causal: true };
        forward::<f32>(&Pool::single(), s, &[], &mut [], &mut [], &mut []);
    }
}
