//! Conversion of text to tokens and back.

use super::text::{Fingerprint, Text, TextError, Width, files};
use super::words;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
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
    #[error("the tokenizer refuses: {problem}")]
    Refused {
        /// Error message of the tokenizer.
        problem: String,
    },
    /// A word is not part of the built-in grammar.
    #[error("'{word}' is not a word of the built-in text; its words are such as {some}")]
    UnknownWord {
        /// The word.
        word: String,
        /// Some words that are.
        some: String,
    },
}

/// Bytes of text tokenized at a time.
const PIECE: usize = 1 << 16;
/// Number of pieces tokenized in parallel, by as many threads as there are cores.
const PIECES: usize = 32;
/// Magic of a token file; the header then has the count, bytes per token and fingerprint.
const MARK: [u8; 8] = *b"PCLTOK1\n";
const HEADER: u64 = 32;

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn open(path: &Path) -> Result<Self, TokenizerError> {
        let wrong = |problem: String| TokenizerError::File { path: path.to_owned(), problem };
        let json = fs::read(path).map_err(|error| wrong(error.to_string()))?;
        let tokenizer = tokenizers::Tokenizer::from_bytes(&json)
            .map_err(|error| wrong(format!("is not a tokenizer.json: {error}")))?;
        Ok(Self::HuggingFace { tokenizer: Box::new(tokenizer), json })
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
                let encoded = tokenizer.encode(text, false);
                let encoded =
                    encoded.map_err(|e| TokenizerError::Refused { problem: e.to_string() })?;
                Ok(encoded.get_ids().to_vec())
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
                tokenizer.decode(tokens, false).unwrap_or_else(|_| "\u{fffd}".to_owned())
            }
        }
    }

    /// Opens a file or directory as tokens.
    ///
    /// Bytes are read directly from the text. A `tokenizer.json` converts the text once, piece by
    /// piece, to a token file that later runs reuse. It is stored beside the text, or in
    /// `elsewhere` if that directory is not writable. Files are separated by the tokenizer's
    /// end-of-text token, if it has one.
    pub fn text(&self, path: &Path, elsewhere: &Path) -> Result<Text, TokenizerError> {
        match self {
            Self::Bytes | Self::Words => Ok(Text::bytes(path)?),
            Self::HuggingFace { tokenizer, json } => {
                let print = fingerprint(path, json)?;
                let name = format!("tokens-{print:016x}");
                let stem = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let hidden = format!(".{stem}.{name}");
                let adjacent = path.parent().unwrap_or(Path::new(".")).join(&hidden);
                let vocab = self.vocab();
                let width = if vocab <= 1 << 16 { Width::Half } else { Width::Word };
                let write = |to: &Path| self.write(tokenizer, path, to, (print, width));
                let there = |file: &Path| is_whole(file, print, width);
                let other = elsewhere.join(&hidden);
                let file = if there(&adjacent) {
                    adjacent
                } else if there(&other) {
                    other
                } else {
                    match write(&adjacent) {
                        Ok(()) => adjacent,
                        Err(TokenizerError::Text(TextError::Io { .. })) => {
                            write(&other)?;
                            other
                        }
                        Err(error) => return Err(error),
                    }
                };
                Ok(Text::tokenised((path, name), (&file, HEADER), (width, vocab))?)
            }
        }
    }

    /// Converts all text to a token file, which is complete or absent.
    fn write(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        path: &Path,
        to: &Path,
        (print, width): (u64, Width),
    ) -> Result<(), TokenizerError> {
        let partial = to.with_extension(format!("{}.partial", std::process::id()));
        let refused = |source| TextError::Io { path: partial.clone(), source };
        let written = (|| {
            let file = File::create(&partial).map_err(refused)?;
            let mut out = BufWriter::new(file);
            out.write_all(&[0; HEADER as usize]).map_err(refused)?;
            let mut count = 0u64;
            let mut put = |tokens: &[u32]| {
                count += tokens.len() as u64;
                let size = width.bytes() as usize;
                tokens.iter().try_for_each(|t| out.write_all(&t.to_le_bytes()[..size]))
            };
            let end = ["<|endoftext|>", "<|end_of_text|>", "</s>"];
            let end = end.iter().find_map(|token| tokenizer.token_to_id(token));
            for file in files(path)? {
                let mut pieces = Pieces::open(&file)?;
                loop {
                    let batch = pieces.next(PIECES)?;
                    if batch.is_empty() {
                        break;
                    }
                    let encoded = tokenizer
                        .encode_batch(batch, false)
                        .map_err(|e| TokenizerError::Refused { problem: e.to_string() })?;
                    for encoding in encoded {
                        put(encoding.get_ids()).map_err(refused)?;
                    }
                }
                put(end.as_slice()).map_err(refused)?;
            }
            let mut header = MARK.to_vec();
            for word in [count, width.bytes(), print] {
                header.extend_from_slice(&word.to_le_bytes());
            }
            let file = out.into_inner().map_err(|error| refused(error.into_error()))?;
            std::os::unix::fs::FileExt::write_all_at(&file, &header, 0).map_err(refused)?;
            file.sync_all().map_err(refused)?;
            fs::rename(&partial, to).map_err(refused)?;
            Ok(())
        })();
        if written.is_err() {
            let _ = fs::remove_file(&partial);
        }
        written
    }
}

