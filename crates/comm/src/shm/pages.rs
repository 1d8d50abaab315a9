//! Large pages for shared memory.
//!
//! Whoever walks through more ordinary pages than a processor remembers the places of waits at every one. Systems
//! give private memory large pages when they are asked to, but shared memory seldom: unless an administrator has
//! allowed it, only once it is there ([`enlarge`]). They can be used where a mapping begins at a multiple of
//! their size ([`Place`]).

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

/// The bytes of a large page, or a multiple of them.
pub(super) const LARGE: usize = 2 << 20;

/// So many bytes, or as many more as make whole large pages if there is room for one.
pub(super) fn rounded(bytes: usize) -> usize {
    if bytes < LARGE { bytes } else { bytes.checked_next_multiple_of(LARGE).unwrap_or(bytes) }
}

/// Addresses set aside for a mapping that begins at a multiple of [`LARGE`].
#[derive(Debug)]
pub(super) struct Place {
    /// What was asked for, to have such a multiple in it.
    all: (*mut c_void, usize),
    /// What is wanted of it.
    kept: (*mut c_void, usize),
}

impl Place {
    /// Sets so many bytes aside.
    pub(super) fn new(bytes: usize) -> Result<Self, Errno> {
        let whole = bytes.checked_add(LARGE).ok_or(Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the system's choice overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), whole, ProtFlags::empty(), flags)?
        };
        let ahead = start.addr().wrapping_neg() % LARGE;
        Ok(Self { all: (start, whole), kept: (start.wrapping_byte_add(ahead), bytes) })
    }

    /// Where the mapping begins.
    pub(super) fn start(&self) -> *mut c_void {
        self.kept.0
    }

    /// Something else lies there now; the rest is given back.
    pub(super) fn fill(mut self) {
        let (start, bytes) = self.kept;
        let behind = start.wrapping_byte_add(bytes.next_multiple_of(SMALL));
        self.kept = (start, 0);
        let (all, whole) = std::mem::replace(&mut self.all, (std::ptr::null_mut(), 0));
        let end = all.wrapping_byte_add(whole);
        for (from, to) in [(all, start), (behind, end)] {
            if from < to {
                // SAFETY: these pages were set aside above and nothing else has been put there.
                let _ = unsafe { rustix::mm::munmap(from, to.addr() - from.addr()) };
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (start, bytes) = self.all;
        if bytes > 0 {
            // SAFETY: nothing was put there, or `fill` would have been called.
            let _ = unsafe { rustix::mm::munmap(start, bytes) };
        }
    }
}

/// No ordinary page is larger.
const SMALL: usize = 1 << 16;

/// Gives zeroed shared memory large pages. The system may decline, and then nothing changes but the time that
/// walking through it takes.
///
/// # Safety
/// The memory is a mapping of so many bytes, writable, zero, and not accessed by anybody else.
pub(super) unsafe fn enlarge(start: NonNull<u8>, bytes: usize) {
    let whole = bytes / LARGE * LARGE;
    if whole == 0 || !start.addr().get().is_multiple_of(LARGE) {
        return;
    }
    let at = start.as_ptr().cast::<c_void>();
    // SAFETY: the pages lie within the mapping, and none of this changes what they hold: only what is there
    // already can be brought together, so that each large page needs a byte.
    unsafe {
        let _ = rustix::mm::madvise(at, whole, Advice::LinuxHugepage);
        (0..whole).step_by(LARGE).for_each(|page| start.as_ptr().add(page).write_volatile(0));
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
        for bytes in [LARGE, 3 * LARGE + 5] {
            let (own, file, address) = Mapping::create(bytes).unwrap();
            assert_eq!(address.bytes, bytes as u64);
            let others = Mapping::open(&address).unwrap();
            for map in [&own, &others] {
                assert!(map.base.addr().get().is_multiple_of(LARGE));
            }
            // SAFETY: this thread has both mappings to itself, one access after the other.
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
        assert_eq!([4096, LARGE - 1].map(rounded), [4096, LARGE - 1]);
        assert_eq!([LARGE, LARGE + 1].map(rounded), [LARGE, 2 * LARGE]);
        assert_eq!(rounded(usize::MAX), usize::MAX, "which nobody has");
    }

    #[test]
    fn a_place_that_is_not_used_is_given_back() {
        let start = Place::new(LARGE).unwrap().start();
        assert!(start.addr().is_multiple_of(LARGE));
    }
}
