//! Program of one pipeline rank: its layers' passes in schedule order, and their exchanges.

use super::arena::{self, Home};
use super::bucket_plan::BucketPlan;
use super::compress::PendingReduce;
use super::dropped::Dropped;
use super::offload::Offloading;
use super::shard::ValueId;
use super::tables::TableState;
use super::weight_stash::WeightVersion;
use super::{Context, UNDECIDED};
use crate::collective::{CollectiveKind, Reduction, SummationOrder};
use crate::dtype::DType;
use crate::ids::{BufferId, CallId, LaneId, Microbatch, OpId, SegmentId, Stage, StageRank};
use crate::mesh::{Axis, GroupKind};
use crate::program::{
    Bucket, Buffer, Call, CarryoverOp, LoadKind, MemoryKind, Op, Outputs, Peer, Program, Section,
    Segment, View,
};
use crate::schedule::{Pass, PassOutput, ScheduleKind, in_flight};
use crate::units::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// Builds the program of pipeline rank `rank`.
pub(super) fn program(context: &mut Context, rank: u32) -> Program {
    let mut role = RoleBuilder::new(context, rank);
    role.run_ahead();
    role.start_compressed();
    role.init_anchor();
    role.barrier();
    let actions = role.context.order[rank as usize].clone();
    for (at, &action) in actions.iter().enumerate() {
        role.offloading.following = actions.get(at + 1).copied();
        let stage = role.stages.iter().position(|state| state.stage == action.stage);
        let stage = stage.expect("a rank runs its own stages");
        match action.pass {
            Pass::Forward => role.forward(stage, action.microbatch),
            Pass::Backward | Pass::BackwardInput => {
                role.backward(stage, action.microbatch, action.pass);
            }
            Pass::BackwardWeight => role.weights(stage, action.microbatch),
        }
        if action.pass == Pass::Backward {
            role.local_step(action.microbatch.index());
        }
    }
    role.update();
    role.serialize_comm();
    role.declare_carryover();
    role.finish()
}

/// First channel of ring messages; channels below belong to stages.
const RING: u16 = 1 << 15;

/// A pass over one of this rank's layers, bound to its buffers.
#[derive(Clone, Debug, Default)]
pub(super) struct BoundPass {
    pub(super) pieces: Vec<Bound>,
    pub(super) open: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(super) enum Bound {
    Run { segment: SegmentId, waits: Vec<usize> },
    Exchange { call: CallId, axis: Axis },
    Shift { sent: View, received: View },
}

/// Lifetime of a value that outlives a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// From the forward pass to the input gradient.
    Input,
    /// From the forward pass to the weight gradients: the whole backward pass, unless it is split.
    Whole,
    /// From the input gradient to the weight gradients.
    Gradient,
}

impl Life {
    pub(super) fn start(self) -> PassOutput {
        match self {
            Self::Input | Self::Whole => PassOutput::Activations,
            Self::Gradient => PassOutput::InputGradient,
        }
    }

    pub(super) fn end(self) -> PassOutput {
        match self {
            Self::Input => PassOutput::InputGradient,
            Self::Whole | Self::Gradient => PassOutput::WeightGradients,
        }
    }
}

/// A virtual stage of this rank.
pub(super) struct StageState {
    pub(super) stage: Stage,
    pub(super) layers: Range<usize>,
    /// Buffer for the previous stage's output.
    pub(super) received: Option<View>,
    /// Buffer for the output to the next stage.
    pub(super) sent: Option<View>,
    pub(super) received_grad: Option<View>,
    pub(super) sent_grad: Option<View>,
    /// Inputs of the model, and their buffers.
    pub(super) loads: Vec<(LoadKind, BufferId)>,
    /// Per microbatch so far: op after which values that live until the input gradient are free.
    input_done: Vec<OpId>,
    /// The same for values that live until the weight gradients.
    freed: Vec<OpId>,
    forward_sends: Vec<OpId>,
    backward_sends: Vec<OpId>,
    /// Index of the first forward pass of the current section.
    first_forward: usize,
    /// Receive of the next forward pass's input, if it is posted one pass early.
    arriving: Option<OpId>,
    /// First op of the section's first forward pass that reads its input.
    first_op: Option<OpId>,
    /// Ops that the input half of each backward pass should have waited for but did not, because it
    /// computed nothing. The weight half waits for them.
    unread: VecDeque<Vec<OpId>>,
    /// Indices of the frames by [`Life`], if there are such buffers.
    pub(super) frames: [Option<u32>; 3],
}

