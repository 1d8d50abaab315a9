//! The same arithmetic on an NVIDIA GPU, behind the feature `cuda`.
//!
//! Building this needs nothing of CUDA: the driver, its compiler, cuBLASLt and cuDNN are loaded when
//! a [`Device`] is opened, and a missing one is an error that names it (without cuDNN, attention has
//! kernels of its own). A device holds one arena, laid out by the plan, and works on streams. Work
//! on one stream runs in order; across streams, one waits for a [`Mark`] of another. Calls return as
//! soon as the work is queued; [`Device::download`] and [`Device::synchronise`] wait.
//!
//! The validated plan guarantees that ops of different streams do not touch the same bytes at once;
//! spans are checked against the arena and the shapes here. Equal inputs give equal bits: sums run
//! in a fixed order, and algorithms of libraries are chosen once.

mod attention;
mod cudnn;
mod device;
mod element_type;
mod handle;
mod jit;
mod ops;
mod pinned;
mod product;

pub use attention::{Attention, AttentionShape, BackwardAt, ForwardAt};
pub use cudnn::Cudnn;
pub use device::{CudaError, Device, DeviceInfo, Mark, Stream, Table, devices};
pub use element_type::ElementType;
pub use handle::{Binding, DeviceBytes, StreamHandle};
pub use jit::{Arg, Grid, HeadShape, Kernels, Routing, Source, StepShape, UpdateConstants};
pub use ops::{
    AttentionAt, AttentionGradientAt, DispatchAt, DispatchShape, Function, HeadNormGradientAt,
    InputGradientAt, LatentAt, LinearAt, LossAt, NormAt, NormGradientAt, Places, RingStepAt,
    RingStepGradientAt, RotationAt, ShardLossAt, Squares, TensorBlocks, Update, UpdateAt, Words,
};
pub use pinned::Readback;
pub use product::{Epilogue, Operands, Pass, Product, Products};
