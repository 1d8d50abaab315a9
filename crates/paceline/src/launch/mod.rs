//! Starts one process per rank from one command.
//!
//! ```text
//! launcher       starts the ranks of this machine, supervises them, and reports why they ended
//! recovery       what happens after a failure: all ranks restart, or the remaining ones do
//! expert_buffers larger buffers for experts, which a rank asks its launcher for
//! layout         layouts of the same work on fewer ranks
//! rank_process   setup of a rank process, started by this program, torchrun, mpirun or srun
//! rank_identity  rank of a process, and address of the rendezvous server
//! meeting        address and secret of the ranks of another launcher
//! address        addresses of this host
//! ```
//!
//! A rank is this same program with the same arguments and makes the same plan. The rendezvous
//! server refuses to start ranks whose plans differ.

mod address;
mod expert_buffers;
mod launcher;
mod layout;
mod meeting;
mod rank_identity;
mod rank_process;
mod recovery;

pub(crate) use address::interface_address;
pub(crate) use expert_buffers::LargerBuffers;
pub(crate) use layout::Layout;
pub(crate) use rank_identity::{RANK, RankIdentity, environment, rank_identity};
pub(crate) use rank_process::{RankProcess, connect, connect_by};
pub(crate) use recovery::{SupervisedRun, restart_state, run};
