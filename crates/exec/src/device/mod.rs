//! Devices that execute the ops of a rank's program.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
