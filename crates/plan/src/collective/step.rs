//! One rank's steps, and how a vector is cut into the chunks that they name.

use std::ops::Range;

/// One thing a rank does in one round of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Step {
    /// Which round; a message is sent and received in the same one.
    pub round: u32,
    /// What is done.
    pub action: Action,
}

/// What a step does. Peers are indices within the group, not ranks of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send these chunks of the work buffer, as they are now, in one message.
    Send {
        /// The receiver.
        to: u32,
        /// What the message carries, in ascending order of chunks.
        chunks: Chunks,
    },
    /// Take one message in.
    Recv {
        /// The sender.
        from: u32,
        /// Which chunks of this rank the message is for.
        chunks: Chunks,
        /// What becomes of it.
        how: Combine,
    },
    /// Combine this rank's own chunks with every contribution held for them, in canonical order
    /// of the contributors, into the work buffer. Nothing is held for them afterwards.
    Fold {
        /// The chunks, exactly as the contributions were held.
        chunks: Chunks,
    },
    /// Copy these chunks of the work buffer to the same places of the output buffer.
    Emit {
        /// The chunks.
        chunks: Chunks,
    },
}

/// What a receiver does with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combine {
    /// It overwrites the chunks.
    Replace,
    /// It is reduced into the chunks.
    Reduce,
    /// It is set aside as the sender's contribution until a [`Action::Fold`] of the same chunks.
    Hold,
    /// It is written to the chunks of the output buffer; the work buffer stays as it is.
    Output,
}

/// A set of chunks with equal distances: `first, first + stride, …`, `count` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Chunks {
    /// The lowest chunk.
    pub first: u32,
    /// How many chunks.
    pub count: u32,
    /// The distance between two of them.
    pub stride: u32,
}

impl Chunks {
    /// A single chunk.
    pub const fn one(index: u32) -> Self {
        Self { first: index, count: 1, stride: 1 }
    }

    /// All chunks below `total`.
    pub const fn all(total: u32) -> Self {
        Self { first: 0, count: total, stride: 1 }
    }

    /// The chunks below `total` that are congruent to `residue` modulo `modulus` (0 means 1).
    pub const fn congruent(residue: u32, modulus: u32, total: u32) -> Self {
        let modulus = if modulus == 0 { 1 } else { modulus };
        let first = residue % modulus;
        let count = if first < total { (total - first).div_ceil(modulus) } else { 0 };
        Self { first, count, stride: modulus }
    }

    /// The chunks' indices, ascending.
    pub fn iter(self) -> impl ExactSizeIterator<Item = u32> {
        (0..self.count).map(move |i| self.first + i * self.stride)
    }
}

/// A vector cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Elements of the whole vector.
    pub elements: u64,
    /// Into how many chunks it is cut.
    pub chunks: u32,
    /// Cuts fall on multiples of this many elements; 0 means 1.
    pub block: u64,
}

impl Cut {
    /// The elements of one chunk.
    pub fn range(&self, chunk: u32) -> Range<u64> {
        chunk_range(self.elements, self.chunks, chunk, self.block)
    }

    /// The elements of several chunks, as few ranges as there are gaps between them.
    pub fn ranges(&self, chunks: Chunks) -> impl Iterator<Item = Range<u64>> {
        let (pieces, width) = match chunks {
            Chunks { count: 0, .. } => (0, 0),
            Chunks { stride: 1, count, .. } => (1, count),
            Chunks { count, .. } => (count, 1),
        };
        let cut = *self;
        (0..pieces).map(move |i| {
            let first = chunks.first + i * chunks.stride;
            cut.range(first).start..cut.range(first + (width - 1)).end
        })
    }

    /// How many elements several chunks have together, without looking at each of them.
    pub fn elements_in(&self, chunks: Chunks) -> u64 {
        let (total, block) = (u64::from(self.chunks.max(1)), self.block.max(1));
        let blocks = self.elements.div_ceil(block);
        let (each, extra) = (blocks / total, blocks % total);
        let (first, count) = (u64::from(chunks.first), u64::from(chunks.count));
        let stride = u64::from(chunks.stride.max(1));
        let below = |bound: u64| bound.saturating_sub(first).div_ceil(stride).min(count);
        let mine = below(total) * each + below(extra);
        // Only the chunk with the vector's last element can have less than whole blocks.
        let last = if each > 0 { total - 1 } else { extra.saturating_sub(1) };
        let missing = if below(last + 1) > below(last) && mine > 0 {
            (block - self.elements % block) % block
        } else {
            0
        };
        let elements = u128::from(mine) * u128::from(block) - u128::from(missing);
        u64::try_from(elements).unwrap_or(u64::MAX)
    }
}

