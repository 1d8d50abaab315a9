//! Starts one process per rank from one command, on this machine or on many.
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
//! hosts          lists of hosts
//! fleet          agents of several hosts, as the leader of a job sees them
//! static_agent   an agent without a leader, for engines that start one process per host
//! agent          starts and watches the ranks of its host
//! protocol       orders to agents, and their events
//! lines          output of ranks of other hosts, and its logs
//! ```
//!
//! A rank is this same program with the same arguments and makes the same plan. The rendezvous
//! server refuses to start ranks whose plans differ.

mod address;
mod agent;
mod expert_buffers;
mod fleet;
mod hosts;
mod launcher;
mod layout;
mod lines;
mod meeting;
mod protocol;
mod rank_identity;
mod rank_process;
mod recovery;
mod static_agent;

pub(crate) use address::interface_address;
pub(crate) use agent::{end_with_agent, file_fact, serve};
pub(crate) use expert_buffers::LargerBuffers;
pub(crate) use fleet::{Fleet, FleetOptions};
pub(crate) use hosts::{Host, parse as parse_hosts};
pub(crate) use layout::Layout;
pub(crate) use rank_identity::{AGENT, FOUND, RANK, RankIdentity, environment, rank_identity};
pub(crate) use rank_process::{RankProcess, connect, connect_by};
pub(crate) use recovery::{SupervisedRun, restart_state, run};
pub(crate) use static_agent::StaticAgent;
