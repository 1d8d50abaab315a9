//! "Did you mean": the known word nearest to a mistyped one.

/// The candidate that was most likely meant, or none if nothing is near.
///
/// Case and the choice of `-`, `_` or nothing between parts do not count. A word that begins
/// candidates (`gpt2` for `gpt2-124m`) means the first of them.
pub(super) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let word = letters(word);
    let allowed = match word.len() {
        0 => return None,
        1..=3 => 1,
        4..=8 => 2,
        _ => 3,
    };
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let other = letters(candidate);
        let distance =
            if other.starts_with(&word) { 1 } else { edits(&word, &other).unwrap_or(usize::MAX) };
        if distance <= allowed && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

fn letters(word: &str) -> Vec<char> {
    word.chars().filter(|c| !matches!(c, '-' | '_' | ' ')).flat_map(char::to_lowercase).collect()
}

/// Levenshtein's distance; none where the lengths alone put it out of reach, so that a megabyte of
/// garbage costs nothing.
fn edits(from: &[char], to: &[char]) -> Option<usize> {
    if from.len().abs_diff(to.len()) > 3 {
        return None;
    }
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row.last().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: [&str; 5] = ["layers", "d_model", "kv_heads", "heads", "seq"];

    #[test]
    fn slips_find_their_word() {
        for (slip, meant) in [
            ("layer", "layers"),
            ("Layers", "layers"),
            ("lyaers", "layers"),
            ("dmodel", "d_model"),
            ("d-model", "d_model"),
            ("kvheads", "kv_heads"),
            ("head", "heads"),
            ("seq_", "seq"),
        ] {
            assert_eq!(nearest(slip, WORDS), Some(meant), "{slip}");
        }
    }

    #[test]
    fn strangers_find_none() {
        for word in ["", "batch", "zzz", "learning_rate", &"layers".repeat(100_000)] {
            assert_eq!(nearest(word, WORDS), None);
        }
    }

    #[test]
    fn distances_are_levenshteins() {
        let distance = |a, b| edits(&letters(a), &letters(b));
        assert_eq!(distance("kitten", "sitting"), Some(3));
        assert_eq!(distance("flaw", "lawn"), Some(2));
        assert_eq!(distance("", "abc"), Some(3));
        assert_eq!(distance("same", "same"), Some(0));
    }
}
