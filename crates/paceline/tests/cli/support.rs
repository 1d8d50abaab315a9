//! Runs the binary in a temporary directory.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that is removed when the test ends.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("paceline-cli-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> &Self {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
        self
    }

    /// Runs `paceline` here with the arguments of one line.
    pub(crate) fn run(&self, line: &str) -> Ran {
        let arguments: Vec<&str> = line.split_whitespace().collect();
        self.run_with(&arguments)
    }

    pub(crate) fn run_with(&self, arguments: &[&str]) -> Ran {
        let Output { status, stdout, stderr } = self.command().args(arguments).output().unwrap();
        let line = arguments.join(" ");
        let (out, err) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
        assert!(!err.contains("panicked"), "paceline {line}\n{err}");
        Ran { line, code: status.code(), out, err }
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_paceline"));
        command.current_dir(&self.0).env("XDG_CACHE_HOME", self.0.join(".cache"));
        command
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Output of a finished process.
pub(crate) struct Ran {
    line: String,
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    /// Asserts that the process succeeded.
    #[track_caller]
    pub(crate) fn done(self) -> Self {
        assert_eq!(self.code, Some(0), "paceline {}\n{}", self.line, self.err);
        self
    }

    /// Asserts that the input was refused, with a message that contains each of `said`.
    #[track_caller]
    pub(crate) fn refused(self, said: &[&str]) -> Self {
        assert_eq!(self.code, Some(2), "paceline {}\n{}{}", self.line, self.out, self.err);
        for text in said {
            let (line, err) = (&self.line, &self.err);
            assert!(err.contains(text), "paceline {line}\nlacks: {text}\nsaid: {err}");
        }
        if self.line.split(' ').any(|word| word == "--json") {
            let [answer] = &self.objects()[..] else { panic!("not one answer: {}", self.out) };
            assert!(answer["error"].is_string() && answer["exit_status"] == 2, "{answer}");
        } else {
            assert!(self.out.is_empty(), "paceline {}: {}", self.line, self.out);
        }
        self
    }

    /// Standard output as JSON, one object per line.
    #[track_caller]
    pub(crate) fn objects(&self) -> Vec<Value> {
        let object = |line: &str| match serde_json::from_str(line) {
            Ok(value @ Value::Object(_)) => value,
            other => panic!("paceline {}: {other:?} in {line}", self.line),
        };
        self.out.lines().map(object).collect()
    }
}
