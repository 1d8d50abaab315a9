//! Compressed reductions: data that replicas exchange instead of a bucket's gradients or
//! pseudo-gradients.
//!
//! | compression | exchange | bytes per rank of N, for n elements |
//! |---|---|---|
//! | int8, onebit | all_to_all of encoded parts, then all_gather of encoded sums | 2·(N−1)/N · encoded |
//! | topk | all_gather of indices and values | (N−1) · 8·fraction·n |
//! | powersgd | all_reduces of the left and of the right factors | 2·(N−1)/N · 4·rank·(rows + columns) |
//!
//! Encoded, n elements are n·257/256 bytes with int8 and n·49/1024·4 with onebit. Both directions
//! are encoded, each with its own error feedback buffer, as in Seide et al. (Interspeech 2014,
//! section 3). A rank keeps the error of encoding its gradients, and the owner of a part keeps the
//! error of encoding the sum.
//!
//! During the warm-up, gradients are reduced uncompressed; the body contains both reductions, and
//! each iteration runs one of them. With Adam, contributions to the first moment are exchanged
//! after it.
//!
//! An op that waits for an exchange is placed on the compute lane after the next bucket's gradients
//! are complete. Compute then does not wait for communication.

use super::bucket_plan::BucketPlan;
use super::role::RoleIr;
use super::slots::Point;
use crate::collective::{CollectiveKind, Reduction};
use crate::compress::{Codec, CompressOp, Compression, factor_lengths, picked};
use crate::dtype::DType;
use crate::graph::{BLOCK, OpKind};
use crate::ids::{CallId, LaneId, Microbatch, OpId};
use crate::mesh::GroupKind;
use crate::program::{IterationFilter, MemoryKind, Op, StepPhase, View};

/// Compressed reduction of a bucket's gradients.
#[derive(Clone, Copy, Debug)]
pub(super) enum CompressedReduce {
    /// Blocks are encoded; each rank sums its part.
    Blocks {
        codec: Codec,
        /// Number of ranks.
        terms: u32,
        error: View,
        /// The whole message: first of the gradients, at the end of their sums.
        message: View,
        /// All ranks' messages for this rank's part.
        received: View,
        /// This rank's part of the sum, encoded, and the encoding error.
        sum: View,
        sum_error: View,
        exchange: CallId,
        gather: CallId,
    },
    /// The largest elements are sent to all ranks.
    TopK { fraction: f64, terms: u32, error: View, message: View, received: View, gather: CallId },
    /// Matrices are reconstructed from factors.
    PowerSgd {
        rank: u32,
        error: View,
        left: View,
        right: View,
        sum_left: CallId,
        sum_right: CallId,
    },
}

/// A compressed reduction that waits for an exchange.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingReduce {
    bucket: usize,
    exchange: OpId,
    /// Number of its completed exchanges.
    done: u8,
}

impl BucketPlan {
    /// Vector that replicas sum: gradients, or pseudo-gradients.
    fn exchanged(&self) -> View {
        self.outer_step().map_or(self.grads, |outer| outer.pseudo_gradient)
    }
}

/// Completes compressed reductions. Their start is part of the reduction of a bucket.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    match point {
        Point::Start => ir.start_compressed(),
        Point::Collect => ir.decompress_all(),
        Point::Step(bucket) => ir.step_with_exchanged_moments(bucket),
        _ => {}
    }
}

