//! From one command to the processes of its ranks.
//!
//! ```text
//! launcher   starts the ranks of this machine, watches them, and says why they ended
//! member     what such a process, or one that torchrun, mpirun or srun started, does first
//! place      which rank a process is, and where the others meet
//! ```
//!
//! A rank is this same program with the same arguments: it makes the same plan, and the hub refuses
//! to let ranks begin that do not agree.

mod launcher;
mod member;
mod place;

pub(crate) use launcher::run;
pub(crate) use member::{Member, connect};
pub(crate) use place::{Place, place};
