//! Hugging Face directories: weights that `transformers` reads, and those it wrote.
//!
//! ```text
//! family   which of their classes computes what a model of ours does
//! config   what its config.json says
//! names    which of their tensors, turned how, make one of ours: the one table
//! import   Pretrained: config.json and one or several safetensors files, read tensor by tensor
//! export   a checkpoint as such a directory
//! ```

mod config;
mod export;
mod family;
mod import;
mod names;

pub use export::{ExportError, can_export, export};
pub use import::{ImportError, Pretrained};

pub(crate) use import::Whole;
