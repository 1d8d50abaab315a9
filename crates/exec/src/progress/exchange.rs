//! Messages and collectives of one rank: their tags and their state in flight.
//!
//! Channels: exchanges that must not mix use separate channels. A point-to-point message uses the
//! plan's channel number, which distinguishes the exchanges of two ranks. A collective uses its
//! group and its lane, whose calls run in one order on all members. Lanes are matched between roles
//! by name.

use crate::error::Fault;
use crate::memory::{Memory, within};
use crate::progress::engine::Staging;
use paceline_comm::native::mpi::{MpiCommunicator, MpiRequest, MpiWorld};
use paceline_comm::native::{Communicator, NativeOp, join_groups};
use paceline_comm::{
    ActiveCollective, CollectiveSpec, CommError, Progress, Receiving, Sending, Tag, Transport, mpi,
};
use paceline_kernels::arena::{Access, Span};
use paceline_plan::DType;
use paceline_plan::collective::{CollectiveKind, Library, Method, chunk_range};
use paceline_plan::ids::{CallId, GroupId, LaneId, Rank};
use paceline_plan::program::{Call, Peer, Plan, Program, View};
use std::collections::BTreeMap;
use std::ops::Range;

/// Communication state of one rank.
#[derive(Debug)]
pub(crate) struct CommContext<'p> {
    plan: &'p Plan,
    program: &'p Program,
    rank: Rank,
    /// Number of each lane's name among those of all roles.
    lanes: Vec<u32>,
    /// Elements of each call's vector that belong to this rank.
    own: Vec<Range<u64>>,
    /// Number of collectives begun by each group on each lane.
    begun: BTreeMap<(GroupId, LaneId), u32>,
    groups: MpiGroups,
    /// Idle collectives by call: their steps are computed only once.
    idle: Vec<Option<Box<ActiveCollective>>>,
}

/// An exchange in flight.
#[derive(Debug)]
pub(crate) enum ExchangeState {
    Send {
        state: Sending,
        data: Span,
        dtype: DType,
    },
    Receive {
        state: Receiving,
        data: Span,
        dtype: DType,
    },
    Collective {
        state: Box<ActiveCollective>,
        call: CallId,
        /// Work buffer.
        data: Span,
        dtype: DType,
        /// Output buffer of an all_to_all.
        output: Option<Span>,
        /// Source and destination of the result's copy at the end.
        result: Option<(Span, Span)>,
    },
    /// A collective that MPI performs.
    Native {
        request: MpiRequest,
        by: (GroupId, LaneId),
        /// Source and destination of the result's copy at the end.
        result: Option<(Span, Span)>,
    },
}

/// Communicators of MPI, by group and lane.
pub(crate) type MpiGroups = BTreeMap<(GroupId, LaneId), MpiCommunicator>;

/// Joins MPI's groups of a plan with the other ranks, if MPI performs any of its collectives; all do
/// this at once, in the same order.
pub(crate) fn join_mpi(plan: &Plan, rank: Rank) -> Result<MpiGroups, CommError> {
    let by_mpi = |call: &Call| call.method.library() == Some(Library::Mpi);
    if !plan.programs.iter().flat_map(|program| &program.calls).any(by_mpi) {
        return Ok(MpiGroups::new());
    }
    let mpi = mpi::joined().ok_or_else(|| {
        let problem = "the plan's collectives are MPI's, and this process has not joined MPI";
        CommError::Job { problem: problem.into() }
    })?;
    let lanes = &plan.program(rank).lanes;
    let groups = join_groups(&mut MpiWorld::new(mpi), plan, rank)?.into_iter();
    let own = groups.filter_map(|((group, name), communicator)| {
        let lane = lanes.iter().position(|known| known == name)?;
        Some(((group, LaneId::from(lane)), communicator))
    });
    Ok(own.collect())
}

