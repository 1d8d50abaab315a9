//! How many of a run's first iterations are the warm-up of compression, where the run may go on from a checkpoint.

use crate::checkpoint::TrainingState;
use crate::error::ExecError;
use paceline_plan::strategy::Strategy;

/// The first iterations in which gradients go as they are, counted from the very start, in a run that ends after so
/// many and may be resumed.
///
/// What a checkpoint's second moments were learned from cannot be changed any more. If they have settled they stay so,
/// however long the run is now. If they have not, all iterations behind the checkpoint were a warm-up.
pub fn warm_up(
    strategy: &Strategy,
    iterations: u32,
    resumed: Option<&TrainingState>,
) -> Result<u32, ExecError> {
    let asked = strategy.warm_up(iterations);
    let Some(state) = resumed.filter(|_| strategy.exchanges_moments()) else { return Ok(asked) };
    match (state.settled, strategy.compress_warmup) {
        (Some(settled), Some(said)) if said != settled => Err(ExecError::Settled { said, settled }),
        (Some(settled), _) => Ok(settled),
        (None, _) => Ok(asked.max(state.iteration)),
    }
}
