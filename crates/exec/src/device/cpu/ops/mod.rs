//! Operators on the CPU, by family.

pub(super) mod clicks;
pub(super) mod compressed;
pub(super) mod experts;
pub(super) mod fused;
pub(super) mod heads;
pub(super) mod images;
