//! GPU with an arena, streams, compiled kernels and the libraries' handles.

use super::attention::{Attention, AttentionShape};
use super::cudnn::Cudnn;
use super::element_type::ElementType;
use super::jit::{Arg, Grid, Kernels, Source};
use super::pinned::{Pinned, Readback};
use super::product::{Operands, Product, Products};
use crate::arena::Span;
use cudarc::driver::sys::{CUdeviceptr, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, result};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Index of a device's stream.
pub type Stream = usize;

/// Error of a GPU operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A CUDA library is missing on this machine.
    #[error("{library} cannot be loaded: {hint}")]
    NoLibrary {
        /// Name of the library.
        library: &'static str,
        /// Suggested remedy.
        hint: &'static str,
    },
    /// There is no such device.
    #[error("there is no CUDA device {ordinal}; this machine has {count}")]
    NoDevice {
        /// Requested device number.
        ordinal: usize,
        /// Number of devices.
        count: usize,
    },
    /// The device has too little free memory.
    #[error(
        "the arena needs {bytes} bytes, and {name} has {free} left; use a plan whose peak is smaller"
    )]
    OutOfMemory {
        /// Size of the arena.
        bytes: u64,
        /// Free memory of the device.
        free: u64,
        /// Name of the device.
        name: String,
    },
    /// A call failed.
    #[error("{call}: {what}")]
    Call {
        /// Description of the call.
        call: String,
        /// Error of the driver.
        what: String,
    },
    /// A span is not inside the arena, or does not have the length of its shape.
    #[error("{what} is at {span}, which is not {len} bytes inside an arena of {bytes} bytes")]
    Span {
        /// Name of the operand.
        what: &'static str,
        /// Span given for it.
        span: Span,
        /// Number of bytes of its shape.
        len: u64,
        /// Size of the arena.
        bytes: u64,
    },
}

/// GPU that holds one rank's arena.
pub struct Device {
    name: String,
    context: Arc<CudaContext>,
    queues: Vec<Queue>,
    kernels: Kernels,
    pinned: Pinned,
    arena: CudaSlice<u8>,
    bytes: u64,
    /// Constants in device memory besides the arena.
    tables: Vec<CudaSlice<u8>>,
    /// File of the products' algorithms.
    stored: Option<PathBuf>,
}

/// Stream, with the libraries and workspaces that are used on it.
struct Queue {
    products: Option<(Products, CudaSlice<u8>)>,
    /// Passes compiled for cuDNN.
    attention: BTreeMap<AttentionShape, Attention>,
    /// The library, if it has been looked for and is present.
    cudnn: Option<Option<Cudnn>>,
    scratch: Option<CudaSlice<u8>>,
    /// Column sums that the last gradient of a norm left.
    sums: Option<CudaSlice<u8>>,
    stream: Arc<CudaStream>,
}

/// Event recorded on a stream.
#[derive(Debug)]
pub struct Mark(CudaEvent);

/// Table of constants.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    index: usize,
    /// Bytes of the table.
    pub(super) bytes: u64,
}

/// Workspace of cuBLASLt on a stream, the size that NVIDIA recommends for Hopper.
const PRODUCT_WORKSPACE: usize = 32 << 20;
/// Alignment in bytes of scratch operands.
const SCRATCH_ALIGNMENT: u64 = 256;

/// A GPU of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name of the model.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
}

/// GPUs of this machine, in the driver's order.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    libraries()?;
    let count = CudaContext::device_count().map_err(failed("counting devices"))?;
    let info = |ordinal| {
        let device = result::device::get(ordinal).map_err(failed("finding a device"))?;
        let name = result::device::get_name(device).map_err(failed("asking its name"))?;
        // SAFETY: the device has just been found.
        let memory = unsafe { result::device::total_mem(device) };
        let memory = memory.map_err(failed("asking for its memory"))? as u64;
        Ok(DeviceInfo { name, memory })
    };
    (0..count).map(info).collect()
}

