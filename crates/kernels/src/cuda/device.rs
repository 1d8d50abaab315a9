//! GPU with an arena and streams.

use crate::arena::Span;
use cudarc::cublas::CudaBlas;
use cudarc::driver::sys::{CUdeviceptr, CUevent_flags};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, result,
};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use std::collections::BTreeMap;
use std::fmt;
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
    #[error(
        "{what} is at {span}, which is not {elements} elements inside an arena of {bytes} bytes"
    )]
    Span {
        /// Name of the operand.
        what: &'static str,
        /// Span given for it.
        span: Span,
        /// Number of elements in its shape.
        elements: u64,
        /// Size of the arena.
        bytes: u64,
    },
}

/// GPU that holds one rank's arena.
pub struct Device {
    name: String,
    context: Arc<CudaContext>,
    streams: Vec<(Arc<CudaStream>, CudaBlas)>,
    functions: BTreeMap<&'static str, CudaFunction>,
    arena: CudaSlice<u8>,
    bytes: u64,
    /// Decrease of the device's free memory when the arena was allocated.
    taken: u64,
}

/// Event recorded on a stream.
#[derive(Debug)]
pub struct Mark(CudaEvent);

const SOURCE: &str = include_str!("kernels.cu");
const KERNELS: [&str; 31] = [
    "fill",
    "add",
    "add3",
    "bias_forward",
    "bias_gradient",
    "relu_forward",
    "relu_gradient",
    "squared_relu_forward",
    "squared_relu_gradient",
    "gelu_forward",
    "gelu_gradient",
    "embedding_forward",
    "embedding_gradient",
    "layer_norm_forward",
    "layer_norm_gradient",
    "layer_norm_weights",
    "rms_norm_forward",
    "rms_norm_gradient",
    "rms_norm_weights",
    "row_max",
    "softmax_stats",
    "cross_entropy",
    "cross_entropy_gradient",
    "block_squares",
    "sum_into",
    "root_of_sum",
    "sgd",
    "momentum",
    "adamw",
    "swiglu_forward",
    "swiglu_gradient",
];

impl Device {
    /// Opens a device with an arena of `bytes` zero bytes and `streams` streams.
    pub fn open(ordinal: usize, streams: usize, bytes: u64) -> Result<Self, CudaError> {
        libraries()?;
        let count = CudaContext::device_count().map_err(failed("counting devices"))?;
        let count = usize::try_from(count).unwrap_or(0);
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(failed("opening the device"))?;
        let name = context.name().map_err(failed("asking its name"))?;
        // SAFETY: all memory of this context is the one arena, and every use of it across streams
        // is ordered by marks, as the plan's edges require.
        unsafe { context.disable_event_tracking() };
        let streams: Vec<_> = (0..streams.max(1))
            .map(|_| {
                let stream = context.new_stream().map_err(failed("making a stream"))?;
                let blas = CudaBlas::new(Arc::clone(&stream)).map_err(failed("starting cuBLAS"))?;
                Ok((stream, blas))
            })
            .collect::<Result<_, CudaError>>()?;
        let (free, _) = context.mem_get_info().map_err(failed("asking for free memory"))?;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        if size > free {
            return Err(CudaError::OutOfMemory { bytes, free: free as u64, name });
        }
        let stream = &streams[0].0;
        let arena = stream.alloc_zeros(size.max(1)).map_err(failed("allocating the arena"))?;
        let functions = compile(&context)?;
        let mut device = Self { name, context, streams, functions, arena, bytes, taken: 0 };
        // The other streams must not start before the arena is zero.
        device.synchronise()?;
        let (left, _) = device.context.mem_get_info().map_err(failed("asking for free memory"))?;
        device.taken = free.saturating_sub(left) as u64;
        Ok(device)
    }

    /// Device memory that opening used, as reported by the driver.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Queues a copy of host bytes into the arena.
    pub fn upload(&self, stream: Stream, span: Span, bytes: &[u8]) -> Result<(), CudaError> {
        let to = self.at("the upload's destination", span, bytes.len() as u64 / 4)?;
        self.bind()?;
        // SAFETY: the span is inside the arena and as long as the slice. The driver has read a
        // slice of pageable memory before this returns.
        unsafe { result::memcpy_htod_async(to, bytes, self.stream(stream).cu_stream()) }
            .map_err(failed("copying to the device"))
    }

