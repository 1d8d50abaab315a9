//! The plan: per role, a program of ops on lanes, over buffers with planned addresses.
//!
//! Ranks that run the same program share it (a *role*): all ranks of one pipeline stage, whatever
//! their data-, context- and tensor-parallel coordinates. Each parameter server is a separate role.
//! Peers and groups are therefore named relative to the rank that reads the program.
//!
//! **Lanes.** Ops are listed in the order of their section. Two ops of one lane run in that order;
//! an op also waits for the ops in its `after` list. Nothing else orders them, so all possible
//! overlap is visible here.
//!
//! **Copies.** Activations of several microbatches are live at once, so a buffer may have several
//! copies. An op of running microbatch k uses copy k mod copies of each buffer it names, where k =
//! iteration × microbatches of an iteration + the op's own microbatch index. That index may exceed
//! the iteration: a pipeline without flush runs ahead. The epilogue counts as the iteration after
//! the last.

mod bucket;
mod expert_buffers;
mod facts;
mod iteration_filter;
pub mod label;
mod memory;
mod template;

pub use bucket::{Bucket, Entry, TensorNorms};
pub use expert_buffers::ExpertBuffers;
pub use facts::{Facts, Numbering, Pacing};
pub use iteration_filter::IterationFilter;
pub use memory::{ALIGNMENT, Buffer, Memory, MemoryKind};
pub use template::{Access, ComputePass, LocalOp, Operand, Segment, Template};

use crate::collective::{
    CollectiveError, CollectiveKind, Library, Method, Pattern, Reduction, SummationOrder,
};
use crate::dtype::DType;
use crate::ids::{
    BufferId, CallId, GroupId, LaneId, Microbatch, OpId, Rank, RoleId, SegmentId, StageRank,
};
use crate::mesh::{Axis, GroupKind, Mesh};
use crate::samples::SampleKind;
use crate::strategy::Strategy;
use crate::units::{Bytes, Seconds};
use serde::{Deserialize, Serialize};

/// Minimum duration of a compute op for a hand-off to the progress thread. A shorter op ends before
/// a second thread is awake, so the rank's messages wait for its end. Both the executor and the
/// simulator use it.
pub const PROGRESS_HANDOFF_MIN: Seconds = Seconds(200e-6);

/// Programs of all ranks, with all buffer addresses.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Name of the model.
    pub model: String,
    /// Strategy that this plan implements.
    pub strategy: Strategy,
    /// Mesh of ranks.
    pub mesh: Mesh,
    /// Groups that calls refer to by [`GroupId`].
    pub groups: Vec<GroupKind>,
    /// Distinct computations that segments refer to; equal layers share them.
    pub templates: Vec<Template>,
    /// One program per role: pipeline ranks first, then servers.
    pub programs: Vec<Program>,
    /// Names of the model's layers.
    pub layers: Vec<String>,
    /// Number of trained parameters of the model, tied tables counted once.
    pub parameters: u64,
    /// Samples that the model reads.
    pub samples: SampleKind,
    /// Number of tensors in the gradient norm, over all stages.
    pub norm_entries: u32,
    /// Library that carries sends and receives; otherwise the ranks' transport does.
    pub messages: Option<Library>,
}

impl Plan {
    /// Role of a rank.
    pub fn role(&self, rank: Rank) -> RoleId {
        match self.mesh.coordinates(rank) {
            Some(at) => RoleId(at.pp),
            None => RoleId(self.mesh.pp + (rank.0 - self.mesh.size())),
        }
    }

    /// Program of a rank.
    pub fn program(&self, rank: Rank) -> &Program {
        &self.programs[self.role(rank).index()]
    }

    /// First rank of a role; the others run the same program at other coordinates.
    pub fn representative(&self, role: RoleId) -> Rank {
        if role.0 < self.mesh.pp {
            self.mesh.stage(role.0).next().unwrap_or_default()
        } else {
            Rank(self.mesh.size() + role.0 - self.mesh.pp)
        }
    }

    /// Number of iterations by which an op may run ahead of its own iteration: zero, unless
    /// iterations overlap.
    pub fn iterations_ahead(&self) -> u32 {
        let bodies = self.programs.iter().flat_map(|program| &program.body.nodes);
        let most = bodies.filter_map(|node| node.op.microbatch()).max().unwrap_or_default();
        most.0 / self.strategy.microbatches().max(1)
    }

