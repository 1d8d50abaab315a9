//! Operators of the CPU, by family: each function returns the kernel of a pass.

pub(super) mod activation;
pub(crate) mod attention;
pub(super) mod clicks;
pub(super) mod compressed;
pub(super) mod concat;
pub(super) mod embedding;
pub(crate) mod experts;
pub(super) mod fused;
pub(crate) mod heads;
pub(crate) mod images;
pub(super) mod linear;
pub(super) mod loss;
pub(crate) mod norm;
pub(super) mod scaling;
pub(super) mod sums;
