//! Huge pages for shared memory.
//!
//! A pass over more ordinary pages than the TLB holds stalls at every page. Systems give private
//! memory huge pages on request, but shared memory seldom: unless an administrator has allowed it,
//! only after it is populated ([`collapse`]). They can be used if a mapping begins at a multiple of
//! their size ([`AlignedReservation`]).

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

/// Bytes of a huge page, or a multiple of them.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// Rounds `bytes` up to whole huge pages if it is at least one huge page.
pub(super) fn rounded(bytes: usize) -> usize {
    if bytes < HUGE_PAGE {
        bytes
    } else {
        bytes.checked_next_multiple_of(HUGE_PAGE).unwrap_or(bytes)
    }
}

/// Address range reserved for a mapping that begins at a multiple of [`HUGE_PAGE`].
#[derive(Debug)]
pub(super) struct AlignedReservation {
    /// Whole reservation, large enough to contain such a multiple.
    all: (*mut c_void, usize),
    /// Aligned part of it.
    kept: (*mut c_void, usize),
}

impl AlignedReservation {
    /// Reserves `bytes` bytes.
    pub(super) fn new(bytes: usize) -> Result<Self, Errno> {
        let whole = bytes.checked_add(HUGE_PAGE).ok_or(Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address chosen by the system overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), whole, ProtFlags::empty(), flags)?
        };
        let ahead = start.addr().wrapping_neg() % HUGE_PAGE;
        Ok(Self { all: (start, whole), kept: (start.wrapping_byte_add(ahead), bytes) })
    }

    /// Start address of the mapping.
    pub(super) fn start(&self) -> *mut c_void {
        self.kept.0
    }

    /// Releases the rest of the reservation; the aligned part now holds another mapping.
    pub(super) fn fill(mut self) {
        let (start, bytes) = self.kept;
        let behind = start.wrapping_byte_add(bytes.next_multiple_of(SMALL));
        self.kept = (start, 0);
        let (all, whole) = std::mem::replace(&mut self.all, (std::ptr::null_mut(), 0));
        let end = all.wrapping_byte_add(whole);
        for (from, to) in [(all, start), (behind, end)] {
            if from < to {
                // SAFETY: these pages were reserved above, and nothing else has been mapped there.
                let _ = unsafe { rustix::mm::munmap(from, to.addr() - from.addr()) };
            }
        }
    }
}

impl Drop for AlignedReservation {
    fn drop(&mut self) {
        let (start, bytes) = self.all;
        if bytes > 0 {
            // SAFETY: nothing was mapped there, or `fill` would have been called.
            let _ = unsafe { rustix::mm::munmap(start, bytes) };
        }
    }
}

/// Upper bound of the ordinary page size, in bytes.
const SMALL: usize = 1 << 16;

/// Gives zeroed shared memory huge pages. The system may decline; then nothing changes but the
/// access time.
///
/// # Safety
/// The memory is a mapping of `bytes` bytes, writable, zero, and not accessed by any other thread
/// or process.
pub(super) unsafe fn collapse(start: NonNull<u8>, bytes: usize) {
    let whole = bytes / HUGE_PAGE * HUGE_PAGE;
    if whole == 0 || !start.addr().get().is_multiple_of(HUGE_PAGE) {
        return;
    }
    let at = start.as_ptr().cast::<c_void>();
    // SAFETY: the pages are within the mapping, and their contents do not change: the bytes written
    // are zero already. Only populated memory can be collapsed, so one byte of each huge page is
    // written.
    unsafe {
        let _ = rustix::mm::madvise(at, whole, Advice::LinuxHugepage);
        (0..whole).step_by(HUGE_PAGE).for_each(|page| start.as_ptr().add(page).write_volatile(0));
        let _ = madvise(at, whole, COLLAPSE);
    }
}

/// `MADV_COLLAPSE` of Linux 6.1 and later.
const COLLAPSE: c_int = 25;

unsafe extern "C" {
    fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
}

#[cfg(test)]
mod tests {
    use super::super::Mapping;
    use super::*;

    #[test]
    fn large_segments_begin_at_large_pages_for_everybody() {
        for bytes in [HUGE_PAGE, 3 * HUGE_PAGE + 5] {
            let (own, file, address) = Mapping::create(bytes).unwrap();
            assert_eq!(address.bytes, bytes as u64);
            let others = Mapping::open(&address).unwrap();
            for map in [&own, &others] {
                assert!(map.base.addr().get().is_multiple_of(HUGE_PAGE));
            }
            // SAFETY: only this thread has the two mappings, and its accesses are sequential.
            unsafe {
                assert!(own.slice(0, bytes).iter().all(|&byte| byte == 0));
                own.write(bytes - 3, b"end");
                assert_eq!(others.slice(bytes - 3, 3), b"end");
            }
            drop(file);
        }
    }

    #[test]
    fn what_has_room_for_a_large_page_is_of_whole_ones() {
        assert_eq!([4096, HUGE_PAGE - 1].map(rounded), [4096, HUGE_PAGE - 1]);
        assert_eq!([HUGE_PAGE, HUGE_PAGE + 1].map(rounded), [HUGE_PAGE, 2 * HUGE_PAGE]);
        assert_eq!(rounded(usize::MAX), usize::MAX, "which nobody has");
    }

    #[test]
    fn a_place_that_is_not_used_is_given_back() {
        let start = AlignedReservation::new(HUGE_PAGE).unwrap().start();
        assert!(start.addr().is_multiple_of(HUGE_PAGE));
    }
}
