//! Lock of a run's directory: one job at a time writes there.

use rustix::io::{FdFlags, fcntl_setfd};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, Instant};

/// Name of the file in the run's directory.
const NAME: &str = ".lock";

/// Time that a resumed run waits for the last ranks of the job before it.
const LAST_RANKS: Duration = Duration::from_secs(5);

/// A held lock. The system releases it when the last process that holds the file has ended.
#[derive(Debug)]
pub(crate) struct Lock(File);

impl Lock {
    /// Locks a directory; the inner error names the process that holds it. If `waits`, ranks of a
    /// dead job get a moment to end.
    pub(crate) fn take(directory: &Path, waits: bool) -> io::Result<Result<Self, String>> {
        let path = directory.join(NAME);
        let mut open = OpenOptions::new();
        let mut file = open.create(true).read(true).write(true).truncate(false).open(path)?;
        let since = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::Error(error)) => return Err(error),
                Err(TryLockError::WouldBlock) if waits && since.elapsed() < LAST_RANKS => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(TryLockError::WouldBlock) => {
                    let mut owner = String::new();
                    let _ = (&mut file).take(20).read_to_string(&mut owner);
                    let owner = owner.trim().parse::<u32>();
                    return Ok(Err(owner.map_or(String::new(), |pid| format!(" (process {pid})"))));
                }
            }
        }
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())?;
        Ok(Ok(Self(file)))
    }

    /// Lets child processes hold the lock too.
    pub(crate) fn inherit(&self) {
        // If it fails, the lock ends with this process.
        let _ = fcntl_setfd(&self.0, FdFlags::empty());
    }
}
