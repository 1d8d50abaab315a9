//! Conversion of text to tokens and back.

use super::text::{Text, TextError};
use super::{token_cache, words};
use crate::private::PrivateDir;
use crate::regular;
use serde_json::{Map, Value, json};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use thiserror::Error;

/// Tokenizer for text.
#[derive(Debug)]
pub enum Tokenizer {
    /// A token is a byte.
    Bytes,
    /// A token is a word of the built-in grammar.
    Words,
    /// A Hugging Face `tokenizer.json`, with the file's contents.
    HuggingFace {
        /// Parsed tokenizer.
        tokenizer: Box<tokenizers::Tokenizer>,
        /// Contents of the file.
        json: Vec<u8>,
        /// Path of the file.
        path: PathBuf,
    },
}

/// Reason why text cannot be tokenized.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// The tokenizer file is invalid.
    #[error("{}: {problem}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// The text cannot be read.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A text file is not UTF-8.
    #[error(
        "{}: byte {at} is not UTF-8; use --tokenizer builtin, which takes any bytes", .path.display()
    )]
    Utf8 {
        /// The file.
        path: PathBuf,
        /// Offset of the first invalid byte.
        at: u64,
    },
    /// The tokenizer reports an error.
    #[error("{}: the tokenizer fails: {problem}", .path.display())]
    Refused {
        /// The tokenizer's file.
        path: PathBuf,
        /// Error message of the tokenizer.
        problem: String,
    },
    /// The token file cannot be written.
    #[error("the token cache cannot be written: {0}; XDG_CACHE_HOME names another directory")]
    Cache(#[from] io::Error),
    /// A word is not part of the built-in grammar.
    #[error("'{word}' is not a word of the built-in text; its words are such as {some}")]
    UnknownWord {
        /// The word.
        word: String,
        /// Some words that are.
        some: String,
    },
}

/// Maximum size of a `tokenizer.json`: ten times that of the largest in use.
const LARGEST: u64 = 256 << 20;

/// Number of guarded calls that are running.
static GUARDED: AtomicUsize = AtomicUsize::new(0);

/// Returns true while a library runs whose panics become errors, so that a panic hook can keep
/// silent about them.
pub fn is_guarded() -> bool {
    GUARDED.load(Ordering::Relaxed) > 0
}

/// Runs a library on a file that may make it panic.
pub(super) fn guarded<R>(run: impl FnOnce() -> R) -> Result<R, String> {
    GUARDED.fetch_add(1, Ordering::Relaxed);
    let ran = catch_unwind(AssertUnwindSafe(run));
    GUARDED.fetch_sub(1, Ordering::Relaxed);
    ran.map_err(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("it panics").to_owned()
    })
}

/// Parses a `tokenizer.json`; the error names the part that is broken, if one is.
fn parse(json: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let load = |json: &[u8]| {
        guarded(|| tokenizers::Tokenizer::from_bytes(json))
            .and_then(|loaded| loaded.map_err(|error| error.to_string()))
    };
    let problem = match load(json) {
        Ok(mut tokenizer) => {
            // These are for sentences of a batch; a corpus is neither cut nor filled up.
            tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
            tokenizer.with_padding(None);
            return Ok(tokenizer);
        }
        Err(problem) => problem,
    };
    let Ok(Value::Object(parts)) = serde_json::from_slice(json) else {
        return Err(format!("is not a tokenizer.json: {problem}"));
    };
    let broken =
        ["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"]
            .into_iter()
            .find(|part| {
                let mut without: Map<String, Value> = parts.clone();
                without.insert((*part).to_owned(), Value::Null);
                serde_json::to_vec(&without).is_ok_and(|json| load(&json).is_ok())
            });
    Err(match broken {
        Some(part) => format!("its `{part}` is broken: {problem}"),
        None => format!("is not a tokenizer.json: {problem}"),
    })
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn open(path: &Path) -> Result<Self, TokenizerError> {
        let wrong = |problem: String| TokenizerError::File { path: path.to_owned(), problem };
        let json = regular::read(path, LARGEST).map_err(|error| wrong(error.to_string()))?;
        let tokenizer = Box::new(parse(&json).map_err(wrong)?);
        Ok(Self::HuggingFace { tokenizer, json, path: path.to_owned() })
    }

    /// Number of tokens in the vocabulary.
    pub fn vocab(&self) -> u32 {
        match self {
            Self::Bytes | Self::Words => 256,
            Self::HuggingFace { tokenizer, .. } => {
                let tokens = tokenizer.get_vocab(true);
                tokens.into_values().max().map_or(0, |last| last.saturating_add(1))
            }
        }
    }

    /// Converts a text to tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::Words => words::read(text).map_err(|word| TokenizerError::UnknownWord {
                word: word.to_owned(),
                some: (1..6).map(words::spell).collect::<Vec<_>>().join(", "),
            }),
            Self::HuggingFace { tokenizer, .. } => {
                let encoded = guarded(|| tokenizer.encode(text, false))
                    .and_then(|encoded| encoded.map_err(|error| error.to_string()));
                Ok(encoded.map_err(|problem| self.refused(problem))?.get_ids().to_vec())
            }
        }
    }

    /// Converts tokens to text; invalid text becomes a replacement character.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match self {
            Self::Bytes => {
                let bytes: Vec<u8> =
                    tokens.iter().map(|&t| u8::try_from(t).unwrap_or(b'?')).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Self::Words => {
                let words: Vec<String> = tokens.iter().map(|&t| words::spell(t)).collect();
                words.join(" ").replace(" .", ".")
            }
            Self::HuggingFace { tokenizer, .. } => {
                let decoded = guarded(|| tokenizer.decode(tokens, false));
                decoded.ok().and_then(Result::ok).unwrap_or_else(|| "\u{fffd}".to_owned())
            }
        }
    }

    /// Opens a file or directory as tokens.
    ///
    /// Bytes are read directly from the text. A `tokenizer.json` converts the text once, piece by
    /// piece, to a token file that later runs reuse; `cache` opens the directory for it.
    pub fn text(
        &self,
        path: &Path,
        cache: impl FnOnce() -> io::Result<PrivateDir>,
    ) -> Result<Text, TokenizerError> {
        match self {
            Self::Bytes | Self::Words => Ok(Text::bytes(path)?),
            Self::HuggingFace { tokenizer, json, .. } => {
                token_cache::tokens(self, (tokenizer, json), path, &cache()?)
            }
        }
    }

    /// The tokenizer as a `tokenizer.json`, for a model with `vocab` tokens.
    pub fn to_json(&self, vocab: u32) -> Vec<u8> {
        let (model, split, join) = match self {
            Self::HuggingFace { json, .. } => return json.clone(),
            Self::Bytes => {
                let vocab: Map<String, Value> =
                    (0..=255u8).map(byte_letter).zip(0u32..).map(named).collect();
                let level = json!({
                    "type": "ByteLevel",
                    "add_prefix_space": false,
                    "trim_offsets": false,
                    "use_regex": false,
                });
                (json!({ "type": "BPE", "vocab": vocab, "merges": [] }), level.clone(), level)
            }
            Self::Words => {
                let words = (0..vocab.min(256)).map(|token| named((words::spell(token), token)));
                let vocab: Map<String, Value> = words.collect();
                // The unknown token is none of the vocabulary: other words are refused.
                let model = json!({ "type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]" });
                (model, json!({ "type": "Whitespace" }), Value::Null)
            }
        };
        let whole = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": null,
            "pre_tokenizer": split,
            "post_processor": null,
            "decoder": join,
            "model": model,
        });
        format!("{whole:#}\n").into_bytes()
    }

    /// Error of the library.
    pub(super) fn refused(&self, problem: String) -> TokenizerError {
        let path = match self {
            Self::HuggingFace { path, .. } => path.clone(),
            Self::Bytes | Self::Words => PathBuf::new(),
        };
        TokenizerError::Refused { path, problem }
    }
}

