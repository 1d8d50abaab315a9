//! Hugging Face directories: weights that `transformers` reads, and those it wrote.
//!
//! ```text
//! import   Pretrained: config.json and one or several safetensors files, read tensor by tensor
//! export   a checkpoint as such a directory
//! ```
//!
//! The family describes the contents of its files and the tensors that they form
//! ([`Family`](paceline_plan::model::hugging_face::Family)).

mod export;
mod import;

pub use export::{ExportError, can_export, export, foreign_file};
pub use import::{ImportError, Pretrained};

pub(crate) use import::Whole;
