//! Hugging Face directories: weights that `transformers` reads, and those it wrote.
//!
//! ```text
//! import   Pretrained: config.json and one or several safetensors files, read tensor by tensor
//! export   a checkpoint as such a directory
//! ```
//!
//! What the files of a family contain, and how their tensors form ours, is the family's own
//! ([`Family`](paceline_plan::model::hugging_face::Family)).

mod export;
mod import;

pub use export::{ExportError, can_export, export, foreign_file};
pub use import::{ImportError, Pretrained};

pub(crate) use import::Whole;
