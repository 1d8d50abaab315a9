use super::kind::AVAILABLE;
use thiserror::Error;

/// Why there is no such schedule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ScheduleError {
    /// The word names no schedule.
    #[error("unknown schedule '{given}' (available: {AVAILABLE})")]
    Unknown {
        /// What was written.
        given: String,
    },
    /// An interleaved schedule without a usable number of chunks per rank.
    #[error(
        "schedule '{given}' does not say how many chunks of layers each rank holds; \
         write interleaved:V or zb-h1:V with V from 1 to 65535, for example interleaved:2"
    )]
    Chunks {
        /// What was written.
        given: String,
    },
    /// A pipeline of zero ranks.
    #[error("a pipeline needs at least one rank")]
    NoRanks,
    /// An iteration of zero microbatches.
    #[error("a pipeline needs at least one microbatch per iteration")]
    NoMicrobatches,
    /// Fewer microbatches than a schedule needs to fill its pipeline.
    #[error(
        "schedule {schedule} over {ranks} pipeline ranks needs at least {needed} microbatches per \
         iteration, two for each rank; there are {microbatches}"
    )]
    TooFewMicrobatches {
        /// The schedule.
        schedule: &'static str,
        /// Pipeline ranks.
        ranks: u16,
        /// Microbatches asked for.
        microbatches: u32,
        /// The fewest that work.
        needed: u32,
    },
    /// A number of microbatches that a pipeline without flush does not take.
    #[error(
        "schedule {schedule} over {ranks} pipeline ranks wants {takes} per iteration; \
         there are {microbatches}"
    )]
    Unflushed {
        /// The schedule.
        schedule: String,
        /// Pipeline ranks.
        ranks: u16,
        /// Microbatches asked for.
        microbatches: u32,
        /// How many it takes.
        takes: String,
    },
    /// More virtual stages than a stage number can count.
    #[error(
        "{ranks} pipeline ranks with {chunks} chunks each are more than 65536 virtual stages; \
         use fewer chunks"
    )]
    TooManyStages {
        /// Pipeline ranks.
        ranks: u16,
        /// Chunks of layers per rank.
        chunks: u16,
    },
    /// A schedule too large to write down.
    #[error(
        "the schedule would have {count} {what}, more than the {limit} that are supported; \
         use fewer microbatches"
    )]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How many there would be.
        count: u64,
        /// How many there may be.
        limit: u64,
    },
    /// An interleaved schedule whose microbatches do not divide into rounds.
    #[error(
        "an interleaved schedule over {ranks} pipeline ranks runs {microbatches} microbatches \
         in {rounds} rounds, which must be equally long; the nearest counts that work are {}",
        nearest(*below, *above)
    )]
    Rounds {
        /// Pipeline ranks.
        ranks: u16,
        /// Microbatches asked for.
        microbatches: u32,
        /// Rounds they would have to divide into.
        rounds: u32,
        /// The largest smaller count that works.
        below: u32,
        /// The smallest larger count that works, if a number can hold it.
        above: Option<u32>,
    },
}

fn nearest(below: u32, above: Option<u32>) -> String {
    match above {
        Some(above) => format!("{below} and {above}"),
        None => below.to_string(),
    }
}
