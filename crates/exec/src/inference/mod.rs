//! Inference with a trained model: evaluation on held-out text, and text generation.
//!
//! One rank, whole weights, forward only, on the kernels of training. There is no plan here:
//! nothing is sharded, no activation is saved for a backward pass, and the sequence length changes
//! with every token.

mod affine;
mod evaluate;
mod ffn;
mod generate;
mod graph_interpreter;
mod kv_cache;
mod network;
mod qkv;
mod sharpness;

pub use evaluate::{Evaluation, evaluate};
pub use generate::{GenerateError, Sampling, generate};
pub use graph_interpreter::ImageNetwork;
pub use network::Network;
pub use sharpness::perturbed;
