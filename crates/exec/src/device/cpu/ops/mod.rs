//! Operators of the CPU, by family: each function returns the kernel of a pass.

pub(super) mod activation;
pub(super) mod attention;
pub(super) mod clicks;
pub(super) mod compressed;
pub(super) mod embedding;
pub(crate) mod experts;
pub(super) mod fused;
pub(super) mod heads;
pub(crate) mod images;
pub(super) mod linear;
pub(super) mod loss;
pub(super) mod norm;
pub(super) mod sums;
