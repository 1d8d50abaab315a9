//! Length of the compress warm-up, for runs that may be resumed from a checkpoint.

use crate::checkpoint::TrainingState;
use crate::error::ExecError;
use paceline_plan::strategy::Strategy;

/// Number of first iterations with uncompressed gradients, counted from the very start, in a run
/// that ends after `iterations` and may be resumed.
///
/// A warm-up that a checkpoint has completed keeps its length, however long the run is now, unless
/// another is requested. If the checkpoint has completed none, all its iterations count as warm-up.
/// Where moments are exchanged, requesting another length is an error: second moments cannot be
/// relearnt.
pub fn warm_up(
    strategy: &Strategy,
    iterations: u32,
    resumed: Option<&TrainingState>,
) -> Result<u32, ExecError> {
    let asked = strategy.compress_warmup(iterations);
    let Some(state) = resumed.filter(|_| strategy.has_compress_warmup()) else { return Ok(asked) };
    match (state.compress_warmup_done, strategy.compress_warmup) {
        (Some(settled), Some(said)) if said != settled && strategy.exchanges_moments() => {
            Err(ExecError::WarmupMismatch { asked: said, done: settled })
        }
        (Some(_), Some(said)) => Ok(said),
        (Some(settled), None) => Ok(settled),
        (None, _) => Ok(asked.max(state.iteration)),
    }
}
