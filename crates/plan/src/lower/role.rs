//! The program of one pipeline rank: its layers' passes in the schedule's order, and what they exchange.

use super::Context;
use super::arena::{self, Home};
use super::compress::Waiting;
use super::dropped::Dropped;
use super::offload::Offloading;
use super::shard::ValueId;
use super::tables::TableState;
use super::update::BucketState;
use super::versions::Reads;
use crate::collective::{self, Algorithm, CollectiveKind, Order, Reduction};
use crate::dtype::DType;
use crate::ids::{BufferId, CallId, LaneId, Microbatch, OpId, SegmentId, Stage, StageRank};
use crate::mesh::{Axis, GroupKind};
use crate::program::{
    Bucket, Buffer, Call, InFlight, LoadKind, MemoryKind, Op, Outputs, Peer, Program, Section,
    Segment, View,
};
use crate::schedule::{Made, Pass, ScheduleKind, in_flight};
use crate::units::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// The program of pipeline rank `rank`.
pub(super) fn program(context: &mut Context, rank: u32) -> Program {
    let mut role = Role::new(context, rank);
    role.run_ahead();
    role.start_compressed();
    role.set_out();
    role.meet();
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
            role.update_apart(action.microbatch.index());
        }
    }
    role.update();
    role.keep_apart();
    role.leave_in_flight();
    role.finish()
}

/// The first channel of what goes round; those below belong to stages.
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

/// How long something lives that outlives a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// From the forward pass to the input's gradient.
    Input,
    /// From the forward pass to the weights' gradients: the whole of it, unless the backward pass is
    /// split.
    Whole,
    /// From the input's gradient to the weights'.
    Gradient,
}

impl Life {
    pub(super) fn start(self) -> Made {
        match self {
            Self::Input | Self::Whole => Made::Activations,
            Self::Gradient => Made::InputGradient,
        }
    }

    pub(super) fn end(self) -> Made {
        match self {
            Self::Input => Made::InputGradient,
            Self::Whole | Self::Gradient => Made::WeightGradients,
        }
    }
}

/// A virtual stage of this rank.
pub(super) struct StageState {
    pub(super) stage: Stage,
    pub(super) layers: Range<usize>,
    /// What the previous stage sends, and how many microbatches of it fit.
    pub(super) received: Option<View>,
    /// What goes to the next stage.
    pub(super) sent: Option<View>,
    pub(super) received_grad: Option<View>,
    pub(super) sent_grad: Option<View>,
    /// What comes from outside the model, and where to.
    pub(super) loads: Vec<(LoadKind, BufferId)>,
    /// For each microbatch so far, the op after which what lives until the input's gradient is free.
    input_done: Vec<OpId>,
    /// The same for what lives until the weights' gradients.
    freed: Vec<OpId>,
    forward_sends: Vec<OpId>,
    backward_sends: Vec<OpId>,
    /// The number of the first forward pass of the section that is being written.
    first_forward: usize,
    /// The receive of what the next forward pass reads, where that is posted one pass early.
    arriving: Option<OpId>,
    /// The first op of the section's first forward pass that reads what it was given.
    first_op: Option<OpId>,
    /// What the input's half of each backward pass waited for without computing anything itself, for
    /// the weights' half to wait for.
    unread: VecDeque<Vec<OpId>>,
    /// Positions of the frames by [`Life`], where there are such buffers.
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

pub(super) struct Role<'c> {
    pub(super) context: &'c mut Context,
    rank: u32,
    lanes: Vec<String>,
    pub(super) buffers: Vec<Buffer>,
    pub(super) homes: Vec<Home>,
    /// Buffers that outlive a pass, by when they die.
    pub(super) lives: BTreeMap<BufferId, Life>,
    pub(super) frames: Vec<Vec<BufferId>>,
    pub(super) scratch: BTreeMap<(usize, Pass, ValueId), BufferId>,
    pub(super) scratch_size: Bytes,
    pub(super) segments: Vec<Segment>,
    pub(super) calls: Vec<Call>,
    pub(super) stages: Vec<StageState>,
    /// By layer of the model; empty for other ranks' layers.
    pub(super) passes: Vec<[BoundPass; 4]>,
    /// The same for forward passes that read a version of the weights that was kept.
    pub(super) kept_forwards: Vec<BoundPass>,
    /// What a stage of this rank puts out for the next one, if that is on this rank too, and the
    /// gradient that comes back: the former and the buffer, until the latter is declared.
    pub(super) handed: Option<(Stage, BufferId)>,
    pub(super) handed_grad: Option<(Stage, BufferId)>,
    pub(super) buckets: Vec<BucketState>,
    /// Tables whose rows take their own steps.
    pub(super) tables: Option<TableState>,
    /// The section that is being written.
    pub(super) body: Section,
    pub(super) prologue: Section,
    pub(super) epilogue: Section,
    in_flight: Vec<InFlight>,
    pub(super) last_compute: Option<OpId>,
    /// Exchanges that the next computation must wait for.
    pending: Vec<OpId>,
    /// Buckets whose reduction of a microbatch is still to be added to those before.
    pub(super) staged: Vec<(usize, usize)>,
    /// Compressed reductions that are under way.
    pub(super) waiting: Vec<Waiting>,
    pub(super) outputs: Outputs,
    pub(super) loss_tree: Vec<BufferId>,
    /// Where dropped tokens are counted, if any can be.
    pub(super) dropped: Option<Dropped>,
    pub(super) offloading: Offloading,
}

