//! Reads the files named by flags.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Maximum size in bytes of a description of a model, a cluster or a run. It is a thousand times
/// more than any needs, but small enough to reject a huge file named by mistake.
const MOST: u64 = 16 << 20;

/// Reads a text file; an error message does not contain the file's name.
pub(crate) fn read_text(path: &Path) -> Result<String, String> {
    let unreadable = |error: std::io::Error| format!("cannot be read: {error}");
    if path.is_dir() {
        return Err("is a directory, not a file".to_owned());
    }
    let file = File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    file.take(MOST + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MOST {
        return Err(format!("is larger than {} MiB, so it is not a description", MOST >> 20));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        format!("is not a text file (byte {at} is not UTF-8)")
    })
}
