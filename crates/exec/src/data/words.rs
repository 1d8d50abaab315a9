//! The built-in corpus as words that can be read aloud, so that a demo can be talked to.

use super::corpus::MOST_WORDS;

/// What a word of the grammar begins with.
const ONSETS: [&str; 15] =
    ["b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v"];
/// What it goes on with. All begin with a vowel and no onset has one: no two words are alike.
const RIMES: [&str; 17] = [
    "a", "e", "i", "o", "u", "ai", "au", "ei", "ou", "an", "en", "in", "on", "un", "ar", "er", "or",
];

const _: () = assert!(ONSETS.len() * RIMES.len() == MOST_WORDS as usize);

/// The word of a token; the full stop is token 0, and tokens beyond the grammar show as numbers.
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

/// The tokens of a text, or the first word that is none.
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
