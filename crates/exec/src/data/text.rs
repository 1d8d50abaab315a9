//! Tokens in files: any text, byte by byte or through a tokenizer.
//!
//! Nothing is loaded in advance: each sample is read on demand. The last twentieth of the tokens is
//! held out: training never reads it, and evaluation reads nothing else. The split is by tokens and
//! not by samples, so that it is at the same position for samples of every length.

use super::corpus::mix;
use super::permutation::Permutation;
use crate::regular;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// One in this many tokens is held out.
const HELD_OUT: u64 = 20;

/// Reason why a text cannot be used for training.
#[derive(Debug, Error)]
pub enum TextError {
    /// The system reports an error.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// No file of a directory has any content.
    #[error("{}: there is no text here", .path.display())]
    Empty {
        /// The file or directory.
        path: PathBuf,
    },
    /// Too few tokens for one training sample and one held-out sample.
    #[error(
        "{}: {tokens} tokens are too few for samples of {seq}; {} are needed, or use a smaller --seq",
        .path.display(), least(*seq)
    )]
    Short {
        /// The file or directory.
        path: PathBuf,
        /// Number of tokens in the text.
        tokens: u64,
        /// Number of tokens in a sample.
        seq: u64,
    },
    /// The model has fewer tokens than the tokenizer.
    #[error(
        "the tokenizer has {tokens} tokens and the model's vocabulary {vocab}; use a model with at least as many"
    )]
    Vocabulary {
        /// Vocabulary size of the tokenizer.
        tokens: u32,
        /// Vocabulary size of the model.
        vocab: u32,
    },
    /// A file is damaged or has changed.
    #[error("{}: {problem}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
}

/// Storage format of a token in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// The text itself: a token is a byte.
    Byte,
    /// Two bytes, little-endian.
    Half,
    /// Four bytes, little-endian.
    Word,
}

impl Width {
    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::Byte => 1,
            Self::Half => 2,
            Self::Word => 4,
        }
    }
}

/// Tokens of one or several files, concatenated in the order of their names.
#[derive(Debug)]
pub struct Text {
    path: PathBuf,
    parts: Vec<TextFile>,
    width: Width,
    tokens: u64,
    /// Vocabulary size of the tokenizer.
    vocab: u32,
    name: String,
}

#[derive(Debug)]
struct TextFile {
    path: PathBuf,
    file: File,
    /// Offset of the first token in the file, in bytes.
    at: u64,
    /// Number of tokens in the files before.
    before: u64,
    tokens: u64,
}

impl Text {
    /// Opens the bytes of a file, or of all files below a directory.
    pub fn bytes(path: &Path) -> Result<Self, TextError> {
        let mut text = Self {
            path: path.to_owned(),
            parts: Vec::new(),
            width: Width::Byte,
            tokens: 0,
            vocab: 256,
            name: String::new(),
        };
        for path in files(path)? {
            let (file, len) = open(&path)?;
            text.push(path, file, 0, len);
        }
        text.name = format!("bytes-{:016x}", text.fingerprint()?);
        text.checked()
    }

    /// Opens a token file from byte `at` on; `path` and `name` are those of the text.
    pub(super) fn tokenised(
        (path, name): (&Path, String),
        (path_of_tokens, file, at): (&Path, File, u64),
        (width, vocab): (Width, u32),
    ) -> Result<Self, TextError> {
        let refused = |source| TextError::Io { path: path_of_tokens.to_owned(), source };
        let len = file.metadata().map_err(refused)?.len();
        let mut text =
            Self { path: path.to_owned(), parts: Vec::new(), width, tokens: 0, vocab, name };
        text.push(path_of_tokens.to_owned(), file, at, len.saturating_sub(at) / width.bytes());
        text.checked()
    }

    /// Name by which checkpoints recognise the text.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of the text.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Reads tokens from a position on; fails if there are too few.
    pub fn read(&self, position: u64, tokens: &mut [u32]) -> Result<(), TextError> {
        let mut position = position;
        let mut rest = tokens;
        while !rest.is_empty() {
            let at = self.parts.partition_point(|part| part.before + part.tokens <= position);
            let Some(part) = self.parts.get(at) else {
                let problem = format!("has {} tokens, number {position} is asked for", self.tokens);
                return Err(TextError::Damaged { path: self.path.clone(), problem });
            };
            let within = position - part.before;
            let count = (part.tokens - within).min(rest.len() as u64) as usize;
            let (now, later) = rest.split_at_mut(count);
            part.read((self.width, self.vocab), within, now)?;
            position += count as u64;
            rest = later;
        }
        Ok(())
    }

    fn push(&mut self, path: PathBuf, file: File, at: u64, tokens: u64) {
        self.parts.push(TextFile { path, file, at, before: self.tokens, tokens });
        self.tokens += tokens;
    }

    fn checked(self) -> Result<Self, TextError> {
        if self.tokens == 0 { Err(TextError::Empty { path: self.path }) } else { Ok(self) }
    }

