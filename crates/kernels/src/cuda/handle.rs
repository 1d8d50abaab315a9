//! Memory and streams of a device, for libraries that work on them.

use super::device::{CudaError, Device, Stream, Table};
use crate::arena::Span;
use cudarc::driver::CudaContext;
use std::fmt;
use std::sync::Arc;

/// Bytes of a device's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceBytes {
    address: u64,
    len: u64,
}

impl DeviceBytes {
    /// Address of the first byte.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// Number of bytes.
    #[allow(clippy::len_without_is_empty)]
    pub const fn len(self) -> u64 {
        self.len
    }
}

/// Stream of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle(usize);

impl StreamHandle {
    /// The driver's handle.
    pub const fn raw(self) -> usize {
        self.0
    }
}

/// Makes a device the current one of a thread.
#[derive(Clone)]
pub struct Binding(Arc<CudaContext>);

impl fmt::Debug for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Binding").field(&self.0.ordinal()).finish()
    }
}

impl Binding {
    /// Makes the device the current one of the calling thread. A failure shows in the next call.
    pub fn bind(&self) {
        let _ = self.0.bind_to_thread();
    }
}

impl Device {
    /// Bytes of a span, which must be inside the arena. They are the device's as long as it lives.
    pub fn bytes_of(&self, span: Span) -> Result<DeviceBytes, CudaError> {
        let address = self.at("a vector", span, span.len)?;
        Ok(DeviceBytes { address, len: span.len })
    }

    /// Bytes of a table, which the device's owner may let a library write.
    pub fn bytes_of_table(&self, table: Table) -> DeviceBytes {
        DeviceBytes { address: self.table_at(table), len: table.bytes }
    }

    /// Handle of a stream.
    pub fn handle(&self, stream: Stream) -> StreamHandle {
        StreamHandle(self.stream(stream).cu_stream() as usize)
    }

    /// Binding of this device.
    pub fn binding(&self) -> Binding {
        Binding(Arc::clone(self.context()))
    }
}
