//! Files that no other user can read, replace or redirect: the user's own cache directory.

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, fstat, linkat, mkdirat, openat, renameat, unlinkat,
};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A directory that belongs to this user alone. Its files are named relative to the opened
/// directory, so that renaming its path redirects nothing.
#[derive(Debug)]
pub struct PrivateDir {
    path: PathBuf,
    directory: OwnedFd,
}

impl PrivateDir {
    /// Opens `paceline/NAME` in the user's cache directory (`XDG_CACHE_HOME`, or `.cache` in the
    /// home directory); creates it with mode 0700.
    pub fn cache(name: &str) -> io::Result<Self> {
        Self::at(&cache_home()?, name)
    }

    /// Opens `paceline/NAME` in the given directory for caches.
    pub fn at(home: &Path, name: &str) -> io::Result<Self> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(home)?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
        let above = rustix::fs::open(home, flags, Mode::empty())?;
        let own = Self::enter(&above, home, "paceline")?;
        Self::enter(&own.directory, &own.path, name)
    }

    fn enter(above: &OwnedFd, path: &Path, name: &str) -> io::Result<Self> {
        let path = path.join(name);
        match mkdirat(above, name, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let opened = openat(above, name, flags, Mode::empty()).map_err(|error| {
            io::Error::new(io::Error::from(error).kind(), format!("{}: {error}", path.display()))
        })?;
        check(&fstat(&opened)?, FileType::Directory).map_err(|problem| refused(&path, problem))?;
        Ok(Self { path, directory: opened })
    }

    /// Path of the directory, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens one of its files, if it is there. A link, or a file that another user could have
    /// written, is an error.
    pub fn open(&self, name: &str) -> io::Result<Option<File>> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::RDONLY;
        let opened = match openat(&self.directory, name, flags, Mode::empty()) {
            Ok(opened) => opened,
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(error) => return Err(refused(&self.path.join(name), &error.to_string())),
        };
        let found = fstat(&opened)?;
        check(&found, FileType::RegularFile)
            .map_err(|problem| refused(&self.path.join(name), problem))?;
        Ok(Some(File::from(opened)))
    }

    /// Creates a file with mode 0600 if there is none, and returns what it contains: the same to all
    /// processes that call this, whichever comes first.
    pub fn create_once(&self, name: &str, bytes: &[u8]) -> io::Result<Vec<u8>> {
        if self.open(name)?.is_none() {
            let fresh = format!("{name}.{:08x}", unique()?);
            self.write(&fresh, |mut file| file.write_all(bytes))?;
            let (directory, none) = (&self.directory, AtFlags::empty());
            let linked = linkat(directory, &fresh, directory, name, none);
            let _ = unlinkat(directory, &fresh, none);
            match linked {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut found = Vec::new();
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        self.open(name)?.ok_or_else(missing)?.read_to_end(&mut found)?;
        Ok(found)
    }

    /// Writes a file with mode 0600, which is complete or absent, and returns it opened for
    /// reading too.
    pub fn write<E: From<io::Error>>(
        &self,
        name: &str,
        write: impl FnOnce(&File) -> Result<(), E>,
    ) -> Result<File, E> {
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDWR;
        let partial = format!(".{name}.{}.{:08x}.partial", std::process::id(), unique()?);
        let opened = openat(&self.directory, &partial, flags, Mode::RUSR | Mode::WUSR);
        let file = File::from(opened.map_err(io::Error::from)?);
        let written = write(&file).and_then(|()| {
            file.sync_all()?;
            renameat(&self.directory, &partial, &self.directory, name).map_err(io::Error::from)?;
            Ok(())
        });
        if written.is_err() {
            // Only the first error is reported.
            let _ = unlinkat(&self.directory, &partial, AtFlags::empty());
        }
        written.map(|()| file)
    }
}

/// Creates a directory of this user alone, with a name that nobody can foresee, in the system's
/// directory for temporary files.
pub fn temporary_directory(stem: &str) -> io::Result<PathBuf> {
    let name = format!("{stem}-{}-{:08x}", std::process::id(), unique()?);
    let path = std::env::temp_dir().join(name);
    // Fails where anything is in the way, a link included.
    std::fs::DirBuilder::new().mode(0o700).create(&path)?;
    Ok(path)
}

fn unique() -> io::Result<u32> {
    let mut bytes = [0; 4];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(u32::from_le_bytes(bytes))
}

fn check(found: &Stat, kind: FileType) -> Result<(), &'static str> {
    if FileType::from_raw_mode(found.st_mode) != kind {
        return Err("is not what it should be; remove it");
    }
    if found.st_uid != rustix::process::geteuid().as_raw() {
        return Err("belongs to another user; remove it, or set XDG_CACHE_HOME");
    }
    if found.st_mode & 0o077 != 0 {
        return Err("can be read or written by other users; remove it, or take their rights away");
    }
    Ok(())
}

fn refused(path: &Path, problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{} {problem}", path.display()))
}

fn cache_home() -> io::Result<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
    // The specification ignores relative paths.
    let own = named("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || named("HOME").map(|home| PathBuf::from(home).join(".cache"));
    own.or_else(home).ok_or_else(|| {
        let problem = "there is no directory for the user's caches: set XDG_CACHE_HOME or HOME";
        io::Error::new(io::ErrorKind::NotFound, problem)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn links_and_open_rights_are_refused() {
        let home = temporary_directory("paceline-private").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let own = PrivateDir::at(&home, "tokens").unwrap();
        assert_eq!(mode(own.path()), 0o700);
        assert!(own.open("a").unwrap().is_none());
        own.write("a", |mut file| file.write_all(b"text")).unwrap();
        assert_eq!(mode(&own.path().join("a")), 0o600);
        let mut text = String::new();
        own.open("a").unwrap().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        symlink("/etc/passwd", own.path().join("link")).unwrap();
        assert!(own.open("link").is_err());
        // A planted link is replaced, never followed.
        let victim = home.join("victim");
        std::fs::write(&victim, "untouched").unwrap();
        symlink(&victim, own.path().join("planted")).unwrap();
        own.write("planted", |mut file| file.write_all(b"own")).unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"untouched");
        let open = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(own.path().join("a"), open).unwrap();
        assert!(own.open("a").unwrap_err().to_string().contains("by other users"));
        let open = std::fs::Permissions::from_mode(0o770);
        std::fs::set_permissions(own.path(), open).unwrap();
        assert!(PrivateDir::at(&home, "tokens").unwrap_err().to_string().contains("by other"));
        std::fs::remove_dir_all(own.path()).unwrap();
        symlink(&home, own.path()).unwrap();
        assert!(PrivateDir::at(&home, "tokens").is_err(), "a link in the place of the directory");
        std::fs::remove_dir_all(home).unwrap();
    }
}
