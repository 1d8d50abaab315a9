//! Reading of regular files only: devices and pipes would block or never end.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a regular file for reading.
pub fn open(path: &Path) -> io::Result<File> {
    let mut open = OpenOptions::new();
    // Opening a pipe would wait for its writer.
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
    let file = open.read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    let found = file.metadata()?;
    if found.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "is a directory, not a file"));
    }
    if !found.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is not a regular file"));
    }
    Ok(file)
}

/// Reads a regular file of at most `most` bytes.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let problem = format!("is larger than {} MiB", most >> 20);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

/// Reads a regular text file of at most `most` bytes.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    String::from_utf8(read(path, most)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let problem = format!("is not a text file (byte {at} is not UTF-8)");
        io::Error::new(io::ErrorKind::InvalidData, problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_pipes_and_large_files_are_refused() {
        let told = |path: &Path| read(path, 4).unwrap_err().to_string();
        assert_eq!(told(Path::new("/dev/zero")), "is not a regular file");
        assert_eq!(told(&std::env::temp_dir()), "is a directory, not a file");
        let path = std::env::temp_dir().join(format!("paceline-regular-{}", std::process::id()));
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(told(&path), "is larger than 0 MiB");
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        std::fs::remove_file(&path).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        if made.is_ok_and(|made| made.success()) {
            assert_eq!(told(&path), "is not a regular file");
            std::fs::remove_file(&path).unwrap();
        }
    }
}
