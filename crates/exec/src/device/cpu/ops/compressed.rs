//! Execution of the operators of a compressed reduction.

use crate::device::cpu::operands::Operands;
use paceline_kernels::Element;
use paceline_kernels::compress::{
    BlockCode, decode_topk, encode_topk, left, orthonormalise, product, residue, right,
};
use paceline_kernels::philox::Stream;
use paceline_kernels::pool::{Pool, strips};
use paceline_plan::compress::{Codec, CompressOp, factors, picked};
use paceline_plan::graph::BLOCK;
use paceline_plan::program::{Entry, Program};
use std::ops::Range;

/// Number of blocks a thread takes at a time.
const TILE: usize = 32;

/// Runs a compression operator on all threads.
pub(in crate::device::cpu) fn run<G: Element>(pool: &Pool, op: CompressOp, on: &Operands<'_>) {
    let program = on.program;
    match op {
        CompressOp::Encode { codec } => {
            let (grads, message, error) = (on.input::<G>(0), on.words_out(0), on.output::<f32>(1));
            if let Some(code) = block_code(codec) {
                over_blocks(pool, code, error, message, |at, error, message| {
                    code.encode(BLOCK_LEN, &grads[at], error, message);
                });
            }
        }
        CompressOp::SelectTopK { fraction, bucket } => {
            let (grads, message, error) = (on.input::<G>(0), on.words_out(0), on.output::<f32>(1));
            let (mut places, mut values) = message.split_at_mut(message.len() / 2);
            for entry in &program.buckets[bucket as usize].entries {
                let count = picked(entry, fraction) as usize;
                let elements = entry.offset as usize..(entry.offset + entry.elements()) as usize;
                let (own_places, own_values);
                (own_places, places) = places.split_at_mut(count);
                (own_values, values) = values.split_at_mut(count);
                let (first, error) = (entry.offset as u32, &mut error[elements.clone()]);
                encode_topk(first, &grads[elements], error, own_places, own_values);
            }
        }
        CompressOp::Merge { codec, terms } => {
            let (received, message, error) = (on.ids(0), on.words_out(0), on.output::<f32>(1));
            if let Some(code) = block_code(codec) {
                let (words, each) = (code.words(BLOCK_LEN), message.len());
                debug_assert_eq!(received.len(), each * terms as usize);
                over_blocks(pool, code, error, message, |at, error, message| {
                    let place = at.start / BLOCK_LEN * words..at.end / BLOCK_LEN * words;
                    let terms = received.chunks_exact(each).map(|term| &term[place.clone()]);
                    code.merge(BLOCK_LEN, terms, error, message);
                });
            }
        }
        CompressOp::Decode { codec, terms } => {
            let (message, grads) = (on.ids(0), on.output::<G>(0));
            match block_code(codec) {
                None => decode_topk(terms as usize, message, grads),
                Some(code) => {
                    let (blocks, words) = (grads.len() / BLOCK_LEN, code.words(BLOCK_LEN));
                    pool.for_each_block(blocks, TILE, strips(grads, BLOCK_LEN), |at, grads| {
                        let message = &message[at.start * words..at.end * words];
                        code.decode(BLOCK_LEN, message, grads);
                    });
                }
            }
        }
        CompressOp::InitRight { rank, bucket } => {
            let q = on.output::<f32>(0);
            for part in Parts::of(program, bucket, rank) {
                if let Some(factor) = part.right {
                    let stream = Stream::new(0, &format!("{}.right", part.entry.name));
                    stream.fill_normal(0, 0.0, 1.0, &mut q[factor]);
                }
            }
        }
        CompressOp::Left { rank, bucket } => {
            let (grads, q) = (on.input::<G>(0), on.input::<f32>(1));
            let (p, error) = (on.output::<f32>(0), on.output::<f32>(1));
            for part in Parts::of(program, bucket, rank) {
                let (m, p) = (&mut error[part.elements.clone()], &mut p[part.left]);
                for (m, grad) in m.iter_mut().zip(&grads[part.elements]) {
                    *m += grad.widen();
                }
                match part.right {
                    Some(factor) => {
                        left(pool, part.columns, rank as usize, m, &q[factor], p);
                    }
                    None => {
                        p.copy_from_slice(m);
                        m.fill(0.0);
                    }
                }
            }
        }
        CompressOp::Right { rank, bucket } => {
            let (p, q) = (on.output::<f32>(0), on.output::<f32>(1));
            let error = on.output::<f32>(2);
            for part in Parts::of(program, bucket, rank) {
                if let Some(factor) = part.right {
                    let (rank, columns) = (rank as usize, part.columns);
                    let (p, q) = (&mut p[part.left], &mut q[factor]);
                    let m = &mut error[part.elements];
                    orthonormalise(rank, p);
                    right(pool, columns, rank, m, p, q);
                    residue(pool, columns, rank, p, q, m);
                }
            }
        }
        CompressOp::Product { rank, bucket } => {
            let (p, q, grads) = (on.input::<f32>(0), on.input::<f32>(1), on.output::<G>(0));
            for part in Parts::of(program, bucket, rank) {
                let (p, grads) = (&p[part.left], &mut grads[part.elements]);
                match part.right {
                    Some(factor) => {
                        product(pool, part.columns, rank as usize, p, &q[factor], grads);
                    }
                    None => {
                        let pairs = grads.iter_mut().zip(p);
                        pairs.for_each(|(grad, p)| *grad = G::narrow(*p));
                    }
                }
            }
        }
    }
}

