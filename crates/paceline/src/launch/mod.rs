//! From one command to the processes of its ranks.
//!
//! ```text
//! launcher   starts the ranks of this machine, watches them, and says why they ended
//! recovery   what happens then: all start again, or those that are left do
//! layout     how fewer ranks can share the work
//! member     what such a process, or one that torchrun, mpirun or srun started, does first
//! place      which rank a process is, and where the others meet
//! ```
//!
//! A rank is this same program with the same arguments: it makes the same plan, and the hub refuses
//! to let ranks begin that do not agree.

mod launcher;
mod layout;
mod member;
mod place;
mod recovery;

pub(crate) use layout::Layout;
pub(crate) use member::{Member, connect};
pub(crate) use place::{Place, place};
pub(crate) use recovery::{Run, carried, run};