    /// Returns true if replicas make local steps, so that their masters and moments differ.
    pub fn states_differ(&self) -> bool {
        self.strategy.local.is_some()
    }

    /// Ranks that hold the same parameters of a bucket.
    pub fn holders(&self, bucket: &Bucket) -> GroupKind {
        let experts = bucket.entries.first().is_some_and(|entry| entry.experts > 0);
        match experts && self.strategy.has_separate_experts() {
            true => GroupKind::Axis(Axis::Edp),
            false => GroupKind::Replicas,
        }
    }

    /// Kind of a group.
    pub fn group(&self, id: GroupId) -> GroupKind {
        self.groups[id.index()]
    }

    /// Rank that `peer` denotes for this rank; `None` if there is none (a server's neighbour).
    pub fn peer(&self, rank: Rank, peer: Peer) -> Option<Rank> {
        let along = |axis: Axis, step: u32| {
            let members = self.mesh.members(GroupKind::Axis(axis), rank);
            let me = members.iter().position(|&r| r == rank)?;
            members.get((me + step as usize) % members.len()).copied()
        };
        match peer {
            Peer::Stage(stage) => {
                let mut at = self.mesh.coordinates(rank)?;
                at.pp = u32::from(stage.0);
                (at.pp < self.mesh.pp).then(|| self.mesh.rank(at))
            }
            Peer::Next(axis) => along(axis, 1),
            Peer::Previous(axis) => along(axis, self.mesh.axis(axis).checked_sub(1)?),
            Peer::Server(k) => (k < self.mesh.servers).then(|| Rank(self.mesh.size() + k)),
            Peer::Replica(k) => (k < self.mesh.size()).then_some(Rank(k)),
        }
    }
}

/// Program of one role.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Display name: `stage 3 (layers 12..16)`.
    pub name: String,
    /// Lanes, by [`LaneId`]; the first is the compute lane.
    pub lanes: Vec<String>,
    /// Buffers, by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// Groups of buffers that are freed together, by index.
    pub frames: Vec<Vec<BufferId>>,
    /// Segments that compute ops run, by [`SegmentId`].
    pub segments: Vec<Segment>,
    /// Collectives that collective ops run, by [`CallId`].
    pub calls: Vec<Call>,
    /// Parameters with their gradients and optimizer state, in units of reduction.
    pub buckets: Vec<Bucket>,
    /// Services of asynchronous servers.
    pub services: Vec<Service>,
    /// Runs once before the first iteration.
    pub prologue: Section,
    /// Runs in every iteration.
    pub body: Section,
    /// Runs once after the last iteration.
    pub epilogue: Section,
    /// Ops of the body that may complete after the next body has started.
    pub in_flight: Vec<CarryoverOp>,
    /// Buffers of the iteration's results.
    pub outputs: Outputs,
    /// Size of the arena by kind of contents.
    pub memory: Memory,
}

/// An op of the body that may still run when the next body starts: an early receive (PipeDream), or
/// a weight gather that overlaps with the next forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarryoverOp {
    /// The op.
    pub op: OpId,
    /// Ops of the next body that wait for it, besides those after it on its lane. The epilogue
    /// waits for everything.
    pub before: Vec<OpId>,
}

/// Results of an iteration that are reported to the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outputs {
    /// Sum of all tokens' losses, on the ranks that have it.
    pub loss: Option<BufferId>,
    /// Norm of the gradient.
    pub norm: Option<BufferId>,
    /// Number of expert choices dropped for lack of capacity, over all layers.
    pub dropped: Option<BufferId>,
}

impl Program {
    /// Buffer with the given id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.index()]
    }

    /// Segment with the given id.
    pub fn segment(&self, id: SegmentId) -> &Segment {
        &self.segments[id.index()]
    }

    /// Collective with the given id.
    pub fn call(&self, id: CallId) -> &Call {
        &self.calls[id.index()]
    }

    /// Number of bytes that an op moves to or from the offload store; `None` for other ops.
    pub fn offloaded(&self, op: &Op) -> Option<Bytes> {
        let (inside, rests) = match *op {
            Op::Stash { from, into, .. } => (from, into),
            Op::Restore { from, into, .. } => (into, from),
            Op::Load { .. }
            | Op::Compute { .. }
            | Op::Send { .. }
            | Op::Recv { .. }
            | Op::Collective { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => return None,
        };
        let stored = self.buffer(rests.buffer).kind == MemoryKind::Offloaded;
        stored.then(|| Bytes(inside.len * self.buffer(inside.buffer).dtype.size()))
    }
}

