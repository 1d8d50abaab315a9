//! Page-locked staging memory: small uploads return at once, and the GPU reads them later.

use super::device::{CudaError, failed};
use cudarc::driver::sys::{CUdeviceptr, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};
use std::ffi::c_void;
use std::sync::Arc;

/// Ring of staging buffers.
pub(super) struct Pinned {
    context: Arc<CudaContext>,
    slots: Vec<Slot>,
    next: usize,
    /// Buffers of readbacks, and those that are free.
    read: Vec<Slot>,
    free: Vec<usize>,
}

/// Bytes on their way to the host.
#[derive(Debug)]
pub struct Readback {
    slot: usize,
    bytes: usize,
}

/// Page-locked memory, and the event behind the last copy from or to it.
struct Slot {
    memory: *mut c_void,
    bytes: usize,
    read: Option<CudaEvent>,
}

// SAFETY: the memory is reached through the ring alone, which has one user at a time.
unsafe impl Send for Slot {}

/// Buffers of the ring.
const SLOTS: usize = 16;
/// Largest upload that is staged.
const LARGEST: usize = 64 << 20;

impl Pinned {
    pub(super) fn new(context: &Arc<CudaContext>) -> Self {
        let slot = || Slot { memory: std::ptr::null_mut(), bytes: 0, read: None };
        let slots = (0..SLOTS).map(|_| slot()).collect();
        let (read, free) = (Vec::new(), Vec::new());
        Self { context: Arc::clone(context), slots, next: 0, read, free }
    }

    /// Returns true if an upload of `bytes` bytes is staged.
    pub(super) const fn holds(bytes: usize) -> bool {
        bytes <= LARGEST
    }

    /// Gives every buffer of the ring the size of the largest: an allocation waits for the device.
    pub(super) fn even_out(&mut self) -> Result<(), CudaError> {
        let most = self.slots.iter().map(|slot| slot.bytes).max().unwrap_or(0);
        self.slots.iter_mut().try_for_each(|slot| slot.grow(most))
    }

    /// Copies bytes to a buffer, and queues a copy of it to an address with room for them.
    pub(super) fn upload(
        &mut self,
        stream: &Arc<CudaStream>,
        to: CUdeviceptr,
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        self.next = (self.next + 1) % SLOTS;
        let slot = &mut self.slots[self.next];
        if let Some(read) = &slot.read {
            read.synchronize().map_err(failed("waiting for an upload"))?;
        }
        slot.grow(bytes.len())?;
        // SAFETY: the buffer has room for the bytes, and the GPU has read what it held before.
        let staged = unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot.memory.cast(), bytes.len());
            std::slice::from_raw_parts(slot.memory.cast::<u8>(), bytes.len())
        };
        // SAFETY: the caller has room for the bytes at the address, and the buffer is not written
        // again before the event behind the copy.
        unsafe { result::memcpy_htod_async(to, staged, stream.cu_stream()) }
            .map_err(failed("copying to the device"))?;
        slot.mark(&self.context, stream)
    }
}

impl Pinned {
    /// Queues a copy from an address with so many bytes. They stay in their buffer until they are
    /// taken.
    pub(super) fn read_back(
        &mut self,
        stream: &Arc<CudaStream>,
        from: CUdeviceptr,
        bytes: usize,
    ) -> Result<Readback, CudaError> {
        let at = match self.free.pop() {
            Some(free) => free,
            None => {
                self.read.push(Slot { memory: std::ptr::null_mut(), bytes: 0, read: None });
                self.read.len() - 1
            }
        };
        let slot = &mut self.read[at];
        slot.grow(bytes)?;
        // SAFETY: the buffer has room for the bytes, and is not read before they are taken.
        let to = unsafe { std::slice::from_raw_parts_mut(slot.memory.cast::<u8>(), bytes) };
        // SAFETY: the caller has found as many bytes at the address.
        unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream()) }
            .map_err(failed("copying from the device"))?;
        slot.mark(&self.context, stream)?;
        Ok(Readback { slot: at, bytes })
    }

    /// Waits for bytes and takes them.
    pub(super) fn take_back(&mut self, read: Readback, bytes: &mut [u8]) -> Result<(), CudaError> {
        let (slot, count) = (&self.read[read.slot], bytes.len().min(read.bytes));
        if let Some(arrived) = &slot.read {
            arrived.synchronize().map_err(failed("waiting for a result"))?;
        }
        // SAFETY: the buffer has these bytes, and nothing writes them any more.
        let from = unsafe { std::slice::from_raw_parts(slot.memory.cast::<u8>(), count) };
        bytes[..count].copy_from_slice(from);
        self.free.push(read.slot);
        Ok(())
    }
}

impl Slot {
    /// Marks the end of a copy.
    fn mark(
        &mut self,
        context: &Arc<CudaContext>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        if self.read.is_none() {
            let flags = Some(CUevent_flags::CU_EVENT_DISABLE_TIMING);
            self.read = Some(context.new_event(flags).map_err(failed("making an event"))?);
        }
        match &self.read {
            Some(read) => read.record(stream).map_err(failed("marking a stream")),
            None => Ok(()),
        }
    }

    /// Makes room for so many bytes. The caller has bound the context.
    fn grow(&mut self, bytes: usize) -> Result<(), CudaError> {
        if self.bytes < bytes {
            self.free();
            // SAFETY: the context is bound; there are no flags.
            self.memory = unsafe { result::malloc_host(bytes, 0) }
                .map_err(failed("allocating page-locked memory"))?;
            self.bytes = bytes;
        }
        Ok(())
    }

    fn free(&mut self) {
        if !self.memory.is_null() {
            // SAFETY: allocated by `upload`, freed once; nothing reads it any more.
            let _ = unsafe { result::free_host(self.memory) };
            self.memory = std::ptr::null_mut();
            self.bytes = 0;
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        for slot in self.slots.iter_mut().chain(&mut self.read) {
            if let Some(read) = &slot.read {
                let _ = read.synchronize();
            }
            slot.free();
        }
    }
}
