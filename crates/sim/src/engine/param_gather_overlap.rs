//! Overlap of the weight all-gather with the start of the next iteration.

use super::timeline::Timeline;
use crate::profile::Profile;
use paceline_plan::collective::CollectiveKind;
use paceline_plan::ids::OpId;
use paceline_plan::mesh::GroupKind;
use paceline_plan::program::{ComputePass, Op, Plan, Program};
use paceline_plan::strategy::Zero;

/// Ends the iteration when the next one can begin, under [`Profile::overlap_param_gather`].
///
/// If optimizer state is sharded but weights are not, a body ends with all-gathers of the updated
/// weights. With this overlap, the next forward pass starts as soon as the first layer's weights
/// have arrived. The others arrive while earlier layers compute, provided that all of them take no
/// longer than the first microbatch's forward pass. The part that runs into the next iteration is
/// cut off here; every iteration begins with the same amount of the previous one.
pub(crate) fn overlap_param_gather(
    plan: &Plan,
    profile: &Profile,
    mut timeline: Timeline,
) -> Timeline {
    let dealt = match plan.strategy.zero {
        Zero::Optimizer | Zero::Gradients => true,
        Zero::None | Zero::Parameters => false,
    };
    if !profile.overlap_param_gather || !plan.strategy.overlap || !dealt {
        return timeline;
    }
    let mut period: f64 = 0.0;
    for class in 0..timeline.classes().len() as u32 {
        let program = &plan.programs[timeline.classes().get(class).role.index()];
        let span = |op: usize| timeline.span_of(class, OpId::from(op));
        let (mut without, mut with, mut first) = (0.0f64, 0.0f64, 0.0);
        for (at, node) in program.body.nodes.iter().enumerate() {
            let (start, end) = span(at);
            with = with.max(end.0);
            if is_gather(plan, program, &node.op) {
                // Buckets are in backward order, so the last one is needed first.
                first = end.0 - start.0;
            } else {
                without = without.max(end.0);
            }
        }
        let hidden = first_forward(plan, program, |at| {
            let (start, end) = span(at);
            end.0 - start.0
        });
        let rest = (with - without - first - hidden).max(0.0);
        period = period.max((without + first + rest).min(with));
    }
    timeline.cut(period);
    timeline
}

/// Returns true if an op gathers a bucket's weights among replicas.
fn is_gather(plan: &Plan, program: &Program, op: &Op) -> bool {
    matches!(op, Op::Collective { call, .. }
        if program.call(*call).kind == CollectiveKind::AllGather
            && plan.group(program.call(*call).group) == GroupKind::Replicas)
}

/// Compute time of one microbatch's forward pass through a role's layers.
fn first_forward(plan: &Plan, program: &Program, time: impl Fn(usize) -> f64) -> f64 {
    let forward = program.body.nodes.iter().enumerate().filter(|(_, node)| {
        matches!(node.op, Op::Compute { segment, microbatch, .. }
            if microbatch.index() == 0
                && plan.templates[program.segment(segment).template as usize].pass
                    == ComputePass::Forward)
    });
    forward.map(|(at, _)| time(at)).sum()
}
