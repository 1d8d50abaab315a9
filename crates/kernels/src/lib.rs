//! Compute kernels for a device: the CPU, and with the feature `cuda` a GPU.
//!
//! Every operator of a model is a few functions here: its forward pass, its input gradient and its
//! weight gradient, kept separate so that a schedule may run them at different times. The functions
//! take slices and a small shape, allocate nothing themselves and know nothing of ranks, plans or
//! microbatches. Larger ones run on the threads of a [`pool::Pool`].
//!
//! # Conventions
//!
//! * Activations are row-major `[rows, width]` slices; a row is a token.
//! * Operands are stored in any [`element`] type and computed with in `f32`. Activations and
//!   weights
//!   share a type `T`, weight gradients have a type `G` of their own, and statistics are `f32`.
//! * Linear weights are `[outputs, inputs]`, as `torch.nn.Linear` stores them, so that a tied
//!   embedding table `[vocabulary, width]` is the head's weight without a transpose.
//! * Arguments come in this order: shape and constants, inputs, outputs, and for weight
//!   gradients the [`Write`] mode.
//! * Sizes come from a validated plan, so a slice of the wrong length is an error in the caller:
//!   it panics, naming the slice and the length its shape needs.
//!
//! # Determinism
//!
//! Equal inputs give equal bits. Sums run in an order fixed by the shape alone (the private modules
//! `ordered_sum` and `matmul` define it). The address or alignment of a slice, the number of
//! threads, or the size of a cache never matter. Outside GEMMs no operation is fused or
//! reassociated and the elementary functions are our own, so the bits are the same on every
//! instruction set. A GEMM fuses its multiply-adds where the processor can, so its bits differ
//! between processors with and without that instruction, and between no others. A GEMM of bfloat16
//! operands uses the processor's instruction for them, so its bits differ between AMX, AVX-512 BF16
//! and neither.

pub mod activation;
pub mod arena;
pub mod attention;
pub mod batch_norm;
pub mod bias;
pub mod compress;
pub mod compressed_adam;
pub mod concat;
pub mod conv;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod element;
pub mod embedding;
pub mod embedding_bag;
pub mod experts;
pub mod head_norm;
pub mod interaction;
pub mod lamb;
pub mod lars;
pub mod latent;
pub mod linear;
pub mod loss;
pub mod mixed_precision;
pub mod norm;
pub mod optimizer;
pub mod outer_optimizer;
pub mod philox;
pub mod pool;
pub mod pooling;
pub mod reduce;
pub mod ring_attention;
pub mod rope;

mod columns;
mod huge_pages;
mod instruction_set;
mod math;
mod matmul;
mod ordered_sum;
pub mod scaling;
mod shape;
mod sparse_memory;
pub mod whole_norm;
mod window;

#[cfg(test)]
mod dtype_tests;
#[cfg(test)]
mod reference;

pub use element::{Bf16, Element, F16};
pub use huge_pages::prefer_huge_pages;
pub use shape::{Rows, Write};
pub use window::Window;
