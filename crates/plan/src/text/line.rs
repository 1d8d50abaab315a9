//! Tokenizer for one line of the text form.

use super::ParseError;
use std::fmt::Display;
use std::str::FromStr;

/// The unread rest of a line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line<'t> {
    number: usize,
    rest: &'t str,
}

type Result<T> = std::result::Result<T, ParseError>;

impl<'t> Line<'t> {
    /// Creates a whole line with its number.
    pub(super) fn new(number: usize, text: &'t str) -> Self {
        Self { number, rest: text.trim() }
    }

    /// Returns an error at this line.
    pub(crate) fn error<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(ParseError { line: self.number, message: message.into() })
    }

    /// Returns true if nothing is left.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Returns the next word without consuming it. A quoted string counts as the word `"`.
    pub(super) fn peek(&self) -> &'t str {
        if self.rest.starts_with('"') {
            return &self.rest[..1];
        }
        self.rest.split(char::is_whitespace).next().unwrap_or("")
    }

    /// Consumes the next word; `what` describes it in errors.
    pub(crate) fn word(&mut self, what: &str) -> Result<&'t str> {
        let word = self.peek();
        if word.is_empty() || word == "\"" {
            return self.error(format!("{what} is missing{}", self.here()));
        }
        self.rest = self.rest[word.len()..].trim_start();
        Ok(word)
    }

    /// Consumes `word` if it is next; returns true if it was.
    pub(super) fn eat(&mut self, word: &str) -> bool {
        let found = !word.is_empty() && self.peek() == word;
        if found {
            self.rest = self.rest[word.len()..].trim_start();
        }
        found
    }

    /// Consumes `word`, which must be next.
    pub(super) fn expect(&mut self, word: &str) -> Result<()> {
        if self.eat(word) {
            return Ok(());
        }
        self.error(format!("'{word}' is missing{}", self.here()))
    }

    /// Consumes a quoted string.
    pub(super) fn string(&mut self, what: &str) -> Result<String> {
        let Some(quoted) = self.rest.strip_prefix('"') else {
            return self.error(format!("{what} is missing, in quotes{}", self.here()));
        };
        let mut text = String::new();
        let mut chars = quoted.chars();
        loop {
            match chars.next() {
                Some('"') => break,
                Some('\\') => match unescape(&mut chars) {
                    Some(escaped) => text.push(escaped),
                    None => return self.error("a string has an unknown escape after '\\'"),
                },
                Some(plain) => text.push(plain),
                None => return self.error("a string lacks its closing quote"),
            }
        }
        self.rest = chars.as_str().trim_start();
        Ok(text)
    }

    /// Consumes a word and parses it as a value.
    pub(super) fn value<T: FromStr<Err: Display>>(&mut self, what: &str) -> Result<T> {
        let word = self.word(what)?;
        self.read(what, word)
    }

    /// Parses a word, or a part of one, as a value.
    pub(super) fn read<T: FromStr<Err: Display>>(&self, what: &str, word: &str) -> Result<T> {
        match word.parse::<T>() {
            Ok(value) => Ok(value),
            Err(why) => self.error(format!("{what} cannot be '{word}': {why}")),
        }
    }

    /// Consumes a word such as `b7` and returns its number.
    pub(super) fn id<T: FromStr>(&mut self, prefix: &str, what: &str) -> Result<T> {
        let word = self.word(what)?;
        match word.strip_prefix(prefix).map(str::parse) {
            Some(Ok(id)) => Ok(id),
            _ => self.error(format!("{what} is written like '{prefix}0', not '{word}'")),
        }
    }

    /// Consumes a word such as `eps=1e-5` and returns its value.
    pub(super) fn assigned<T: FromStr>(&mut self, key: &str, what: &str) -> Result<T> {
        let word = self.word(what)?;
        let value = word.strip_prefix(key).and_then(|rest| rest.strip_prefix('='));
        match value.map(str::parse) {
            Some(Ok(value)) => Ok(value),
            _ => self.error(format!("{what} is written like '{key}=0', not '{word}'")),
        }
    }

    /// Consumes all following words such as `o1 o2`.
    pub(super) fn ids<T: FromStr>(&mut self, prefix: &str, what: &str) -> Result<Vec<T>> {
        let mut all = Vec::new();
        while self.starts_id(prefix) {
            all.push(self.id(prefix, what)?);
        }
        Ok(all)
    }

    /// Returns true if the next word is the prefix and a number.
    pub(super) fn starts_id(&self, prefix: &str) -> bool {
        let digits = self.peek().strip_prefix(prefix);
        digits.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    }

    /// Checks that nothing is left.
    pub(super) fn end(&self) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        self.error(format!("'{}' is too much", self.rest))
    }

    /// Describes the current position, for messages.
    fn here(&self) -> String {
        match self.peek() {
            "" => " at the end of the line".into(),
            "\"" => " before a string".into(),
            word => format!(" before '{word}'"),
        }
    }
}

fn unescape(chars: &mut std::str::Chars<'_>) -> Option<char> {
    Some(match chars.next()? {
        '"' => '"',
        '\\' => '\\',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'u' => {
            let (digits, rest) = chars.as_str().strip_prefix('{')?.split_once('}')?;
            *chars = rest.chars();
            char::from_u32(u32::from_str_radix(digits, 16).ok()?)?
        }
        _ => return None,
    })
}

/// Appends a string in quotes, escaped to stay on one line.
pub(super) fn quote(text: &str, out: &mut String) {
    out.push('"');
    for char in text.chars() {
        match char {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            control if control.is_control() => {
                out.push_str(&format!("\\u{{{:x}}}", u32::from(control)));
            }
            plain => out.push(plain),
        }
    }
    out.push('"');
}
