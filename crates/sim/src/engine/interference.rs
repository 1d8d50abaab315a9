//! Interference of communication with compute.
//!
//! A collective is also a kernel: it reads and writes the device's memory, so concurrent
//! computations wait for theirs. If GEMMs are split into parts, exchanges overlap with them.

use crate::compute::{Roofline, largest_of};
use crate::profile::Profile;
use paceline_plan::collective::CollectiveKind;
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{Op, Plan, Program};
use paceline_plan::strategy::Zero;
use paceline_plan::units::{Bytes, Seconds};

/// Returns the slowdown factor of a role's compute from concurrent communication.
///
/// The bytes of all exchanges with other replicas that may overlap with compute are converted to
/// time at memory bandwidth and spread evenly over the role's compute. Their position in the
/// iteration hardly matters, because every layer has its share of both.
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
            Op::Collective { call, .. } => {
                let call = program.call(call);
                let exchange = (plan.group(call.group), call.kind, call.bytes());
                bytes += bytes_moved(exchange, plan.strategy.zero, profile);
            }
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

/// Returns the bytes that an exchange with other replicas moves through one device's memory.
///
/// In a ring, a rank reads the bytes it sends and writes the bytes it receives, once for each part
/// of the vector; reducing reads a second operand.
pub(crate) fn bytes_moved(
    (group, kind, bytes): (GroupKind, CollectiveKind, Bytes),
    zero: Zero,
    profile: &Profile,
) -> f64 {
    if group != GroupKind::Replicas {
        return 0.0;
    }
    let gathered = profile.copies_shards && zero == Zero::Parameters;
    let copy = |times: f64| if gathered { times } else { 0.0 };
    let times = match kind {
        // Copied out of the gathered vector: read and written.
        CollectiveKind::AllGather => 2.0 + copy(2.0),
        // Copied into the vector to be reduced: read at half the element size, and written.
        CollectiveKind::ReduceScatter => 3.0 + copy(1.5),
        CollectiveKind::AllReduce => 5.0,
        CollectiveKind::Broadcast
        | CollectiveKind::Gather
        | CollectiveKind::Reduce
        | CollectiveKind::AllToAll
        | CollectiveKind::Scatter
        | CollectiveKind::SendRecv => 2.0,
        CollectiveKind::Barrier => 0.0,
    };
    bytes.as_f64() * times
}

/// Returns the slowdown factor of the slowest of `ranks` devices relative to the average.
///
/// Devices of one kind differ by silicon and cooling, and more so at the power limit (Sinha et al.,
/// "Not All GPUs Are Created Equal", SC 2022). Ranks wait for each other in every iteration, so the
/// slowest sets the pace.
pub(crate) fn slowest(ranks: u32) -> f64 {
    1.0 + DEVIATION * largest_of(ranks.into())
}

/// Relative standard deviation of the sustained rate of devices of one kind.
const DEVIATION: f64 = 0.01;

/// Exposed part of an exchange and its additional copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Exposure {
    /// Fraction of the exchange that ranks wait for.
    pub(crate) share: f64,
    /// Time of the copies before and after it.
    pub(crate) copies: Seconds,
}

impl Exposure {
    /// The whole exchange, without copies.
    pub(crate) const WHOLE: Self = Self { share: 1.0, copies: Seconds::ZERO };

    /// Exposed time of an exchange that takes `alone`.
    pub(crate) fn of(&self, alone: Seconds) -> Seconds {
        alone * self.share + self.copies
    }
}

/// Returns the exposed part of a tensor-parallel exchange.
///
/// Under [`Profile::tp_comm_overlap`], GEMMs and the exchanges next to them are split into as many
/// parts as there are ranks. The first part to arrive or the last to leave is exposed, and the
/// parts of a GEMM are slower than the whole. About half of the exchange therefore stays exposed.
///
/// Under [`Profile::copies_tokens`], the exchanged data is read and written once more.
pub(crate) fn exposure(
    (group, kind, bytes): (GroupKind, CollectiveKind, Bytes),
    micro_batch: u64,
    profile: &Profile,
    roofline: &Roofline<'_>,
) -> Exposure {
    let along_tensor = group == GroupKind::Axis(Axis::Tp);
    let cut = matches!(kind, CollectiveKind::AllGather | CollectiveKind::ReduceScatter);
    if !along_tensor || !cut {
        return Exposure::WHOLE;
    }
    let share = if profile.tp_comm_overlap { 0.5 } else { 1.0 };
    let copied = profile.copies_tokens && micro_batch > 1;
    let copies = if copied { 2.0 * bytes.as_f64() } else { 0.0 };
    Exposure { share, copies: roofline.stolen(copies) }
}
