//! Steps of one rank, and the split of a vector into the chunks that they name.

use std::ops::Range;

/// One action of a rank in one round of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Step {
    /// Round; a message is sent and received in the same round.
    pub round: u32,
    /// Action performed.
    pub action: Action,
}

/// Action of a step. Peers are indices within the group, not world ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send these chunks of the work buffer, with their current contents, in one message.
    Send {
        /// The receiver.
        to: u32,
        /// Contents of the message, in their order.
        chunks: Chunks,
    },
    /// Receive one message.
    Recv {
        /// The sender.
        from: u32,
        /// Chunks of this rank that the message is combined with.
        chunks: Chunks,
        /// Use of the message.
        how: Combine,
    },
    /// Combine this rank's own chunks with every contribution held for them, in canonical order of
    /// the contributors, into the work buffer. The held contributions are then released.
    Fold {
        /// The chunks, exactly as the contributions were held.
        chunks: Chunks,
    },
    /// Copy chunks of the work buffer to the output buffer.
    Emit {
        /// The chunks.
        chunks: Chunks,
        /// Their positions in the output, in the same order.
        into: Chunks,
    },
    /// Let a peer read these chunks of the work buffer; nothing is sent. They stay unchanged until
    /// the end of the round, and this rank leaves the round only after the peer has read them.
    Lend {
        /// The reader.
        to: u32,
        /// Readable chunks, in ascending order.
        chunks: Chunks,
    },
    /// Read the chunks a peer lends in place, like the contents of a message.
    Read {
        /// The lender.
        from: u32,
        /// Chunks of this rank that the loan is combined with.
        chunks: Chunks,
        /// Use of the lent chunks. [`Combine::Hold`] does not copy: its [`Action::Fold`] is in the
        /// same round, during the loan.
        how: Combine,
    },
    /// Overwrite a peer's chunks with this rank's. The peer lent exactly these chunks to this rank,
    /// and to no other, in the round before; this rank folded them there. A round of writes holds
    /// nothing else and prolongs those loans to its own end.
    Write {
        /// The peer.
        to: u32,
        /// The chunks, as they were lent.
        chunks: Chunks,
    },
    /// Pass these chunks to the switch that joins the given ranks, including this one. It sums the
    /// offers of all of them in this round.
    Offer {
        /// Ranks that share the switch.
        to: Peers,
        /// Offered chunks, in ascending order.
        chunks: Chunks,
    },
    /// Overwrite these chunks with the sum of all offers that the given ranks, including this one,
    /// make for them to their switch in this round.
    Take {
        /// Ranks that share the switch.
        from: Peers,
        /// Chunks to overwrite.
        chunks: Chunks,
    },
}

impl Action {
    /// Chunks of this rank's work buffer, or of a message to it.
    pub const fn chunks(&self) -> Chunks {
        match *self {
            Self::Send { chunks, .. }
            | Self::Recv { chunks, .. }
            | Self::Fold { chunks }
            | Self::Emit { chunks, .. }
            | Self::Lend { chunks, .. }
            | Self::Read { chunks, .. }
            | Self::Write { chunks, .. }
            | Self::Offer { chunks, .. }
            | Self::Take { chunks, .. } => chunks,
        }
    }
}

/// Equally spaced ranks of a group that share one switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peers {
    /// Lowest rank.
    pub first: u32,
    /// Number of ranks.
    pub count: u32,
    /// Distance between consecutive ranks.
    pub stride: u32,
}

impl Peers {
    /// Ranks 0 to `count` − 1.
    pub const fn consecutive(count: u32) -> Self {
        Self { first: 0, count, stride: 1 }
    }

    /// The highest rank.
    pub const fn last(self) -> u32 {
        self.first.saturating_add(self.count.saturating_sub(1).saturating_mul(self.stride))
    }

    /// Returns true if `rank` is one of the peers.
    pub const fn contains(self, rank: u32) -> bool {
        self.first <= rank
            && rank <= self.last()
            && (rank - self.first).is_multiple_of(if self.stride == 0 { 1 } else { self.stride })
    }
}

