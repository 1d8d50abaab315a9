use super::kind::AVAILABLE;
use thiserror::Error;

/// Reason that a schedule cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ScheduleError {
    /// Unknown schedule name.
    #[error("unknown schedule '{given}' (available: {AVAILABLE})")]
    Unknown {
        /// The name as given.
        given: String,
    },
    /// An interleaved schedule without a usable number of chunks per rank.
    #[error(
        "schedule '{given}' does not say how many chunks of layers each rank holds; \
         write interleaved:V or zb-h1:V with V from 1 to 65535, for example interleaved:2"
    )]
    Chunks {
        /// The name as given.
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
    NotEnoughMicrobatches {
        /// The schedule.
        schedule: &'static str,
        /// Pipeline ranks.
        ranks: u16,
        /// Requested microbatches.
        microbatches: u32,
        /// Smallest number that works.
        needed: u32,
    },
    /// A number of microbatches that a pipeline without flush does not support.
    #[error(
        "schedule {schedule} over {ranks} pipeline ranks wants {takes} per iteration; \
         there are {microbatches}"
    )]
    Unflushed {
        /// The schedule.
        schedule: String,
        /// Pipeline ranks.
        ranks: u16,
        /// Requested microbatches.
        microbatches: u32,
        /// Supported number of microbatches, in words.
        takes: String,
    },
    /// More virtual stages than a stage number can represent.
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
    /// A schedule that exceeds a size limit.
    #[error(
        "the schedule would have {count} {what}, more than the {limit} that are supported; \
         use fewer microbatches"
    )]
    TooLarge {
        /// The items that are too many (actions or cells).
        what: &'static str,
        /// Number of items the schedule would have.
        count: u64,
        /// Largest supported number of items.
        limit: u64,
    },
    /// An interleaved schedule whose microbatches do not divide into equal rounds.
    #[error(
        "an interleaved schedule over {ranks} pipeline ranks runs {microbatches} microbatches \
         in {rounds} rounds, which must be equally long; the nearest counts that work are {}",
        nearest(*below, *above)
    )]
    Rounds {
        /// Pipeline ranks.
        ranks: u16,
        /// Requested microbatches.
        microbatches: u32,
        /// Number of rounds the microbatches would have to divide into.
        rounds: u32,
        /// The largest smaller count that works.
        below: u32,
        /// The smallest larger count that works, if it fits into a `u32`.
        above: Option<u32>,
    },
}

fn nearest(below: u32, above: Option<u32>) -> String {
    match above {
        Some(above) => format!("{below} and {above}"),
        None => below.to_string(),
    }
}
