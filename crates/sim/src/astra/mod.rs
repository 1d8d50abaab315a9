//! ASTRA-sim's semantics, for comparison.
//!
//! ASTRA-sim 2 (Won et al., ISPASS 2023) is the simulator whose numbers others quote. Asked for
//! them, this module answers what it answers, to the nanosecond: the same chunks, the same order
//! of events, the same truncations, and the same shortcuts. It shares nothing with Paceline's own
//! network backends, which model what this one leaves out.
//!
//! ```text
//! Case ──► schedule: chunks, and the phases that each runs through ──► fold: ranks that behave alike
//!                                                                         │
//!    unaware: a message takes hops · latency + bytes / bandwidth          ▼
//!    aware: links are FIFO, messages stored and forwarded whole  ◄──► engine ──► Outcome
//! ```
//!
//! - `schedule`: a collective is cut into chunks; a chunk runs one *phase* per dimension, or a
//!   reduce-scatter up and an all-gather down the dimensions.
//! - `exchange`, `tree`: what a rank does in a phase when a packet is ready or received.
//! - `engine`: a queue of chunks per rank and dimension, and the loop over events.
//! - `agenda`, `calls`, `mailbox`: events of a tick in the order of their making, the callbacks a
//!   rank asked for, and receives that wait for messages or the reverse.
//! - `fold`: one rank stands for all that provably do the same at the same time.
//!
//! Not here: compute, remote memory, more than one collective at a time, Themis's schedule (which
//! ASTRA-sim's own configuration cannot reach), and the shared-bus model, which is off by default.

mod agenda;
mod aware;
mod calls;
mod case;
mod engine;
mod exchange;
mod fold;
mod mailbox;
mod own;
mod schedule;
mod topology;
mod tree;
mod unaware;

#[cfg(test)]
mod tests;

pub use case::{
    Algorithm, Algorithms, AstraError, Backend, Case, Collective, Dimension, Kind, Optimization,
};

pub use own::own_time;

use fold::Fold;

/// When the ranks finish, and what it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// When the last rank finishes.
    pub time_ns_max: u64,
    /// When the first rank finishes.
    pub time_ns_min: u64,
    /// Messages sent by all ranks together.
    pub messages: u64,
}

/// Times a collective as ASTRA-sim does.
///
/// Ranks that do the same at the same time are simulated once. Where the order of events in one
/// tick could tell them apart, every rank is simulated, so that the answer is always that of
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

/// Times a collective as ASTRA-sim does, with every rank and every message on its own.
pub fn simulate_every_rank(case: &Case) -> Result<Outcome, AstraError> {
    every_rank(case, &schedule::schedule(case)?)
}

fn every_rank(case: &Case, schedule: &schedule::Schedule) -> Result<Outcome, AstraError> {
    let outcome = run(case, schedule, &Fold::none(case, schedule))?;
    // Without folding no order is ambiguous: the outcome is there.
    outcome.ok_or(AstraError::Stuck { finished: 0, ranks: case.ranks() })
}

/// None if the order of events could tell ranks apart that the fold takes for equal.
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