impl Device {
    /// Opens a device with an arena of `bytes` zero bytes and `streams` streams. Algorithms of
    /// matrix products that have been timed are kept in the folder `stored`.
    pub fn open(
        ordinal: usize,
        streams: usize,
        bytes: u64,
        stored: Option<&Path>,
    ) -> Result<Self, CudaError> {
        libraries()?;
        let count = CudaContext::device_count().map_err(failed("counting devices"))?;
        let count = usize::try_from(count).unwrap_or(0);
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(failed("opening the device"))?;
        let name = context.name().map_err(failed("asking its name"))?;
        // SAFETY: every use of the arena across streams is ordered by marks, as the plan's edges
        // require; workspaces and tables belong to one stream or are constant.
        unsafe { context.disable_event_tracking() };
        let queues: Vec<_> = (0..streams.max(1))
            .map(|_| {
                let stream = context.new_stream().map_err(failed("making a stream"))?;
                let attention = BTreeMap::new();
                let (products, cudnn, scratch, sums) = (None, None, None, None);
                Ok(Queue { products, attention, cudnn, scratch, sums, stream })
            })
            .collect::<Result<_, CudaError>>()?;
        let (free, _) = context.mem_get_info().map_err(failed("asking for free memory"))?;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        if size > free {
            return Err(CudaError::OutOfMemory { bytes, free: free as u64, name });
        }
        let stream = &queues[0].stream;
        let arena = stream.alloc_zeros(size.max(1)).map_err(failed("allocating the arena"))?;
        let kernels = Kernels::new(&context)?;
        let pinned = Pinned::new(&context);
        let stored = stored.map(|folder| {
            let file = name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
            folder.join(format!("products-{file}-{}.txt", Products::version()))
        });
        let tables = Vec::new();
        let device = Self { name, context, queues, kernels, pinned, arena, bytes, tables, stored };
        // The other streams must not start before the arena is zero.
        device.synchronise()?;
        Ok(device)
    }