const BLOCK_LEN: usize = BLOCK as usize;

fn block_code(codec: Codec) -> Option<BlockCode> {
    match codec {
        Codec::Int8 => Some(BlockCode::Int8),
        Codec::OneBit => Some(BlockCode::OneBit),
        Codec::TopK => None,
    }
}

/// Calls `body` with elements, their error feedback and message part, on all threads.
fn over_blocks(
    pool: &Pool,
    code: BlockCode,
    error: &mut [f32],
    message: &mut [u32],
    body: impl Fn(Range<usize>, &mut [f32], &mut [u32]) + Sync,
) {
    let blocks = error.len() / BLOCK_LEN;
    let outputs = (strips(error, BLOCK_LEN), strips(message, code.words(BLOCK_LEN)));
    pool.for_each_block(blocks, TILE, outputs, |at, (error, message)| {
        body(at.start * BLOCK_LEN..at.end * BLOCK_LEN, error, message);
    });
}

/// A tensor of a bucket and its factors.
struct Part<'p> {
    entry: &'p Entry,
    columns: usize,
    elements: Range<usize>,
    /// Range of its left factor, or of the whole tensor if it has none.
    left: Range<usize>,
    right: Option<Range<usize>>,
}

/// Tensors of a bucket, in the order of [`paceline_plan::compress::factor_lengths`].
struct Parts<'p> {
    entries: std::slice::Iter<'p, Entry>,
    rank: u32,
    left: usize,
    right: usize,
}

impl<'p> Parts<'p> {
    fn of(program: &'p Program, bucket: u32, rank: u32) -> Self {
        let entries = program.buckets[bucket as usize].entries.iter();
        Self { entries, rank, left: 0, right: 0 }
    }
}

impl<'p> Iterator for Parts<'p> {
    type Item = Part<'p>;

    fn next(&mut self) -> Option<Part<'p>> {
        let entry = self.entries.next()?;
        let start = entry.offset as usize;
        let factors = factors(entry, self.rank).map(|of| of.map(|len| len as usize));
        let (left, right) = (self.left, self.right);
        self.left += factors.map_or(entry.elements() as usize, |of| of[0]);
        self.right += factors.map_or(0, |of| of[1]);
        Some(Part {
            entry,
            columns: entry.local[1] as usize,
            elements: start..start + entry.elements() as usize,
            left: left..self.left,
            right: factors.map(|_| right..self.right),
        })
    }
}
