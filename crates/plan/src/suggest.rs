//! "Did you mean": the known name closest to a mistyped one.

/// Returns the most likely intended candidate, or `None` if none is close.
///
/// Case and separators (`-`, `_` or none) are ignored. A prefix of candidates (`gpt2` for
/// `gpt2-124m`) matches the first of them.
pub fn suggest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
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

/// Damerau–Levenshtein distance, restricted to adjacent transpositions: insertions, deletions,
/// replacements and swaps, the usual typing errors. `None` if the lengths differ too much, so that
/// a megabyte of garbage costs nothing.
fn edits(from: &[char], to: &[char]) -> Option<usize> {
    if from.len().abs_diff(to.len()) > 3 {
        return None;
    }
    let mut before = vec![0; to.len() + 1];
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for i in 1..=from.len() {
        let mut next = vec![i; to.len() + 1];
        for j in 1..=to.len() {
            let replaced = row[j - 1] + usize::from(from[i - 1] != to[j - 1]);
            next[j] = replaced.min(row[j] + 1).min(next[j - 1] + 1);
            if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                next[j] = next[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut row, next);
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
            assert_eq!(suggest(slip, WORDS), Some(meant), "{slip}");
        }
    }

    #[test]
    fn strangers_find_none() {
        for word in ["", "batch", "zzz", "learning_rate", &"layers".repeat(100_000)] {
            assert_eq!(suggest(word, WORDS), None);
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

    #[test]
    fn swapped_letters_are_one_slip() {
        let known = ["train", "plan", "simulate", "global-batch", "laptop", "dgx-a100"];
        assert_eq!(suggest("trian", known), Some("train"));
        assert_eq!(suggest("simualte", known), Some("simulate"));
        assert_eq!(suggest("globalbatch", known), Some("global-batch"));
        assert_eq!(suggest("labtop", known), Some("laptop"));
        assert_eq!(suggest("dgx-a10", known), Some("dgx-a100"));
        assert_eq!(suggest("frontier", known), None);
    }
}
