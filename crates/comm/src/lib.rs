//! Moves and reduces bytes between ranks, and knows nothing of what they mean.
//!
//! A [`Transport`] carries tagged messages; [`thread`] is the one for ranks that are threads of one
//! process. [`Running`] interprets the steps of a collective from `paceline-plan` on any transport,
//! and [`point`] and [`barrier`] have the same shape: a small state machine whose `progress` never
//! blocks, so that one thread can keep many of them under way.
//!
//! Nothing here waits for ever: a rank that fails takes its world down with an error that names it,
//! a rank that disagrees is found by the header of its first message, and a rank that is silent is
//! noticed by whoever waits for it.

mod arithmetic;
pub mod barrier;
pub mod collective;
mod error;
pub mod point;
pub mod thread;
mod transport;

pub use barrier::Barrier;
pub use collective::{CollectiveSpec, Running};
pub use error::CommError;
pub use point::{Receiving, Sending};
pub use transport::{Header, Payload, Progress, Purpose, Tag, Transport, finish};