/// Use of a received message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combine {
    /// It overwrites the chunks.
    Replace,
    /// It is reduced into the chunks.
    Reduce,
    /// It is held as the sender's contribution until a [`Action::Fold`] of the same chunks.
    Hold,
    /// It is written to the chunks of the output buffer; the work buffer is unchanged.
    Output,
}

/// A set of chunks, or of one piece of each: `count` equally spaced runs of `width` equally spaced
/// chunks.
///
/// Most sets are single chunks at equal distances, `first, first + stride, …`. Runs occur if a
/// vector is split for one group of ranks and each chunk again for another; they do not overlap.
/// Pieces occur if several streams share every chunk. In a set that wraps around, the last run may be
/// shorter, and the stride may be negative: the modulus minus a distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Chunks {
    /// The lowest chunk.
    pub first: u32,
    /// Number of runs.
    pub count: u32,
    /// Distance between the first chunks of consecutive runs.
    pub stride: u32,
    /// Number of chunks per run.
    pub width: u32,
    /// Distance between consecutive chunks of a run.
    pub step: u32,
    /// Index of the piece of each chunk.
    pub piece: u32,
    /// Number of pieces each chunk is split into; 0 means 1.
    pub pieces: u32,
    /// Number of chunks that the last run lacks.
    pub missing: u32,
    /// Number after which chunks are counted from 0 again; 0 means never.
    pub modulus: u32,
}

impl Chunks {
    /// A single chunk.
    pub const fn one(index: u32) -> Self {
        Self::spaced(index, 1, 1)
    }

    /// All chunks below `total`.
    pub const fn all(total: u32) -> Self {
        Self::spaced(0, total, 1)
    }

    /// Single chunks at equal distances: `first, first + stride, …`, `count` of them.
    pub const fn spaced(first: u32, count: u32, stride: u32) -> Self {
        Self {
            first,
            count,
            stride,
            width: 1,
            step: 1,
            piece: 0,
            pieces: 1,
            missing: 0,
            modulus: 0,
        }
    }

    /// The chunks below `total` that are congruent to `residue` modulo `modulus` (0 means 1).
    pub const fn congruent(residue: u32, modulus: u32, total: u32) -> Self {
        let modulus = if modulus == 0 { 1 } else { modulus };
        let first = residue % modulus;
        let count = if first < total { (total - first).div_ceil(modulus) } else { 0 };
        Self::spaced(first, count, modulus)
    }

    /// Piece `piece` of `pieces` of each chunk.
    pub const fn piece(self, piece: u32, pieces: u32) -> Self {
        Self { piece, pieces, ..self }
    }

    /// Single chunks at equal distances, counted modulo `modulus`.
    pub const fn around(first: u32, count: u32, stride: u32, modulus: u32) -> Self {
        Self { modulus, ..Self::spaced(first, count, stride) }
    }

    /// Number of chunks.
    pub const fn number(self) -> u32 {
        self.count.saturating_mul(self.width).saturating_sub(self.missing)
    }

    /// The chunks' indices, in the order of their contents in a message.
    pub fn iter(self) -> impl ExactSizeIterator<Item = u32> {
        (0..self.number()).map(move |i| self.nth(i))
    }

    /// The set after each chunk *c* is split into `width` chunks that start at `first + apart·c`
    /// with distance `step`. This set must have runs of width 1.
    pub(super) fn subdivide(self, first: u32, apart: u32, width: u32, step: u32) -> Self {
        debug_assert_eq!(self.width, 1, "chunks of chunks of chunks");
        let Self { piece, pieces, .. } = self;
        let modulus = self.modulus * apart * width;
        let first = first + apart * self.first;
        let (across, within) = ((self.count, apart * self.stride), (width, step));
        let (runs, run) = if across.1 >= within.1 { (across, within) } else { (within, across) };
        let chunks = if self.count <= 1 {
            Self::spaced(first, self.count * width, step)
        } else if width == 1 {
            Self::spaced(first, across.0, across.1)
        } else if runs.1 == run.0 * run.1 {
            Self::spaced(first, runs.0 * run.0, run.1)
        } else {
            Self { width: run.0, step: run.1, ..Self::spaced(first, runs.0, runs.1) }
        };
        Self { modulus, ..chunks.piece(piece, pieces) }
    }

