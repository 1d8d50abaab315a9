//! Reuse distance: bytes touched since the last access, which decides the cache level.

use paceline_plan::ids::BufferId;
use paceline_plan::program::{Program, View};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Start of a range of elements: buffer, copy, first element.
type Place = (BufferId, u64, u64);

/// Memory ranges in order of last access.
///
/// The distance of an access is the size that an ideal LRU cache would need to still hold the data:
/// the distinct bytes touched since (Mattson et al., "Evaluation techniques for storage
/// hierarchies", 1970).
#[derive(Debug, Default)]
pub(super) struct ReuseDistance {
    clock: u64,
    last: BTreeMap<Place, Touched>,
    by_time: BTreeMap<u64, f64>,
}

#[derive(Clone, Copy, Debug)]
struct Touched {
    at: u64,
    elements: u64,
}

/// Distance beyond which counting stops: no cache is larger.
const FAR: f64 = (1u64 << 32) as f64;

/// Part of an access and its reuse distance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Access {
    pub(super) bytes: f64,
    /// Infinite on first access.
    pub(super) distance: f64,
    /// Clock of the previous access; 0 if there was none.
    pub(super) at: u64,
}

impl ReuseDistance {
    /// Touches a view in the copy of microbatch `running`; returns the distance of each part.
    pub(super) fn touch(&mut self, program: &Program, view: &View, running: u64) -> Vec<Access> {
        let buffer = program.buffer(view.buffer);
        let (size, copy) = (buffer.dtype.size() as f64, running % u64::from(buffer.copies.max(1)));
        let place = |offset: u64| (view.buffer, copy, offset);
        let end = view.offset.saturating_add(view.len);
        let before = self.last.range(place(0)..place(view.offset)).next_back();
        let before =
            before.filter(|((.., start), t)| start.saturating_add(t.elements) > view.offset);
        let known: Vec<(u64, Touched)> = (before.into_iter())
            .chain(self.last.range(place(view.offset)..place(end)))
            .map(|(&(.., start), &touched)| (start, touched))
            .collect();
        let mut covered = 0;
        let mut parts = Vec::with_capacity(known.len() + 1);
        for &(start, Touched { at, elements }) in &known {
            let (from, to) = (start.max(view.offset), end.min(start.saturating_add(elements)));
            covered += to - from;
            parts.push(Access { bytes: (to - from) as f64 * size, distance: self.since(at), at });
        }
        let missing = view.len.saturating_sub(covered);
        if missing > 0 {
            parts.push(Access { bytes: missing as f64 * size, distance: f64::INFINITY, at: 0 });
        }
        for (&Access { bytes, .. }, (start, touched)) in parts.iter().zip(known) {
            let Touched { at, elements } = touched;
            self.last.remove(&place(start));
            // Elements before and after the view keep their access time.
            let stop = start.saturating_add(elements);
            for (start, stop) in [(start, view.offset), (end, stop)] {
                if start < stop {
                    self.last.insert(place(start), Touched { at, elements: stop - start });
                }
            }
            if let Entry::Occupied(mut then) = self.by_time.entry(at) {
                *then.get_mut() -= bytes;
                if *then.get() <= 0.0 {
                    then.remove();
                }
            }
        }
        if view.len > 0 {
            self.clock += 1;
            self.last.insert(place(view.offset), Touched { at: self.clock, elements: view.len });
            self.by_time.insert(self.clock, view.len as f64 * size);
        }
        parts
    }

    /// Current clock value.
    pub(super) fn now(&self) -> u64 {
        self.clock
    }

    /// Distinct bytes touched since clock `at`.
    pub(super) fn since(&self, at: u64) -> f64 {
        let mut sum = 0.0;
        for (_, bytes) in self.by_time.range(at + 1..).rev() {
            sum += bytes;
            if sum > FAR {
                break;
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::program::Plan;
    use paceline_plan::strategy::Strategy;

    fn plan() -> Plan {
        let mini = built_in::get("mini").unwrap().unwrap();
        lower(&mini, &Strategy { seq: mini.seq, ..Strategy::default() }).unwrap()
    }

    fn view(buffer: u32, offset: u64, len: u64) -> View {
        View { buffer: BufferId(buffer), offset, len }
    }

    #[test]
    fn distances_count_different_bytes() {
        let plan = plan();
        let program = &plan.programs[0];
        let mut reuse = ReuseDistance::default();
        let (a, b) = (view(0, 0, 16), view(1, 0, 4));
        let size = |v: &View| program.buffer(v.buffer).dtype.size() as f64;
        assert_eq!(reuse.touch(program, &a, 0)[0].distance, f64::INFINITY);
        assert_eq!(reuse.touch(program, &a, 0)[0].distance, 0.0);
        for _ in 0..3 {
            reuse.touch(program, &b, 0);
        }
        let again = reuse.touch(program, &a, 0);
        let (bytes, distance) = (16.0 * size(&a), 4.0 * size(&b));
        assert_eq!(again, [Access { bytes, distance, at: 2 }], "touched second, and last now");
    }

    #[test]
    fn parts_are_told_apart() {
        let plan = plan();
        let program = &plan.programs[0];
        let size = program.buffer(BufferId(0)).dtype.size() as f64;
        let mut reuse = ReuseDistance::default();
        reuse.touch(program, &view(0, 0, 8), 0);
        reuse.touch(program, &view(0, 8, 8), 0);
        let whole = reuse.touch(program, &view(0, 0, 20), 0);
        let sizes: Vec<f64> = whole.iter().map(|part| part.bytes / size).collect();
        assert_eq!(sizes, [8.0, 8.0, 4.0]);
        assert_eq!(whole[0].distance, 8.0 * size);
        assert_eq!(whole[1].distance, 0.0);
        assert_eq!(whole[2].distance, f64::INFINITY);
    }

    /// A gradient bucket is touched both as a whole and layer by layer.
    #[test]
    fn a_part_does_not_bring_the_whole_near() {
        let plan = plan();
        let program = &plan.programs[0];
        let size = program.buffer(BufferId(0)).dtype.size() as f64;
        let mut reuse = ReuseDistance::default();
        reuse.touch(program, &view(0, 0, 20), 0);
        assert_eq!(reuse.touch(program, &view(0, 8, 4), 0).len(), 1);
        let whole = reuse.touch(program, &view(0, 0, 20), 0);
        let parts: Vec<_> = whole.iter().map(|p| (p.bytes / size, p.distance / size)).collect();
        assert_eq!(parts, [(8.0, 4.0), (4.0, 0.0), (8.0, 4.0)]);
        assert_eq!(reuse.since(0), 20.0 * size, "nothing counts twice");
        assert_eq!(reuse.touch(program, &view(0, 0, 20), 0).len(), 1, "one again");
    }
}