impl StageState {
    pub(super) fn new(stage: Stage, layers: Range<usize>) -> Self {
        Self {
            stage,
            layers,
            received: None,
            sent: None,
            received_grad: None,
            sent_grad: None,
            loads: Vec::new(),
            input_done: Vec::new(),
            freed: Vec::new(),
            forward_sends: Vec::new(),
            backward_sends: Vec::new(),
            first_forward: 0,
            arriving: None,
            first_op: None,
            unread: VecDeque::new(),
            frames: [None; 3],
        }
    }
}

pub(super) struct RoleBuilder<'c> {
    pub(super) context: &'c mut Context,
    rank: u32,
    lanes: Vec<String>,
    pub(super) buffers: Vec<Buffer>,
    pub(super) homes: Vec<Home>,
    /// Lifetimes of buffers that outlive a pass.
    pub(super) lives: BTreeMap<BufferId, Life>,
    pub(super) frames: Vec<Vec<BufferId>>,
    pub(super) scratch: BTreeMap<(usize, Pass, ValueId), BufferId>,
    pub(super) scratch_size: Bytes,
    pub(super) segments: Vec<Segment>,
    pub(super) calls: Vec<Call>,
    pub(super) stages: Vec<StageState>,
    /// Passes by layer of the model; empty for other ranks' layers.
    pub(super) passes: Vec<[BoundPass; 4]>,
    /// The same for forward passes that read stashed weights.
    pub(super) kept_forwards: Vec<BoundPass>,
    /// Stage and buffer of an output for a next stage on the same rank, and of the gradient that
    /// returns, until the receiving stage is declared.
    pub(super) handed: Option<(Stage, BufferId)>,
    pub(super) handed_grad: Option<(Stage, BufferId)>,
    pub(super) buckets: Vec<BucketPlan>,
    /// Tables with sparse steps.
    pub(super) tables: Option<TableState>,
    /// The current section.
    pub(super) body: Section,
    pub(super) prologue: Section,
    pub(super) epilogue: Section,
    in_flight: Vec<CarryoverOp>,
    pub(super) last_compute: Option<OpId>,
    /// Exchanges that the next compute op must wait for.
    pending: Vec<OpId>,
    /// Buckets whose reduction of a microbatch is not yet added to the previous ones.
    pub(super) staged: Vec<(usize, usize)>,
    /// Compressed reductions in flight.
    pub(super) waiting: Vec<PendingReduce>,
    pub(super) outputs: Outputs,
    pub(super) loss_tree: Vec<BufferId>,
    /// Buffers that count dropped tokens, if tokens can be dropped.
    pub(super) dropped: Option<Dropped>,
    pub(super) offloading: Offloading,
}

impl<'c> RoleBuilder<'c> {
    fn new(context: &'c mut Context, rank: u32) -> Self {
        let layers = context.graph.layers.len();
        let mut role = Self {
            context,
            rank,
            lanes: vec!["compute".into()],
            buffers: Vec::new(),
            homes: Vec::new(),
            lives: BTreeMap::new(),
            frames: Vec::new(),
            scratch: BTreeMap::new(),
            scratch_size: Bytes::ZERO,
            segments: Vec::new(),
            calls: Vec::new(),
            stages: Vec::new(),
            passes: vec![Default::default(); layers],
            kept_forwards: vec![Default::default(); layers],
            handed: None,
            handed_grad: None,
            buckets: Vec::new(),
            tables: None,
            body: Section::default(),
            prologue: Section::default(),
            epilogue: Section::default(),
            in_flight: Vec::new(),
            last_compute: None,
            pending: Vec::new(),
            staged: Vec::new(),
            waiting: Vec::new(),
            outputs: Outputs::default(),
            loss_tree: Vec::new(),
            dropped: None,
            offloading: Offloading::default(),
        };
        let last = Stage::from(role.context.stages.len() - 1);
        let mine: Vec<Stage> =
            role.context.strategy.schedule.stages_of(StageRank(rank as u16), role.pp()).collect();
        for &stage in &mine {
            role.declare_buckets(role.context.stages[stage.index()].clone());
            role.declare_tables(role.context.stages[stage.index()].clone());
        }
        if mine.contains(&last) {
            role.declare_loss();
        }
        let layers: Vec<usize> =
            mine.iter().flat_map(|stage| role.context.stages[stage.index()].clone()).collect();
        role.declare_dropped(layers.into_iter());
        for &stage in &mine {
            role.declare_stage(stage);
        }
        role
    }