    /// Copies from the arena to the host, after all work queued on the stream.
    pub fn download(&self, stream: Stream, span: Span, bytes: &mut [u8]) -> Result<(), CudaError> {
        let from = self.at("the download's source", span, bytes.len() as u64 / 4)?;
        self.bind()?;
        let stream = self.stream(stream);
        // SAFETY: the span is inside the arena and as long as the slice, which is not touched
        // before the stream has been synchronised.
        unsafe { result::memcpy_dtoh_async(bytes, from, stream.cu_stream()) }
            .map_err(failed("copying from the device"))?;
        stream.synchronize().map_err(failed("waiting for a stream"))
    }

    /// Queues a copy from one span to another of the same length.
    pub fn copy(&self, stream: Stream, from: Span, to: Span) -> Result<(), CudaError> {
        let elements = from.len / 4;
        let (a, b) = (
            self.at("the copy's source", from, elements)?,
            self.at("its destination", to, elements)?,
        );
        self.bind()?;
        // SAFETY: both spans are inside the arena and have the same length.
        unsafe {
            result::memcpy_dtod_async(b, a, from.len as usize, self.stream(stream).cu_stream())
        }
        .map_err(failed("copying on the device"))
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

    /// Waits for all queued work.
    pub fn synchronise(&self) -> Result<(), CudaError> {
        for (stream, _) in &self.streams {
            stream.synchronize().map_err(failed("waiting for a stream"))?;
        }
        self.context.check_err().map_err(failed("what was queued"))
    }

    pub(super) fn stream(&self, stream: Stream) -> &Arc<CudaStream> {
        &self.streams[stream].0
    }

    pub(super) fn blas(&self, stream: Stream) -> &CudaBlas {
        &self.streams[stream].1
    }

    pub(super) fn function(&self, name: &'static str) -> &CudaFunction {
        &self.functions[name]
    }

    /// Address of an operand, which must be inside the arena and have the length of its shape.
    pub(super) fn at(
        &self,
        what: &'static str,
        span: Span,
        elements: u64,
    ) -> Result<CUdeviceptr, CudaError> {
        let end = span.offset.checked_add(span.len);
        let fits =
            end.is_some_and(|end| end <= self.bytes) && elements.checked_mul(4) == Some(span.len);
        if !fits || !span.offset.is_multiple_of(4) {
            let bytes = self.bytes;
            return Err(CudaError::Span { what, span, elements, bytes });
        }
        Ok(self.arena.device_ptr(self.stream(0)).0 + span.offset)
    }

    fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(failed("using the device"))
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
            cudarc::cublas::sys::is_culib_present(),
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
        return missing("cuBLAS (libcublas)", "add the CUDA toolkit's lib64 to LD_LIBRARY_PATH");
    }
    Ok(())
}

fn compile(context: &Arc<CudaContext>) -> Result<BTreeMap<&'static str, CudaFunction>, CudaError> {
    let (major, minor) = context.compute_capability().map_err(failed("asking its capability"))?;
    let options = CompileOptions {
        options: vec![format!("--gpu-architecture=compute_{major}{minor}")],
        name: Some("kernels.cu".to_owned()),
        ..CompileOptions::default()
    };
    let ptx = compile_ptx_with_opts(SOURCE, options).map_err(failed("compiling the kernels"))?;
    let module: Arc<CudaModule> =
        context.load_module(ptx).map_err(failed("loading the kernels"))?;
    let load = |name: &'static str| {
        let function = module.load_function(name).map_err(failed(name))?;
        Ok((name, function))
    };
    KERNELS.into_iter().map(load).collect()
}

/// Converts an error of a call into a [`CudaError`] that names the call.
pub(super) fn failed<E: fmt::Debug>(call: &str) -> impl FnOnce(E) -> CudaError {
    let call = call.to_owned();
    move |error| CudaError::Call { call, what: format!("{error:?}") }
}