impl RoleIr<'_> {
    /// Declares the compressed reduction of a bucket's gradients; `None` if uncompressed.
    pub(super) fn declare_compressed(
        &mut self,
        name: &str,
        entries: &[crate::program::Entry],
        elements: u64,
        holders: GroupKind,
    ) -> Option<CompressedReduce> {
        let replicas = self.context.mesh.group_size(holders);
        if replicas <= 1 {
            return None;
        }
        let ranks = u64::from(replicas);
        match self.context.strategy.compress {
            Compression::None => None,
            Compression::Int8 | Compression::OneBit => {
                let codec = self.context.strategy.compress.codec()?;
                let words = codec.words_per_block()?;
                let len = elements / BLOCK * words;
                let error = self.error_feedback_buffer(name, "error", elements);
                let sum_error = self.error_feedback_buffer(name, "sum.error", elements / ranks);
                let message = self.wire(name, "message", DType::U32, len);
                let received = self.wire(name, "received", DType::U32, len);
                let sum = self.wire(name, "sum", DType::U32, len / ranks);
                let (all_to_all, all_gather) =
                    (CollectiveKind::AllToAll, CollectiveKind::AllGather);
                let exchange = self.exchange(name, all_to_all, holders, (message, received), words);
                let gather = self.exchange(name, all_gather, holders, (sum, message), words);
                Some(CompressedReduce::Blocks {
                    codec,
                    terms: replicas,
                    error,
                    message,
                    received,
                    sum,
                    sum_error,
                    exchange,
                    gather,
                })
            }
            Compression::TopK(fraction) => {
                let picked: u64 = entries.iter().map(|entry| picked(entry, fraction)).sum();
                let len = 2 * picked;
                let error = self.error_feedback_buffer(name, "error", elements);
                let message = self.wire(name, "message", DType::U32, len);
                let received = self.wire(name, "received", DType::U32, len * ranks);
                let gather = self.exchange(
                    name,
                    CollectiveKind::AllGather,
                    holders,
                    (message, received),
                    len,
                );
                Some(CompressedReduce::TopK {
                    fraction,
                    terms: replicas,
                    error,
                    message,
                    received,
                    gather,
                })
            }
            Compression::PowerSgd(rank) => {
                let [left, right] = factor_lengths(entries, rank);
                // A bucket without matrices is sent uncompressed.
                if right == 0 {
                    return None;
                }
                let error = self.error_feedback_buffer(name, "error", elements);
                let left = self.wire(name, "left", DType::F32, left);
                let right = self.error_feedback_buffer(name, "right", right);
                let all_reduce = CollectiveKind::AllReduce;
                let sum_left =
                    self.exchange(&format!("{name}.left"), all_reduce, holders, (left, left), 1);
                let sum_right =
                    self.exchange(&format!("{name}.right"), all_reduce, holders, (right, right), 1);
                Some(CompressedReduce::PowerSgd { rank, error, left, right, sum_left, sum_right })
            }
        }
    }

    /// Buffer kept across iterations: optimizer state, like moments.
    fn error_feedback_buffer(&mut self, name: &str, what: &str, elements: u64) -> View {
        let name = format!("{name}.{what}");
        let buffer = self.buffer(name, DType::F32, elements, 1, MemoryKind::Optimizer);
        self.whole(buffer)
    }

    fn wire(&mut self, name: &str, what: &str, dtype: DType, elements: u64) -> View {
        let name = format!("{name}.{what}");
        let buffer = self.buffer(name, dtype, elements, 1, MemoryKind::Communication);
        self.whole(buffer)
    }

    fn exchange(
        &mut self,
        name: &str,
        kind: CollectiveKind,
        holders: GroupKind,
        (input, output): (View, View),
        block: u64,
    ) -> CallId {
        let name = format!("{name}.grad");
        self.call(&name, kind, Reduction::Sum, holders, input, output, block)
    }

    /// Adds the initialisation before the first iteration: arbitrary right factors. Errors are zero
    /// from the start, like moments.
    fn start_compressed(&mut self) {
        for bucket in 0..self.buckets.len() {
            if let Some(CompressedReduce::PowerSgd { rank, right, .. }) =
                self.buckets[bucket].compressed()
            {
                let guess = CompressOp::InitRight { rank, bucket: bucket as u32 };
                let op = self.compress_op(guess, &[], &[right]);
                self.prologue.push(LaneId(0), op, &[]);
            }
        }
    }

    /// Starts the compressed reduction of a bucket.
    pub(super) fn compress(&mut self, bucket: usize, compressed: CompressedReduce, after: &[OpId]) {
        let grads = self.buckets[bucket].exchanged();
        if self.context.strategy.exchanges_moments() {
            let share = Op::Step { bucket: bucket as u32, phase: StepPhase::LocalMomentum };
            let share = self.compute(share, after);
            self.after_warmup(share);
        }
        let call = match compressed {
            CompressedReduce::Blocks { codec, error, message, exchange, .. } => {
                let encode = CompressOp::Encode { codec };
                self.run_compress(encode, &[grads, error], &[message, error], after);
                exchange
            }
            CompressedReduce::TopK { fraction, error, message, gather, .. } => {
                let pick = CompressOp::SelectTopK { fraction, bucket: bucket as u32 };
                self.run_compress(pick, &[grads, error], &[message, error], after);
                gather
            }
            CompressedReduce::PowerSgd { rank, error, left, right, sum_left, .. } => {
                let step = CompressOp::Left { rank, bucket: bucket as u32 };
                self.run_compress(step, &[grads, right, error], &[left, error], after);
                sum_left
            }
        };
        self.await_exchange(bucket, call, 0);
    }

    /// Advances all compressed reductions by one exchange. It is called when the next reduction
    /// starts, a bucket's backward pass later, so that compute does not wait.
    pub(super) fn decompress(&mut self) {
        for PendingReduce { bucket, exchange, done } in std::mem::take(&mut self.waiting) {
            let state = &self.buckets[bucket];
            let (Some(compressed), grads) = (state.compressed(), state.exchanged()) else {
                continue;
            };
            let (number, after) = (bucket as u32, [exchange]);
            let decoded = match (compressed, done) {
                (
                    CompressedReduce::Blocks {
                        codec,
                        terms,
                        received,
                        sum,
                        sum_error: error,
                        gather,
                        ..
                    },
                    0,
                ) => {
                    let merge = CompressOp::Merge { codec, terms };
                    self.run_compress(merge, &[received, error], &[sum, error], &after);
                    self.await_exchange(bucket, gather, 1);
                    continue;
                }
                (CompressedReduce::Blocks { codec, message, .. }, _) => {
                    let decode = CompressOp::Decode { codec, terms: 1 };
                    self.run_compress(decode, &[message], &[grads], &after)
                }
                (CompressedReduce::TopK { terms, received, .. }, _) => {
                    let decode = CompressOp::Decode { codec: Codec::TopK, terms };
                    self.run_compress(decode, &[received], &[grads], &after)
                }
                (CompressedReduce::PowerSgd { rank, error, left, right, sum_right, .. }, 0) => {
                    let step = CompressOp::Right { rank, bucket: number };
                    self.run_compress(step, &[left, error], &[left, right, error], &after);
                    self.await_exchange(bucket, sum_right, 1);
                    continue;
                }
                (CompressedReduce::PowerSgd { rank, left, right, .. }, _) => {
                    let product = CompressOp::Product { rank, bucket: number };
                    self.run_compress(product, &[left, right], &[grads], &after)
                }
            };
            self.buckets[bucket].ready = Some(decoded);
        }
    }

    /// Completes all compressed reductions.
    pub(super) fn decompress_all(&mut self) {
        while !self.waiting.is_empty() {
            self.decompress();
        }
    }

    fn await_exchange(&mut self, bucket: usize, call: CallId, done: u8) {
        let after: Vec<OpId> = self.walk.last_compute.into_iter().collect();
        let lane = self.lane("reduce");
        let op = Op::Collective { call, microbatch: Microbatch(0) };
        let exchange = self.body.push(lane, op, &after);
        self.after_warmup(exchange);
        self.waiting.push(PendingReduce { bucket, exchange, done });
    }

    fn run_compress(
        &mut self,
        op: CompressOp,
        inputs: &[View],
        outputs: &[View],
        after: &[OpId],
    ) -> OpId {
        let op = self.compress_op(op, inputs, outputs);
        let op = self.compute(op, after);
        self.after_warmup(op);
        op
    }

    /// Restricts an op to iterations after the warm-up, if there is one.
    pub(super) fn after_warmup(&mut self, op: OpId) {
        if self.context.strategy.has_compress_warmup() {
            self.body.nodes[op.index()].filter = IterationFilter::AfterWarmup;
        }
    }

    /// After the warm-up, the step uses first moments that were exchanged instead of gradients.
    fn step_with_exchanged_moments(&mut self, bucket: usize) {
        let state = &self.buckets[bucket];
        if !self.context.strategy.exchanges_moments() || state.compressed().is_none() {
            return;
        }
        if let Some(step) = self.walk.last_compute {
            self.body.nodes[step.index()].filter = IterationFilter::Warmup;
        }
        let follow = self.step(bucket, StepPhase::ApplyMomentum, &[]);
        self.after_warmup(follow);
    }

    /// Builds a segment of one operator of a compressed reduction.
    fn compress_op(&mut self, op: CompressOp, inputs: &[View], outputs: &[View]) -> Op {
        let segment = self.update_segment(OpKind::Compress(op), inputs, outputs);
        Op::Compute { segment, microbatch: Microbatch(0), fresh: true }
    }
}
