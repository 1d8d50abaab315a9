//! Files for fuzz targets of parsers that read files.

use std::path::PathBuf;

/// Writes a file for this process alone, and returns its path.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let path = folder.join(format!("paceline-fuzz-{}-{name}", std::process::id()));
    std::fs::write(&path, bytes).expect("a file of the fuzzer");
    path
}
