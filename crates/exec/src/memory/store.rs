//! Store for offloaded bytes: an unnamed file, or host memory outside the arena.

use paceline_plan::strategy;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use thiserror::Error;

/// Offload store of a rank. Its addresses continue after the arena's.
#[derive(Debug)]
pub(crate) struct OffloadStore {
    /// First address.
    start: u64,
    medium: Medium,
}

#[derive(Debug)]
enum Medium {
    Disk { file: File, folder: PathBuf },
    Host(Mutex<Vec<u8>>),
}

/// Reason why the store failed.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The disk is full, or the folder is not writable.
    #[error(
        "cannot keep {bytes} offloaded bytes in {}: {source}; --offload-dir names another folder",
        folder.display()
    )]
    Open {
        /// Number of bytes.
        bytes: u64,
        /// Folder of the file.
        folder: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The host has too little memory.
    #[error("the host has no {bytes} bytes to offload to; --offload-to disk needs less memory")]
    Memory {
        /// Number of bytes.
        bytes: u64,
    },
    /// The file could not be read or written.
    #[error("offloading to {}: {source}", folder.display())]
    Move {
        /// Folder of the file.
        folder: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The plan offloads, but no store was opened.
    #[error("there is no store to offload to")]
    None,
}

impl OffloadStore {
    /// Allocates `bytes` zeroed bytes from address `start` on.
    pub(crate) fn open(
        start: u64,
        bytes: u64,
        kind: strategy::Store,
        folder: &Path,
    ) -> Result<Self, StoreError> {
        let medium = match kind {
            strategy::Store::Host => {
                let mut memory = Vec::new();
                let size = usize::try_from(bytes).map_err(|_| StoreError::Memory { bytes })?;
                memory.try_reserve_exact(size).map_err(|_| StoreError::Memory { bytes })?;
                memory.resize(size, 0);
                Medium::Host(Mutex::new(memory))
            }
            strategy::Store::Disk => {
                let folder = folder.to_owned();
                match nameless(&folder, bytes) {
                    Ok(file) => Medium::Disk { file, folder },
                    Err(source) => return Err(StoreError::Open { bytes, folder, source }),
                }
            }
        };
        Ok(Self { start, medium })
    }

    /// Copies bytes to an address.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let at = at - self.start;
        match &self.medium {
            Medium::Disk { file, folder } => {
                let moved = |source| StoreError::Move { folder: folder.clone(), source };
                file.write_all_at(bytes, at).map_err(moved)
            }
            Medium::Host(memory) => {
                let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                memory[at as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Copies bytes from an address.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let at = at - self.start;
        match &self.medium {
            Medium::Disk { file, folder } => {
                let moved = |source| StoreError::Move { folder: folder.clone(), source };
                file.read_exact_at(into, at).map_err(moved)
            }
            Medium::Host(memory) => {
                let memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                into.copy_from_slice(&memory[at as usize..][..into.len()]);
                Ok(())
            }
        }
    }
}

/// Creates a file that disappears when this process ends, in any way: it is unlinked before use.
fn nameless(folder: &Path, bytes: u64) -> io::Result<File> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    std::fs::create_dir_all(folder)?;
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = folder.join(format!(".offload-{}-{number}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(&path)?;
    file.set_len(bytes)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_there_comes_back() {
        let folder = std::env::temp_dir().join(format!("paceline-store-{}", std::process::id()));
        for kind in [strategy::Store::Disk, strategy::Store::Host] {
            let store = OffloadStore::open(1000, 64, kind, &folder).unwrap();
            store.write(1010, &[1, 2, 3]).unwrap();
            let mut back = [9; 5];
            store.read(1009, &mut back).unwrap();
            assert_eq!(back, [0, 1, 2, 3, 0], "{kind}");
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a file kept its name");
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn where_nothing_can_be_written_the_folder_is_named() {
        let file = std::env::temp_dir().join(format!("paceline-no-store-{}", std::process::id()));
        std::fs::write(&file, "a file").unwrap();
        let told = OffloadStore::open(0, 8, strategy::Store::Disk, &file).unwrap_err().to_string();
        std::fs::remove_file(&file).unwrap();
        assert!(told.contains("paceline-no-store") && told.contains("--offload-dir"), "{told}");
    }
}
