//! Growth of a plan if routing is uneven, so that the buffers of experts grow.

use paceline_plan::lower::lower;
use paceline_plan::model::Model;
use paceline_plan::program::{ExpertBuffers, Plan};
use paceline_plan::strategy::Strategy;
use paceline_plan::units::Bytes;

/// Peak memory of the fullest role with buffers that hold every token that can come; `None` where
/// nothing can overflow them.
pub(crate) fn largest_peak(model: &Model, plan: &Plan) -> Option<Bytes> {
    let ExpertBuffers { largest, .. } = plan.expert_buffers()?;
    let strategy = Strategy { expert_buffer_factor: largest, ..plan.strategy.clone() };
    let larger = lower(model, &strategy).ok()?;
    let peak = |plan: &Plan| plan.programs.iter().map(|program| program.memory.total()).max();
    peak(&larger).max(peak(plan))
}

/// Buffers of the experts, and what they can come to, as a fact about the plan.
pub(super) fn expert_fact(model: &Model, plan: &Plan) -> Option<String> {
    let ExpertBuffers { factor, largest } = plan.expert_buffers()?;
    let peak = largest_peak(model, plan)?;
    let shares = if factor == 1.0 { "equal share" } else { "equal shares" };
    Some(format!(
        "buffers of {factor} {shares} of the tokens; uneven routing: up to {largest}, peak {peak}"
    ))
}
