//! Exchanges in flight: the engine that advances them, and the thread that drives it.

pub(crate) mod engine;
pub(crate) mod exchange;
pub(crate) mod thread;