impl<'p> CommContext<'p> {
    pub(crate) fn new(plan: &'p Plan, rank: Rank, groups: MpiGroups) -> Self {
        let program = plan.program(rank);
        let mut names: Vec<&String> = plan.programs.iter().flat_map(|p| &p.lanes).collect();
        names.sort_unstable();
        names.dedup();
        let number = |name: &String| names.binary_search(&name).unwrap_or(0) as u32;
        let own = |call: &Call| {
            let members = plan.mesh.members(plan.group(call.group), rank);
            let me = members.iter().position(|&member| member == rank).unwrap_or(0);
            chunk_range(call.elements(), members.len() as u32, me as u32, call.block)
        };
        Self {
            plan,
            program,
            rank,
            lanes: program.lanes.iter().map(number).collect(),
            own: program.calls.iter().map(own).collect(),
            begun: BTreeMap::new(),
            groups,
            idle: program.calls.iter().map(|_| None).collect(),
        }
    }

    /// Begins to send a message.
    pub(crate) fn send(
        &self,
        to: Peer,
        channel: u16,
        (data, dtype): (Span, DType),
        running: u64,
    ) -> Result<ExchangeState, Fault> {
        let to = self.plan.peer(self.rank, to).ok_or(Fault::NoPeer)?;
        Ok(ExchangeState::Send {
            state: Sending::start(to, message(channel, running)),
            data,
            dtype,
        })
    }

    /// Begins to receive a message.
    pub(crate) fn receive(
        &self,
        from: Peer,
        channel: u16,
        (data, dtype): (Span, DType),
        running: u64,
    ) -> Result<ExchangeState, Fault> {
        let from = self.plan.peer(self.rank, from).ok_or(Fault::NoPeer)?;
        Ok(ExchangeState::Receive {
            state: Receiving::start(from, message(channel, running)),
            data,
            dtype,
        })
    }

    /// Begins a collective.
    pub(crate) fn collective(
        &mut self,
        memory: &Memory<'_>,
        id: CallId,
        lane: LaneId,
        running: u64,
    ) -> Result<ExchangeState, Fault> {
        let call = self.program.call(id);
        if let Some(op) = NativeOp::of(call)
            && let Some(group) = self.groups.get_mut(&(call.group, lane))
        {
            let own = self.own[id.index()].clone();
            let Buffers { copied, data, output, result } = Buffers::of(memory, call, own, running);
            copied.map_or(Ok(()), |(from, to)| memory.copy(from, to))?;
            let output = output.map(|span| memory.lend(span)).transpose()?;
            let request = group.start(&op, call.dtype, memory.lend(data)?, output, &())?;
            return Ok(ExchangeState::Native { request, by: (call.group, lane), result });
        }
        let begun = self.begun.entry((call.group, lane)).or_default();
        let channel = COLLECTIVE | self.lanes[lane.index()] << 16 | u32::from(call.group.0);
        let tag = Tag::new(channel, *begun);
        *begun = begun.wrapping_add(1);
        let state = match self.idle[id.index()].take() {
            Some(mut state) => {
                state.restart(tag);
                state
            }
            None => self.prepare(call, tag)?,
        };
        let own = self.own[id.index()].clone();
        let Buffers { copied, data, output, result } = Buffers::of(memory, call, own, running);
        copied.map_or(Ok(()), |(from, to)| memory.copy(from, to))?;
        let dtype = call.dtype;
        Ok(ExchangeState::Collective { state, call: id, data, dtype, output, result })
    }

    /// Memory that a collective reads and writes.
    pub(crate) fn staging(&self, memory: &Memory<'_>, id: CallId, running: u64) -> Staging {
        let call = self.program.call(id);
        let (input, output) = (memory.span(call.input, running), memory.span(call.output, running));
        let gathers = matches!(call.kind, CollectiveKind::AllGather | CollectiveKind::Gather);
        // Of a whole vector, a gather reads this rank's part.
        let read = match gathers && call.input.len == call.elements() {
            true => within(input, call.dtype, self.own[id.index()].clone()),
            false => input,
        };
        Staging { read: Some(read), written: Some(output) }
    }