    /// Fingerprint of the files' lengths and beginnings.
    fn fingerprint(&self) -> Result<u64, TextError> {
        let mut print = Fingerprint::default();
        for part in &self.parts {
            print.add(&part.tokens.to_le_bytes());
            let mut start = vec![0; part.tokens.min(4096) as usize];
            part.exact(&mut start, 0)?;
            print.add(&start);
        }
        Ok(print.0)
    }
}

impl TextFile {
    /// Reads tokens, which must be in the tokenizer's vocabulary.
    fn read(
        &self,
        (width, vocab): (Width, u32),
        first: u64,
        tokens: &mut [u32],
    ) -> Result<(), TextError> {
        let mut bytes = [0; 4096];
        let size = width.bytes() as usize;
        let mut at = self.at + first * width.bytes();
        for tokens in tokens.chunks_mut(bytes.len() / size) {
            let bytes = &mut bytes[..tokens.len() * size];
            self.exact(bytes, at)?;
            at += bytes.len() as u64;
            for (token, bytes) in tokens.iter_mut().zip(bytes.chunks_exact(size)) {
                let mut word = [0; 4];
                word[..size].copy_from_slice(bytes);
                *token = u32::from_le_bytes(word);
            }
            if let Some(token) = tokens.iter().find(|token| **token >= vocab) {
                let problem = format!("has token {token}, beyond the vocabulary of {vocab}");
                return Err(TextError::Damaged { path: self.path.clone(), problem });
            }
        }
        Ok(())
    }

    fn exact(&self, bytes: &mut [u8], at: u64) -> Result<(), TextError> {
        self.file.read_exact_at(bytes, at).map_err(|source| {
            let path = self.path.clone();
            if source.kind() == io::ErrorKind::UnexpectedEof {
                let problem = "has become shorter since the run began".to_owned();
                return TextError::Damaged { path, problem };
            }
            TextError::Io { path, source }
        })
    }
}

/// A text divided into samples of one length.
#[derive(Debug)]
pub(super) struct Samples {
    text: std::sync::Arc<Text>,
    /// Position of the first token of the first window.
    first: u64,
    /// Number of windows. Each begins at the end of the previous one, and its last target is the
    /// first token of the next.
    windows: u64,
    seq: u64,
    /// Seed of the order, if the windows are shuffled.
    shuffled_by: Option<u64>,
}

impl Samples {
    /// Creates the training samples, in a different order every epoch, or the held-out samples.
    /// `further` more tokens follow a window's last target.
    pub(super) fn new(
        text: &std::sync::Arc<Text>,
        vocab: u32,
        (seq, further): (u64, u64),
        shuffled_by: Option<u64>,
    ) -> Result<Self, TextError> {
        if text.vocab > vocab {
            return Err(TextError::Vocabulary { tokens: text.vocab, vocab });
        }
        let held_out = text.tokens / HELD_OUT;
        let cut = text.tokens - held_out;
        let behind = further.saturating_add(1);
        let windows = |tokens: u64| tokens.saturating_sub(behind).checked_div(seq).unwrap_or(0);
        if windows(held_out) == 0 {
            let (path, tokens) = (text.path.clone(), text.tokens);
            let seq = seq.saturating_add(further);
            return Err(TextError::Short { path, tokens, seq });
        }
        let (first, windows) = match shuffled_by {
            Some(_) => (0, windows(cut)),
            None => (cut, windows(held_out)),
        };
        Ok(Self { text: text.clone(), first, windows, seq, shuffled_by })
    }

    pub(super) fn text(&self) -> &Text {
        &self.text
    }

    pub(super) fn windows(&self) -> u64 {
        self.windows
    }

    pub(super) fn fill(
        &self,
        sample: u64,
        ahead: u64,
        tokens: &mut [u32],
    ) -> Result<(), TextError> {
        let (epoch, index) = (sample / self.windows, sample % self.windows);
        let window = match self.shuffled_by {
            Some(seed) => Permutation::new(self.windows, mix(seed) ^ mix(!epoch)).at(index),
            None => index,
        };
        self.text.read(self.first + window * self.seq + ahead, tokens)
    }
}

/// Minimum number of tokens for one held-out sample.
fn least(seq: u64) -> u64 {
    seq.saturating_add(1).saturating_mul(HELD_OUT)
}

/// Running hash, sufficient to recognise a text that is read in place.
#[derive(Debug, Default)]
struct Fingerprint(u64);

impl Fingerprint {
    fn add(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = mix(self.0 ^ u64::from_le_bytes(word)).wrapping_add(chunk.len() as u64);
        }
    }
}