    fn nth(self, i: u32) -> u32 {
        let Self { first, stride, width, step, modulus, .. } = self;
        if modulus == 0 {
            return first + i / width * stride + i % width * step;
        }
        let [first, i, stride, width, step] = [first, i, stride, width, step].map(u64::from);
        ((first + i / width * stride + i % width * step) % u64::from(modulus)) as u32
    }
}

/// A vector split into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunking {
    /// Number of elements of the whole vector.
    pub elements: u64,
    /// Number of chunks.
    pub chunks: u32,
    /// Chunk boundaries are multiples of this number of elements; 0 means 1.
    pub block: u64,
}

impl Chunking {
    /// Element range of one chunk.
    pub fn range(&self, chunk: u32) -> Range<u64> {
        chunk_range(self.elements, self.chunks, chunk, self.block)
    }

    /// Element ranges of several chunks; adjacent chunks are merged into one range.
    pub fn ranges(&self, chunks: Chunks) -> impl Iterator<Item = Range<u64>> {
        // Number of adjacent chunks that form a range, and number of such rows.
        let row = match chunks {
            Chunks { pieces: 2.., .. } | Chunks { modulus: 1.., .. } => 1,
            Chunks { stride: 1, width: 1, count, .. } => count,
            Chunks { step: 1, width, .. } => width,
            Chunks { .. } => 1,
        };
        let rows = chunks.number().checked_div(row).unwrap_or(0);
        let cut = *self;
        (0..rows).map(move |i| {
            let first = chunks.nth(i * row);
            let whole = cut.range(first).start..cut.range(first + (row - 1)).end;
            cut.piece_of(whole, chunks)
        })
    }

    /// Total number of elements of several chunks, without iterating over all of them.
    pub fn elements_in(&self, chunks: Chunks) -> u64 {
        let Chunks { first, count, stride, width, step, .. } = chunks;
        if chunks.modulus > 0 {
            let sizes = chunks.iter().map(|chunk| self.piece_of(self.range(chunk), chunks));
            return sizes.map(|range| range.end - range.start).fold(0, u64::saturating_add);
        }
        if chunks.pieces > 1 {
            return self.elements_in_pieces(chunks);
        }
        let (rows, apart, count, stride) = if width <= count {
            (width, step, count, stride)
        } else {
            (count, stride, width, step)
        };
        (0..rows)
            .map(|row| self.elements_spaced(first + row * apart, count, stride))
            .fold(0, u64::saturating_add)
    }

    /// Elements of a piece of a chunk; pieces are split like chunks.
    fn piece_of(&self, chunk: Range<u64>, Chunks { piece, pieces, .. }: Chunks) -> Range<u64> {
        let range = chunk_range(chunk.end - chunk.start, pieces, piece, self.block);
        chunk.start + range.start..chunk.start + range.end
    }