/// A part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The buffer.
    pub buffer: BufferId,
    /// First element within a copy.
    pub offset: u64,
    /// Number of elements.
    pub len: u64,
}

/// A collective that a role takes part in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Name for display and traces: `all_reduce blocks.3.x tp`.
    pub name: String,
    /// Kind of collective.
    pub kind: CollectiveKind,
    /// Operation that combines contributions, if the kind reduces.
    pub reduction: Reduction,
    /// Steps or library that carry it out.
    pub method: Method,
    /// Order of summation.
    pub order: SummationOrder,
    /// Group of ranks that take part.
    pub group: GroupId,
    /// Index of the root in the group, if the kind has one.
    pub root: u32,
    /// Input. For `all_gather`, this rank's part (or, in place, the whole vector).
    pub input: View,
    /// Output. For `reduce_scatter`, this rank's part (or, in place, the whole vector). Equal to
    /// `input` if the call works in place.
    pub output: View,
    /// Element type of the messages.
    pub dtype: DType,
    /// Parts are split at multiples of this number of elements.
    pub block: u64,
}

impl Call {
    /// Pattern of the call in a group of `ranks` ranks; see [`Method::pattern`].
    pub fn pattern(&self, ranks: u32) -> Result<Pattern, CollectiveError> {
        self.method.pattern(self.kind, self.order, ranks, self.root)
    }

    /// Number of elements of the whole vector.
    pub fn elements(&self) -> u64 {
        self.input.len.max(self.output.len)
    }

    /// Number of bytes of the whole vector.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.elements() * self.dtype.size())
    }
}

/// Contract of an asynchronous server: the only data-dependent op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Ranks that it serves, in the group's order.
    pub group: GroupId,
    /// View that it receives from each peer, per request.
    pub receives: View,
    /// View that it sends back.
    pub sends: View,
    /// Average number of requests per peer in one run of the section. A fast peer may take the turn
    /// of a slow one; over a whole run every request is answered.
    pub requests: u32,
    /// Maximum lead in iterations of the fastest peer over the slowest (`None`: no bound).
    pub staleness: Option<u32>,
}

/// An ordered list of ops.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// Ops, by [`OpId`].
    pub nodes: Vec<Node>,
    /// The `after` lists, concatenated.
    pub edges: Vec<OpId>,
}

impl Section {
    /// Ops that must complete before this one starts, besides those before it on its lane.
    pub fn after(&self, op: OpId) -> &[OpId] {
        let node = &self.nodes[op.index()];
        &self.edges[node.after_start as usize..][..node.after_len as usize]
    }

    /// Adds an op.
    pub fn push(&mut self, lane: LaneId, op: Op, after: &[OpId]) -> OpId {
        let id = OpId::from(self.nodes.len());
        let after_start = u32::try_from(self.edges.len()).expect("fewer than 2^32 edges");
        let after_len = u16::try_from(after.len()).expect("fewer than 2^16 edges of one op");
        self.edges.extend_from_slice(after);
        self.nodes.push(Node { lane, op, filter: IterationFilter::All, after_start, after_len });
        id
    }

    /// Adds an op that does not run in every iteration.
    pub fn push_filtered(
        &mut self,
        turn: IterationFilter,
        lane: LaneId,
        op: Op,
        after: &[OpId],
    ) -> OpId {
        let id = self.push(lane, op, after);
        self.nodes[id.index()].filter = turn;
        id
    }
}

/// An op on its lane.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Lane of the op.
    pub lane: LaneId,
    /// The op.
    pub op: Op,
    /// Iterations in which it runs.
    pub filter: IterationFilter,
    after_start: u32,
    after_len: u16,
}

/// Another rank, named relative to this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Peer {
    /// The rank with the same coordinates on another pipeline rank.
    Stage(StageRank),
    /// The next rank along an axis, with wrap-around.
    Next(Axis),
    /// The previous rank along an axis, with wrap-around.
    Previous(Axis),
    /// A parameter server.
    Server(u32),
    /// A rank of the mesh, from the view of a server.
    Replica(u32),
}

/// Kind of data that a load reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadKind {
    /// Input token ids of the model.
    Tokens,
    /// Input features of the model, e.g. pixels.
    Features,
    /// Prediction targets.
    Targets,
    /// Token ids the given number of positions after the input tokens.
    Lookahead(u16),
}

/// Treatment of the previous value by an accumulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccumulateMode {
    /// `into` = `into` + `from`.
    Add,
    /// `into` = `from`.
    Move,
}

