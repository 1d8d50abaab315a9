//! Names from users' files and directories, made harmless for a terminal.

use std::borrow::Cow;
use std::fmt::Write;

/// Escapes characters that a terminal obeys instead of showing: controls except newline and tab, and
/// those that reorder text.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_obeyed) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if is_obeyed(letter) {
            let _ = write!(shown, "{}", letter.escape_unicode());
        } else {
            shown.push(letter);
        }
    }
    Cow::Owned(shown)
}

fn is_obeyed(letter: char) -> bool {
    let reorders = matches!(letter, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    reorders || (letter.is_control() && !matches!(letter, '\n' | '\t'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_obey_nothing() {
        assert!(matches!(escaped("plain, größer →\n\t"), Cow::Borrowed(_)));
        assert_eq!(escaped("a\u{1b}]0;title\u{7}b"), "a\\u{1b}]0;title\\u{7}b");
        assert_eq!(escaped("\u{9b}31m\r\u{7f}"), "\\u{9b}31m\\u{d}\\u{7f}");
        assert_eq!(escaped("gpj.\u{202e}exe"), "gpj.\\u{202e}exe");
    }
}