    /// Number of elements of one piece of several chunks, counted by distinct piece size.
    fn elements_in_pieces(&self, chunks: Chunks) -> u64 {
        let Chunks { first, count, stride, width, step, piece, pieces, .. } = chunks;
        let (total, block) = (u64::from(self.chunks.max(1)), self.block.max(1));
        let blocks = self.elements.div_ceil(block);
        let (each, extra) = (blocks / total, blocks % total);
        let (rows, apart, count, stride) = if width <= count {
            (width, step, count, stride)
        } else {
            (count, stride, width, step)
        };
        let below = |bound: u64| -> u64 {
            let row = |row: u32| {
                let first = u64::from(first) + u64::from(row) * u64::from(apart);
                let stride = u64::from(stride.max(1));
                bound.saturating_sub(first).div_ceil(stride).min(count.into())
            };
            (0..rows).map(row).sum()
        };
        let (piece, pieces) = (u64::from(piece), u64::from(pieces));
        let whole = |blocks: u64| {
            let dealt = blocks / pieces + u64::from(piece < blocks % pieces);
            u128::from(dealt) * u128::from(block)
        };
        let large = below(extra);
        let small = below(total) - large;
        let nominal = u128::from(large) * whole(each + 1) + u128::from(small) * whole(each);
        // Only the chunk with the vector's last element can end within a block.
        let last = if each > 0 { total - 1 } else { extra.saturating_sub(1) };
        let mut elements = nominal;
        if below(last + 1) > below(last) {
            let range = self.piece_of(self.range(last as u32), chunks);
            elements -= whole(if last < extra { each + 1 } else { each });
            elements += u128::from(range.end - range.start);
        }
        u64::try_from(elements).unwrap_or(u64::MAX)
    }

