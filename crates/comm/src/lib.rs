//! Moves and reduces bytes between ranks, independent of their meaning.
//!
//! A [`Transport`] carries tagged messages. [`thread`] connects ranks that are threads of one
//! process; [`process`] connects processes, by shared memory within a host and by TCP between
//! hosts; [`transport::mpi`] connects processes of an MPI launcher. Processes find each other through [`rendezvous`], and [`launch`] reads a process's rank
//! from its launcher.
//!
//! [`ActiveCollective`] interprets the steps of a collective from `paceline-plan` on any transport.
//! [`point`] and [`barrier`] have the same shape: a small state machine whose `progress` never
//! blocks, so that one thread can keep many in flight.
//!
//! Nothing here waits forever. A rank that fails ends its world with an error that names it, and a
//! rank that disagrees is detected by the header of its first message. A process that dies or stops
//! is detected by the rendezvous server, and a silent rank by the rank that waits for it.

pub mod affinity;
mod arithmetic;
pub mod barrier;
mod error;
mod frame_reader;
pub mod launch;
mod mailbox;
pub mod measure;
pub mod mpi;
pub mod native;
pub mod point;
mod recorder;
pub mod rendezvous;
mod secret;
mod session;
mod shared_memory;
mod shm;
pub mod steps;
pub mod transport;
mod vector;
pub mod wire;

pub use barrier::Barrier;
pub use error::CommError;
pub use point::{Receiving, Sending};
pub use recorder::{Direction, Entry, FlightRecorder};
pub use secret::Secret;
pub use shared_memory::{Lent, SharedMemory};
pub use shm::window::{SharedBuffer, Window};
pub use steps::{ActiveCollective, CollectiveSpec};
pub use transport::{
    Header, LocalWorld, MessageChunk, MessageSink, Progress, Purpose, RecvStatus, Tag, Transport,
    TransportKind, Wait, Waker, ZeroCopy, finish, process, thread,
};
pub use vector::Vector;
