//! Memory shared by several processes of a host: the only part of the crate with `unsafe` code.
//!
//! Every rank owns one segment, an unnamed `memfd`, and maps those of the other ranks in its shm
//! domain. Nothing appears in a file system, so a killed rank leaves nothing behind. Offsets and
//! lengths are checked here; access to the bytes is governed by the protocol of [`inbox`].
#![allow(unsafe_code)]

mod huge_pages;
pub(crate) mod inbox;
pub(crate) mod splice;
pub(crate) mod window;

use crate::error::CommError;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Address of a segment for other processes, through the owner's descriptor table.
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

// SAFETY: a mapping is plain memory that any thread may reach through the methods below. They
// return atomics or require their callers to prevent conflicting accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Creates a zeroed segment, and the descriptor that keeps it open for other processes. It uses
    /// huge pages if it is large enough and the system provides them.
    pub(crate) fn create(bytes: usize) -> Result<(Self, OwnedFd, Address), CommError> {
        let failed =
            |error| problem(format!("cannot make {bytes} bytes of shared memory: {error}"));
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Nobody can run it as a program; systems before Linux 6.3 do not know that flag.
        let file = rustix::fs::memfd_create("paceline", flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| rustix::fs::memfd_create("paceline", flags))
            .map_err(failed)?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(failed)?;
        // No process can truncate it under a reader, since that would kill the reader.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        let mapping = Self::map(&file, bytes).map_err(failed)?;
        // SAFETY: no other process or thread knows of the zeroed, writable segment yet.
        unsafe { huge_pages::collapse(mapping.base, bytes) };
        let address = Address {
            process: std::process::id(),
            descriptor: file.as_raw_fd() as u32,
            bytes: bytes as u64,
        };
        Ok((mapping, file, address))
    }

    /// Maps the segment of another process, which must belong to the same user and host.
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
        let place = if bytes < huge_pages::HUGE_PAGE {
            None
        } else {
            Some(huge_pages::AlignedReservation::new(bytes)?)
        };
        let (at, flags) = match &place {
            Some(place) => (place.start(), flags | MapFlags::FIXED),
            None => (std::ptr::null_mut(), flags),
        };
        // SAFETY: a fresh mapping at an address chosen by the system, or in a range reserved for
        // it, overlaps nothing in use. The file is as long as the mapping and sealed against
        // shrinking.
        let base = unsafe { rustix::mm::mmap(at, bytes, protection, flags, file, 0)? };
        let base = NonNull::new(base.cast()).ok_or(rustix::io::Errno::FAULT)?;
        place.into_iter().for_each(huge_pages::AlignedReservation::fill);
        Ok(Self { base, bytes })
    }

    /// Counter in the segment; an out-of-bounds or unaligned offset is a bug, not bad input.
    pub(crate) fn atomic_u32(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.bytes, "no counter at {at}");
        // SAFETY: the offset is within the mapping and aligned, since the mapping starts at a page.
        // Every bit pattern is a valid counter, and all processes access it as an atomic only.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
    }

    /// Like [`atomic_u32`](Self::atomic_u32), for 64 bits.
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
        // SAFETY: both ranges are valid, and private memory never overlaps a mapping that is
        // reached only through this type. The caller excludes other accesses.
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

    /// Bytes of the segment, in place and writable.
    ///
    /// # Safety
    /// No thread or process, this one included, accesses these bytes in another way as long as the
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