    fn pp(&self) -> u16 {
        self.context.strategy.pp as u16
    }

    /// Returns true if this rank holds a virtual stage.
    pub(super) fn is_mine(&self, stage: Stage) -> bool {
        let all = self.context.stages.len();
        stage.index() < all && u32::from(self.neighbour(stage.0).0) == self.rank
    }

    /// Number of microbatches whose forward pass has run on this rank when an iteration begins.
    pub(super) fn ahead(&self) -> u32 {
        self.context.strategy.schedule.ahead(self.rank as u16, self.pp())
    }

    /// Maximum number of microbatches between two points of this rank's order, at least one.
    pub(super) fn in_flight(&self, from: (Stage, PassOutput), until: (Stage, PassOutput)) -> u32 {
        let row = &self.context.order[self.rank as usize];
        // Microbatches run ahead are between a forward pass and all that follows it.
        let ahead = if from.1 == PassOutput::Activations { self.ahead() } else { 0 };
        (ahead + in_flight(row, from, until)).max(1)
    }

    /// Builds the prologue: the forward passes that run ahead of the first iteration.
    fn run_ahead(&mut self) {
        if self.context.strategy.schedule.flushes() {
            return;
        }
        self.stash_initial_weights();
        // Input of the very first forward pass.
        self.stages[0].arriving = self.receive(0, Microbatch(0));
        for microbatch in (0..self.ahead()).map(Microbatch) {
            self.forward(0, microbatch);
        }
        self.prologue = std::mem::take(&mut self.body);
        // All of it is complete when the first iteration begins.
        self.last_compute = None;
        self.pending.clear();
        let first = self.ahead() as usize;
        let state = &mut self.stages[0];
        state.forward_sends.clear();
        state.first_forward = first;
        (state.arriving, state.first_op) = (None, None);
    }

    /// Declares the receives of the next iteration's first forward pass as carryover ops: they may
    /// still be in flight when that iteration begins.
    fn declare_carryover(&mut self) {
        let stages = self.stages.iter();
        self.in_flight = stages
            .filter_map(|state| {
                let before = state.first_op.into_iter().collect();
                state.arriving.map(|op| CarryoverOp { op, before })
            })
            .collect();
    }

    /// Lane with the given name, declared on first use.
    pub(super) fn lane(&mut self, name: &str) -> LaneId {
        let at = self.lanes.iter().position(|known| known == name);
        LaneId::from(at.unwrap_or_else(|| {
            self.lanes.push(name.into());
            self.lanes.len() - 1
        }))
    }

    /// Lane for messages between a virtual stage and the next one. If stages form a V, both
    /// directions pass the same ranks, and neither may block the other.
    fn pipeline_lane(&mut self, name: &str, stage: u16) -> LaneId {
        let upwards =
            self.context.strategy.schedule == ScheduleKind::DualPipeV && stage >= self.pp();
        if upwards { self.lane(&format!("{name}-up")) } else { self.lane(name) }
    }

    pub(super) fn buffer(
        &mut self,
        name: String,
        dtype: DType,
        elements: u64,
        copies: u32,
        kind: MemoryKind,
    ) -> BufferId {
        self.buffers.push(Buffer { name, dtype, elements, copies, kind, offset: Bytes::ZERO });
        self.homes.push(Home::Own);
        BufferId::from(self.buffers.len() - 1)
    }

    /// Declares a buffer with one copy and returns a view of all of it.
    pub(super) fn view(
        &mut self,
        name: String,
        dtype: DType,
        elements: u64,
        kind: MemoryKind,
    ) -> View {
        let id = self.buffer(name, dtype, elements, 1, kind);
        self.whole(id)
    }

    pub(super) fn whole(&self, buffer: BufferId) -> View {
        View { buffer, offset: 0, len: self.buffers[buffer.index()].elements }
    }

