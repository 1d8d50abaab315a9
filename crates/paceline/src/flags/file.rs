//! Reading the files that flags name.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The largest description of a model, a cluster or a run: a thousand times what any needs, and
/// little enough that a mistyped name of a huge file ends in a message.
const MOST: u64 = 16 << 20;

/// A file's text, or what is wrong with it (without its name).
pub(crate) fn read_text(path: &Path) -> Result<String, String> {
    let unreadable = |error: std::io::Error| format!("cannot be read: {error}");
    if path.is_dir() {
        return Err("is a directory, not a file".to_owned());
    }
    let file = File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    file.take(MOST + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MOST {
        return Err(format!("is larger than {} MiB, so it is no description", MOST >> 20));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        format!("is not a text file (byte {at} is not UTF-8)")
    })
}
