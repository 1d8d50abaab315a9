//! How many of a run's first iterations are the warm-up of compression, where the run may go on from a checkpoint.

use crate::checkpoint::TrainingState;
use crate::error::ExecError;
use paceline_plan::strategy::Strategy;

/// The first iterations in which gradients go as they are, counted from the very start, in a run that ends after so
/// many and may be resumed.
///
/// A warm-up that a checkpoint has behind it stays as long as it was, however long the run is now. If it has none behind
/// it, all its iterations were one. What second moments were learned from cannot be changed by saying so either.
pub fn warm_up(
    strategy: &Strategy,
    iterations: u32,
    resumed: Option<&TrainingState>,
) -> Result<u32, ExecError> {
    let asked = strategy.warm_up(iterations);
    let Some(state) = resumed.filter(|_| strategy.warms_up()) else { return Ok(asked) };
    match (state.settled, strategy.compress_warmup) {
        (Some(settled), Some(said)) if said != settled && strategy.exchanges_moments() => {
            Err(ExecError::Settled { said, settled })
        }
        (Some(_), Some(said)) => Ok(said),
        (Some(settled), None) => Ok(settled),
        (None, _) => Ok(asked.max(state.iteration)),
    }
}