    /// Device memory of the arena, workspaces and tables, without that of the driver.
    pub fn taken(&self) -> u64 {
        let queues = self.queues.iter().map(|queue| {
            let products = queue.products.as_ref().map_or(0, |(_, workspace)| workspace.len());
            let others = [&queue.scratch, &queue.sums].into_iter().flatten().map(CudaSlice::len);
            (products + others.sum::<usize>()) as u64
        });
        let tables = self.tables.iter().map(|table| table.len() as u64);
        self.bytes + queues.sum::<u64>() + tables.sum::<u64>()
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Queues a copy of host bytes into the arena. The bytes may change once this returns.
    pub fn upload(&mut self, stream: Stream, span: Span, bytes: &[u8]) -> Result<(), CudaError> {
        let to = self.at("the upload's destination", span, bytes.len() as u64)?;
        self.copy_in(stream, to, bytes)
    }

    fn copy_in(&mut self, stream: Stream, to: CUdeviceptr, bytes: &[u8]) -> Result<(), CudaError> {
        self.bind()?;
        let stream = &self.queues[stream].stream;
        if Pinned::holds(bytes.len()) {
            return self.pinned.upload(stream, to, bytes);
        }
        // SAFETY: the callers have found as many bytes at the address. The driver has read a slice
        // of pageable memory before this returns.
        unsafe { result::memcpy_htod_async(to, bytes, stream.cu_stream()) }
            .map_err(failed("copying to the device"))
    }

    /// Copies from the arena to the host, after all work queued on the stream.
    pub fn download(&self, stream: Stream, span: Span, bytes: &mut [u8]) -> Result<(), CudaError> {
        let from = self.at("the download's source", span, bytes.len() as u64)?;
        self.bind()?;
        let stream = self.stream(stream);
        // SAFETY: the span is inside the arena and as long as the slice, which is not touched
        // before the stream has been synchronised.
        unsafe { result::memcpy_dtoh_async(bytes, from, stream.cu_stream()) }
            .map_err(failed("copying from the device"))?;
        stream.synchronize().map_err(failed("waiting for a stream"))
    }

    /// Queues a copy of a few bytes of the arena to page-locked memory.
    pub fn read_back(&mut self, stream: Stream, span: Span) -> Result<Readback, CudaError> {
        let from = self.at("what is read back", span, span.len)?;
        self.bind()?;
        self.pinned.read_back(&self.queues[stream].stream, from, span.len as usize)
    }

    /// Waits for bytes that are read back, and copies them.
    pub fn take_back(&mut self, read: Readback, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.bind()?;
        self.pinned.take_back(read, bytes)
    }

    /// Waits for a mark.
    pub fn wait_for(&self, mark: &Mark) -> Result<(), CudaError> {
        mark.0.synchronize().map_err(failed("waiting for what was queued"))
    }

    /// Waits for all queued work, and makes the arena zero as it was at the start.
    pub fn reset(&mut self) -> Result<(), CudaError> {
        self.synchronise()?;
        self.bind()?;
        self.pinned.even_out()?;
        self.clear(0, Span { offset: 0, len: self.bytes })?;
        self.synchronise()
    }

    /// Number of streams.
    pub fn streams(&self) -> usize {
        self.queues.len()
    }

    /// Queues a copy from one span to another of the same length.
    pub fn copy(&self, stream: Stream, from: Span, to: Span) -> Result<(), CudaError> {
        let (a, b) = (
            self.at("the copy's source", from, from.len)?,
            self.at("its destination", to, from.len)?,
        );
        self.bind()?;
        // SAFETY: both spans are inside the arena and have the same length.
        unsafe {
            result::memcpy_dtod_async(b, a, from.len as usize, self.stream(stream).cu_stream())
        }
        .map_err(failed("copying on the device"))
    }

    /// Queues writing zeros.
    pub fn clear(&self, stream: Stream, span: Span) -> Result<(), CudaError> {
        let at = self.at("what is cleared", span, span.len)?;
        self.bind()?;
        // SAFETY: the span is inside the arena.
        unsafe {
            result::memset_d8_async(at, 0, span.len as usize, self.stream(stream).cu_stream())
        }
        .map_err(failed("clearing memory"))
    }

    /// Copies constants to memory of their own.
    pub fn table(&mut self, bytes: &[u8]) -> Result<Table, CudaError> {
        let stream = &self.queues[0].stream;
        let table = stream.clone_htod(bytes).map_err(failed("copying a table"))?;
        stream.synchronize().map_err(failed("waiting for a stream"))?;
        self.tables.push(table);
        Ok(Table { index: self.tables.len() - 1, bytes: bytes.len() as u64 })
    }

    /// Queues a mark that other streams can wait for and that records its time.
    pub fn mark(&self, stream: Stream) -> Result<Mark, CudaError> {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        self.stream(stream).record_event(flags).map(Mark).map_err(failed("marking a stream"))
    }

    /// Queues a mark again, in place of its last position.
    pub fn record(&self, stream: Stream, mark: &Mark) -> Result<(), CudaError> {
        mark.0.record(self.stream(stream)).map_err(failed("marking a stream"))
    }

    /// Makes a stream wait for a mark of another.
    pub fn wait(&self, stream: Stream, mark: &Mark) -> Result<(), CudaError> {
        self.stream(stream).wait(&mark.0).map_err(failed("waiting for a mark"))
    }

    /// Seconds between two completed marks.
    pub fn seconds(&self, from: &Mark, to: &Mark) -> Result<f64, CudaError> {
        let elapsed = from.0.elapsed_ms(&to.0).map_err(failed("reading a clock"))?;
        Ok(f64::from(elapsed) / 1e3)
    }

    /// Returns true if a mark has been passed.
    pub fn has_passed(&self, mark: &Mark) -> Result<bool, CudaError> {
        mark.0.try_is_complete().map_err(failed("asking for a mark"))
    }

    /// Waits for all queued work.
    pub fn synchronise(&self) -> Result<(), CudaError> {
        for queue in &self.queues {
            queue.stream.synchronize().map_err(failed("waiting for a stream"))?;
        }
        self.context.check_err().map_err(failed("what was queued"))
    }

    /// Returns true if all queued work is done.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        use cudarc::driver::sys::CUresult;
        self.bind()?;
        for queue in &self.queues {
            // SAFETY: the stream lives.
            match unsafe { cudarc::driver::sys::cuStreamQuery(queue.stream.cu_stream()) } {
                CUresult::CUDA_SUCCESS => {}
                CUresult::CUDA_ERROR_NOT_READY => return Ok(false),
                other => return Err(failed("asking for a stream")(other)),
            }
        }
        Ok(true)
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(super) fn stream(&self, stream: Stream) -> &Arc<CudaStream> {
        &self.queues[stream].stream
    }

    /// Address of an operand of `len` bytes, which must be inside the arena.
    pub(super) fn at(
        &self,
        what: &'static str,
        span: Span,
        len: u64,
    ) -> Result<CUdeviceptr, CudaError> {
        let end = span.offset.checked_add(span.len);
        let fits = end.is_some_and(|end| end <= self.bytes) && len == span.len;
        if !fits || !span.offset.is_multiple_of(4) {
            return Err(CudaError::Span { what, span, len, bytes: self.bytes });
        }
        Ok(self.arena.device_ptr(self.stream(0)).0 + span.offset)
    }

    /// Address of an operand of a type.
    pub(super) fn of(
        &self,
        what: &'static str,
        span: Span,
        elements: u64,
        element: ElementType,
    ) -> Result<CUdeviceptr, CudaError> {
        self.at(what, span, elements.saturating_mul(element.bytes()))
    }

    /// Address of a table.
    pub(super) fn table_at(&self, table: Table) -> CUdeviceptr {
        self.tables[table.index].device_ptr(self.stream(0)).0
    }

    /// Memory for column sums on a stream, of rows of `width` elements.
    pub(super) fn column_sums_at(
        &mut self,
        stream: Stream,
        width: u64,
    ) -> Result<CUdeviceptr, CudaError> {
        let queue = &mut self.queues[stream];
        if queue.sums.as_ref().is_none_or(|sums| (sums.len() as u64) < 4 * width) {
            let sums = queue.stream.alloc_zeros::<u8>(4 * width as usize);
            let old = queue.sums.replace(sums.map_err(failed("allocating a workspace"))?);
            drop(old);
        }
        Ok(queue.sums.as_ref().map_or(0, |sums| sums.device_ptr(&queue.stream).0))
    }

    /// Memory for one call on a stream, aligned to 256 bytes, in parts of these lengths. Calls on a
    /// stream run in order, so that all use the same memory.
    pub(super) fn scratch<const N: usize>(
        &mut self,
        stream: Stream,
        lengths: [u64; N],
    ) -> Result<[CUdeviceptr; N], CudaError> {
        let padded = lengths.map(|len| len.next_multiple_of(SCRATCH_ALIGNMENT));
        let total = padded.iter().sum::<u64>().max(SCRATCH_ALIGNMENT) as usize;
        let queue = &mut self.queues[stream];
        if queue.scratch.as_ref().is_none_or(|scratch| scratch.len() < total) {
            let failed = |what| failed(what);
            queue.stream.synchronize().map_err(failed("waiting for a stream"))?;
            queue.scratch = None;
            // SAFETY: calls write their scratch before they read it.
            let scratch = unsafe { queue.stream.alloc::<u8>(total) };
            let scratch = scratch.map_err(failed("allocating a workspace"))?;
            queue.stream.synchronize().map_err(failed("waiting for a stream"))?;
            queue.scratch = Some(scratch);
        }
        let mut next = match &queue.scratch {
            Some(scratch) => scratch.device_ptr(&queue.stream).0,
            None => 0,
        };
        Ok(padded.map(|len| {
            let at = next;
            next += len;
            at
        }))
    }

    /// Queues writing a byte all over scratch memory.
    pub(super) fn fill_bytes(
        &self,
        stream: Stream,
        to: CUdeviceptr,
        byte: u8,
        len: u64,
    ) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the callers pass scratch of this length.
        unsafe { result::memset_d8_async(to, byte, len as usize, self.stream(stream).cu_stream()) }
            .map_err(failed("filling memory"))
    }

