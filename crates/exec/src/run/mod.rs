//! Runs of a plan: their set-up, on threads or processes, and the reports of their ranks.

mod cgroup;
pub(crate) mod check;
pub(crate) mod control;
pub(crate) mod expert_overflow;
pub(crate) mod job;
pub(crate) mod learning_rate;
pub(crate) mod loss_scale;
pub(crate) mod member;
pub(crate) mod options;
pub(crate) mod outcome;
mod report_channel;
pub(crate) mod reports;
pub mod resident;
pub(crate) mod staleness;
pub(crate) mod stop_consensus;
pub(crate) mod threads;
pub(crate) mod warm_up;
