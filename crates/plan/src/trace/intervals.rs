//! Sets of points in time, as sorted disjoint intervals.

use crate::units::Seconds;

/// A set of points in time: half-open intervals, sorted, disjoint and not touching.
///
/// Compute, communication and idle time overlap in a trace. Unions and differences of such sets
/// give exposed time without double counting.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Intervals(Vec<(f64, f64)>);

impl Intervals {
    /// Union of any intervals. Those that are empty, reversed or not finite are ignored.
    pub fn new(parts: impl IntoIterator<Item = (Seconds, Seconds)>) -> Self {
        let mut parts: Vec<(f64, f64)> = parts
            .into_iter()
            .map(|(start, end)| (start.0, end.0))
            .filter(|(start, end)| start.is_finite() && end.is_finite() && start < end)
            .collect();
        parts.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self(joined(parts))
    }

    /// Union of both sets.
    pub fn union(&self, other: &Self) -> Self {
        let mut parts = [self.0.as_slice(), other.0.as_slice()].concat();
        parts.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self(joined(parts))
    }

    /// Difference of the sets, in one pass over both.
    pub fn subtract(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        let mut holes = other.0.iter().peekable();
        for &(mut start, end) in &self.0 {
            while holes.next_if(|hole| hole.1 <= start).is_some() {}
            // A hole may also reach into the next interval, so it is not consumed here.
            let mut ahead = holes.clone();
            while let Some(&(from, to)) = ahead.next_if(|hole| hole.0 < end) {
                if start < from {
                    left.push((start, from));
                }
                start = to;
            }
            if start < end {
                left.push((start, end));
            }
        }
        Self(left)
    }

    /// Total time in the set.
    pub fn measure(&self) -> Seconds {
        Seconds(self.0.iter().map(|(start, end)| end - start).fold(0.0, |sum, part| sum + part))
    }

    /// Time in the set between two points. Visits only the intervals between them.
    pub fn measure_within(&self, start: Seconds, end: Seconds) -> Seconds {
        let first = self.0.partition_point(|part| part.1 <= start.0);
        let inside = self.0[first..].iter().take_while(|part| part.0 < end.0);
        let lengths = inside.map(|part| (part.1.min(end.0) - part.0.max(start.0)).max(0.0));
        // `sum` of an empty iterator would be −0.
        Seconds(lengths.fold(0.0, |sum, part| sum + part))
    }
}

/// Merges sorted intervals that overlap or touch.
fn joined(sorted: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    let mut out: Vec<(f64, f64)> = Vec::with_capacity(sorted.len());
    for (start, end) in sorted {
        match out.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => out.push((start, end)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GRID: usize = 48;

    /// Reference implementation: one flag for each unit of a small grid.
    fn flags(parts: &[(u8, u8)]) -> [bool; GRID] {
        std::array::from_fn(|i| parts.iter().any(|&(a, b)| (a as usize..b as usize).contains(&i)))
    }

    fn set(parts: &[(u8, u8)]) -> Intervals {
        Intervals::new(parts.iter().map(|&(a, b)| (Seconds(a.into()), Seconds(b.into()))))
    }

    /// Asserts that the set is sorted, disjoint, not touching and not empty, and equals the flags.
    fn assert_is(set: &Intervals, flags: [bool; GRID]) {
        assert!(set.0.iter().all(|(a, b)| a < b), "{set:?}");
        assert!(set.0.windows(2).all(|w| w[0].1 < w[1].0), "{set:?}");
        for (i, &flag) in flags.iter().enumerate() {
            let unit = set.measure_within(Seconds(i as f64), Seconds(i as f64 + 1.0));
            assert_eq!(unit.0, f64::from(u8::from(flag)), "unit {i} of {set:?}");
        }
        assert_eq!(set.measure().0, flags.iter().filter(|&&f| f).count() as f64);
    }

    fn parts() -> impl Strategy<Value = Vec<(u8, u8)>> {
        prop::collection::vec((0..GRID as u8, 0..=GRID as u8), 0..12)
    }

    proptest! {
        #[test]
        fn new_holds_exactly_the_points_given(a in parts()) {
            assert_is(&set(&a), flags(&a));
        }

        #[test]
        fn union_is_or(a in parts(), b in parts()) {
            let (fa, fb) = (flags(&a), flags(&b));
            assert_is(&set(&a).union(&set(&b)), std::array::from_fn(|i| fa[i] || fb[i]));
        }

        #[test]
        fn subtract_is_and_not(a in parts(), b in parts()) {
            let (fa, fb) = (flags(&a), flags(&b));
            assert_is(&set(&a).subtract(&set(&b)), std::array::from_fn(|i| fa[i] && !fb[i]));
        }

        #[test]
        fn a_window_cuts_at_its_ends(a in parts(), from in 0..GRID, length in 0..GRID) {
            let inside = flags(&a).iter().skip(from).take(length).filter(|&&f| f).count();
            let (start, end) = (Seconds(from as f64), Seconds((from + length) as f64));
            let window = set(&a).measure_within(start, end);
            prop_assert_eq!(window.0, inside as f64);
        }

        #[test]
        fn union_splits_into_one_and_the_rest_of_the_other(
            a in prop::collection::vec((-1e6..1e6f64, 0.0..1e5f64), 0..30),
            b in prop::collection::vec((-1e6..1e6f64, 0.0..1e5f64), 0..30),
        ) {
            let set = |parts: &[(f64, f64)]| {
                Intervals::new(parts.iter().map(|&(s, d)| (Seconds(s), Seconds(s + d))))
            };
            let (a, b) = (set(&a), set(&b));
            let whole = a.union(&b).measure().0;
            let split = a.measure().0 + b.subtract(&a).measure().0;
            prop_assert!((whole - split).abs() <= 1e-9 * whole.max(1.0), "{whole} {split}");
        }
    }

    #[test]
    fn absurd_intervals_hold_no_time() {
        let absurd = [(0.0, f64::NAN), (f64::NAN, 1.0), (0.0, f64::INFINITY), (3.0, 2.0)];
        let set = Intervals::new(absurd.map(|(a, b)| (Seconds(a), Seconds(b))));
        assert_eq!(set, Intervals::default());
        assert_eq!(set.measure(), Seconds::ZERO);
        let one = Intervals::new([(Seconds(0.0), Seconds(1.0))]);
        assert_eq!(one.measure_within(Seconds(0.8), Seconds(0.2)), Seconds::ZERO);
        assert_eq!(one.measure_within(Seconds(f64::NAN), Seconds(2.0)).0, 1.0);
    }
}