/// Returns true if a file holds all tokens of this text.
fn is_whole(file: &Path, print: u64, width: Width) -> bool {
    let mut header = [0; HEADER as usize];
    let Ok(mut opened) = File::open(file) else { return false };
    let (Ok(()), Ok(found)) = (opened.read_exact(&mut header), opened.metadata()) else {
        return false;
    };
    let words = header[8..].as_chunks::<8>().0;
    let [count, size, known] = [0, 1, 2].map(|at| u64::from_le_bytes(words[at]));
    let len = count.checked_mul(width.bytes()).and_then(|bytes| bytes.checked_add(HEADER));
    header.starts_with(&MARK) && (size, known) == (width.bytes(), print) && len == Some(found.len())
}

/// Fingerprint of the tokenizer and of the files' lengths, beginnings and modification times.
fn fingerprint(path: &Path, json: &[u8]) -> Result<u64, TextError> {
    let mut print = Fingerprint::default();
    print.add(json);
    for file in files(path)? {
        let refused = |source| TextError::Io { path: file.clone(), source };
        let opened = File::open(&file).map_err(refused)?;
        let found = opened.metadata().map_err(refused)?;
        print.add(&found.len().to_le_bytes());
        let changed = found.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        print.add(&changed.map_or(0, |since| since.as_nanos() as u64).to_le_bytes());
        let mut start = Vec::new();
        opened.take(4096).read_to_end(&mut start).map_err(refused)?;
        print.add(&start);
    }
    Ok(print.0)
}

/// Text of a file in pieces that end at line ends, if there are any.
struct Pieces {
    path: PathBuf,
    file: File,
    /// Bytes read but not yet returned.
    rest: Vec<u8>,
    /// Number of bytes returned.
    before: u64,
    at_end: bool,
}

impl Pieces {
    fn open(path: &Path) -> Result<Self, TextError> {
        let file = File::open(path);
        let file = file.map_err(|source| TextError::Io { path: path.to_owned(), source })?;
        let path = path.to_owned();
        Ok(Self { path, file, rest: Vec::new(), before: 0, at_end: false })
    }