    /// Queues a copy of words into scratch memory.
    pub(super) fn fill_scratch(
        &mut self,
        stream: Stream,
        to: CUdeviceptr,
        words: &[u32],
    ) -> Result<(), CudaError> {
        self.copy_in(stream, to, bytemuck::cast_slice(words))
    }

    /// Queues a kernel.
    ///
    /// # Safety
    ///
    /// As for [`Kernels::launch`].
    pub(super) unsafe fn launch(
        &self,
        stream: Stream,
        kernel: (Source, ElementType, &'static str),
        grid: Grid,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        if grid.blocks.0 == 0 || grid.blocks.1 == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.kernels.launch(self.stream(stream), kernel, grid, args) }
    }

    /// Queues a product of a shape that will come again.
    ///
    /// # Safety
    ///
    /// As for [`Products::run`].
    pub(super) unsafe fn product(
        &mut self,
        stream: Stream,
        product: Product,
        at: &Operands,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.products(stream)?.run(product, at) }
    }

    /// Queues a product of a shape that may never come again.
    ///
    /// # Safety
    ///
    /// As for [`Products::run`].
    pub(super) unsafe fn product_once(
        &mut self,
        stream: Stream,
        product: Product,
        at: &Operands,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.products(stream)?.run_once(product, at) }
    }

    fn products(&mut self, stream: Stream) -> Result<&mut Products, CudaError> {
        let queue = &mut self.queues[stream];
        if queue.products.is_none() {
            // SAFETY: the library writes its workspace before it reads it.
            let workspace = unsafe { queue.stream.alloc::<u8>(PRODUCT_WORKSPACE) };
            let workspace = workspace.map_err(failed("allocating cuBLASLt's workspace"))?;
            let at = workspace.device_ptr(&queue.stream).0;
            // SAFETY: the workspace is kept as long as the products and used by nobody else.
            let mut products = unsafe { Products::new(&queue.stream, at, PRODUCT_WORKSPACE) }?;
            products.keep_in(self.stored.as_deref());
            queue.products = Some((products, workspace));
        }
        match &mut queue.products {
            Some((products, _)) => Ok(products),
            None => unreachable!("opened above"),
        }
    }

    /// Bytes of workspace of attention by cuDNN; `None` if the library is absent or has no kernel
    /// for the shape.
    pub(super) fn attention_workspace(
        &mut self,
        stream: Stream,
        shape: AttentionShape,
    ) -> Result<Option<[u64; 2]>, CudaError> {
        if !shape.is_fused() {
            return Ok(None);
        }
        let queue = &mut self.queues[stream];
        let cudnn = match &mut queue.cudnn {
            Some(known) => known,
            none => none.insert(Cudnn::open(&queue.stream)?),
        };
        let Some(cudnn) = cudnn else { return Ok(None) };
        if let Some(known) = queue.attention.get(&shape) {
            return Ok(Some(known.workspace()));
        }
        match Attention::new(cudnn, shape) {
            Ok(attention) => {
                let workspace = attention.workspace();
                queue.attention.insert(shape, attention);
                Ok(Some(workspace))
            }
            Err(_) => Ok(None),
        }
    }

    /// Attention of a shape for which [`Self::attention_workspace`] returned a size.
    pub(super) fn attention(
        &self,
        stream: Stream,
        shape: &AttentionShape,
    ) -> Option<(&Cudnn, &Attention)> {
        let queue = &self.queues[stream];
        Some((queue.cudnn.as_ref()?.as_ref()?, queue.attention.get(shape)?))
    }

    fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(failed("using the device"))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Nothing may still use the memory that is freed.
        let _ = self.synchronise();
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// Checks that the libraries are present: the bindings would abort the process over a missing one.
fn libraries() -> Result<(), CudaError> {
    let missing = |library, hint| Err(CudaError::NoLibrary { library, hint });
    // SAFETY: loading CUDA's libraries runs their initialisers, which have no preconditions.
    let [driver, compiler, blas] = unsafe {
        [
            cudarc::driver::sys::is_culib_present(),
            cudarc::nvrtc::sys::is_culib_present(),
            cudarc::cublaslt::sys::is_culib_present(),
        ]
    };
    if !driver {
        return missing("NVIDIA's driver (libcuda)", "this machine needs a GPU and its driver");
    }
    if !compiler {
        return missing(
            "CUDA's compiler (libnvrtc)",
            "add the CUDA toolkit's lib64 to LD_LIBRARY_PATH",
        );
    }
    if !blas {
        return missing(
            "cuBLASLt (libcublasLt)",
            "add the CUDA toolkit's lib64 to LD_LIBRARY_PATH",
        );
    }
    Ok(())
}

/// Converts an error of a call into a [`CudaError`] that names the call.
pub(super) fn failed<E: fmt::Debug>(call: &str) -> impl FnOnce(E) -> CudaError {
    let call = call.to_owned();
    move |error| CudaError::Call { call, what: format!("{error:?}") }
}