    /// Total number of elements of `count` equally spaced chunks.
    fn elements_spaced(&self, first: u32, count: u32, stride: u32) -> u64 {
        let (total, block) = (u64::from(self.chunks.max(1)), self.block.max(1));
        let blocks = self.elements.div_ceil(block);
        let (each, extra) = (blocks / total, blocks % total);
        let (first, count, stride) = (u64::from(first), u64::from(count), u64::from(stride.max(1)));
        let below = |bound: u64| bound.saturating_sub(first).div_ceil(stride).min(count);
        let mine = below(total) * each + below(extra);
        // Only the chunk with the vector's last element can end within a block.
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

/// Elements of chunk `index` if `elements` are split into `chunks` chunks of nearly equal size at
/// multiples of `block` (0 means 1).
///
/// The blocks are distributed evenly; the first chunks get one more if the division leaves a
/// remainder. Only the chunk with the vector's last element can end within a block. With fewer
/// blocks than chunks the last chunks are empty, as is every chunk that does not exist.
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

/// Builder for the steps of one rank.
#[derive(Default)]
pub(super) struct StepList(Vec<Step>);

impl StepList {
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
        self.emit_into(round, chunks, chunks);
    }

    pub(super) fn emit_into(&mut self, round: u32, chunks: Chunks, into: Chunks) {
        self.0.push(Step { round, action: Action::Emit { chunks, into } });
    }

    pub(super) fn lend(&mut self, round: u32, to: u32, chunks: Chunks) {
        self.0.push(Step { round, action: Action::Lend { to, chunks } });
    }

    pub(super) fn read(&mut self, round: u32, from: u32, chunks: Chunks, how: Combine) {
        self.0.push(Step { round, action: Action::Read { from, chunks, how } });
    }

    pub(super) fn write(&mut self, round: u32, to: u32, chunks: Chunks) {
        self.0.push(Step { round, action: Action::Write { to, chunks } });
    }

    /// Appends (possibly adapted) steps of another algorithm.
    pub(super) fn extend(&mut self, steps: impl IntoIterator<Item = Step>) {
        self.0.extend(steps);
    }

    pub(super) fn done(self) -> Vec<Step> {
        self.0
    }

    /// Like [`done`](Self::done), for steps not written in round order: within a round outgoing
    /// steps come first, and the rest keeps its order.
    pub(super) fn sorted(mut self) -> Vec<Step> {
        self.0.sort_by_key(|step| {
            let goes_out = matches!(
                step.action,
                Action::Send { .. } | Action::Lend { .. } | Action::Offer { .. }
            );
            (step.round, !goes_out)
        });
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn chunks_are_cut_at_blocks() {
        let cut = Chunking { elements: 10, chunks: 3, block: 4 };
        assert_eq!([cut.range(0), cut.range(1), cut.range(2)], [0..4, 4..8, 8..10]);
        let cut = Chunking { elements: 2, chunks: 4, block: 1 };
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
    fn a_cut_of_a_cut_is_written_as_simply_as_it_can_be() {
        assert_eq!(Chunks::all(3).subdivide(0, 4, 4, 1), Chunks::all(12));
        assert_eq!(Chunks::one(2).subdivide(1, 4, 3, 1), Chunks::spaced(9, 3, 1));
        assert_eq!(Chunks::all(4).subdivide(0, 1, 3, 4), Chunks::all(12));
        let runs = Chunks::congruent(1, 2, 6).subdivide(0, 4, 4, 1);
        let spaced = Chunks::spaced(4, 3, 8);
        assert_eq!(runs, Chunks { width: 4, ..spaced });
    }

    #[test]
    fn absurd_cuts_do_not_overflow() {
        let max = u64::MAX;
        assert_eq!(chunk_range(max, 1, 0, max), 0..max);
        assert_eq!(chunk_range(max, 0, 0, 0), 0..max);
        assert_eq!(chunk_range(max, u32::MAX, u32::MAX - 1, 1).end, max);
        assert_eq!(chunk_range(max, 3, u32::MAX, 7), max..max);
        assert_eq!(chunk_range(0, 5, 2, 3), 0..0);
        let cut = Chunking { elements: max, chunks: 3, block: max - 1 };
        assert_eq!(cut.elements_in(Chunks::all(3)), max);
    }

    proptest! {
        #[test]
        fn a_cut_is_even_and_complete(elements in 0u64..5000, chunks in 1u32..40, block in 1u64..9) {
            let cut = Chunking { elements, chunks, block };
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
        fn pieces_make_up_their_chunks(
            elements in 0u64..5000,
            chunks in 1u32..20,
            pieces in 1u32..7,
            block in 1u64..9,
        ) {
            let cut = Chunking { elements, chunks, block };
            for chunk in 0..chunks {
                let mut end = cut.range(chunk).start;
                for piece in 0..pieces {
                    let piece = Chunks::one(chunk).piece(piece, pieces);
                    let range = cut.ranges(piece).next().unwrap();
                    prop_assert_eq!(cut.elements_in(piece), range.end - range.start);
                    prop_assert_eq!(range.start, end);
                    prop_assert!(range.end == elements || range.end.is_multiple_of(block));
                    end = range.end;
                }
                prop_assert_eq!(end, cut.range(chunk).end);
            }
            let all = |piece| cut.elements_in(Chunks::all(chunks).piece(piece, pieces));
            prop_assert_eq!((0..pieces).map(all).sum::<u64>(), elements);
        }

        #[test]
        fn ranges_are_those_of_the_chunks(
            elements in 0u64..300,
            block in 1u64..9,
            first in 0u32..9,
            stride in 1u32..5,
            total in 1u32..12,
            (width, of_runs) in (1u32..5, any::<bool>()),
        ) {
            let chunks = total * width;
            let cut = Chunking { elements, chunks, block };
            let single = Chunks::congruent(first, stride, total);
            // Each chunk becomes a contiguous run, or `width` chunks spread over the vector.
            let chunks = match of_runs {
                true => single.subdivide(0, width, width, 1),
                false => single.subdivide(0, 1, width, total),
            };
            let wanted: std::collections::BTreeSet<u32> = single
                .iter()
                .flat_map(|c| {
                    (0..width).map(move |i| if of_runs { c * width + i } else { c + i * total })
                })
                .collect();
            prop_assert_eq!(chunks.iter().collect::<Vec<_>>(), Vec::from_iter(wanted));
            let of_chunks: Vec<u64> = chunks.iter().flat_map(|chunk| cut.range(chunk)).collect();
            let of_ranges: Vec<u64> = cut.ranges(chunks).flatten().collect();
            prop_assert_eq!(cut.elements_in(chunks), of_chunks.len() as u64);
            prop_assert_eq!(of_ranges, of_chunks);
        }
    }
}