    /// Returns up to `most` pieces; none at the end.
    fn next(&mut self, most: usize) -> Result<Vec<String>, TokenizerError> {
        let mut pieces = Vec::new();
        while pieces.len() < most {
            while !self.at_end && self.rest.len() < PIECE {
                let mut chunk = vec![0; PIECE];
                match self.file.read(&mut chunk) {
                    Ok(0) => self.at_end = true,
                    Ok(read) => self.rest.extend_from_slice(&chunk[..read]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(source) => {
                        return Err(TextError::Io { path: self.path.clone(), source }.into());
                    }
                }
            }
            if self.rest.is_empty() {
                break;
            }
            let cut = self.cut()?;
            let later = self.rest.split_off(cut);
            let piece = std::mem::replace(&mut self.rest, later);
            let at = self.before;
            self.before += cut as u64;
            pieces.push(String::from_utf8(piece).map_err(|error| TokenizerError::Utf8 {
                path: self.path.clone(),
                at: at + error.utf8_error().valid_up_to() as u64,
            })?);
        }
        Ok(pieces)
    }

    /// End of the next piece: after a line, or at least after a character.
    fn cut(&self) -> Result<usize, TokenizerError> {
        let window = &self.rest[..self.rest.len().min(PIECE)];
        if self.at_end && window.len() == self.rest.len() {
            return Ok(window.len());
        }
        if let Some(line) = window.iter().rposition(|&byte| byte == b'\n') {
            return Ok(line + 1);
        }
        match std::str::from_utf8(window) {
            Ok(_) => Ok(window.len()),
            Err(error) if error.error_len().is_none() => Ok(error.valid_up_to()),
            Err(error) => Err(TokenizerError::Utf8 {
                path: self.path.clone(),
                at: self.before + error.valid_up_to() as u64,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: &str = r#"{"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": null, "decoder": null, "model": {"type": "WordLevel",
        "vocab": {"a": 0, "b": 1, "[UNK]": 2, "<|endoftext|>": 300}, "unk_token": "[UNK]"}}"#;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("paceline-tokenizer-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(path.join("text")).unwrap();
            Self(path)
        }

        fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, bytes).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn all(text: &Text) -> Vec<u32> {
        let mut tokens = vec![0; text.tokens() as usize];
        text.read(0, &mut tokens).unwrap();
        tokens
    }

    #[test]
    fn a_directory_is_turned_once_and_found_again() {
        let folder = Folder::new("once");
        let tokenizer = Tokenizer::open(&folder.file("tokenizer.json", WORDS)).unwrap();
        assert_eq!(tokenizer.vocab(), 301);
        folder.file("text/1.txt", "a b\nb");
        folder.file("text/2.txt", "a what");
        let read = || tokenizer.text(&folder.0.join("text"), &folder.0).unwrap();
        let first = read();
        let expected = [0, 1, 1, 300, 0, 2, 300];
        assert_eq!(all(&first), expected);
        let kept = || -> Vec<PathBuf> {
            let entries = fs::read_dir(&folder.0).unwrap().flatten().map(|entry| entry.path());
            entries.filter(|path| path.to_string_lossy().contains(".tokens-")).collect()
        };
        let [file] = kept().try_into().unwrap();
        let written = fs::metadata(&file).unwrap().modified().unwrap();
        assert_eq!(read().name(), first.name());
        assert_eq!(fs::metadata(&file).unwrap().modified().unwrap(), written);
        // A truncated file is written again, and other text gets another file.
        fs::write(&file, b"PCLTOK1\n").unwrap();
        assert_eq!(all(&read()), expected);
        folder.file("text/2.txt", "b b");
        assert_ne!(read().name(), first.name());
        assert_eq!(kept().len(), 2);
        assert_eq!(tokenizer.decode(&[0, 1]), "a b");
    }

    #[test]
    fn pieces_join_to_the_text_and_cut_no_character() {
        let folder = Folder::new("pieces");
        for text in
            ["", "short\n", &"löng ünbröken ".repeat(20_000), &"lines\nof it\n".repeat(20_000)]
        {
            let mut pieces = Pieces::open(&folder.file("t", text)).unwrap();
            let (mut joined, mut count) = (String::new(), 0);
            loop {
                let some = pieces.next(2).unwrap();
                if some.is_empty() {
                    break;
                }
                count += some.len();
                joined.extend(some);
            }
            assert_eq!(joined, text);
            assert_eq!(
                count,
                text.len().div_ceil(PIECE),
                "no piece is much shorter than asked for"
            );
        }
    }

    #[test]
    fn what_is_no_text_is_named_by_its_first_byte() {
        let folder = Folder::new("bytes");
        let tokenizer = Tokenizer::open(&folder.file("tokenizer.json", WORDS)).unwrap();
        for (name, bytes) in
            [("start", vec![b'a', 0xff]), ("late", [vec![b'a'; 99_999], vec![0xff; 9]].concat())]
        {
            let path = folder.file(name, &bytes);
            let told = tokenizer.text(&path, &folder.0).unwrap_err().to_string();
            let at = bytes.iter().position(|&byte| byte == 0xff).unwrap();
            assert!(told.contains(&format!("{name}: byte {at} is not UTF-8")), "{told}");
        }
        let told = Tokenizer::open(&folder.file("none.json", "{}")).unwrap_err().to_string();
        assert!(told.contains("none.json: is not a tokenizer.json"), "{told}");
    }
}
