//! The known word that a misspelt one most likely meant.

/// The candidate with the fewest edits, if few enough to be worth suggesting.
pub(super) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let close_enough = (word.chars().count() / 3).max(2);
    candidates
        .into_iter()
        .map(|candidate| (edits(word, candidate), candidate))
        .filter(|&(edits, _)| edits <= close_enough)
        .min_by_key(|&(edits, _)| edits)
        .map(|(_, candidate)| candidate)
}

/// Levenshtein's distance: insertions, deletions and replacements of single characters.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        assert_eq!(edits("", ""), 0);
        assert_eq!(edits("ring", ""), 4);
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("µs", "us"), 1);
    }

    #[test]
    fn only_close_words_are_suggested() {
        let known = ["dgx-a100", "dgx-h100", "laptop"];
        assert_eq!(nearest("dgx-a10", known), Some("dgx-a100"));
        assert_eq!(nearest("labtop", known), Some("laptop"));
        assert_eq!(nearest("frontier", known), None);
        assert_eq!(nearest("", known), None);
    }
}
