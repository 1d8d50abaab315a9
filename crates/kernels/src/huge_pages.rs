//! Huge pages for the memory that kernels access.
//!
//! A GEMM reads a matrix some rows at a time. With ordinary pages these rows span more pages than
//! the TLB holds. With huge pages the same GEMMs took 1 to 2 % less time.

use std::ptr::NonNull;

/// Requests huge pages for memory outside an arena, for example for vectors of a measurement that
/// must be backed like those of a run.
pub fn prefer_huge_pages(memory: &mut [u8]) {
    let bytes = memory.len();
    prefer_huge(NonNull::from(memory).cast(), bytes);
}

/// Requests huge pages for some memory. The system may decline, and then only the speed of kernels
/// differs.
pub(crate) fn prefer_huge(start: NonNull<u8>, bytes: usize) {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        use rustix::mm::{Advice, madvise};
        let padding = start.addr().get().wrapping_neg() % PAGE;
        let whole = bytes.saturating_sub(padding) / PAGE * PAGE;
        if whole >= HUGE_PAGE {
            // SAFETY: the pages are within the memory that the caller owns, and this advice leaves
            // their contents unchanged.
            let _ = unsafe {
                madvise(start.as_ptr().add(padding).cast(), whole, Advice::LinuxHugepage)
            };
        }
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    let _ = (start, bytes);
}

/// Largest ordinary page size, so that its multiples are multiples of all.
#[cfg(all(target_os = "linux", not(miri)))]
const PAGE: usize = 1 << 16;

/// Size of a huge page; smaller memory cannot contain one.
#[cfg(all(target_os = "linux", not(miri)))]
const HUGE_PAGE: usize = 1 << 21;
