//! Exchanges that NCCL performs on the streams of lanes.

use super::Cuda;
use crate::device::{Setup, Stream};
use crate::error::Fault;
use crate::progress::exchange::{CommunicatorKey, NativeExchange};
use paceline_comm::native::nccl::{Nccl, NcclCommunicator, NcclWorld};
use paceline_comm::native::{Communicator, NativeOp, NativeWorld, join_groups};
use paceline_comm::{CommError, Transport};
use paceline_plan::collective::{Algorithm, CollectiveKind};
use paceline_plan::ids::{LaneId, Rank};
use paceline_plan::program::{Op, Plan};
use std::collections::{BTreeMap, BTreeSet};
use std::env;

/// Communicators of a rank.
pub(super) type Communicators = BTreeMap<CommunicatorKey, NcclCommunicator>;

/// Joins NCCL's groups of a plan with the other ranks; all do this at once, in the same order.
pub(super) fn join(
    cuda: &mut Cuda,
    setup: &Setup<'_, Cuda>,
    transport: &mut dyn Transport,
) -> Result<Communicators, Fault> {
    let (plan, me) = (setup.plan, transport.rank());
    let calls = || plan.programs.iter().flat_map(|program| &program.calls);
    if plan.messages.is_none() && !calls().any(|call| NativeOp::of(call).is_some()) {
        return Ok(Communicators::new());
    }
    let forced = calls().any(|call| {
        let forced = NativeOp::Collective {
            kind: call.kind,
            reduction: call.reduction,
            root: call.root,
            forced: Some(Algorithm::Ring),
        };
        NativeOp::of(call) == Some(forced)
    });
    if forced && env::var("NCCL_ALGO").as_deref() != Ok("Ring") {
        let problem = "NCCL uses the ring for all collectives if NCCL_ALGO=Ring is set on every \
                       rank before the start; set it, or leave out --collective";
        return Err(CommError::Job { problem: problem.into() }.into());
    }
    let timeout = setup.options.exchange_timeout;
    let mut world = NcclWorld::new(Nccl::load()?, transport, cuda.gpu.binding(), timeout);
    let lanes = &plan.program(me).lanes;
    let mut joined = Communicators::new();
    let (queue, room) = (cuda.gpu.handle(0), vec![0; 2 * plan.mesh.world() as usize]);
    let room = cuda.gpu.table(&room)?;
    let room = cuda.gpu.bytes_of_table(room);
    for ((group, lane), mut communicator) in join_groups(&mut world, plan, me)? {
        let sends = |kind| {
            matches!(
                kind,
                CollectiveKind::AllToAll
                    | CollectiveKind::Gather
                    | CollectiveKind::Scatter
                    | CollectiveKind::SendRecv
            )
        };
        if calls().any(|call| call.group == group && sends(call.kind)) {
            communicator.connect(room, &queue)?;
        }
        if let Some(lane) = lanes.iter().position(|known| known == lane) {
            joined.insert(CommunicatorKey::Group(group, LaneId::from(lane)), communicator);
        }
    }
    for (from, to, channel) in messages(plan) {
        if let Some(mut communicator) = world.group(&[from, to])? {
            communicator.connect(room, &queue)?;
            joined.insert(CommunicatorKey::Messages { from, to, channel }, communicator);
        }
    }
    Ok(joined)
}

/// Senders, receivers and channels of all messages of a plan that the library carries.
fn messages(plan: &Plan) -> BTreeSet<(Rank, Rank, u16)> {
    let mut found = BTreeSet::new();
    if plan.messages.is_none() {
        return found;
    }
    for from in (0..plan.mesh.world()).map(Rank) {
        let program = plan.program(from);
        let sections = [&program.prologue, &program.body, &program.epilogue];
        for node in sections.into_iter().flat_map(|section| &section.nodes) {
            if let Op::Send { to, channel, .. } = node.op
                && let Some(to) = plan.peer(from, to)
            {
                found.insert((from, to, channel));
            }
        }
    }
    found
}

impl Cuda {
    /// Queues an exchange, with the copies around it.
    pub(super) fn queue(&mut self, on: Stream, native: &NativeExchange) -> Result<(), Fault> {
        let NativeExchange { by, op, dtype, buffers } = native;
        let written = [Some(buffers.data), buffers.output, buffers.result.map(|(_, to)| to)];
        written.into_iter().flatten().for_each(|span| self.write(span));
        if let Some((from, to)) = buffers.copied {
            self.gpu.copy(on, from, to)?;
        }
        let data = self.gpu.bytes_of(buffers.data)?;
        let output = buffers.output.map(|span| self.gpu.bytes_of(span)).transpose()?;
        let queue = self.gpu.handle(on);
        let missing = || CommError::Job { problem: format!("there is no communicator {by:?}") };
        let communicator = self.communicators.get_mut(by).ok_or_else(missing)?;
        communicator.start(op, *dtype, data, output, &queue)?;
        if let Some((from, to)) = buffers.result {
            self.gpu.copy(on, from, to)?;
        }
        Ok(())
    }
}