/// Phase of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepPhase {
    /// Updates the moments and sums squares of weights and directions into the bucket's
    /// [`TensorNorms`]. Weights stay unchanged.
    TensorNorms,
    /// Changes the weights; the only phase if the optimizer needs no tensor norms.
    Apply,
    /// Converts this rank's gradient contribution into its contribution to the next first moment.
    LocalMomentum,
    /// Changes the weights by the first moment, which is in the gradient buffer.
    ApplyMomentum,
}

impl StepPhase {
    /// Name of such an op in programs and messages.
    pub const fn word(self) -> &'static str {
        match self {
            Self::TensorNorms => "tensor_norms",
            Self::Apply => "step",
            Self::LocalMomentum => "local_momentum",
            Self::ApplyMomentum => "apply_momentum",
        }
    }
}

/// The closed set of ops. Executor and simulator match it exhaustively.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Loads a microbatch's data.
    Load {
        /// Kind of data.
        what: LoadKind,
        /// Destination.
        into: BufferId,
        /// Microbatch of the data.
        microbatch: Microbatch,
    },
    /// Runs a segment.
    Compute {
        /// The segment.
        segment: SegmentId,
        /// Microbatch it runs on.
        microbatch: Microbatch,
        /// True if accumulated operands start from zero.
        fresh: bool,
    },
    /// Sends a view. The receiver's `Recv` names the same channel and microbatch.
    Send {
        /// Receiver.
        to: Peer,
        /// Distinguishes the messages of two ranks.
        channel: u16,
        /// Data to send.
        view: View,
        /// Microbatch of the data.
        microbatch: Microbatch,
    },
    /// Receives into a view.
    Recv {
        /// Sender.
        from: Peer,
        /// Channel of the sender.
        channel: u16,
        /// Destination.
        view: View,
        /// Microbatch of the data.
        microbatch: Microbatch,
    },
    /// Takes part in a collective.
    Collective {
        /// The collective.
        call: CallId,
        /// Microbatch it runs on.
        microbatch: Microbatch,
    },
    /// Adds one buffer to another, element-wise, or copies it.
    Accumulate {
        /// Source.
        from: View,
        /// Destination.
        into: View,
        /// Treatment of the previous value of `into`.
        mode: AccumulateMode,
    },
    /// Updates a bucket's parameters from its gradients.
    Step {
        /// Index in [`Program::buckets`].
        bucket: u32,
        /// Phase of the update.
        phase: StepPhase,
    },
    /// Saves a copy: a microbatch's version of parameters, or offloaded data.
    Stash {
        /// Source.
        from: View,
        /// Buffer of the saved copy.
        into: View,
        /// Microbatch of the data.
        microbatch: Microbatch,
    },
    /// Restores a saved copy.
    Restore {
        /// Buffer of the saved copy.
        from: View,
        /// Destination.
        into: View,
        /// Microbatch of the data.
        microbatch: Microbatch,
    },
    /// Frees a frame's copies of this microbatch.
    Free {
        /// Index in [`Program::frames`].
        frame: u32,
        /// Microbatch of the copies.
        microbatch: Microbatch,
    },
    /// Answers requests in order of arrival.
    Serve {
        /// Index in [`Program::services`].
        service: u32,
    },
}

impl Op {
    /// Microbatch of the op, if any.
    pub fn microbatch(&self) -> Option<Microbatch> {
        match *self {
            Self::Load { microbatch, .. }
            | Self::Compute { microbatch, .. }
            | Self::Send { microbatch, .. }
            | Self::Recv { microbatch, .. }
            | Self::Collective { microbatch, .. }
            | Self::Stash { microbatch, .. }
            | Self::Restore { microbatch, .. }
            | Self::Free { microbatch, .. } => Some(microbatch),
            Self::Accumulate { .. } | Self::Step { .. } | Self::Serve { .. } => None,
        }
    }

    /// Call of the op, if it is a collective.
    pub fn call(&self) -> Option<CallId> {
        match *self {
            Self::Collective { call, .. } => Some(call),
            Self::Load { .. }
            | Self::Compute { .. }
            | Self::Send { .. }
            | Self::Recv { .. }
            | Self::Accumulate { .. }
            | Self::Step { .. }
            | Self::Stash { .. }
            | Self::Restore { .. }
            | Self::Free { .. }
            | Self::Serve { .. } => None,
        }
    }
}
