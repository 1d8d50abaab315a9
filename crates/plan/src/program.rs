//! The plan: per role, a program of ops on lanes, over buffers with planned addresses.
//!
//! Ranks that run the same program share it (a *role*): all ranks of one pipeline stage, whatever
//! their data-, context- and tensor-parallel coordinates; each parameter server is a role of its own.
//! Peers and groups are therefore named relative to the rank that reads the program.
//!
//! **Lanes.** Ops stand in the order of their section. Two ops of one lane run in that order; an op
//! also waits for the ops named in its `after` list. Nothing else orders them: what may overlap is
//! visible here.
//!
//! **Copies.** Activations of several microbatches are alive at once, so a buffer may have several
//! copies. An op of running microbatch k works on copy k mod copies of each buffer it names, where
//! k = iteration × microbatches of an iteration + the op's own number. That number may reach beyond the
//! iteration: a pipeline without flush runs ahead. The epilogue counts as the iteration after the last.

mod bucket;
mod memory;
mod turn;

pub use bucket::{Bucket, Entry, Gauge};
pub use memory::{ALIGNMENT, Buffer, Memory, MemoryKind};
pub use turn::Turn;

use crate::collective::{Algorithm, CollectiveKind, Order, Reduction};
use crate::dtype::DType;
use crate::graph::{OpKind, Part};
use crate::ids::{
    BufferId, CallId, GroupId, LaneId, LayerId, Microbatch, OpId, Rank, RoleId, SegmentId,
    StageRank,
};
use crate::mesh::{Axis, GroupKind, Mesh};
use crate::strategy::Strategy;
use crate::units::{Bytes, Seconds};
use serde::{Deserialize, Serialize};

/// An op that takes less is over before a second thread is awake: a rank's messages wait for its end. The
/// executor goes by it, and whoever predicts what an executor does.
pub const WORTH_A_THREAD: Seconds = Seconds(200e-6);

/// What every rank does, and where everything lies.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The model's name.
    pub model: String,
    /// The choices that this plan follows.
    pub strategy: Strategy,
    /// The grid of ranks.
    pub mesh: Mesh,
    /// Groups that calls refer to by [`GroupId`].
    pub groups: Vec<GroupKind>,
    /// Distinct computations that segments refer to; equal layers share them.
    pub templates: Vec<Template>,
    /// One program per role: pipeline ranks first, then servers.
    pub programs: Vec<Program>,
    /// Names of the model's layers.
    pub layers: Vec<String>,
    /// Trained parameters of the model, tied tables counted once.
    pub parameters: u64,
    /// Tensors whose squares make up the gradient's norm, over all stages.
    pub norm_entries: u32,
}

impl Plan {
    /// The role that a rank plays.
    pub fn role(&self, rank: Rank) -> RoleId {
        match self.mesh.coordinates(rank) {
            Some(at) => RoleId(at.pp),
            None => RoleId(self.mesh.pp + (rank.0 - self.mesh.size())),
        }
    }

    /// A rank's program.
    pub fn program(&self, rank: Rank) -> &Program {
        &self.programs[self.role(rank).index()]
    }

    /// The first rank that plays a role; the others do the same at other coordinates.
    pub fn representative(&self, role: RoleId) -> Rank {
        if role.0 < self.mesh.pp {
            Rank(role.0 * self.mesh.stride(Axis::Pp))
        } else {
            Rank(self.mesh.size() + role.0 - self.mesh.pp)
        }
    }

    /// By how many iterations an op may be ahead of the iteration that it stands in: none, unless
    /// iterations run into each other.
    pub fn iterations_ahead(&self) -> u32 {
        let bodies = self.programs.iter().flat_map(|program| &program.body.nodes);
        let most = bodies.filter_map(|node| node.op.microbatch()).max().unwrap_or_default();
        most.0 / self.strategy.microbatches().max(1)
    }

    /// Whether replicas make steps of their own, so that their masters and moments differ.
    pub fn states_differ(&self) -> bool {
        self.strategy.local.is_some()
    }

