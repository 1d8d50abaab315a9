//! ASTRA-sim's semantics, for comparison.
//!
//! ASTRA-sim 2 (Won et al., ISPASS 2023) is the simulator whose numbers others quote. This module
//! reproduces its results to the nanosecond: the same chunks, the same order of events, the same
//! truncations, and the same shortcuts. It shares nothing with Paceline's own network backends,
//! which model the effects that ASTRA-sim omits.
//!
//! ```text
//! Case ──► schedule: chunks, and the phases that each runs through ──► fold: ranks that behave alike
//!                                                                         │
//!    unaware: a message takes hops · latency + bytes / bandwidth          ▼
//!    aware: links are FIFO, messages stored and forwarded whole  ◄──► engine ──► Outcome
//! ```
//!
//! - `schedule`: a collective is split into chunks; a chunk runs one *phase* per dimension, or a
//!   reduce-scatter up and an all-gather down the dimensions.
//! - `exchange`, `tree`: actions of a rank in a phase when a packet is ready or received.
//! - `engine`: a queue of chunks per rank and dimension, and the event loop.
//! - `event_queue`, `calls`, `mailbox`: events of a tick in order of creation, the callbacks a
//!   rank requested, and receives that wait for messages or the reverse.
//! - `fold`: one rank represents all that provably do the same at the same time.
//!
//! Not included: compute, remote memory, more than one collective at a time, Themis's schedule
//! (which ASTRA-sim's own configuration cannot reach), and the shared-bus model, which is off by
//! default.

mod aware;
mod calls;
mod case;
mod engine;
mod event_queue;
mod exchange;
mod fold;
mod mailbox;
mod native;
mod schedule;
mod topology;
mod tree;
mod unaware;

#[cfg(test)]
mod tests;

pub use case::{
    Algorithm, Algorithms, AstraError, Backend, Case, Collective, Dimension, Kind, Optimization,
};

pub use native::own_time;

use fold::Fold;

/// Finish times of the ranks, and the number of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Finish time of the last rank.
    pub time_ns_max: u64,
    /// Finish time of the first rank.
    pub time_ns_min: u64,
    /// Number of messages sent by all ranks.
    pub messages: u64,
}

/// Times a collective as ASTRA-sim does.
///
/// Ranks that do the same at the same time are simulated once. If the order of events in one tick
/// could distinguish them, every rank is simulated. The result always equals that of
/// [`simulate_every_rank`].
pub fn simulate(case: &Case) -> Result<Outcome, AstraError> {
    let schedule = schedule::schedule(case)?;
    if let Some(fold) = Fold::by_symmetry(case, &schedule)
        && let Some(outcome) = run(case, &schedule, &fold)?
    {
        return Ok(outcome);
    }
    every_rank(case, &schedule)
}

/// Times a collective as ASTRA-sim does, simulating every rank and every message.
pub fn simulate_every_rank(case: &Case) -> Result<Outcome, AstraError> {
    every_rank(case, &schedule::schedule(case)?)
}

fn every_rank(case: &Case, schedule: &schedule::Schedule) -> Result<Outcome, AstraError> {
    let outcome = run(case, schedule, &Fold::none(case, schedule))?;
    // Without folding no order is ambiguous, so there is an outcome.
    outcome.ok_or(AstraError::Stuck { finished: 0, ranks: case.ranks() })
}

/// Runs the backend. Returns `None` if the event order could distinguish ranks that are folded.
fn run(
    case: &Case,
    schedule: &schedule::Schedule,
    fold: &Fold,
) -> Result<Option<Outcome>, AstraError> {
    fold.check(case, schedule)?;
    match case.backend {
        Backend::CongestionUnaware => engine::run(case, schedule, fold, unaware::Unaware),
        Backend::CongestionAware => {
            engine::run(case, schedule, fold, aware::Aware::new(case, schedule, fold))
        }
    }
}
