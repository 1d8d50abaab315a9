//! Inference with a trained model: evaluation on held-out text, and text generation.
//!
//! One rank, whole weights, forward only, on the kernels of training: the operators of the model's
//! graph in sequence, with a KV cache behind attention. There is no plan here: nothing is sharded, no activation is saved for a backward pass, and the sequence length changes
//! with every token.

mod evaluate;
mod generate;
mod interpreter;
mod kv_cache;
mod network;
mod sharpness;

pub use evaluate::{Evaluation, evaluate};
pub use generate::{GenerateError, Sampling, generate};
pub use network::{ImageNetwork, Network, trains_only};
pub use sharpness::perturbed;