    /// The ranks that hold the same of a bucket.
    pub fn holders(&self, bucket: &Bucket) -> GroupKind {
        let experts = bucket.entries.first().is_some_and(|entry| entry.experts > 0);
        match experts && self.strategy.experts_apart() {
            true => GroupKind::Axis(Axis::Edp),
            false => GroupKind::Replicas,
        }
    }

    /// A group's kind.
    pub fn group(&self, id: GroupId) -> GroupKind {
        self.groups[id.index()]
    }

    /// The rank that a peer means for this rank. `None` if there is none (a server's neighbour).
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

/// What one role does.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// A name for people: `stage 3 (layers 12..16)`.
    pub name: String,
    /// Lanes, by [`LaneId`]; the first is the compute lane.
    pub lanes: Vec<String>,
    /// Buffers, by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// Groups of buffers that are freed together, by position.
    pub frames: Vec<Vec<BufferId>>,
    /// What compute ops run, by [`SegmentId`].
    pub segments: Vec<Segment>,
    /// What collective ops do, by [`CallId`].
    pub calls: Vec<Call>,
    /// Parameters with their gradients and optimizer state, in units of reduction.
    pub buckets: Vec<Bucket>,
    /// What asynchronous serving declares.
    pub services: Vec<Service>,
    /// Once before the first iteration.
    pub prologue: Section,
    /// Every iteration.
    pub body: Section,
    /// Once after the last iteration.
    pub epilogue: Section,
    /// Ops of the body that need not be done when the next body starts.
    pub in_flight: Vec<InFlight>,
    /// Where the iteration's results stand.
    pub outputs: Outputs,
    /// The arena's size and what it holds.
    pub memory: Memory,
}

/// An op of the body that may still run when the next body starts: what arrives early (PipeDream), or
/// weights that are gathered while the next forward pass begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// The op.
    pub op: OpId,
    /// Ops of the next body that wait for it, beside those behind it on its lane. The epilogue waits for
    /// everything.
    pub before: Vec<OpId>,
}

/// Results of an iteration that a person wants to see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outputs {
    /// The sum of all tokens' losses, on the ranks that have it.
    pub loss: Option<BufferId>,
    /// The norm of the gradient.
    pub norm: Option<BufferId>,
    /// By layer, the choices of tokens that found no room with their expert.
    pub dropped: Option<BufferId>,
}

impl Program {
    /// A buffer.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.index()]
    }

    /// A segment.
    pub fn segment(&self, id: SegmentId) -> &Segment {
        &self.segments[id.index()]
    }

    /// A collective.
    pub fn call(&self, id: CallId) -> &Call {
        &self.calls[id.index()]
    }

    /// The bytes that an op moves to or from the store; none if it moves nothing there.
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
        let stored = self.buffer(rests.buffer).kind == MemoryKind::Stored;
        stored.then(|| Bytes(inside.len * self.buffer(inside.buffer).dtype.size()))
    }
}

/// A part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Which buffer.
    pub buffer: BufferId,
    /// First element within a copy.
    pub offset: u64,
    /// Number of elements.
    pub len: u64,
}

/// The pass that a computation belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SegmentPass {
    /// Forward.
    Forward,
    /// Input and weight gradients together.
    Backward,
    /// Input gradients only.
    BackwardInput,
    /// Weight gradients only.
    BackwardWeight,
    /// Forward again, because its results were not kept.
    Recompute,
    /// Around the optimizer step.
    Update,
}

impl SegmentPass {
    /// One letter (`F B I W R U`), as in the schedule's notation.
    pub const fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Backward => 'B',
            Self::BackwardInput => 'I',
            Self::BackwardWeight => 'W',
            Self::Recompute => 'R',
            Self::Update => 'U',
        }
    }
}

/// What a segment does to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Reads what was there.
    Read,
    /// Defines it, whatever was there.
    Write,
    /// Adds to it; a *fresh* compute op overwrites it instead.
    Accumulate,
    /// Adds to it, however fresh: an op before has begun the sum.
    Add,
}

