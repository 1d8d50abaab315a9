//! The same arithmetic on an NVIDIA GPU, behind the feature `cuda`.
//!
//! Nothing of CUDA is needed to build this: the driver, its compiler and cuBLAS are looked for when a
//! [`Device`] is opened, and an absent one is an error with its name. A device holds one arena, laid
//! out as the plan says, and works on streams: what is asked of one stream happens in order, and
//! across streams a [`Mark`] of one is waited for by another. Calls return as soon as the work is
//! queued; [`Device::download`] and [`Device::synchronise`] wait.
//!
//! That ops of different streams do not touch the same bytes at once is laid down by the plan, which
//! was validated; spans are checked against the arena and the shapes here.

mod device;
mod ops;
mod rows;

pub use device::{CudaError, Device, Mark, Stream};
pub use ops::{Function, Update};
