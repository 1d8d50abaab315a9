//! Hugging Face directories: weights that `transformers` reads, and those it wrote.
//!
//! ```text
//! family   class of transformers that is equivalent to a model of ours
//! config   contents of its config.json
//! names    mapping of their tensors, with transformations, to ours: the one table
//! import   Pretrained: config.json and one or several safetensors files, read tensor by tensor
//! export   a checkpoint as such a directory
//! ```

mod config;
mod export;
mod family;
mod import;
mod names;

pub use export::{ExportError, can_export, export, foreign_file};
pub use import::{ImportError, Pretrained};

pub(crate) use import::Whole;