/// One operand of a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Local rows and width.
    pub dims: [u64; 2],
    /// Element type.
    pub dtype: DType,
    /// What the template does to it.
    pub access: Access,
}

impl Operand {
    /// Elements.
    pub fn elements(&self) -> u64 {
        self.dims[0] * self.dims[1]
    }
}

/// An operator on operands of its template, with one rank's shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalOp {
    /// What it computes, with local head counts and the like.
    pub kind: OpKind,
    /// Forward, input gradient or weight gradient.
    pub part: Part,
    /// Operands it reads, in the operator's order.
    pub inputs: Vec<u16>,
    /// Parameters it reads, or whose gradients it adds to.
    pub params: Vec<u16>,
    /// Operands it writes.
    pub outputs: Vec<u16>,
}

impl LocalOp {
    /// Whether its gradients are added to what is there, however fresh the segment runs.
    pub fn adds(&self, template: &Template) -> bool {
        let adds = |&i: &u16| template.operands[usize::from(i)].access == Access::Add;
        self.part == Part::WeightGradient && self.params.iter().any(adds)
    }
}

/// A computation without communication inside, shared by all layers of equal shape: the unit that is
/// executed, costed and traced.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    /// A name for people and traces: `F.block.0`.
    pub name: String,
    /// Which pass it belongs to.
    pub pass: SegmentPass,
    /// Its operands.
    pub operands: Vec<Operand>,
    /// Its operators, in order.
    pub ops: Vec<LocalOp>,
}

/// A template bound to one layer's buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Position in [`Plan::templates`].
    pub template: u32,
    /// The layer it belongs to, if any.
    pub layer: Option<LayerId>,
    /// One view per operand of the template.
    pub operands: Vec<View>,
}

/// A collective that a role takes part in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// A name for people and traces: `all_reduce blocks.3.x tp`.
    pub name: String,
    /// What it does.
    pub kind: CollectiveKind,
    /// How the parts are combined, where any are.
    pub reduction: Reduction,
    /// By which algorithm; never `Auto`.
    pub algorithm: Algorithm,
    /// Whether the order of summation is fixed.
    pub order: Order,
    /// Among which ranks.
    pub group: GroupId,
    /// Index in the group of the root, where the kind has one.
    pub root: u32,
    /// What goes in. For `all_gather`, this rank's part (or, in place, the whole vector).
    pub input: View,
    /// What comes out. For `reduce_scatter`, this rank's part (or, in place, the whole vector). Equal to
    /// `input` when the call works in place.
    pub output: View,
    /// Element type on the wire.
    pub dtype: DType,
    /// Parts are cut at multiples of this many elements.
    pub block: u64,
}

impl Call {
    /// Elements of the whole vector that the call is about.
    pub fn elements(&self) -> u64 {
        self.input.len.max(self.output.len)
    }

    /// Bytes of the whole vector.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.elements() * self.dtype.size())
    }
}

/// What an asynchronous server promises: the one data-dependent op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Whom it serves, in the group's order.
    pub group: GroupId,
    /// What it receives from each peer, per request.
    pub receives: View,
    /// What it sends back.
    pub sends: View,
    /// Requests per peer in one run of the section, on average: whoever is fast may take the turn of one
    /// who is slow, and over a whole run all that were sent are answered.
    pub requests: u32,
    /// How many iterations the fastest peer may be ahead of the slowest (`None`: no bound).
    pub staleness: Option<u32>,
}

/// An ordered list of ops.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// Ops, by [`OpId`].
    pub nodes: Vec<Node>,
    /// The `after` lists, end to end.
    pub edges: Vec<OpId>,
}

impl Section {
    /// The ops that must be done before this one starts, beside those before it on its lane.
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
        self.nodes.push(Node { lane, op, turn: Turn::Always, after_start, after_len });
        id
    }

    /// Adds an op that does not take place in every iteration.
    pub fn push_in_turn(&mut self, turn: Turn, lane: LaneId, op: Op, after: &[OpId]) -> OpId {
        let id = self.push(lane, op, after);
        self.nodes[id.index()].turn = turn;
        id
    }
}

