//! Memory of which only touched pages exist, for an arena that is mostly an address space: that of the
//! host beside a GPU's.

use crate::arena::{Arena, ArenaError};

impl Arena {
    /// Like [`Arena::new`], for more bytes than the machine may have, of which few are touched.
    pub fn sparse(bytes: u64) -> Result<Self, ArenaError> {
        #[cfg(target_os = "linux")]
        {
            let memory = mapped::Mapped::new(bytes);
            memory
                .map(|memory| Self::adopt(Box::new(memory)))
                .ok_or(ArenaError::OutOfMemory { bytes })
        }
        #[cfg(not(target_os = "linux"))]
        Self::new(bytes)
    }
}

#[cfg(target_os = "linux")]
mod mapped {
    use crate::arena::BackingMemory;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    use std::ptr::{NonNull, null_mut};

    /// Private zero pages for which the system reserves nothing.
    pub(super) struct Mapped {
        memory: NonNull<u8>,
        bytes: usize,
    }

    // SAFETY: the pages belong to this value alone.
    unsafe impl Send for Mapped {}
    // SAFETY: as above; shared access only reads.
    unsafe impl Sync for Mapped {}

    impl Mapped {
        pub(super) fn new(bytes: u64) -> Option<Self> {
            let bytes = usize::try_from(bytes.max(1)).ok()?;
            let (access, flags) =
                (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
            // SAFETY: a new mapping at an address that the system chooses.
            let memory = unsafe { mmap_anonymous(null_mut(), bytes, access, flags) }.ok()?;
            Some(Self { memory: NonNull::new(memory.cast())?, bytes })
        }
    }

    // SAFETY: the mapping has these bytes until it is dropped, and its address is given to nobody
    // else.
    unsafe impl BackingMemory for Mapped {
        fn memory(&self) -> NonNull<[u8]> {
            NonNull::slice_from_raw_parts(self.memory, self.bytes)
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: mapped by `new`, unmapped once.
            let _ = unsafe { munmap(self.memory.as_ptr().cast(), self.bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::arena::{Access, Arena, Span};

    #[test]
    fn an_arena_may_be_larger_than_the_machine() {
        let bytes = if cfg!(target_os = "linux") { 1 << 42 } else { 1 << 20 };
        let arena = Arena::sparse(bytes).expect("address space");
        let last = Span { offset: bytes - 64, len: 64 };
        let views = arena.views(&[(last, Access::Write)]).expect("inside");
        assert_eq!(views.take_f32(0)[15], 0.0);
    }
}
