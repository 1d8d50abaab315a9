//! A GPU with an arena and streams.

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

/// Which of a device's streams.
pub type Stream = usize;

/// Why a GPU could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A library of CUDA's is not on this machine.
    #[error("{library} cannot be loaded: {hint}")]
    NoLibrary {
        /// Its name.
        library: &'static str,
        /// What would help.
        hint: &'static str,
    },
    /// There is no such device.
    #[error("there is no CUDA device {ordinal}; this machine has {count}")]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The device has too little memory left.
    #[error(
        "the arena needs {bytes} bytes, and {name} has {free} left; use a plan whose peak is smaller"
    )]
    OutOfMemory {
        /// The arena's size.
        bytes: u64,
        /// What the device can still give.
        free: u64,
        /// The device.
        name: String,
    },
    /// A call failed.
    #[error("{call}: {what}")]
    Call {
        /// What was tried.
        call: String,
        /// What the driver said.
        what: String,
    },
    /// A span does not lie in the arena, or is not of the length its shape says.
    #[error(
        "{what} is at {span}, which is not {elements} elements inside an arena of {bytes} bytes"
    )]
    Span {
        /// The operand.
        what: &'static str,
        /// Where it is said to lie.
        span: Span,
        /// How many elements its shape has.
        elements: u64,
        /// The arena's size.
        bytes: u64,
    },
}

/// A GPU that holds one rank's arena.
pub struct Device {
    name: String,
    context: Arc<CudaContext>,
    streams: Vec<(Arc<CudaStream>, CudaBlas)>,
    functions: BTreeMap<&'static str, CudaFunction>,
    arena: CudaSlice<u8>,
    bytes: u64,
    /// What the arena took of the device's free memory.
    taken: u64,
}

/// A moment of a stream.
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
    /// Opens a device and gives it an arena, all zero, and so many streams.
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
        // is ordered by marks, as the plan's edges say.
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
        // The other streams must not begin before the arena is zero.
        device.synchronise()?;
        let (left, _) = device.context.mem_get_info().map_err(failed("asking for free memory"))?;
        device.taken = free.saturating_sub(left) as u64;
        Ok(device)
    }

    /// How much of the device's memory became used when this was opened, as the driver counts.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// What the device is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Queues a copy of the host's bytes into the arena.
    pub fn upload(&self, stream: Stream, span: Span, bytes: &[u8]) -> Result<(), CudaError> {
        let to = self.at("the upload's destination", span, bytes.len() as u64 / 4)?;
        self.bind()?;
        // SAFETY: the span lies in the arena and is as long as the slice. The driver has read a
        // slice of pageable memory before this returns.
        unsafe { result::memcpy_htod_async(to, bytes, self.stream(stream).cu_stream()) }
            .map_err(failed("copying to the device"))
    }

    /// Copies from the arena to the host, after all that the stream has queued.
    pub fn download(&self, stream: Stream, span: Span, bytes: &mut [u8]) -> Result<(), CudaError> {
        let from = self.at("the download's source", span, bytes.len() as u64 / 4)?;
        self.bind()?;
        let stream = self.stream(stream);
        // SAFETY: the span lies in the arena and is as long as the slice, which is not touched
        // before the stream has come to its end.
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
        // SAFETY: both spans lie in the arena and have one length.
        unsafe {
            result::memcpy_dtod_async(b, a, from.len as usize, self.stream(stream).cu_stream())
        }
        .map_err(failed("copying on the device"))
    }

    /// Queues a mark, which others can wait for and whose time can be told.
    pub fn mark(&self, stream: Stream) -> Result<Mark, CudaError> {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        self.stream(stream).record_event(flags).map(Mark).map_err(failed("marking a stream"))
    }

    /// Lets a stream go on only after a mark of another.
    pub fn wait(&self, stream: Stream, mark: &Mark) -> Result<(), CudaError> {
        self.stream(stream).wait(&mark.0).map_err(failed("waiting for a mark"))
    }

    /// Seconds between two marks that have been passed.
    pub fn seconds(&self, from: &Mark, to: &Mark) -> Result<f64, CudaError> {
        let elapsed = from.0.elapsed_ms(&to.0).map_err(failed("reading a clock"))?;
        Ok(f64::from(elapsed) / 1e3)
    }

    /// Waits for everything that was queued.
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

    /// The address of an operand, which must lie in the arena and be of the length its shape says.
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

/// The bindings would end the process over a library that is not there; this says so before.
fn libraries() -> Result<(), CudaError> {
    let missing = |library, hint| Err(CudaError::NoLibrary { library, hint });
    // SAFETY: loading CUDA's libraries runs their initialisers, which have no conditions.
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

/// Says what was tried when a call failed.
pub(super) fn failed<E: fmt::Debug>(call: &str) -> impl FnOnce(E) -> CudaError {
    let call = call.to_owned();
    move |error| CudaError::Call { call, what: format!("{error:?}") }
}
