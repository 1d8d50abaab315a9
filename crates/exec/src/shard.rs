//! Logical elements of a tensor that a rank holds, and their offsets.

use crate::rank_coords::{RankCoords, ShardIndex};
use paceline_plan::lower::assign;
use paceline_plan::program::Entry;
use paceline_plan::spec::{Layout, Placement};
use std::ops::Range;

/// Elements that are contiguous both in a rank's shard and in the logical tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ElementRun {
    /// First element in the shard.
    pub(crate) local: u64,
    /// Number of elements.
    pub(crate) len: u64,
    /// First element in the logical tensor, row-major; `None` for padding.
    pub(crate) logical: Option<u64>,
}

impl ElementRun {
    /// Part of the run within the range `elements` of the shard, if any.
    pub(crate) fn within(self, elements: &Range<u64>) -> Option<Self> {
        let start = self.local.max(elements.start);
        let end = (self.local + self.len).min(elements.end);
        (start < end).then(|| Self {
            local: start,
            len: end - start,
            logical: self.logical.map(|logical| logical + (start - self.local)),
        })
    }
}

/// Returns true if a parameter can have this placement; others are for activations.
pub(crate) fn is_holdable(placement: Placement) -> bool {
    match placement {
        Placement::Replicate => true,
        Placement::Shard { dim: 0 | 1, layout: Layout::Contiguous | Layout::Blocks } => true,
        Placement::Shard { dim: 0, layout: Layout::Whole } => true,
        Placement::Shard { .. } | Placement::Partial(_) | Placement::FlatShard => false,
    }
}

/// Element runs of the shard of an entry that a rank holds, in order.
///
/// Experts are stacked by rows: the shard consists of the experts assigned to the rank, each
/// sharded as other tensors are.
pub(crate) fn runs_of(entry: &Entry, place: &RankCoords) -> Vec<ElementRun> {
    if entry.experts == 0 {
        return runs(entry, place.part(entry));
    }
    let [rows, columns] = entry.dims;
    let here = entry.experts / u64::from(place.experts.count);
    let first = u64::from(place.experts.index) * here;
    let one = Entry {
        dims: [rows / entry.experts, columns],
        local: [entry.local[0] / here.max(1), entry.local[1]],
        experts: 0,
        ..entry.clone()
    };
    let cut = runs(&one, place.expert_tensor);
    let of = |expert: u64| {
        let (local, logical) = (expert * one.elements(), (first + expert) * one.dims[0] * columns);
        cut.iter().map(move |run| ElementRun {
            local: run.local + local,
            len: run.len,
            logical: run.logical.map(|at| at + logical),
        })
    };
    (0..here).flat_map(of).collect()
}

/// Element runs of shard `tensor` of an entry along the tensor-parallel axis, in order.
///
/// A sharded dimension consists of blocks, each split contiguously. If a block does not divide
/// equally, the last shards are padded at the end.
fn runs(entry: &Entry, tensor: ShardIndex) -> Vec<ElementRun> {
    let cut = match entry.tp {
        Placement::Shard { dim, .. } => usize::from(dim),
        Placement::Replicate | Placement::Partial(_) | Placement::FlatShard => {
            return vec![ElementRun { local: 0, len: entry.elements(), logical: Some(0) }];
        }
    };
    if let Placement::Shard { layout: Layout::Whole, .. } = entry.tp {
        return whole_blocks(entry, tensor);
    }
    let [_, columns] = entry.dims;
    let [_, local_columns] = entry.local;
    let pieces = pieces(entry, cut, tensor);
    if cut == 0 {
        let of = |p: &ElementRun| ElementRun {
            local: p.local * columns,
            len: p.len * columns,
            logical: p.logical.map(|row| row * columns),
        };
        return pieces.iter().map(of).collect();
    }
    let of_row = |row: u64| {
        let place = move |p: &ElementRun| ElementRun {
            local: row * local_columns + p.local,
            len: p.len,
            logical: p.logical.map(|column| row * columns + column),
        };
        pieces.iter().map(place)
    };
    (0..entry.local[0]).flat_map(of_row).collect()
}

/// Whole blocks that a shard holds, one after the other, and the padding after them.
fn whole_blocks(entry: &Entry, part: ShardIndex) -> Vec<ElementRun> {
    let columns = entry.dims[1];
    let (mut found, mut logical) = (Vec::new(), 0);
    for (seat, &rows) in assign(&entry.blocks, part.count).iter().zip(&entry.blocks) {
        if seat.rank == part.index {
            let (local, len) = (seat.first * columns, rows * columns);
            found.push(ElementRun { local, len, logical: Some(logical * columns) });
        }
        logical += rows;
    }
    found.sort_by_key(|run| run.local);
    let end = found.last().map_or(0, |run| run.local + run.len);
    let padding =
        ElementRun { local: end, len: entry.elements().saturating_sub(end), logical: None };
    found.extend([padding].into_iter().filter(|run| run.len > 0));
    found
}