/// The elements of chunk `index` when `elements` are cut into `chunks` of nearly equal size at
/// multiples of `block` (0 means 1).
///
/// The blocks are dealt out evenly and the first chunks get one more where they do not divide; only
/// the chunk with the vector's last element can end within a block. With fewer blocks than chunks
/// the last chunks are empty, and so is every chunk that does not exist.
pub fn chunk_range(elements: u64, chunks: u32, index: u32, block: u64) -> Range<u64> {
    let (chunks, block) = (u64::from(chunks.max(1)), block.max(1));
    let blocks = elements.div_ceil(block);
    let (each, extra) = (blocks / chunks, blocks % chunks);
    let start = |index: u64| {
        let index = index.min(chunks);
        (index * each + index.min(extra)).saturating_mul(block).min(elements)
    };
    start(u64::from(index))..start(u64::from(index) + 1)
}

/// The steps of one rank while an algorithm writes them down.
#[derive(Default)]
pub(super) struct Script(Vec<Step>);

impl Script {
    pub(super) fn send(&mut self, round: u32, to: u32, chunks: Chunks) {
        self.0.push(Step { round, action: Action::Send { to, chunks } });
    }

    pub(super) fn recv(&mut self, round: u32, from: u32, chunks: Chunks, how: Combine) {
        self.0.push(Step { round, action: Action::Recv { from, chunks, how } });
    }

    pub(super) fn fold(&mut self, round: u32, chunks: Chunks) {
        self.0.push(Step { round, action: Action::Fold { chunks } });
    }

    pub(super) fn emit(&mut self, round: u32, chunks: Chunks) {
        self.0.push(Step { round, action: Action::Emit { chunks } });
    }

    pub(super) fn done(self) -> Vec<Step> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn chunks_are_cut_at_blocks() {
        let cut = Cut { elements: 10, chunks: 3, block: 4 };
        assert_eq!([cut.range(0), cut.range(1), cut.range(2)], [0..4, 4..8, 8..10]);
        let cut = Cut { elements: 2, chunks: 4, block: 1 };
        assert_eq!(
            [cut.range(1), cut.range(2), cut.range(3), cut.range(4)],
            [1..2, 2..2, 2..2, 2..2]
        );
    }

    #[test]
    fn congruent_chunks_stop_at_the_total() {
        assert_eq!(Chunks::congruent(1, 4, 11).iter().collect::<Vec<_>>(), [1, 5, 9]);
        assert_eq!(Chunks::congruent(3, 4, 11).iter().collect::<Vec<_>>(), [3, 7]);
        assert_eq!(Chunks::congruent(3, 4, 2).count, 0);
    }

    #[test]
    fn absurd_cuts_do_not_overflow() {
        let max = u64::MAX;
        assert_eq!(chunk_range(max, 1, 0, max), 0..max);
        assert_eq!(chunk_range(max, 0, 0, 0), 0..max);
        assert_eq!(chunk_range(max, u32::MAX, u32::MAX - 1, 1).end, max);
        assert_eq!(chunk_range(max, 3, u32::MAX, 7), max..max);
        assert_eq!(chunk_range(0, 5, 2, 3), 0..0);
        let cut = Cut { elements: max, chunks: 3, block: max - 1 };
        assert_eq!(cut.elements_in(Chunks::all(3)), max);
    }

    proptest! {
        #[test]
        fn a_cut_is_even_and_complete(elements in 0u64..5000, chunks in 1u32..40, block in 1u64..9) {
            let cut = Cut { elements, chunks, block };
            let mut end = 0;
            let mut sizes = Vec::new();
            for index in 0..chunks {
                let range = cut.range(index);
                prop_assert_eq!(range.start, end);
                prop_assert!(range.end == elements || range.end.is_multiple_of(block));
                sizes.push(range.end - range.start);
                end = range.end;
            }
            prop_assert_eq!(end, elements);
            prop_assert!(sizes.windows(2).all(|pair| pair[0] >= pair[1]));
            prop_assert!(sizes[0] - sizes[sizes.len() - 1] < 2 * block);
            prop_assert_eq!(cut.elements_in(Chunks::all(chunks)), elements);
        }

        #[test]
        fn ranges_are_those_of_the_chunks(
            elements in 0u64..200,
            block in 1u64..9,
            first in 0u32..9,
            stride in 1u32..5,
            total in 1u32..30,
        ) {
            let cut = Cut { elements, chunks: total, block };
            let chunks = Chunks::congruent(first, stride, total);
            let of_chunks: Vec<u64> = chunks.iter().flat_map(|chunk| cut.range(chunk)).collect();
            let of_ranges: Vec<u64> = cut.ranges(chunks).flatten().collect();
            prop_assert_eq!(cut.elements_in(chunks), of_chunks.len() as u64);
            prop_assert_eq!(of_ranges, of_chunks);
        }
    }
}
