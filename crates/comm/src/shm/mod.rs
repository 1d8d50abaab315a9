//! Memory that several processes of a host share: the only part of the crate with `unsafe` in it.
//!
//! Every rank owns one segment, a `memfd` without a name, and maps those of its neighbours. Nothing
//! of it appears in a file system, so nothing can be left behind by a rank that is killed. Offsets
//! and lengths are checked here; who may touch which bytes when is the protocol of [`inbox`].
#![allow(unsafe_code)]

pub(crate) mod chute;
pub(crate) mod inbox;
mod pages;
pub(crate) mod window;

use crate::error::CommError;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// What another process needs to find a segment: through the owner's descriptor table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) process: u32,
    pub(crate) descriptor: u32,
    pub(crate) bytes: u64,
}

/// A mapped segment.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is plain memory that any thread may reach through the methods below, which
// give out atomics or leave it to their callers to keep accesses apart.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// A new segment of zeros, and the descriptor that keeps it open for others to find. It lies on large
    /// pages as far as it has room for them and the system can be moved to it.
    pub(crate) fn create(bytes: usize) -> Result<(Self, OwnedFd, Address), CommError> {
        let failed =
            |error| problem(format!("cannot make {bytes} bytes of shared memory: {error}"));
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("paceline", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(failed)?;
        // Nobody can cut it short under a reader, who would die of that.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        let mapping = Self::map(&file, bytes).map_err(failed)?;
        // SAFETY: nobody else knows of the segment yet, which is all zeros and writable.
        unsafe { pages::enlarge(mapping.base, bytes) };
        let address = Address {
            process: std::process::id(),
            descriptor: file.as_raw_fd() as u32,
            bytes: bytes as u64,
        };
        Ok((mapping, file, address))
    }

    /// Maps the segment of another process, which must be of the same user and host.
    pub(crate) fn open(address: &Address) -> Result<Self, CommError> {
        let Address { process, descriptor, bytes } = address;
        let path = format!("/proc/{process}/fd/{descriptor}");
        let failed = |error| problem(format!("cannot reach the shared memory {path}: {error}"));
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        let file = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).map_err(failed)?;
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(failed)?;
        let size = rustix::fs::fstat(&file).map_err(failed)?.st_size as u64;
        if size != *bytes || !seals.contains(SealFlags::SHRINK) {
            return Err(problem(format!("{path} is not the shared memory that was announced")));
        }
        Self::map(&file, size as usize).map_err(failed)
    }

    fn map(file: &OwnedFd, bytes: usize) -> Result<Self, rustix::io::Errno> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let place = if bytes < pages::LARGE { None } else { Some(pages::Place::new(bytes)?) };
        let (at, flags) = match &place {
            Some(place) => (place.start(), flags | MapFlags::FIXED),
            None => (std::ptr::null_mut(), flags),
        };
        // SAFETY: a fresh mapping at an address of the system's choice, or in a place that was set aside
        // for it, overlaps nothing that is used; the file is as long as the mapping and sealed against
        // shrinking.
        let base = unsafe { rustix::mm::mmap(at, bytes, protection, flags, file, 0)? };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::FAULT)?;
        place.into_iter().for_each(pages::Place::fill);
        Ok(Self { base, bytes })
    }

    /// A counter in the segment; places out of bounds or alignment are a bug here, not bad input.
    pub(crate) fn atomic_u32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.bytes, "no counter at {at}");
        // SAFETY: the place is inside the mapping and aligned, which starts at a page; zeros and
        // anything else are valid counters; it is accessed as an atomic only, by all processes.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// As [`atomic_u32`](Self::atomic_u32).
    pub(crate) fn atomic_u64(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.bytes, "no counter at {at}");
        // SAFETY: as for 32 bits.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// Copies bytes into the segment.
    ///
    /// # Safety
    /// No other thread or process accesses these bytes of the segment during the call.
    pub(crate) unsafe fn write(&self, at: usize, from: &[u8]) {
        assert!(at.checked_add(from.len()).is_some_and(|end| end <= self.bytes));
        // SAFETY: both ranges are valid, and private memory never overlaps a mapping that is only
        // reached through this type; the caller excludes other accesses.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), self.base.as_ptr().add(at), from.len());
        }
    }

    /// Copies bytes out of the segment.
    ///
    /// # Safety
    /// No other thread or process writes these bytes of the segment during the call.
    pub(crate) unsafe fn read(&self, at: usize, into: &mut [u8]) {
        assert!(at.checked_add(into.len()).is_some_and(|end| end <= self.bytes));
        // SAFETY: as in `write`.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.base.as_ptr().add(at),
                into.as_mut_ptr(),
                into.len(),
            );
        }
    }

    /// Bytes of the segment, in place.
    ///
    /// # Safety
    /// No thread or process writes these bytes as long as the result lives.
    pub(crate) unsafe fn slice(&self, at: usize, bytes: usize) -> &[u8] {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        // SAFETY: the range is valid for as long as `self`; the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(at), bytes) }
    }

    /// Bytes of the segment, in place and to be written.
    ///
    /// # Safety
    /// No thread or process, this one included, accesses these bytes otherwise as long as the
    /// result lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice_mut(&self, at: usize, bytes: usize) -> &mut [u8] {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        // SAFETY: the range is valid for as long as `self`; the caller excludes other accesses.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(at), bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the one that was mapped, and no reference into it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

fn problem(problem: String) -> CommError {
    CommError::Job { problem }
}
