//! x
pub mod training {}