fn named((word, token): (String, u32)) -> (String, Value) {
    (word, token.into())
}

/// Letter that stands for a byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`):
/// printable ones stand for themselves, the others follow U+0100 in their order.
fn byte_letter(byte: u8) -> String {
    let prints = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let letter = if prints(byte) {
        char::from(byte)
    } else {
        let before = (0..byte).filter(|byte| !prints(*byte)).count() as u32;
        char::from_u32(0x100 + before).unwrap_or('?')
    };
    letter.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(json: &[u8]) -> Result<Tokenizer, TokenizerError> {
        let name = format!("paceline-tokenizer-{:016x}.json", {
            use std::hash::{DefaultHasher, Hash, Hasher};
            let mut hasher = DefaultHasher::new();
            (std::process::id(), json).hash(&mut hasher);
            hasher.finish()
        });
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, json).unwrap();
        let opened = Tokenizer::open(&path);
        std::fs::remove_file(path).unwrap();
        opened
    }

    #[test]
    fn built_in_tokenizers_survive_as_files() {
        let bytes = opened(&Tokenizer::Bytes.to_json(256)).unwrap();
        assert_eq!(bytes.vocab(), 256);
        for text in ["plain text, in\n lines\t", "größer → 🎈", "", "\u{0}\u{7f}\u{a0}\u{ad}"]
        {
            let expected: Vec<u32> = text.bytes().map(u32::from).collect();
            assert_eq!(bytes.encode(text).unwrap(), expected);
            assert_eq!(bytes.decode(&expected), text);
        }
        let words = opened(&Tokenizer::Words.to_json(256)).unwrap();
        let text = "ba da. fa .";
        assert_eq!(words.encode(text).unwrap(), Tokenizer::Words.encode(text).unwrap());
        assert!(words.encode("ba hello").is_err());
    }

    #[test]
    fn broken_files_are_errors_that_name_the_part() {
        let told = |json: &str| opened(json.as_bytes()).unwrap_err().to_string();
        assert!(told("{}").contains("is not a tokenizer.json"), "{}", told("{}"));
        let json = String::from_utf8(Tokenizer::Bytes.to_json(256)).unwrap();
        for charsmap in ["", "AAAA", "/////w==", "AQAAAA=="] {
            let broken = format!(
                r#""normalizer": {{"type": "Precompiled", "precompiled_charsmap": "{charsmap}"}}"#
            );
            let json = json.replace(r#""normalizer": null"#, &broken);
            // Some are refused when they are read, the others must not end the process.
            match opened(json.as_bytes()) {
                Err(error) => assert!(error.to_string().contains("normalizer"), "{error}"),
                Ok(tokenizer) => drop(tokenizer.encode("größer")),
            }
        }
        assert!(!is_guarded());
    }
}
