//! Moves and reduces bytes between ranks, and knows nothing of what they mean.
//!
//! A [`Transport`] carries tagged messages. [`thread`] is the one for ranks that are threads of one
//! process; [`process`] is the one for processes, which uses shared memory between ranks of one host
//! and TCP between hosts. [`rendezvous`] is how processes find each other, [`launch`] how a process
//! learns from its launcher which rank it is.
//!
//! [`Running`] interprets the steps of a collective from `paceline-plan` on any transport, and
//! [`point`] and [`barrier`] have the same shape: a small state machine whose `progress` never
//! blocks, so that one thread can keep many of them under way.
//!
//! Nothing here waits for ever: a rank that fails takes its world down with an error that names it,
//! a rank that disagrees is found by the header of its first message, a process that dies or stops
//! is noticed by the hub, and a rank that is silent is noticed by whoever waits for it.

pub mod affinity;
mod arithmetic;
pub mod barrier;
pub mod collective;
mod error;
mod half_precision;
mod inflow;
pub mod launch;
mod mailbox;
pub mod measure;
pub mod point;
pub mod process;
mod recorder;
pub mod rendezvous;
mod secret;
mod shm;
pub mod thread;
mod transport;
pub mod wire;

pub use barrier::Barrier;
pub use collective::{CollectiveSpec, Running};
pub use error::CommError;
pub use point::{Receiving, Sending};
pub use recorder::{Entry, FlightRecorder, Way};
pub use secret::Secret;
pub use shm::window::{Loan, SharedBuffer, Window};
pub use transport::{
    Header, Lending, Lent, Piece, Progress, Purpose, Tag, Taken, Transport, Visitor, Waker, finish,
};
