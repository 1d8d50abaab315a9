//! Kernels compiled at run time for an element type and, where a kernel keeps rows in registers, a width.

use super::device::{CudaError, failed};
use super::element_type::ElementType;
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Source file of a group of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Elementwise kernels, updates, embeddings and column sums.
    Elementwise,
    /// Attention of any type and head.
    Attention,
    /// Norms of heads and latent attention.
    Heads,
    /// Routing, dispatch and combination of experts.
    Experts,
    /// Layer norm (`layer`) and RMS norm of rows of `width` elements.
    Norm {
        /// Elements of a row.
        width: u32,
        /// True for layer norm.
        layer: bool,
        /// Warps that share a row: 1, 2, 4 or 8.
        warps: u32,
    },
    /// Softmax cross entropy over rows of `width` logits, of which `words` count.
    CrossEntropy {
        /// Elements of a row.
        width: u32,
        /// Words of the vocabulary.
        words: u32,
        /// Threads of a block.
        threads: u32,
        /// Blocks that share a multiprocessor.
        blocks: u32,
        /// True to hold rows in registers.
        held: bool,
    },
}

const COMMON: &str = include_str!("source/common.cuh");

impl Source {
    fn text(self) -> &'static str {
        match self {
            Self::Elementwise => include_str!("source/elementwise.cu"),
            Self::Attention => include_str!("source/attention.cu"),
            Self::Heads => include_str!("source/heads.cu"),
            Self::Experts => include_str!("source/experts.cu"),
            Self::Norm { .. } => include_str!("source/norm.cu"),
            Self::CrossEntropy { .. } => include_str!("source/cross_entropy.cu"),
        }
    }

    /// Constants that the source is compiled with.
    fn defines(self) -> Vec<String> {
        match self {
            Self::Elementwise | Self::Attention | Self::Heads | Self::Experts => Vec::new(),
            Self::Norm { width, layer, warps } => vec![
                format!("-DWIDTH={width}"),
                format!("-DWARPS_PER_ROW={warps}"),
                format!("-DLAYER={}", u32::from(layer)),
            ],
            Self::CrossEntropy { width, words, threads, blocks, held } => vec![
                format!("-DWIDTH={width}"),
                format!("-DWORDS={words}"),
                format!("-DTHREADS={threads}"),
                format!("-DBLOCKS={blocks}"),
                format!("-DHELD={}", u32::from(held)),
            ],
        }
    }
}

/// Argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub enum Arg {
    /// Address; 0 for an absent operand.
    At(CUdeviceptr),
    /// 64-bit number.
    Long(u64),
    /// 32-bit number.
    Word(u32),
    /// 32-bit float.
    Real(f32),
    /// Parameters of a routing.
    Routing(Routing),
    /// Constants of an update.
    Update(UpdateConstants),
    /// Shape of the attention kernels.
    Heads(HeadShape),
    /// Step of ring attention.
    Step(StepShape),
}

/// Constants of an update, as the kernels declare them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UpdateConstants {
    /// Factor of a decaying weight, or the weight decay of SGD.
    pub keep: f32,
    /// Learning rate, divided by the first moment's bias.
    pub rate: f32,
    /// Root of the second moment's bias.
    pub correction: f32,
    /// Factor by which the first moment moves towards the gradient.
    pub towards: f32,
    /// Decay of the second moment, or momentum.
    pub beta2: f32,
    /// Factor of the squared gradient in the second moment.
    pub fresh: f32,
    /// Term added to the root of the second moment.
    pub epsilon: f32,
    /// Factor of every gradient.
    pub scale: f32,
    /// Longest gradient, or 0.
    pub clip: f32,
}

// SAFETY: plain numbers in C's layout, as the kernels declare them.
unsafe impl cudarc::driver::DeviceRepr for UpdateConstants {}

/// Shape of the attention kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadShape {
    /// Tokens of a sequence.
    pub seq: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub dim: u32,
    /// Factor of the scores.
    pub scale: f32,
}

// SAFETY: plain numbers in C's layout, as the kernels declare them.
unsafe impl cudarc::driver::DeviceRepr for HeadShape {}

/// Queries and keys of a step of ring attention.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// First query of a sequence.
    pub first: u32,
    /// Number of keys.
    pub keys: u32,
}

// SAFETY: plain numbers in C's layout, as the kernels declare them.
unsafe impl cudarc::driver::DeviceRepr for StepShape {}

