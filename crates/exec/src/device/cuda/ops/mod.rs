//! Operators of a GPU.

pub(super) mod activation;
pub(super) mod attention;
pub(super) mod embedding;
pub(super) mod experts;
pub(super) mod heads;
pub(super) mod linear;
pub(super) mod loss;
pub(super) mod norm;
pub(super) mod sums;
