//! Assigns addresses to buffers.

use crate::program::{ALIGNMENT, Buffer, Memory, MemoryKind};
use crate::units::Bytes;

/// Lifetime of a value in steps of some order, both ends included.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interval {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) size: Bytes,
}

/// Places values so that those live at the same time do not overlap: largest first, each at the
/// lowest address that is free during its lifetime. Returns the addresses and the total size.
pub(super) fn pack(intervals: &[Interval]) -> (Vec<Bytes>, Bytes) {
    let mut by_size: Vec<usize> = (0..intervals.len()).collect();
    by_size.sort_by_key(|&i| (std::cmp::Reverse(intervals[i].size), intervals[i].start, i));
    let mut places: Vec<Option<Bytes>> = vec![None; intervals.len()];
    let mut total = Bytes::ZERO;
    for i in by_size {
        let life = intervals[i];
        let size = life.size.round_up(ALIGNMENT);
        let mut busy: Vec<(Bytes, Bytes)> = intervals
            .iter()
            .zip(&places)
            .filter(|(other, _)| other.start <= life.end && life.start <= other.end)
            .filter_map(|(other, place)| place.map(|at| (at, at + other.size.round_up(ALIGNMENT))))
            .collect();
        busy.sort();
        let mut at = Bytes::ZERO;
        for (from, to) in busy {
            if at + size <= from {
                break;
            }
            at = at.max(to);
        }
        places[i] = Some(at);
        total = total.max(at + size);
    }
    (places.into_iter().map(|place| place.unwrap_or_default()).collect(), total)
}

/// Placement of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// At an exclusive address.
    Own,
    /// In the scratch region, at this offset.
    Scratch(Bytes),
}

/// Assigns addresses by memory kind, with the scratch region at the end of the activations.
pub(super) fn assign(buffers: &mut [Buffer], homes: &[Home], scratch: Bytes) -> Memory {
    let mut memory = Memory::default();
    let mut cursor = Bytes::ZERO;
    for kind in MemoryKind::ALL {
        let start = cursor;
        let here = buffers.iter_mut().zip(homes).filter(|(b, _)| b.kind == kind);
        for (buffer, home) in here {
            if *home == Home::Own {
                buffer.offset = cursor;
                cursor += buffer.extent();
            }
        }
        if kind == MemoryKind::Activations {
            for (buffer, home) in buffers.iter_mut().zip(homes) {
                if let Home::Scratch(at) = *home {
                    buffer.offset = cursor + at;
                }
            }
            cursor += scratch;
        }
        memory.by_kind[kind as usize] = cursor - start;
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lives_that_do_not_meet_share_memory() {
        let life = |start, end| Interval { start, end, size: Bytes(100) };
        let (places, total) = pack(&[life(0, 1), life(2, 3), life(1, 2)]);
        assert_eq!(places[0], places[1]);
        assert_eq!(total, Bytes(256));
    }

    proptest! {
        #[test]
        fn the_living_never_overlap(
            lives in prop::collection::vec((0usize..20, 0usize..10, 1u64..5000), 0..40)
        ) {
            let intervals: Vec<Interval> = lives
                .iter()
                .map(|&(start, length, size)| Interval { start, end: start + length, size: Bytes(size) })
                .collect();
            let (places, total) = pack(&intervals);
            for i in 0..intervals.len() {
                prop_assert!(places[i] + intervals[i].size <= total);
                for j in 0..i {
                    let (a, b) = (intervals[i], intervals[j]);
                    let together = a.start <= b.end && b.start <= a.end;
                    let apart = places[i] + a.size <= places[j] || places[j] + b.size <= places[i];
                    prop_assert!(!together || apart);
                }
            }
        }
    }
}
