//! Search for the MPI library that belongs to the launcher of this process.
#![allow(unsafe_code)]

use super::LIBRARY;
use super::abi::problem;
use crate::error::CommError;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::path::{Path, PathBuf};

/// Names of the library in Open MPI, and in MPICH and its relatives. Distributions that install both
/// rename one (`libmpich.so.12`).
const OPEN_MPI: [&str; 1] = ["libmpi.so.40"];
const MPICH: [&str; 3] = ["libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1"];
/// Name without a version, last: it is whatever the developer's package points to.
const ANY: &str = "libmpi.so";

/// Loads the library: the one the user names, or one beside the launcher, or one that the system
/// finds by its name.
pub(super) fn load(launcher: &str) -> Result<(Library, PathBuf), CommError> {
    if let Some(named) = std::env::var_os(LIBRARY).filter(|named| !named.is_empty()) {
        let path = PathBuf::from(named);
        return open(&path).map(|library| (library, path.clone())).map_err(|error| {
            problem(format!("{LIBRARY} is {}, which cannot be loaded: {error}", path.display()))
        });
    }
    let mut last = String::new();
    let candidates = candidates(launcher);
    for path in &candidates {
        match open(path) {
            Ok(library) => return Ok((library, path.clone())),
            Err(error) => last = error,
        }
    }
    let names: Vec<_> = names(launcher).collect();
    Err(problem(format!(
        "no MPI library can be loaded ({}): {last}; set {LIBRARY} to its path",
        names.join(", ")
    )))
}

/// Names to try under a launcher.
fn names(launcher: &str) -> impl Iterator<Item = &'static str> {
    let (first, second): (&[_], &[_]) = match launcher {
        "Open MPI" => (&OPEN_MPI, &[]),
        "PMI" => (&MPICH, &[]),
        _ => (&OPEN_MPI, &MPICH),
    };
    first.iter().chain(second).copied().chain([ANY])
}

/// Paths to try, in order. An implementation that was installed into a directory of its own has its
/// libraries beside the programs that have started this one.
fn candidates(launcher: &str) -> Vec<PathBuf> {
    let homes = ancestors().into_iter().filter_map(|program| {
        let home = program.parent()?.parent()?.to_owned();
        Some(home).filter(|home| home != Path::new("/") && home != Path::new("/usr"))
    });
    let mut found = Vec::new();
    for home in homes {
        for folder in ["lib", "lib64"] {
            found.extend(names(launcher).map(|name| home.join(folder).join(name)));
        }
    }
    found.retain(|path| path.exists());
    found.extend(names(launcher).map(PathBuf::from));
    found
}

/// Programs of the processes above this one, nearest first, as far as they can be read.
fn ancestors() -> Vec<PathBuf> {
    const FARTHEST: usize = 4;
    let mut programs = Vec::new();
    let mut process =
        rustix::process::getppid().map_or(0, |process| process.as_raw_nonzero().get());
    while process > 1 && programs.len() < FARTHEST {
        if let Ok(program) = std::fs::read_link(format!("/proc/{process}/exe")) {
            programs.push(program);
        }
        let Some(parent) = parent(process) else { break };
        process = parent;
    }
    programs
}

/// Parent of a process, from the fourth field of its `stat`; its name may contain anything.
fn parent(process: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn open(path: &Path) -> Result<Library, String> {
    // Open MPI's plug-ins look for the library's symbols among those of the whole process.
    // SAFETY: the initialisers of MPI libraries have no preconditions.
    let opened = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    opened.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_launcher_has_names_of_its_own() {
        let of = |launcher| names(launcher).collect::<Vec<_>>();
        assert_eq!(of("Open MPI"), ["libmpi.so.40", "libmpi.so"]);
        assert_eq!(of("PMI")[0], "libmpi.so.12");
        assert_eq!(of("Slurm").len(), 5);
    }

    #[test]
    fn the_parent_of_this_process_is_found() {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let above = rustix::process::getppid().map(|process| process.as_raw_nonzero().get());
        assert_eq!(parent(own), above);
        assert!(!ancestors().is_empty());
    }
}
