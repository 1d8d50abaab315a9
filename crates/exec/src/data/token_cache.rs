//! Token files: a text is tokenized once, and its tokens are kept in the user's cache directory.
//!
//! ```text
//! tokens-DIGEST  magic, count, bytes per token, SHA-256 of text and tokenizer, tokens
//! text-IDENTITY  SHA-256 of a text whose files have these inodes, lengths and times
//! ```
//!
//! Whoever could write there could replace the corpus: the directory and its files belong to the
//! user alone ([`PrivateDir`]).

use super::text::{Text, TextError, Width, files};
use super::tokenizer::{Tokenizer, TokenizerError, guarded};
use crate::private::PrivateDir;
use crate::regular;
use sha2::{Digest, Sha256};
use std::fs::{File, Metadata};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Bytes of text tokenized at a time.
const PIECE: usize = 1 << 16;
/// Number of pieces tokenized in parallel, by as many threads as there are cores.
const PIECES: usize = 32;
/// Magic of a token file; the header then has the count, bytes per token and digest.
const MARK: [u8; 8] = *b"PCLTOK2\n";
const HEADER: u64 = 56;
/// A file that changed this recently may change again within the same timestamp.
const SETTLED: Duration = Duration::from_secs(2);

/// Tokens of a text; tokenizes it unless the cache has them.
pub(super) fn tokens(
    tokenizer: &Tokenizer,
    (library, json): (&tokenizers::Tokenizer, &[u8]),
    path: &Path,
    cache: &PrivateDir,
) -> Result<Text, TokenizerError> {
    let digest = Sha256::new().chain_update(text_digest(path, cache)?).chain_update(json);
    let digest: [u8; 32] = digest.finalize().into();
    let name = format!("tokens-{}", hex(&digest));
    let vocab = tokenizer.vocab();
    let width = if vocab <= 1 << 16 { Width::Half } else { Width::Word };
    let refused = |source| TextError::Io { path: cache.path().to_owned(), source };
    let there = cache.open(&name).map_err(refused)?;
    let file = match there.filter(|file| is_whole(file, &digest, width)) {
        Some(file) => file,
        None => {
            cache.write(&name, |file| write(tokenizer, library, path, file, (&digest, width)))?
        }
    };
    let kept = cache.path().join(&name);
    // Half of the digest tells texts apart in checkpoints.
    let name = name[..7 + 32].to_owned();
    Ok(Text::tokenised((path, name), (&kept, file, HEADER), (width, vocab))?)
}

/// Digest of the text's files; taken from the cache if they are the ones it was computed for.
fn text_digest(path: &Path, cache: &PrivateDir) -> Result<[u8; 32], TextError> {
    let refused = |path: &Path| {
        let path = path.to_owned();
        move |source| TextError::Io { path, source }
    };
    let all = files(path)?;
    let mut identity = Sha256::new();
    let mut settled = true;
    for file in &all {
        let real = file.canonicalize().map_err(refused(file))?;
        let found = file.metadata().map_err(refused(file))?;
        identity.update(real.as_os_str().as_encoded_bytes());
        let times = [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()];
        times.iter().for_each(|time| identity.update(time.to_le_bytes()));
        for number in [found.dev(), found.ino(), found.len()] {
            identity.update(number.to_le_bytes());
        }
        settled &= is_settled(&found);
    }
    let memo = format!("text-{}", hex(&identity.finalize().into()));
    if let Some(file) = cache.open(&memo).map_err(refused(cache.path()))? {
        let mut known = [0; 32];
        if settled && file.read_exact_at(&mut known, 0).is_ok() {
            return Ok(known);
        }
    }
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    for file in &all {
        let mut opened = regular::open(file).map_err(refused(file))?;
        digest.update(opened.metadata().map_err(refused(file))?.len().to_le_bytes());
        loop {
            match opened.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => digest.update(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(TextError::Io { path: file.clone(), source }),
            }
        }
    }
    let digest: [u8; 32] = digest.finalize().into();
    if settled {
        let written = cache.write(&memo, |mut file| file.write_all(&digest));
        written.map_err(refused(cache.path()))?;
    }
    Ok(digest)
}

fn is_settled(found: &Metadata) -> bool {
    let changed = u64::try_from(found.ctime()).map(Duration::from_secs).unwrap_or_default();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(changed) > SETTLED
}

fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns true if a file holds all tokens of this text.
fn is_whole(file: &File, digest: &[u8; 32], width: Width) -> bool {
    let mut header = [0; HEADER as usize];
    let (Ok(()), Ok(found)) = (file.read_exact_at(&mut header, 0), file.metadata()) else {
        return false;
    };
    let [count, size] = [8, 16].map(|at| {
        let word = header[at..].first_chunk::<8>().copied();
        u64::from_le_bytes(word.unwrap_or_default())
    });
    let len = count.checked_mul(width.bytes()).and_then(|bytes| bytes.checked_add(HEADER));
    header.starts_with(&MARK)
        && size == width.bytes()
        && header[24..] == *digest
        && len == Some(found.len())
}