impl<'c> Role<'c> {
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

    /// Whether this rank holds a virtual stage.
    pub(super) fn is_mine(&self, stage: Stage) -> bool {
        let all = self.context.stages.len();
        stage.index() < all && u32::from(self.neighbour(stage.0).0) == self.rank
    }

    /// How many microbatches' forward passes this rank has run when an iteration begins.
    pub(super) fn ahead(&self) -> u32 {
        self.context.strategy.schedule.ahead(self.rank as u16, self.pp())
    }

    /// The most microbatches that are between two points of this rank's order, one at least.
    pub(super) fn in_flight(&self, from: (Stage, Made), until: (Stage, Made)) -> u32 {
        let row = &self.context.order[self.rank as usize];
        // What was run ahead is between a forward pass and all that follows it.
        let ahead = if from.1 == Made::Activations { self.ahead() } else { 0 };
        (ahead + in_flight(row, from, until)).max(1)
    }

    /// Writes the prologue: the forward passes that are run ahead of the first iteration.
    fn run_ahead(&mut self) {
        if self.context.strategy.schedule.flushes() {
            return;
        }
        self.keep_first_versions();
        // What the first forward pass of all reads.
        self.stages[0].arriving = self.receive(0, Microbatch(0));
        for microbatch in (0..self.ahead()).map(Microbatch) {
            self.forward(0, microbatch);
        }
        self.prologue = std::mem::take(&mut self.body);
        // All of it is done when the first iteration begins.
        self.last_compute = None;
        self.pending.clear();
        let first = self.ahead() as usize;
        let state = &mut self.stages[0];
        state.forward_sends.clear();
        state.first_forward = first;
        (state.arriving, state.first_op) = (None, None);
    }

    /// Declares what the next iteration's first forward pass reads, which may still be on its way when
    /// that iteration begins.
    fn leave_in_flight(&mut self) {
        let stages = self.stages.iter();
        self.in_flight = stages
            .filter_map(|state| {
                let before = state.first_op.into_iter().collect();
                state.arriving.map(|op| InFlight { op, before })
            })
            .collect();
    }

    /// The lane of this name, declared on first use.
    pub(super) fn lane(&mut self, name: &str) -> LaneId {
        let at = self.lanes.iter().position(|known| known == name);
        LaneId::from(at.unwrap_or_else(|| {
            self.lanes.push(name.into());
            self.lanes.len() - 1
        }))
    }

    /// The lane for what goes from a virtual stage to the next one, or back. Where stages form a V, both
    /// ways pass the same ranks, and neither may hold up the other.
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

    pub(super) fn whole(&self, buffer: BufferId) -> View {
        View { buffer, offset: 0, len: self.buffers[buffer.index()].elements }
    }

