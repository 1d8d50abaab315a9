//! A trained model at work: what it makes of held-out text, and the text that it makes.
//!
//! One rank, whole weights, forward only, on the kernels that training runs on. There is no plan here: nothing
//! is cut, nothing is kept for a backward pass, and the length of what is read changes with every
//! token.

mod affine;
mod attend;
mod evaluate;
mod feed;
mod generate;
mod network;
mod project;
mod walk;

pub use evaluate::{Evaluation, evaluate};
pub use generate::{GenerateError, Sampling, generate};
pub use network::Network;
pub use walk::ImageNetwork;
