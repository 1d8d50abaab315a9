//! "Did you mean": the known word nearest to a mistyped one.

/// The candidate with the fewest edits, if few enough to be worth suggesting.
pub(crate) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let word: Vec<char> = word.chars().take(64).collect();
    let allowed = (word.len() / 3).clamp(1, 3);
    candidates
        .into_iter()
        .map(|candidate| (edits(&word, candidate), candidate))
        .filter(|&(edits, _)| edits <= allowed)
        .min_by_key(|&(edits, _)| edits)
        .map(|(_, candidate)| candidate)
}

/// The distance of Damerau and Levenshtein, restricted to neighbours: insertions, deletions,
/// replacements and swaps, which are what typing gets wrong.
fn edits(a: &[char], b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut before = vec![0; b.len() + 1];
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut next = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replaced = row[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            next[j] = replaced.min(row[j] + 1).min(next[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                next[j] = next[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut row, next);
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let known = ["train", "plan", "simulate", "global-batch"];
        assert_eq!(nearest("trian", known), Some("train"));
        assert_eq!(nearest("simualte", known), Some("simulate"));
        assert_eq!(nearest("globalbatch", known), Some("global-batch"));
        assert_eq!(nearest("xyz", known), None);
        assert_eq!(nearest("", known), None);
    }
}