    /// Declares a collective. What this rank's part is cut by is `block`.
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
        let strategy = &self.context.strategy;
        let ranks = self.context.mesh.group_size(group);
        let wanted =
            if group == GroupKind::Replicas { strategy.collective } else { Algorithm::Auto };
        let order = strategy.order;
        let algorithm = collective::resolve(kind, wanted, ranks, order)
            .or_else(|_| collective::resolve(kind, Algorithm::Auto, ranks, order))
            .expect("some algorithm does every kind");
        let order = if kind.reduces() { order } else { Order::Free };
        let dtype = self.buffers[input.buffer.index()].dtype;
        let group = self.context.group(group);
        let name = format!("{kind} {name}");
        self.calls.push(Call {
            name,
            kind,
            reduction,
            algorithm,
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

    /// Adds an op to the compute lane, after what it must wait for.
    pub(super) fn compute(&mut self, op: Op, after: &[OpId]) -> OpId {
        let id = self.body.push(LaneId(0), op, after);
        self.last_compute = Some(id);
        id
    }

    /// Runs a pass over a layer; its first computation waits for `after`.
    fn pass(
        &mut self,
        layer: usize,
        (pass, reads): (Pass, Reads),
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
                    // What goes along both axes of the experts follows each other.
                    let lane = self.lane(match axis {
                        Axis::Dp => "batch",
                        Axis::Ep | Axis::Etp => "experts",
                        Axis::Pp | Axis::Cp | Axis::Tp | Axis::Edp => "tensor",
                    });
                    let op = Op::Collective { call: *call, microbatch };
                    done[at].push(self.body.push(lane, op, &waits));
                }
                Bound::Shift { sent, received } => {
                    // What is handed on may have just arrived, and where the next one goes, the one
                    // before may still be on its way out.
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

    fn bound(&mut self, layer: usize, pass: Pass, reads: Reads) -> &mut BoundPass {
        match (pass, reads) {
            (Pass::Forward, Reads::Kept) => &mut self.kept_forwards[layer],
            _ => &mut self.passes[layer][pass as usize],
        }
    }

    /// What a send must wait for: the last computation, or the exchange behind it.
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
            // What this pass reads was asked for one pass ago, in the last iteration if it is the first
            // of this one; what the next one reads is asked for now.
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
            self.make_room(layer, &layers, &mut after);
            // Of what a forward pass makes, only the loss adds up.
            let read = (Pass::Forward, self.forward_reads(microbatch));
            self.pass(layer, read, microbatch, self.opens_leaf(k), &mut after);
            self.used(layer);
            self.put_away(layer, &layers, microbatch);
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

    /// Receives what the stage before puts out for a microbatch, if there is one.
    fn receive(&mut self, at: usize, microbatch: Microbatch) -> Option<OpId> {
        let (stage, view) = (self.stages[at].stage, self.stages[at].received?);
        let free = self.freed(at, view.buffer, microbatch.index());
        let from = Peer::Stage(self.neighbour(stage.0 - 1));
        let lane = self.pipeline_lane("forward-recv", stage.0 - 1);
        let op = Op::Recv { from, channel: 2 * (stage.0 - 1), view, microbatch };
        Some(self.body.push(lane, op, &free))
    }

    /// A whole backward pass, or the half of it that makes the input's gradient.
    fn backward(&mut self, at: usize, microbatch: Microbatch, pass: Pass) {
        let k = microbatch.index();
        let whole = pass.makes(Made::WeightGradients);
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
        self.bring_last(&layers, microbatch);
        for layer in layers.clone().rev() {
            self.brought(layer, &mut after);
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
            self.vacate(layer, &layers, microbatch);
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

    /// The half of a backward pass that makes the weights' gradients.
    fn weights(&mut self, at: usize, microbatch: Microbatch) {
        let k = microbatch.index();
        let mut after = self.stages[at].unread.pop_front().unwrap_or_default();
        for layer in self.stages[at].layers.clone().rev() {
            self.reserve_gradients(layer, &mut after);
            let read = (Pass::BackwardWeight, Reads::Newest);
            self.pass(layer, read, microbatch, self.is_fresh(k), &mut after);
            self.layer_done(layer, k);
        }
        self.free_rest(at, microbatch);
        self.action_done(self.stages[at].layers.clone(), k);
    }

    /// Declares dead what lives until the weights' gradients are made.
    fn free_rest(&mut self, at: usize, microbatch: Microbatch) {
        self.free(at, Life::Gradient, microbatch);
        self.free(at, Life::Whole, microbatch);
        let done = self.last_compute.expect("a backward pass follows a forward pass");
        self.stages[at].freed.push(done);
    }

    /// Declares a stage's buffers of one life dead.
    fn free(&mut self, at: usize, life: Life, microbatch: Microbatch) {
        let Some(frame) = self.stages[at].frames[life as usize] else { return };
        // Nothing may be freed under an exchange that still reads it.
        let open = std::mem::take(&mut self.pending);
        self.compute(Op::Free { frame, microbatch }, &open);
    }

    /// What must be done before microbatch `k` may be put into a buffer: the last use of its copy.
    fn freed(&self, at: usize, buffer: BufferId, k: usize) -> Vec<OpId> {
        let state = &self.stages[at];
        let late = self.lives.get(&buffer).is_some_and(|life| life.end() == Made::WeightGradients);
        let freed = if late { &state.freed } else { &state.input_done };
        let copies = self.buffers[buffer.index()].copies as usize;
        k.checked_sub(copies).map(|old| freed[old]).into_iter().collect()
    }

    /// The send that used the same copy of a double buffer, which must be done before it is written.
    /// The section's sends begin with that of microbatch `first`; those before it are done.
    fn reusable(&self, sends: &[OpId], view: View, k: usize, first: usize) -> Option<OpId> {
        let copies = self.buffers[view.buffer.index()].copies as usize;
        k.checked_sub(copies + first).map(|old| sends[old])
    }

    /// Whether gradients start anew with this microbatch: the first of a leaf, or each one where they
    /// are reduced at once.
    pub(super) fn is_fresh(&self, k: usize) -> bool {
        let opens = self.apart().map_or_else(|| self.opens_leaf(k), |size| k.is_multiple_of(size));
        self.transient_gradients() || opens
    }

    /// Whether this microbatch is the first of a leaf.
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