/// Indices of the sharded dimension `cut` that a shard holds.
fn pieces(entry: &Entry, cut: usize, tensor: ShardIndex) -> Vec<ElementRun> {
    let total = entry.dims[cut];
    let of_this_dim = !entry.blocks.is_empty() && entry.blocks.iter().sum::<u64>() == total;
    let blocks = if of_this_dim { entry.blocks.clone() } else { vec![total] };
    let (mut local, mut logical) = (0, 0);
    let mut pieces = Vec::new();
    for block in blocks {
        let each = block.div_ceil(u64::from(tensor.count));
        let before = (u64::from(tensor.index) * each).min(block);
        let held = each.min(block - before);
        let piece = ElementRun { local, len: held, logical: Some(logical + before) };
        let padding = ElementRun { local: local + held, len: each - held, logical: None };
        pieces.extend([piece, padding].into_iter().filter(|run| run.len > 0));
        local += each;
        logical += block;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::graph::Init;
    use proptest::prelude::*;

    fn entry(dims: [u64; 2], blocks: &[u64], tp: Placement, local: [u64; 2]) -> Entry {
        Entry {
            name: "t".into(),
            dims,
            blocks: blocks.to_vec(),
            experts: 0,
            tp,
            local,
            offset: 0,
            init: Init::Zero,
            decay: false,
            running: false,
            sparse: false,
            counted: true,
            norm_entry: 0,
        }
    }

    fn run(local: u64, len: u64, logical: impl Into<Option<u64>>) -> ElementRun {
        ElementRun { local, len, logical: logical.into() }
    }

    #[test]
    fn every_block_of_rows_is_cut() {
        // Queries of 4 rows, keys and values of 2 each, 3 columns; the second of two ranks.
        let entry = entry([8, 3], &[4, 2, 2], Placement::ROWS, [4, 3]);
        let second = ShardIndex { index: 1, count: 2 };
        assert_eq!(runs(&entry, second), [run(0, 6, 6), run(6, 3, 15), run(9, 3, 21)]);
    }

    #[test]
    fn every_row_is_cut_along_the_width() {
        let entry = entry([2, 4], &[], Placement::WIDTH, [2, 2]);
        let second = ShardIndex { index: 1, count: 2 };
        assert_eq!(runs(&entry, second), [run(0, 2, 2), run(2, 2, 6)]);
        // A bias has one row with its blocks side by side.
        let bias = super::tests::entry([1, 6], &[4, 2], Placement::WIDTH, [1, 3]);
        assert_eq!(runs(&bias, second), [run(0, 2, 2), run(2, 1, 5)]);
    }

    #[test]
    fn an_uneven_vocabulary_ends_in_padding() {
        let of = |index| {
            let entry = entry([5, 2], &[], Placement::ROWS, [2, 2]);
            runs(&entry, ShardIndex { index, count: 4 })
        };
        assert_eq!(of(0), [run(0, 4, 0)]);
        assert_eq!(of(2), [run(0, 2, 8), run(2, 2, None)]);
        assert_eq!(of(3), [run(0, 4, None)]);
    }

    proptest! {
        #[test]
        fn shards_cover_the_tensor_once_and_themselves_whole(
            rows in 1u64..20, columns in 1u64..20, count in 1u32..5, dim in 0u8..2,
        ) {
            let dims = [rows, columns];
            let mut local = dims;
            local[usize::from(dim)] = dims[usize::from(dim)].div_ceil(u64::from(count));
            let tp = Placement::Shard { dim, layout: Layout::Blocks };
            let entry = entry(dims, &[], tp, local);
            let mut seen = vec![0; (rows * columns) as usize];
            for index in 0..count {
                let mut next = 0;
                for run in runs(&entry, ShardIndex { index, count }) {
                    prop_assert_eq!(run.local, next);
                    next += run.len;
                    for i in 0..run.len {
                        if let Some(logical) = run.logical {
                            seen[(logical + i) as usize] += 1;
                        }
                    }
                }
                prop_assert_eq!(next, entry.elements());
            }
            prop_assert!(seen.iter().all(|&times| times == 1));
        }
    }
}