/// Returns the file itself, or all files below a directory by name, except hidden ones.
pub(super) fn files(path: &Path) -> Result<Vec<PathBuf>, TextError> {
    let refused = |source| TextError::Io { path: path.to_owned(), source };
    if !fs::metadata(path).map_err(refused)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    let entries = fs::read_dir(path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let mut paths: Vec<PathBuf> =
        entries.map_err(refused)?.iter().map(fs::DirEntry::path).collect();
    paths.sort();
    for path in paths {
        let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if !hidden {
            found.extend(files(&path)?);
        }
    }
    Ok(found)
}

fn open(path: &Path) -> Result<(File, u64), TextError> {
    let refused = |source| TextError::Io { path: path.to_owned(), source };
    let file = regular::open(path).map_err(refused)?;
    let len = file.metadata().map_err(refused)?.len();
    Ok((file, len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("paceline-text-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(path.join("deeper")).unwrap();
            Self(path)
        }

        fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
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

    #[test]
    fn a_directory_is_its_files_end_to_end() {
        let folder = Folder::new("directory");
        folder.file("b.txt", b"defg");
        folder.file("a.txt", b"abc");
        folder.file("empty.txt", b"");
        folder.file(".hidden", b"nothing");
        folder.file("deeper/c.txt", b"hi");
        let text = Text::bytes(&folder.0).unwrap();
        assert_eq!(text.tokens(), 9);
        let mut tokens = [0; 9];
        text.read(0, &mut tokens).unwrap();
        assert_eq!(tokens.map(|t| t as u8), *b"abcdefghi");
        let mut tokens = [0; 4];
        text.read(2, &mut tokens).unwrap();
        assert_eq!(tokens.map(|t| t as u8), *b"cdef");
        let told = text.read(6, &mut tokens).unwrap_err().to_string();
        assert!(told.ends_with("has 9 tokens, number 9 is asked for"), "{told}");
    }

    #[test]
    fn every_window_is_read_once_an_epoch_and_held_out_text_never() {
        let folder = Folder::new("windows");
        let bytes: Vec<u8> = (0..2000u32).map(|i| (i / 8) as u8).collect();
        let text = Arc::new(Text::bytes(&folder.file("t", &bytes)).unwrap());
        let samples = Samples::new(&text, 256, (8, 0), Some(3)).unwrap();
        assert_eq!(samples.windows(), 237);
        let epoch = |epoch: u64| -> Vec<u32> {
            let first = |sample| {
                let (mut inputs, mut targets) = ([0; 8], [0; 8]);
                samples.fill(sample, 0, &mut inputs).unwrap();
                samples.fill(sample, 1, &mut targets).unwrap();
                assert_eq!((inputs[1], targets[7]), (inputs[0], inputs[0] + 1));
                inputs[0]
            };
            (epoch * 237..(epoch + 1) * 237).map(first).collect()
        };
        let (first, second) = (epoch(0), epoch(1));
        assert_ne!(first, second);
        for mut order in [first, second] {
            order.sort();
            assert!(order.iter().copied().eq(0..237), "each once, and none of the last 100 bytes");
        }
        let held_out = Samples::new(&text, 256, (8, 0), None).unwrap();
        assert_eq!(held_out.windows(), 12);
        let mut tokens = [0; 1];
        held_out.fill(0, 0, &mut tokens).unwrap();
        assert_eq!(tokens, [1900 / 8]);
        held_out.fill(12, 0, &mut tokens).unwrap();
        assert_eq!(tokens, [1900 / 8], "and from the start again");
    }

    #[test]
    fn what_cannot_be_learnt_from_is_said() {
        let folder = Folder::new("refused");
        let told = |result: Result<Text, TextError>| result.unwrap_err().to_string();
        assert!(told(Text::bytes(&folder.0)).ends_with("there is no text here"));
        assert!(told(Text::bytes(&folder.0.join("absent"))).contains("No such file"));
        let text = Arc::new(Text::bytes(&folder.file("t", &[b'x'; 180])).unwrap());
        let short = Samples::new(&text, 256, (9, 0), Some(0)).unwrap_err().to_string();
        assert!(
            short.contains("180 tokens are too few for samples of 9; 200 are needed"),
            "{short}"
        );
        assert!(Samples::new(&text, 256, (8, 0), Some(0)).is_ok());
        for seq in [0, u64::MAX] {
            assert!(Samples::new(&text, 256, (seq, 0), Some(0)).is_err());
        }
        let small = Samples::new(&text, 255, (8, 0), Some(0)).unwrap_err().to_string();
        assert!(small.contains("has 256 tokens and the model's vocabulary 255"), "{small}");
    }

    #[test]
    fn a_file_that_shrinks_under_a_run_is_named() {
        let folder = Folder::new("shrinks");
        let path = folder.file("t", &[b'x'; 400]);
        let text = Text::bytes(&path).unwrap();
        fs::write(&path, [b'x'; 10]).unwrap();
        let told = text.read(100, &mut [0; 5]).unwrap_err().to_string();
        assert!(told.ends_with("has become shorter since the run began"), "{told}");
    }

    #[test]
    fn other_contents_have_another_name() {
        let folder = Folder::new("names");
        let name = |bytes: &[u8]| Text::bytes(&folder.file("t", bytes)).unwrap().name().to_owned();
        assert_eq!(name(b"abc"), name(b"abc"));
        assert_ne!(name(b"abc"), name(b"abd"));
        assert_ne!(name(b"abc"), name(b"abc\0"));
    }
}