/// Writes all tokens of a text. Files are separated by the tokenizer's end-of-text token, if it
/// has one.
fn write(
    tokenizer: &Tokenizer,
    library: &tokenizers::Tokenizer,
    path: &Path,
    file: &File,
    (digest, width): (&[u8; 32], Width),
) -> Result<(), TokenizerError> {
    let mut out = BufWriter::new(file);
    out.write_all(&[0; HEADER as usize])?;
    let mut count = 0u64;
    let mut put = |tokens: &[u32]| {
        count += tokens.len() as u64;
        let size = width.bytes() as usize;
        tokens.iter().try_for_each(|token| out.write_all(&token.to_le_bytes()[..size]))
    };
    let end = ["<|endoftext|>", "<|end_of_text|>", "</s>"];
    let end = end.iter().find_map(|token| library.token_to_id(token));
    for file in files(path)? {
        let mut pieces = Pieces::open(&file)?;
        loop {
            let batch = pieces.next(PIECES)?;
            if batch.is_empty() {
                break;
            }
            let encoded = guarded(|| library.encode_batch(batch, false))
                .and_then(|encoded| encoded.map_err(|error| error.to_string()));
            for encoding in encoded.map_err(|problem| tokenizer.refused(problem))? {
                put(encoding.get_ids())?;
            }
        }
        put(end.as_slice())?;
    }
    let mut header = MARK.to_vec();
    for word in [count, width.bytes()] {
        header.extend_from_slice(&word.to_le_bytes());
    }
    header.extend_from_slice(digest);
    out.flush()?;
    drop(out);
    Ok(file.write_all_at(&header, 0)?)
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
        let file = regular::open(path);
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
    use std::fs;

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

        fn cache(&self) -> io::Result<PrivateDir> {
            PrivateDir::at(&self.0.join("cache"), "tokens")
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
        let read = || tokenizer.text(&folder.0.join("text"), || folder.cache()).unwrap();
        let first = read();
        let expected = [0, 1, 1, 300, 0, 2, 300];
        assert_eq!(all(&first), expected);
        let kept = || -> Vec<PathBuf> {
            let entries = fs::read_dir(folder.cache().unwrap().path()).unwrap().flatten();
            let paths = entries.map(|entry| entry.path());
            paths.filter(|path| path.to_string_lossy().contains("tokens-")).collect()
        };
        let [file] = kept().try_into().unwrap();
        let written = fs::metadata(&file).unwrap().modified().unwrap();
        assert_eq!(read().name(), first.name());
        assert_eq!(fs::metadata(&file).unwrap().modified().unwrap(), written);
        // A truncated file is written again, and other text gets another file.
        fs::write(&file, MARK).unwrap();
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
            let told = tokenizer.text(&path, || folder.cache()).unwrap_err().to_string();
            let at = bytes.iter().position(|&byte| byte == 0xff).unwrap();
            assert!(told.contains(&format!("{name}: byte {at} is not UTF-8")), "{told}");
        }
    }

    /// Truncation to 64 tokens and padding to 10^10 stand in files of sentence encoders; a corpus is
    /// taken whole.
    #[test]
    fn a_corpus_is_neither_cut_nor_filled() {
        let folder = Folder::new("whole");
        let cut = r#""truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 9}"#;
        let fill = r#""padding": {"strategy": {"Fixed": 10000000000}, "direction": "Right",
            "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}"#;
        let json = WORDS.replace(r#""truncation": null"#, cut).replace(r#""padding": null"#, fill);
        assert_ne!(json, WORDS);
        let tokenizer = Tokenizer::open(&folder.file("tokenizer.json", json)).unwrap();
        let path = folder.file("t", "a b a b a");
        let text = tokenizer.text(&path, || folder.cache()).unwrap();
        assert_eq!(all(&text), [0, 1, 0, 1, 0, 300]);
        assert_eq!(tokenizer.encode("a b a").unwrap(), [0, 1, 0]);
    }

    /// Another user's file, and ids that the tokenizer does not have, are refused.
    #[test]
    fn a_planted_token_file_is_refused() {
        let folder = Folder::new("planted");
        let tokenizer = Tokenizer::open(&folder.file("tokenizer.json", WORDS)).unwrap();
        let path = folder.file("t", "a b a b a");
        let text = || tokenizer.text(&path, || folder.cache());
        let name = text().unwrap().name().to_owned();
        let kept = folder.cache().unwrap().path().to_owned();
        let file = fs::read_dir(&kept).unwrap().flatten().map(|entry| entry.path());
        let file = { file }.find(|path| path.to_string_lossy().contains(&name)).unwrap();
        let mut bytes = fs::read(&file).unwrap();
        bytes[HEADER as usize + 1] = 99;
        fs::write(&file, &bytes).unwrap();
        let mut tokens = [0; 3];
        let told = text().unwrap().read(0, &mut tokens).unwrap_err().to_string();
        assert!(told.contains("token 25344") && told.contains("vocabulary of 301"), "{told}");
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(&path, &file).unwrap();
        assert!(text().is_err(), "a link");
    }
}
