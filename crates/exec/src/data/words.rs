//! Built-in corpus as pronounceable words, so that a demo can be prompted.

use super::corpus::MOST_WORDS;

/// Beginnings of the grammar's words.
const ONSETS: [&str; 15] =
    ["b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v"];
/// Endings of the words. All begin with a vowel and no onset has one: all words are different.
const RIMES: [&str; 17] = [
    "a", "e", "i", "o", "u", "ai", "au", "ei", "ou", "an", "en", "in", "on", "un", "ar", "er", "or",
];

const _: () = assert!(ONSETS.len() * RIMES.len() == MOST_WORDS as usize);

/// Word of a token; the full stop is token 0, and tokens beyond the grammar are shown as numbers.
pub(super) fn spell(token: u32) -> String {
    match token.checked_sub(1) {
        None => ".".to_owned(),
        Some(word) if word < MOST_WORDS => {
            let (rime, onset) = (word as usize / ONSETS.len(), word as usize % ONSETS.len());
            format!("{}{}", ONSETS[onset], RIMES[rime])
        }
        Some(_) => format!("<{token}>"),
    }
}

/// Converts a text to tokens, or fails with the first unknown word.
pub(super) fn read(text: &str) -> Result<Vec<u32>, &str> {
    let mut tokens = Vec::new();
    for piece in text.split_inclusive('.').flat_map(str::split_whitespace) {
        let (word, stop) = match piece.strip_suffix('.') {
            Some(word) => (word, true),
            None => (piece, false),
        };
        if !word.is_empty() {
            let token = (1..=MOST_WORDS).find(|&token| spell(token).eq_ignore_ascii_case(word));
            tokens.push(token.ok_or(word)?);
        }
        if stop {
            tokens.push(0);
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_has_a_word_of_its_own() {
        let all: Vec<u32> = (0..=MOST_WORDS).collect();
        let text: Vec<String> = all.iter().map(|&token| spell(token)).collect();
        assert_eq!(read(&text.join(" ")), Ok(all));
        assert_eq!(text[..4], [".", "ba", "da", "fa"]);
        assert_eq!(spell(256), "<256>");
    }

    #[test]
    fn stops_may_stand_at_words_and_strangers_are_named() {
        assert_eq!(read("Ba da. fa."), Ok(vec![1, 2, 0, 3, 0]));
        assert_eq!(read("  . "), Ok(vec![0]));
        assert_eq!(read(""), Ok(vec![]));
        assert_eq!(read("ba hello da"), Err("hello"));
    }
}