/// An op on its lane.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Where it stands.
    pub lane: LaneId,
    /// What it does.
    pub op: Op,
    /// In which iterations.
    pub turn: Turn,
    after_start: u32,
    after_len: u16,
}

/// Another rank, named relative to this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Peer {
    /// The rank with the same coordinates on another pipeline rank.
    Stage(StageRank),
    /// The next rank along an axis, around the end.
    Next(Axis),
    /// The rank before along an axis, around the end.
    Previous(Axis),
    /// A parameter server.
    Server(u32),
    /// A rank of the mesh, seen from a server.
    Replica(u32),
}

/// What a load brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadKind {
    /// What the model reads, as numbers of tokens.
    Tokens,
    /// What it reads that is measured and not counted: pixels.
    Features,
    /// What it should predict.
    Targets,
    /// Tokens so many places behind those that it reads.
    Further(u16),
}

/// How an accumulation treats what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccumulateMode {
    /// `into` = `into` + `from`.
    Add,
    /// `into` = `from`.
    Move,
}

/// How much of an update an op does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepPhase {
    /// Moves the moments on and sums squares of weights and directions into the bucket's [`Gauge`].
    /// Weights stay as they are.
    Gauge,
    /// Changes the weights; all there is to do where the optimizer gauges nothing.
    Apply,
    /// Turns this rank's part of a sum of gradients into its part of the next first moment.
    Share,
    /// Changes the weights by the first moment that stands where gradients do.
    Follow,
}

impl StepPhase {
    /// What programs and messages call such an op.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Apply => "step",
            Self::Share => "share",
            Self::Follow => "follow",
        }
    }
}

/// The closed set of ops. Both engines match it exhaustively.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Brings a microbatch's tokens.
    Load {
        /// Which of them.
        what: LoadKind,
        /// Where to.
        into: BufferId,
        /// Of which microbatch.
        microbatch: Microbatch,
    },
    /// Runs a segment.
    Compute {
        /// Which one.
        segment: SegmentId,
        /// On which microbatch.
        microbatch: Microbatch,
        /// Whether accumulated operands start anew.
        fresh: bool,
    },
    /// Sends a view. The receiver's `Recv` names the same channel and microbatch.
    Send {
        /// Whom to.
        to: Peer,
        /// Tells apart what two ranks exchange.
        channel: u16,
        /// What.
        view: View,
        /// Of which microbatch.
        microbatch: Microbatch,
    },
    /// Receives into a view.
    Recv {
        /// Whom from.
        from: Peer,
        /// As the sender's.
        channel: u16,
        /// Where to.
        view: View,
        /// Of which microbatch.
        microbatch: Microbatch,
    },
    /// Takes part in a collective.
    Collective {
        /// Which one.
        call: CallId,
        /// On which microbatch.
        microbatch: Microbatch,
    },
    /// Adds one buffer to another, element by element.
    Accumulate {
        /// What is added.
        from: View,
        /// To what.
        into: View,
        /// Whether `into` counts.
        mode: AccumulateMode,
    },
    /// Updates a bucket's parameters from its gradients.
    Step {
        /// Position in [`Program::buckets`].
        bucket: u32,
        /// How much of the update this is.
        phase: StepPhase,
    },
    /// Keeps a copy: a microbatch's version of parameters, or what is offloaded.
    Stash {
        /// What.
        from: View,
        /// Where it is kept.
        into: View,
        /// Whose it is.
        microbatch: Microbatch,
    },
    /// Brings back what was kept.
    Restore {
        /// Where it is kept.
        from: View,
        /// Where it is read.
        into: View,
        /// Whose it is.
        microbatch: Microbatch,
    },
    /// Declares a frame's copies for this microbatch dead.
    Free {
        /// Position in [`Program::frames`].
        frame: u32,
        /// Of which microbatch.
        microbatch: Microbatch,
    },
    /// Answers requests as they come.
    Serve {
        /// Position in [`Program::services`].
        service: u32,
    },
}

impl Op {
    /// The microbatch it belongs to, if any.
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

    /// The call that it makes, if it is a collective.
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