    /// Collective that a library performs; `None` if the plan's steps do.
    pub(crate) fn native_collective(
        &self,
        memory: &Memory<'_>,
        (id, lane): (CallId, LaneId),
        running: u64,
    ) -> Option<NativeExchange> {
        let call = self.program.call(id);
        let op = NativeOp::of(call)?;
        let buffers = Buffers::of(memory, call, self.own[id.index()].clone(), running);
        let by = CommunicatorKey::Group(call.group, lane);
        Some(NativeExchange { by, op, dtype: call.dtype, buffers })
    }

    /// Message that a library carries, to or from a peer; `None` if the transport does.
    pub(crate) fn native_message(
        &self,
        (peer, sends): (Peer, bool),
        channel: u16,
        (data, dtype): (Span, DType),
    ) -> Option<Result<NativeExchange, Fault>> {
        self.plan.messages?;
        let buffers = Buffers { copied: None, data, output: None, result: None };
        Some(self.plan.peer(self.rank, peer).ok_or(Fault::NoPeer).map(|peer| {
            let (from, to) = if sends { (self.rank, peer) } else { (peer, self.rank) };
            let op = if sends { NativeOp::Send { to: 1 } } else { NativeOp::Recv { from: 0 } };
            let by = CommunicatorKey::Messages { from, to, channel };
            NativeExchange { by, op, dtype, buffers }
        }))
    }

    /// Keeps the reusable state of a finished collective.
    pub(crate) fn keep(&mut self, state: ExchangeState) {
        match state {
            ExchangeState::Collective { state, call, .. } => self.idle[call.index()] = Some(state),
            ExchangeState::Send { .. }
            | ExchangeState::Receive { .. }
            | ExchangeState::Native { .. } => {}
        }
    }

    /// Advances an exchange as far as possible without blocking.
    pub(crate) fn progress(
        &mut self,
        state: &mut ExchangeState,
        transport: &mut dyn Transport,
        memory: &Memory<'_>,
    ) -> Result<Progress, Fault> {
        let ExchangeState::Native { request, by, result } = state else {
            return state.progress(transport, memory);
        };
        let missing = Fault::NoCommunicator { library: Library::Mpi };
        let group = self.groups.get_mut(by).ok_or(missing)?;
        // MPI moves data only while it is called, and a little with each call.
        for _ in 0..TESTS {
            if group.test(request)? {
                result.map_or(Ok(()), |(from, to)| memory.copy(from, to))?;
                return Ok(Progress::Done);
            }
        }
        let members = self.plan.mesh.members(self.plan.group(by.0), self.rank);
        let on = members.into_iter().find(|member| *member != self.rank).unwrap_or(self.rank);
        Ok(Progress::Pending { on, step: 0, moved: 0 })
    }

    /// Tells MPI's groups that this rank cannot continue.
    pub(crate) fn abort(&mut self, reason: &str) {
        self.groups.values_mut().for_each(|group| group.abort(reason));
    }

    fn prepare(&self, call: &Call, tag: Tag) -> Result<Box<ActiveCollective>, Fault> {
        let algorithm = match call.method {
            Method::Steps(algorithm) => algorithm,
            Method::Library { library, .. } => return Err(Fault::NoCommunicator { library }),
        };
        let members = self.plan.mesh.members(self.plan.group(call.group), self.rank);
        let spec = CollectiveSpec {
            kind: call.kind,
            algorithm,
            order: call.order,
            reduction: call.reduction,
            root: call.root,
            block: call.block,
        };
        Ok(Box::new(ActiveCollective::start(&spec, &members, self.rank, tag)?))
    }
}

/// Buffers of a collective. All collectives work in place, on the whole vector.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    /// Copy of the input to the work buffer, at the start.
    pub(crate) copied: Option<(Span, Span)>,
    /// The work buffer.
    pub(crate) data: Span,
    /// Output buffer of an all_to_all.
    pub(crate) output: Option<Span>,
    /// Copy of the result, at the end.
    pub(crate) result: Option<(Span, Span)>,
}