    /// Declares a collective. This rank's shard is split at multiples of `block`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn call(
        &mut self,
        name: &str,
        kind: CollectiveKind,
        reduction: Reduction,
        group: GroupKind,
        input: View,
        output: View,
        block: u64,
    ) -> CallId {
        let order = self.context.strategy.order;
        let order = if kind.reduces() { order } else { SummationOrder::Free };
        let dtype = self.buffers[input.buffer.index()].dtype;
        let group = self.context.group(group);
        let name = format!("{kind} {name}");
        self.calls.push(Call {
            name,
            kind,
            reduction,
            method: UNDECIDED,
            order,
            group,
            root: 0,
            input,
            output,
            dtype,
            block,
        });
        CallId::from(self.calls.len() - 1)
    }

    /// Adds an op to the compute lane, after the ops it must wait for.
    pub(super) fn compute(&mut self, op: Op, after: &[OpId]) -> OpId {
        let id = self.body.push(LaneId(0), op, after);
        self.last_compute = Some(id);
        id
    }

    /// Adds a pass over a layer; its first compute op waits for `after`.
    fn pass(
        &mut self,
        layer: usize,
        (pass, reads): (Pass, WeightVersion),
        microbatch: Microbatch,
        fresh: bool,
        after: &mut Vec<OpId>,
    ) {
        let bound = std::mem::take(self.bound(layer, pass, reads));
        let mut done: Vec<Vec<OpId>> = vec![Vec::new(); bound.pieces.len()];
        let mut shifted: Vec<OpId> = Vec::new();
        let mut waits: Vec<OpId> = Vec::new();
        for (at, piece) in bound.pieces.iter().enumerate() {
            match piece {
                Bound::Run { segment, waits: exchanges } => {
                    waits.clear();
                    waits.extend(exchanges.iter().flat_map(|&e| &done[e]));
                    waits.append(&mut self.pending);
                    waits.append(after);
                    let op = Op::Compute { segment: *segment, microbatch, fresh };
                    self.compute(op, &waits);
                }
                Bound::Exchange { call, axis } => {
                    waits.clear();
                    waits.extend(self.last_compute);
                    waits.extend_from_slice(after);
                    // Exchanges along both expert axes are serialised on one lane.
                    let lane = self.lane(match axis {
                        Axis::Dp => "batch",
                        Axis::Ep | Axis::Etp => "experts",
                        Axis::Pp | Axis::Cp | Axis::Tp | Axis::Edp => "tensor",
                    });
                    let op = Op::Collective { call: *call, microbatch };
                    done[at].push(self.body.push(lane, op, &waits));
                }
                Bound::Shift { sent, received } => {
                    // The sent value may have just arrived, and the receive buffer may still be
                    // read by the previous send.
                    waits.clear();
                    waits.extend(self.last_compute);
                    waits.extend_from_slice(&shifted);
                    waits.extend_from_slice(after);
                    let channel = RING + at as u16;
                    let (to, from) = (Peer::Next(Axis::Cp), Peer::Previous(Axis::Cp));
                    let send = Op::Send { to, channel, view: *sent, microbatch };
                    let recv = Op::Recv { from, channel, view: *received, microbatch };
                    let lanes = [self.lane("ring-send"), self.lane("ring-recv")];
                    shifted = vec![
                        self.body.push(lanes[0], send, &waits),
                        self.body.push(lanes[1], recv, &waits),
                    ];
                    done[at].clone_from(&shifted);
                }
            }
        }
        self.pending.extend(bound.open.iter().flat_map(|&e| &done[e]));
        *self.bound(layer, pass, reads) = bound;
    }

    fn bound(&mut self, layer: usize, pass: Pass, reads: WeightVersion) -> &mut BoundPass {
        match (pass, reads) {
            (Pass::Forward, WeightVersion::Stashed) => &mut self.kept_forwards[layer],
            _ => &mut self.passes[layer][pass as usize],
        }
    }

    /// Ops that a send must wait for: the last compute op, or the exchange after it.
    pub(super) fn produced(&mut self) -> Vec<OpId> {
        self.last_compute.into_iter().chain(self.pending.iter().copied()).collect()
    }

    fn forward(&mut self, at: usize, microbatch: Microbatch) {
        let k = microbatch.index();
        let state = &self.stages[at];
        let (stage, layers) = (state.stage, state.layers.clone());
        let (received, sent) = (state.received, state.sent);
        let loads = state.loads.clone();
        let mut after = Vec::new();
        if self.context.strategy.schedule.flushes() {
            after.extend(self.receive(at, microbatch));
        } else if received.is_some() {
            // The receive of this pass's input was posted one pass ago, for an iteration's first
            // pass in the previous iteration. The receive for the next pass is posted now.
            after.extend(self.stages[at].arriving);
            self.stages[at].arriving = self.receive(at, Microbatch(microbatch.0 + 1));
        }
        for (what, into) in loads {
            let free = self.freed(at, into, k);
            let lane = self.lane("load");
            after.push(self.body.push(lane, Op::Load { what, into, microbatch }, &free));
        }
        let first = OpId::from(self.body.nodes.len());
        self.stages[at].first_op.get_or_insert(first);
        for layer in layers.clone() {
            self.gather(layer, &mut after);
            self.pull(layer);
            if let (true, Some(view)) = (layer + 1 == layers.end, sent) {
                let state = &self.stages[at];
                after.extend(self.reusable(&state.forward_sends, view, k, state.first_forward));
            }
            self.reserve_slot(layer, &layers, &mut after);
            // In a forward pass only the loss and the dropped-token count accumulate.
            let read = (Pass::Forward, self.forward_reads(microbatch));
            self.pass(layer, read, microbatch, self.opens_leaf(k), &mut after);
            self.used(layer);
            self.offload_layer(layer, &layers, microbatch);
        }
        if let Some(view) = sent {
            let produced = self.produced();
            let to = Peer::Stage(self.neighbour(stage.0 + 1));
            let lane = self.pipeline_lane("forward-send", stage.0);
            let op = Op::Send { to, channel: 2 * stage.0, view, microbatch };
            let id = self.body.push(lane, op, &produced);
            self.stages[at].forward_sends.push(id);
        }
        self.dropped_leaf_done(&layers, k);
        if layers.end == self.context.graph.layers.len() {
            self.loss_leaf_done(k);
        }
    }

    /// Adds the receive of the previous stage's output for a microbatch, if there is such a stage.
    fn receive(&mut self, at: usize, microbatch: Microbatch) -> Option<OpId> {
        let (stage, view) = (self.stages[at].stage, self.stages[at].received?);
        let free = self.freed(at, view.buffer, microbatch.index());
        let from = Peer::Stage(self.neighbour(stage.0 - 1));
        let lane = self.pipeline_lane("forward-recv", stage.0 - 1);
        let op = Op::Recv { from, channel: 2 * (stage.0 - 1), view, microbatch };
        Some(self.body.push(lane, op, &free))
    }

    /// Adds a whole backward pass, or its half that computes the input gradient.
    fn backward(&mut self, at: usize, microbatch: Microbatch, pass: Pass) {
        let k = microbatch.index();
        let whole = pass.makes(PassOutput::WeightGradients);
        let state = &self.stages[at];
        let (stage, layers) = (state.stage, state.layers.clone());
        let (received, sent) = (state.received_grad, state.sent_grad);
        let mut after = Vec::new();
        if let Some(view) = received {
            let free = self.freed(at, view.buffer, k);
            let from = Peer::Stage(self.neighbour(stage.0 + 1));
            let lane = self.pipeline_lane("backward-recv", stage.0);
            let op = Op::Recv { from, channel: 2 * stage.0 + 1, view, microbatch };
            after.push(self.body.push(lane, op, &free));
        }
        self.prefetch_last(&layers, microbatch);
        for layer in layers.clone().rev() {
            self.await_prefetch(layer, &mut after);
            self.gather(layer, &mut after);
            if whole {
                self.reserve_gradients(layer, &mut after);
            }
            if let (true, Some(view)) = (layer == layers.start, sent) {
                after.extend(self.reusable(&self.stages[at].backward_sends, view, k, 0));
            }
            let read = (pass, self.backward_reads());
            self.pass(layer, read, microbatch, self.is_fresh(k), &mut after);
            self.used(layer);
            self.release_slot(layer, &layers, microbatch);
            if whole {
                self.layer_done(layer, k);
            }
        }
        if let Some(view) = sent {
            let produced = self.produced();
            let to = Peer::Stage(self.neighbour(stage.0 - 1));
            let lane = self.pipeline_lane("backward-send", stage.0 - 1);
            let op = Op::Send { to, channel: 2 * (stage.0 - 1) + 1, view, microbatch };
            let id = self.body.push(lane, op, &produced);
            self.stages[at].backward_sends.push(id);
        }
        self.free(at, Life::Input, microbatch);
        if whole {
            self.free_rest(at, microbatch);
        } else {
            self.stages[at].unread.push_back(after);
        }
        let done = self.last_compute.expect("a backward pass follows a forward pass");
        self.stages[at].input_done.push(done);
        if whole {
            self.action_done(layers, k);
        }
    }

    /// Adds the half of a backward pass that computes the weight gradients.
    fn weights(&mut self, at: usize, microbatch: Microbatch) {
        let k = microbatch.index();
        let mut after = self.stages[at].unread.pop_front().unwrap_or_default();
        for layer in self.stages[at].layers.clone().rev() {
            self.reserve_gradients(layer, &mut after);
            let read = (Pass::BackwardWeight, WeightVersion::Latest);
            self.pass(layer, read, microbatch, self.is_fresh(k), &mut after);
            self.layer_done(layer, k);
        }
        self.free_rest(at, microbatch);
        self.action_done(self.stages[at].layers.clone(), k);
    }

    /// Frees values that live until the weight gradients are computed.
    fn free_rest(&mut self, at: usize, microbatch: Microbatch) {
        self.free(at, Life::Gradient, microbatch);
        self.free(at, Life::Whole, microbatch);
        let done = self.last_compute.expect("a backward pass follows a forward pass");
        self.stages[at].freed.push(done);
    }

    /// Frees a stage's buffers of one lifetime.
    fn free(&mut self, at: usize, life: Life, microbatch: Microbatch) {
        let Some(frame) = self.stages[at].frames[life as usize] else { return };
        // No buffer may be freed while an exchange still reads it.
        let open = std::mem::take(&mut self.pending);
        self.compute(Op::Free { frame, microbatch }, &open);
    }

    /// Ops to complete before microbatch `k` is written to a buffer: the last use of its copy.
    fn freed(&self, at: usize, buffer: BufferId, k: usize) -> Vec<OpId> {
        let state = &self.stages[at];
        let late =
            self.lives.get(&buffer).is_some_and(|life| life.end() == PassOutput::WeightGradients);
        let freed = if late { &state.freed } else { &state.input_done };
        let copies = self.buffers[buffer.index()].copies as usize;
        k.checked_sub(copies).map(|old| freed[old]).into_iter().collect()
    }

    /// Send that used the same copy of a double buffer and must complete before it is written. The
    /// section's sends begin with that of microbatch `first`; earlier ones are complete.
    fn reusable(&self, sends: &[OpId], view: View, k: usize, first: usize) -> Option<OpId> {
        let copies = self.buffers[view.buffer.index()].copies as usize;
        k.checked_sub(copies + first).map(|old| sends[old])
    }

    /// Returns true if gradients start from zero with this microbatch: the first of a leaf, or
    /// every one if gradients are reduced immediately.
    pub(super) fn is_fresh(&self, k: usize) -> bool {
        let opens = self
            .local_sgd_steps()
            .map_or_else(|| self.opens_leaf(k), |size| k.is_multiple_of(size));
        self.transient_gradients() || opens
    }

    /// Returns true if this microbatch is the first of a leaf.
    fn opens_leaf(&self, k: usize) -> bool {
        let strategy = &self.context.strategy;
        let leaf = (strategy.microbatches() / strategy.local_leaves()).max(1) as usize;
        k.is_multiple_of(leaf)
    }

    fn neighbour(&self, stage: u16) -> StageRank {
        self.context.strategy.schedule.rank_of(Stage(stage), self.pp())
    }

    fn finish(mut self) -> Program {
        let memory = arena::assign(&mut self.buffers, &self.homes, self.scratch_size);
        let spans: Vec<String> = self
            .stages
            .iter()
            .map(|s| {
                let name = |l: usize| self.context.graph.layers[l].name.as_str();
                match s.layers.len() {
                    1 => name(s.layers.start).to_string(),
                    _ => format!("{}..{}", name(s.layers.start), name(s.layers.end - 1)),
                }
            })
            .collect();
        let mut buckets: Vec<Bucket> = self.buckets.iter().map(|state| state.finish()).collect();
        buckets.extend(self.tables.iter().map(TableState::finish));
        Program {
            name: format!("pipeline rank {} ({})", self.rank, spans.join(", ")),
            lanes: self.lanes,
            buffers: self.buffers,
            frames: self.frames,
            segments: self.segments,
            calls: self.calls,
            buckets,
            services: Vec::new(),
            prologue: self.prologue,
            body: self.body,
            epilogue: self.epilogue,
            in_flight: self.in_flight,
            outputs: self.outputs,
            memory,
        }
    }
}
