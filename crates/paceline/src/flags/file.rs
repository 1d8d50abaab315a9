//! Reads the files named by flags.

use paceline_exec::regular;
use std::path::Path;

/// Maximum size in bytes of a description of a model, a cluster or a run. It is a thousand times
/// more than any needs, but small enough to reject a huge file named by mistake.
const MOST: u64 = 16 << 20;

/// Reads a text file; an error message does not contain the file's name.
pub(crate) fn read_text(path: &Path) -> Result<String, String> {
    regular::read_text(path, MOST).map_err(|error| match error.kind() {
        std::io::ErrorKind::FileTooLarge => format!("{error}, so it is not a description"),
        _ if error.raw_os_error().is_some() => format!("cannot be read: {error}"),
        _ => error.to_string(),
    })
}
