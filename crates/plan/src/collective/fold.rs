//! The canonical summation order: the only definition of its tree.

use smallvec::SmallVec;

/// Combines contributions in canonical order as they arrive, one after the other.
///
/// The tree pairs neighbours: level 0 is the contributions in order, and each level above adds the
/// first to the second, the third to the fourth and so on; an odd last one moves up unchanged. Five
/// contributions are summed as `((0+1)+(2+3))+4`, seven as `((0+1)+(2+3))+((4+5)+6)`.
///
/// Two properties make this the canonical tree. Every aligned run of 2ᵏ contributions is a subtree,
/// so ranks may sum their own runs before they exchange with others. And after *n* contributions
/// the number of live partial sums equals the number of one-bits of *n*, at most log₂ n + 1, as in
/// a binary counter.
#[derive(Clone, Debug)]
pub struct CanonicalFold<T> {
    /// Complete subtrees, the leftmost and largest first, each with its height.
    subtrees: SmallVec<[(u32, T); 5]>,
}

impl<T> CanonicalFold<T> {
    /// Creates an empty fold.
    pub fn new() -> Self {
        Self { subtrees: SmallVec::new() }
    }

    /// Adds the next contribution; `add` gets the left operand first.
    pub fn push(&mut self, part: T, mut add: impl FnMut(T, T) -> T) {
        let (mut height, mut sum) = (0, part);
        while self.subtrees.last().is_some_and(|(top, _)| *top == height)
            && let Some((_, left)) = self.subtrees.pop()
        {
            sum = add(left, sum);
            height += 1;
        }
        self.subtrees.push((height, sum));
    }

    /// Returns the sum of all contributions, or `None` if there are none.
    pub fn finish(mut self, mut add: impl FnMut(T, T) -> T) -> Option<T> {
        let (_, mut sum) = self.subtrees.pop()?;
        while let Some((_, left)) = self.subtrees.pop() {
            sum = add(left, sum);
        }
        Some(sum)
    }
}

impl<T> Default for CanonicalFold<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Combines `parts` in canonical order; see [`CanonicalFold`] for the tree.
pub fn canonical_fold<T>(
    parts: impl IntoIterator<Item = T>,
    mut add: impl FnMut(T, T) -> T,
) -> Option<T> {
    let mut fold = CanonicalFold::new();
    for part in parts {
        fold.push(part, &mut add);
    }
    fold.finish(add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of the tree, level by level.
    fn by_levels(mut level: Vec<String>) -> Option<String> {
        while level.len() > 1 {
            level = level
                .chunks(2)
                .map(|pair| match pair {
                    [left, right] => format!("({left}+{right})"),
                    rest => rest.concat(),
                })
                .collect();
        }
        level.pop()
    }

    #[test]
    fn streaming_gives_the_tree_of_the_definition() {
        for n in 0..70 {
            let parts: Vec<_> = (0..n).map(|i| i.to_string()).collect();
            let folded = canonical_fold(parts.clone(), |a, b| format!("({a}+{b})"));
            assert_eq!(folded, by_levels(parts));
        }
    }

    #[test]
    fn runs_summed_beforehand_give_the_same_tree() {
        let add = |a: String, b: String| format!("({a}+{b})");
        let leaves: Vec<_> = (0..24).map(|i| i.to_string()).collect();
        let whole = canonical_fold(leaves.clone(), add);
        for run in [2, 4, 8] {
            let sums = leaves.chunks(run).filter_map(|run| canonical_fold(run.to_vec(), add));
            assert_eq!(canonical_fold(sums, add), whole);
        }
    }

    #[test]
    fn few_partial_sums_are_alive() {
        let mut fold = CanonicalFold::new();
        for n in 1..=1000u32 {
            fold.push(1, |a, b| a + b);
            assert_eq!(fold.subtrees.len(), n.count_ones() as usize);
        }
        assert_eq!(fold.finish(|a, b| a + b), Some(1000));
    }
}