impl Buffers {
    /// Buffers of a call; `own` is this rank's part of the vector.
    fn of(memory: &Memory<'_>, call: &Call, own: Range<u64>, running: u64) -> Self {
        let (input, output) = (memory.span(call.input, running), memory.span(call.output, running));
        let in_place = call.input == call.output;
        // A view shorter than the whole vector holds this rank's part.
        let part_of = |view: View, span: Span| {
            if view.len == call.elements() { within(span, call.dtype, own.clone()) } else { span }
        };
        let none = Self { copied: None, data: output, output: None, result: None };
        match call.kind {
            CollectiveKind::AllReduce | CollectiveKind::Reduce | CollectiveKind::Broadcast => {
                Self { copied: (!in_place).then_some((input, output)), ..none }
            }
            CollectiveKind::AllGather | CollectiveKind::Gather => {
                let part = || within(output, call.dtype, own.clone());
                let copied = (!in_place).then(|| (part_of(call.input, input), part()));
                Self { copied, ..none }
            }
            CollectiveKind::ReduceScatter | CollectiveKind::Scatter => {
                let part = || within(input, call.dtype, own.clone());
                let result = (!in_place).then(|| (part(), part_of(call.output, output)));
                Self { data: input, result, ..none }
            }
            CollectiveKind::AllToAll | CollectiveKind::SendRecv => {
                Self { data: input, output: Some(output), ..none }
            }
            CollectiveKind::Barrier => none,
        }
    }
}

/// Communicator of a library: that of a group on a lane, or of two ranks for the messages of a channel
/// from one to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CommunicatorKey {
    Group(GroupId, LaneId),
    Messages { from: Rank, to: Rank, channel: u16 },
}

/// Exchange that a library performs in the memory of a device.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "GPUs queue exchanges of a library"))]
pub(crate) struct NativeExchange {
    pub(crate) by: CommunicatorKey,
    pub(crate) op: NativeOp,
    pub(crate) dtype: DType,
    pub(crate) buffers: Buffers,
}

impl ExchangeState {
    /// Advances as far as possible without blocking. Memory is borrowed during this call only.
    pub(crate) fn progress(
        &mut self,
        transport: &mut dyn Transport,
        memory: &Memory<'_>,
    ) -> Result<Progress, Fault> {
        match self {
            Self::Send { state, data, dtype } => {
                let views = memory.views(&[(*data, Access::Read)])?;
                Ok(state.progress_bytes(transport, *dtype, views.bytes(0))?)
            }
            Self::Receive { state, data, dtype } => {
                let views = memory.views(&[(*data, Access::Write)])?;
                Ok(state.progress_bytes(transport, *dtype, views.take_bytes(0))?)
            }
            Self::Collective { state, data, dtype, output, result, call: _ } => {
                let progress = match *output {
                    None => {
                        let views = memory.views(&[(*data, Access::Write)])?;
                        state.progress_bytes(transport, *dtype, views.take_bytes(0), None)?
                    }
                    Some(output) => {
                        let spans = [(*data, Access::Write), (output, Access::Write)];
                        let views = memory.views(&spans)?;
                        let output = Some(views.take_bytes(1));
                        state.progress_bytes(transport, *dtype, views.take_bytes(0), output)?
                    }
                };
                if let (Progress::Done, Some((from, to))) = (progress, *result) {
                    memory.copy(from, to)?;
                }
                Ok(progress)
            }
            Self::Native { .. } => Err(Fault::NoCommunicator { library: Library::Mpi }),
        }
    }
}

/// Number of times that MPI is asked for a request in a row.
const TESTS: u32 = 8;

/// Bit set in the channels of collectives, and not in those of messages.
const COLLECTIVE: u32 = 1 << 31;

/// Tag of a message; its sequence number is that of the microbatch, over all iterations.
pub(crate) fn message(channel: u16, running: u64) -> Tag {
    Tag::new(u32::from(channel), running as u32)
}
