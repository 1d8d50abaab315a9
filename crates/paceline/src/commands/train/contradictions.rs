//! Flags of a training run that contradict its plan or its checkpoint.

use crate::flags::{CheckpointOptions, Problems, SavePolicy, Training};
use paceline_plan::program::Plan;

/// Records flags that name a rank that the plan lacks, save while ranks are at different
/// iterations, or end before the checkpoint.
pub(super) fn refuse_contradictions(
    plan: Option<&Plan>,
    training: &Training,
    keeping: &CheckpointOptions,
    problems: &mut Problems,
) {
    if let (Some(slow), Some(plan)) = (training.straggler, plan)
        && slow.rank >= plan.mesh.world()
    {
        let (rank, last) = (slow.rank, plan.mesh.world() - 1);
        problems.add("--straggler", format!("there is no rank {rank}; the last one is {last}"));
    }
    if let (Some(_), Some(plan)) = (training.federated, plan) {
        if plan.strategy.local.is_none() {
            let text = "clients make local steps before they are averaged; add --local-steps";
            problems.add("--clients", text);
        }
        if plan.strategy.dp < 2 {
            problems.add("--clients", "needs at least 2 replicas; use --dp 2 or more");
        }
    }
    if let (SavePolicy::Every(_), Some(plan)) = (&keeping.saving, plan)
        && plan.strategy.sync.is_async()
    {
        let sync = plan.strategy.sync;
        problems.add(
            "--save-every",
            format!("with {sync} ranks are at different iterations; the run is saved at its end"),
        );
    }
    let done = keeping.resume.as_ref().map_or(0, |resume| resume.state().iteration);
    if done > 0 && training.iterations <= done {
        let text = format!(
            "{} counts from the run's start, and the checkpoint is at {done}; use more than that",
            training.iterations
        );
        problems.add("--iterations", text);
    }
}
