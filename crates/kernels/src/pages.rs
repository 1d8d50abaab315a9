//! Large pages for the memory that kernels walk through.
//!
//! A product reads a matrix some rows at a time, and with ordinary pages every few of those rows lie
//! on another page, more of them than a processor remembers the places of. With large pages the same
//! products were seen to take 1 to 2 % less time.

use std::ptr::NonNull;

/// Asks for large pages for memory that is no arena's: for vectors of a measurement, say, that are to lie as
/// those of a run do.
pub fn prefer_large_pages(memory: &mut [u8]) {
    let bytes = memory.len();
    prefer_large(NonNull::from(memory).cast(), bytes);
}

/// Asks the system to back some memory with large pages. It may decline, and then nothing changes
/// but the time that kernels take.
pub(crate) fn prefer_large(start: NonNull<u8>, bytes: usize) {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        use rustix::mm::{Advice, madvise};
        let padding = start.addr().get().wrapping_neg() % PAGE;
        let whole = bytes.saturating_sub(padding) / PAGE * PAGE;
        if whole >= LARGE {
            // SAFETY: the pages lie within the memory that the caller owns, and this advice leaves
            // what they hold as it is.
            let _ = unsafe {
                madvise(start.as_ptr().add(padding).cast(), whole, Advice::LinuxHugepage)
            };
        }
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    let _ = (start, bytes);
}

/// The largest of the ordinary sizes of a page, so that its multiples are multiples of all.
#[cfg(all(target_os = "linux", not(miri)))]
const PAGE: usize = 1 << 16;

/// What is smaller than this has no room for a large page.
#[cfg(all(target_os = "linux", not(miri)))]
const LARGE: usize = 1 << 21;
