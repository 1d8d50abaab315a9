//! Atomic file writes: a file is complete or absent.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Writes a file through a temporary one in the same directory, so that no reader sees, and no
/// crash leaves, a partial file. Creates missing directories.
pub(crate) fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    fs::create_dir_all(folder)?;
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.partial", std::process::id()));
    let partial = folder.join(hidden);
    // What a dead process of this number left, and nothing that it links to.
    let _ = fs::remove_file(&partial);
    let written = File::create_new(&partial)
        .and_then(|mut file| {
            file.write_all(contents)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // Only the first error is reported.
        let _ = fs::remove_file(&partial);
        return written;
    }
    // The new name is durable only once the directory is synced; not every system supports that.
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_nothing_is_left_beside_it() {
        let folder = std::env::temp_dir().join(format!("paceline-atomic-{}", std::process::id()));
        let path = folder.join("deep").join("file.txt");
        write(&path, b"first").unwrap();
        write(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        let blocked = path.join("below-a-file");
        assert!(write(&blocked, b"x").is_err());
        assert_eq!(fs::read(&path).unwrap(), b"second");
        fs::remove_dir_all(folder).unwrap();
    }
}