/// Parameters of the routing kernels, as in [`crate::experts::route::Routing`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Number of experts.
    pub experts: u32,
    /// Experts of a token.
    pub topk: u32,
    /// 1 if scores are sigmoids, 0 for a softmax.
    pub sigmoid: u32,
    /// Tokens of a sequence.
    pub seq: u32,
    /// Maximum number of tokens of a sequence per expert, 0 if unbounded.
    pub capacity: u32,
    /// Groups of experts, at most 32.
    pub groups: u32,
    /// Groups that a token's experts come from.
    pub kept_groups: u32,
    /// Shards of a sequence in zigzag layout.
    pub parts: u32,
    /// Sum of the weights of a token's experts.
    pub scale: f32,
    /// Weight of a sequence's imbalance in the loss.
    pub balance: f32,
}

// SAFETY: plain numbers in C's layout, as the kernels declare them.
unsafe impl cudarc::driver::DeviceRepr for Routing {}

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Blocks along x and y.
    pub blocks: (u32, u32),
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared: u32,
}

impl Grid {
    /// Grid of a kernel over `n` elements, eight a thread, which strides over the rest.
    pub fn over(n: u64) -> Self {
        let blocks = n.div_ceil(8 * 256).clamp(1, 8192) as u32;
        Self { blocks: (blocks, 1), threads: 256, shared: 0 }
    }

    /// Grid of `blocks` blocks of `threads` threads.
    pub const fn of(blocks: u32, threads: u32) -> Self {
        Self { blocks: (blocks, 1), threads, shared: 0 }
    }
}

type Key = (Source, ElementType);

/// Compiled kernels of a device.
pub struct Kernels {
    context: Arc<CudaContext>,
    architecture: String,
    modules: Mutex<BTreeMap<Key, Arc<CudaModule>>>,
    functions: Mutex<BTreeMap<(Key, &'static str), CudaFunction>>,
}

impl Kernels {
    /// Kernels of a context; each source is compiled when first used.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let (major, minor) =
            context.compute_capability().map_err(failed("asking its capability"))?;
        Ok(Self {
            context: Arc::clone(context),
            architecture: format!("--gpu-architecture=compute_{major}{minor}"),
            modules: Mutex::default(),
            functions: Mutex::default(),
        })
    }

    /// Kernel of a source, compiled for an element type.
    pub fn get(
        &self,
        source: Source,
        element: ElementType,
        name: &'static str,
    ) -> Result<CudaFunction, CudaError> {
        let key = (source, element);
        let mut functions = self.functions.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(function) = functions.get(&(key, name)) {
            return Ok(function.clone());
        }
        let module = self.module(key)?;
        let function = module.load_function(name).map_err(failed(name))?;
        functions.insert((key, name), function.clone());
        Ok(function)
    }

    fn module(&self, key: Key) -> Result<Arc<CudaModule>, CudaError> {
        let mut modules = self.modules.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(module) = modules.get(&key) {
            return Ok(Arc::clone(module));
        }
        let (source, element) = key;
        let text = format!("{COMMON}\ntypedef {} T;\n{}", element.name(), source.text());
        let mut options = vec![self.architecture.clone(), "--std=c++17".to_owned()];
        options.extend(source.defines());
        let options = CompileOptions { options, ..CompileOptions::default() };
        let what = format!("compiling {source:?} for {}", element.name());
        let ptx = compile_ptx_with_opts(text, options).map_err(failed(&what))?;
        let module = self.context.load_module(ptx).map_err(failed(&what))?;
        modules.insert(key, Arc::clone(&module));
        Ok(module)
    }

    /// Queues a kernel on a stream.
    ///
    /// # Safety
    ///
    /// The arguments are those that the kernel declares, and its addresses are valid for what it
    /// accesses until the stream has passed it.
    pub unsafe fn launch(
        &self,
        stream: &Arc<CudaStream>,
        (source, element, name): (Source, ElementType, &'static str),
        grid: Grid,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        let function = self.get(source, element, name)?;
        let mut builder = stream.launch_builder(&function);
        for arg in args {
            match arg {
                Arg::At(address) => builder.arg(address),
                Arg::Long(number) => builder.arg(number),
                Arg::Word(number) => builder.arg(number),
                Arg::Real(number) => builder.arg(number),
                Arg::Routing(routing) => builder.arg(routing),
                Arg::Update(update) => builder.arg(update),
                Arg::Heads(heads) => builder.arg(heads),
                Arg::Step(step) => builder.arg(step),
            };
        }
        let config = LaunchConfig {
            grid_dim: (grid.blocks.0, grid.blocks.1, 1),
            block_dim: (grid.threads, 1, 1),
            shared_mem_bytes: grid.shared,
        };
        // SAFETY: the caller's promise.
        unsafe { builder.launch(config) }.map(|_| ()).map_err(failed(name))
    }
}
