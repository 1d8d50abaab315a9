//! What communication takes from computation.
//!
//! A collective is a kernel too: it reads and writes the device's memory, and computations beside
//! it wait for theirs. And where products are cut into parts, exchanges hide behind them.

use crate::compute::{Roofline, largest_of};
use crate::profile::Profile;
use paceline_plan::collective::CollectiveKind;
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{Call, Op, Plan, Program};
use paceline_plan::strategy::Zero;
use paceline_plan::units::Seconds;

/// How many times longer a role's computations take for what is moved beside them.
///
/// The bytes of all exchanges with other replicas that may run beside computations, at the memory's
/// rate, are spread evenly over the role's computations: where in the iteration they fall hardly
/// matters, because every layer has its share of both.
pub(super) fn slowdown(
    plan: &Plan,
    program: &Program,
    profile: &Profile,
    roofline: &Roofline<'_>,
    templates: &[Seconds],
) -> f64 {
    if !plan.strategy.overlap {
        return 1.0;
    }
    let (mut compute, mut bytes) = (0.0, 0.0);
    for node in &program.body.nodes {
        match node.op {
            Op::Compute { segment, .. } => {
                compute += templates[program.segment(segment).template as usize].0;
            }
            Op::Collective { call, .. } => bytes += moved(plan, program.call(call), profile),
            Op::Load { .. }
            | Op::Send { .. }
            | Op::Recv { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => {}
        }
    }
    if compute > 0.0 { 1.0 + roofline.stolen(bytes).0 / compute } else { 1.0 }
}

/// Bytes that an exchange with other replicas moves through one device's memory.
///
/// In a ring, a rank reads what it sends and writes what it receives, once for each part of the
/// vector; reducing reads a second operand.
fn moved(plan: &Plan, call: &Call, profile: &Profile) -> f64 {
    if plan.group(call.group) != GroupKind::Replicas {
        return 0.0;
    }
    let gathered = profile.copies_shards && plan.strategy.zero == Zero::Parameters;
    let copy = |times: f64| if gathered { times } else { 0.0 };
    let times = match call.kind {
        // Copied out of the gathered vector: read and written.
        CollectiveKind::AllGather => 2.0 + copy(2.0),
        // Copied into the vector to be reduced: read in half its type, and written.
        CollectiveKind::ReduceScatter => 3.0 + copy(1.5),
        CollectiveKind::AllReduce => 5.0,
        CollectiveKind::Broadcast
        | CollectiveKind::Gather
        | CollectiveKind::Reduce
        | CollectiveKind::AllToAll => 2.0,
    };
    call.bytes().as_f64() * times
}

/// How much longer the slowest of so many devices takes than the average one.
///
/// Devices of one kind differ, by their silicon and by how well they are cooled, and more so at the
/// power limit (Sinha et al., "Not All GPUs Are Created Equal", SC 2022). Ranks wait for each other
/// in every iteration, so the slowest sets the pace.
pub(super) fn slowest(ranks: u32) -> f64 {
    1.0 + DEVIATION * largest_of(ranks.into())
}

/// The standard deviation of what devices of one kind sustain.
const DEVIATION: f64 = 0.01;

/// What is left of an exchange for the ranks to wait for, and what comes on top.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Exposure {
    /// The share of it that is waited for.
    pub(super) share: f64,
    /// What copies before and after it add.
    pub(super) copies: Seconds,
}

impl Exposure {
    /// All of an exchange, and nothing else.
    pub(super) const WHOLE: Self = Self { share: 1.0, copies: Seconds::ZERO };

    /// Of an exchange that takes so long.
    pub(super) fn of(&self, alone: Seconds) -> Seconds {
        alone * self.share + self.copies
    }
}

/// What software makes of a tensor-parallel exchange.
///
/// Under [`Profile::overlapped_tensor`], products and the exchanges next to them are cut into as
/// many parts as there are ranks. The first part to arrive or the last to leave is exposed, and
/// parts of a product are slower than the whole: about half of what was exposed still is.
///
/// Under [`Profile::copies_tokens`], what is exchanged is read and written once more.
pub(super) fn exposure(
    plan: &Plan,
    call: &Call,
    profile: &Profile,
    roofline: &Roofline<'_>,
) -> Exposure {
    let along_tensor = plan.group(call.group) == GroupKind::Axis(Axis::Tp);
    let cut = matches!(call.kind, CollectiveKind::AllGather | CollectiveKind::ReduceScatter);
    if !along_tensor || !cut {
        return Exposure::WHOLE;
    }
    let share = if profile.overlapped_tensor { 0.5 } else { 1.0 };
    let copied = profile.copies_tokens && plan.strategy.micro_batch > 1;
    let copies = if copied { 2.0 * call.bytes().as_f64() } else { 0.0 };
    Exposure { share, copies: roofline.stolen(copies) }
}
