//! The program of one pipeline rank: its layers' passes in the schedule's order, and what they exchange.

use super::arena::{self, Home};
use super::segment::{Piece, Scratch, Source, aliases};
use super::shard::ValueId;
use super::update::BucketState;
use super::{Context, TENSOR};
use crate::collective::{self, Algorithm, CollectiveKind, Order, Reduction};
use crate::dtype::DType;
use crate::graph::TensorClass;
use crate::ids::{
    BufferId, CallId, LaneId, LayerId, Microbatch, OpId, ParamId, SegmentId, Stage, StageRank,
};
use crate::mesh::GroupKind;
use crate::program::{
    Buffer, Call, LoadKind, MemoryKind, Op, Outputs, Peer, Program, Section, Segment, View,
};
use crate::schedule::{Pass, in_flight, rank_of};
use crate::units::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;

/// The program of pipeline rank `rank`.
pub(super) fn program(context: &mut Context, rank: u32) -> Program {
    let mut role = Role::new(context, rank);
    let actions = role.context.order[rank as usize].clone();
    for action in actions {
        let stage = usize::from(action.stage.0 / role.context.strategy.pp as u16);
        match action.pass {
            Pass::Forward => role.forward(stage, action.microbatch),
            Pass::Backward => role.backward(stage, action.microbatch),
            // No schedule that is available yet splits the backward pass.
            Pass::BackwardInput | Pass::BackwardWeight => {}
        }
    }
    role.update();
    role.finish()
}

/// A pass over one of this rank's layers, bound to its buffers.
#[derive(Clone, Debug, Default)]
struct BoundPass {
    pieces: Vec<Bound>,
    open: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Bound {
    Run { segment: SegmentId, waits: Vec<usize> },
    Exchange { call: CallId },
}

/// A virtual stage of this rank.
struct StageState {
    stage: Stage,
    layers: Range<usize>,
    /// What the previous stage sends, and how many microbatches of it fit.
    received: Option<View>,
    /// What goes to the next stage.
    sent: Option<View>,
    received_grad: Option<View>,
    sent_grad: Option<View>,
    tokens: Option<BufferId>,
    targets: Option<BufferId>,
    /// For each microbatch so far, the op that freed its activations.
    freed: Vec<OpId>,
    forward_sends: Vec<OpId>,
    backward_sends: Vec<OpId>,
    /// Buffers that live from the forward to the backward pass.
    frame: Vec<BufferId>,
    copies: u32,
}

/// Where a layer's values go that do not live in scratch memory.
#[derive(Clone, Default)]
struct LayerBuffers {
    /// By root of the alias class.
    values: BTreeMap<ValueId, BufferId>,
}

pub(super) struct Role<'c> {
    pub(super) context: &'c mut Context,
    rank: u32,
    lanes: Vec<String>,
    pub(super) buffers: Vec<Buffer>,
    homes: Vec<Home>,
    scratch: BTreeMap<(usize, bool, ValueId), BufferId>,
    scratch_size: Bytes,
    pub(super) segments: Vec<Segment>,
    pub(super) calls: Vec<Call>,
    stages: Vec<StageState>,
    /// By layer of the model; empty for other ranks' layers.
    passes: Vec<[BoundPass; 2]>,
    pub(super) buckets: Vec<BucketState>,
    pub(super) body: Section,
    pub(super) last_compute: Option<OpId>,
    /// Exchanges that the next computation must wait for.
    pending: Vec<OpId>,
    pub(super) outputs: Outputs,
    pub(super) loss_tree: Vec<BufferId>,
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
            scratch: BTreeMap::new(),
            scratch_size: Bytes::ZERO,
            segments: Vec::new(),
            calls: Vec::new(),
            stages: Vec::new(),
            passes: vec![Default::default(); layers],
            buckets: Vec::new(),
            body: Section::default(),
            last_compute: None,
            pending: Vec::new(),
            outputs: Outputs::default(),
            loss_tree: Vec::new(),
        };
        let pp = role.context.strategy.pp as usize;
        let mine: Vec<usize> = (rank as usize..role.context.stages.len()).step_by(pp).collect();
        for &stage in &mine {
            role.declare_buckets(role.context.stages[stage].clone());
        }
        if mine.contains(&(role.context.stages.len() - 1)) {
            role.declare_loss();
        }
        let waiting = in_flight(&role.context.order, StageRank(rank as u16));
        for &stage in &mine {
            let stage = Stage::from(stage);
            let copies = waiting.get(&stage).copied().unwrap_or(1).max(1);
            role.declare_stage(stage, copies);
        }
        role
    }

    /// The lane of this name, declared on first use.
    pub(super) fn lane(&mut self, name: &str) -> LaneId {
        let at = self.lanes.iter().position(|known| known == name);
        LaneId::from(at.unwrap_or_else(|| {
            self.lanes.push(name.into());
            self.lanes.len() - 1
        }))
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

    fn value_elements(&self, kind: usize, value: ValueId) -> (u64, DType) {
        let value = &self.context.sharded[kind].values[value];
        (value.dims[0] * value.dims[1], value.dtype)
    }

    /// Buffers and bound passes of one virtual stage.
    fn declare_stage(&mut self, stage: Stage, copies: u32) {
        let layers = self.context.stages[stage.index()].clone();
        let last = stage.index() + 1 == self.context.stages.len();
        let first = stage.index() == 0;
        // One spare copy lets the next microbatch arrive while the oldest is still in use.
        let more = u32::from(
            self.context.strategy.overlap && copies < self.context.strategy.microbatches(),
        );
        let mut state = StageState {
            stage,
            layers: layers.clone(),
            received: None,
            sent: None,
            received_grad: None,
            sent_grad: None,
            tokens: None,
            targets: None,
            freed: Vec::new(),
            forward_sends: Vec::new(),
            backward_sends: Vec::new(),
            frame: Vec::new(),
            copies,
        };
        let mut homes: Vec<LayerBuffers> = vec![LayerBuffers::default(); layers.len()];
        for layer in layers.clone() {
            let at = layer - layers.start;
            let kind = self.context.graph.layers[layer].kind;
            let root = self.roots(kind);
            let name = self.context.graph.layers[layer].name.clone();
            let sharded = &self.context.sharded[kind];
            let (input, saved) = (sharded.input, sharded.saved.clone());
            let (output, output_grad, input_grad) =
                (sharded.output, sharded.output_grad, sharded.input_grad);
            if let Some(value) = input {
                let arrives = layer == layers.start;
                let spare = if arrives { more } else { 0 };
                let id = self.frame_buffer(&name, kind, value, copies + spare, &mut state);
                homes[at].values.insert(root[value], id);
                if arrives {
                    state.received = Some(self.whole(id));
                } else {
                    // It is what the layer before puts out.
                    let before = self.context.graph.layers[layer - 1].kind;
                    let from =
                        self.context.sharded[before].output.expect("inner layers have outputs");
                    let from = self.roots(before)[from];
                    homes[at - 1].values.insert(from, id);
                }
            }
            for value in saved {
                if homes[at].values.contains_key(&root[value]) {
                    continue;
                }
                let id = self.frame_buffer(&name, kind, value, copies, &mut state);
                homes[at].values.insert(root[value], id);
                match self.context.sharded[kind].values[value].class {
                    TensorClass::Tokens => state.tokens = Some(id),
                    TensorClass::Targets => state.targets = Some(id),
                    TensorClass::Activation | TensorClass::Statistic | TensorClass::Loss => {}
                }
            }
            if let (Some(value), true, false) = (output, layer + 1 == layers.end, last) {
                let id = self.edge_buffer(&format!("{name}.sent"), kind, value);
                homes[at].values.insert(root[value], id);
                state.sent = Some(self.whole(id));
            }
            if let Some(value) = output_grad {
                let id = if layer + 1 == layers.end {
                    let id = self.edge_buffer(&format!("{name}.received.grad"), kind, value);
                    state.received_grad = Some(self.whole(id));
                    id
                } else {
                    self.gradient_buffer(layer + 1, kind, value)
                };
                homes[at].values.insert(root[value], id);
            }
            if let Some(value) = input_grad {
                let id = if layer == layers.start && !first {
                    let id = self.edge_buffer(&format!("{name}.sent.grad"), kind, value);
                    state.sent_grad = Some(self.whole(id));
                    id
                } else {
                    self.gradient_buffer(layer, kind, value)
                };
                homes[at].values.insert(root[value], id);
            }
            if let Some(loss) = self.outputs.loss {
                let values = &self.context.sharded[kind].values;
                let of_loss = values.iter().position(|v| v.class == TensorClass::Loss);
                if let Some(value) = of_loss {
                    homes[at].values.insert(root[value], loss);
                }
            }
        }
        for layer in layers.clone() {
            self.passes[layer] = [
                self.bind(layer, &homes[layer - layers.start], false),
                self.bind(layer, &homes[layer - layers.start], true),
            ];
        }
        self.stages.push(state);
    }

    /// The representative of each value's alias class.
    fn roots(&self, kind: usize) -> Vec<ValueId> {
        let layer = &self.context.sharded[kind];
        let items: Vec<_> =
            layer.forward.iter().chain(&layer.recompute).chain(&layer.backward).cloned().collect();
        aliases(&items, layer.values.len())
    }

    fn frame_buffer(
        &mut self,
        layer: &str,
        kind: usize,
        value: ValueId,
        copies: u32,
        state: &mut StageState,
    ) -> BufferId {
        let (elements, dtype) = self.value_elements(kind, value);
        let name = format!("{layer}.{}", self.context.sharded[kind].values[value].name);
        let id = self.buffer(name, dtype, elements, copies, MemoryKind::Activations);
        state.frame.push(id);
        id
    }

    /// A buffer that another stage fills or empties, double so that compute need not wait for it.
    fn edge_buffer(&mut self, name: &str, kind: usize, value: ValueId) -> BufferId {
        let (elements, dtype) = self.value_elements(kind, value);
        let copies = self.context.strategy.microbatches().clamp(1, 2);
        self.buffer(name.to_string(), dtype, elements, copies, MemoryKind::Communication)
    }

    /// The gradient between two layers of a stage: two buffers, used in turn.
    fn gradient_buffer(&mut self, layer: usize, kind: usize, value: ValueId) -> BufferId {
        let (elements, dtype) = self.value_elements(kind, value);
        let name = format!("stream.grad.{}", layer % 2);
        if let Some(at) = self.buffers.iter().position(|b| b.name == name && b.elements == elements)
        {
            return BufferId::from(at);
        }
        self.buffer(name, dtype, elements, 1, MemoryKind::Activations)
    }

    /// The buffer of a value that lives only within a pass over a layer of this kind.
    fn scratch_buffer(&mut self, kind: usize, backward: bool, value: ValueId) -> BufferId {
        if let Some(&known) = self.scratch.get(&(kind, backward, value)) {
            return known;
        }
        let passes = &self.context.kinds[kind];
        let scratch: &Scratch =
            if backward { &passes.backward_scratch } else { &passes.forward_scratch };
        let (offset, size) = (scratch.offsets[value].expect("a scratch value"), scratch.size);
        let (elements, dtype) = self.value_elements(kind, value);
        let pass = if backward { "backward" } else { "forward" };
        let layer = &self.context.graph.kinds[kind].name;
        let name = format!("{layer}.{pass}.{}", self.context.sharded[kind].values[value].name);
        let id = self.buffer(name, dtype, elements, 1, MemoryKind::Activations);
        self.homes[id.index()] = Home::Scratch(offset);
        self.scratch_size = self.scratch_size.max(size);
        self.scratch.insert((kind, backward, value), id);
        id
    }

    /// Binds a pass over a layer to this role's buffers.
    fn bind(&mut self, layer: usize, homes: &LayerBuffers, backward: bool) -> BoundPass {
        let kind = self.context.graph.layers[layer].kind;
        let passes = &self.context.kinds[kind];
        let pass = if backward { &passes.backward } else { &passes.forward }.clone();
        let root = self.roots(kind);
        let mut pieces = Vec::new();
        for piece in &pass.pieces {
            pieces.push(match piece {
                Piece::Run { template, sources, waits } => {
                    let operands = sources
                        .iter()
                        .map(|&source| match source {
                            Source::Value(v) => self.value_view(kind, backward, root[v], homes),
                            Source::Param(p) => self.param_view(layer, p),
                            Source::Gradient(p) => self.gradient_view(layer, p),
                        })
                        .collect();
                    let segment = Segment {
                        template: *template,
                        layer: Some(LayerId::from(layer)),
                        operands,
                    };
                    self.segments.push(segment);
                    let segment = SegmentId::from(self.segments.len() - 1);
                    Bound::Run { segment, waits: waits.clone() }
                }
                Piece::Exchange { kind: collective, reduction, from, to } => {
                    let input = self.value_view(kind, backward, root[*from], homes);
                    let output = self.value_view(kind, backward, root[*to], homes);
                    let what = &self.context.sharded[kind].values[*to].name;
                    let name = format!("{}.{what}", self.context.graph.layers[layer].name);
                    let call = self.call(&name, *collective, *reduction, TENSOR, input, output, 1);
                    Bound::Exchange { call }
                }
            });
        }
        BoundPass { pieces, open: pass.open }
    }

    fn value_view(
        &mut self,
        kind: usize,
        backward: bool,
        root: ValueId,
        homes: &LayerBuffers,
    ) -> View {
        let id = match homes.values.get(&root) {
            Some(&id) => id,
            None => self.scratch_buffer(kind, backward, root),
        };
        self.whole(id)
    }

    fn param_view(&self, layer: usize, param: ParamId) -> View {
        let (bucket, entry) = self.owner(layer, param);
        let state = &self.buckets[bucket];
        let entry = &state.shape.entries[entry];
        View { offset: entry.offset, len: entry.elements(), ..state.compute_params }
    }

    fn gradient_view(&self, layer: usize, param: ParamId) -> View {
        let (bucket, entry) = self.owner(layer, param);
        let state = &self.buckets[bucket];
        let entry = &state.shape.entries[entry];
        // The head's use of a table that this rank holds for the embedding too has its own gradient.
        let second = !state.shape.layers.contains(&layer);
        let base = if second { state.second_use.expect("a tied table") } else { state.grads };
        View { offset: entry.offset, len: entry.elements(), ..base }
    }

    /// The bucket and the entry that hold a parameter.
    fn owner(&self, layer: usize, param: ParamId) -> (usize, usize) {
        let found = self.buckets.iter().enumerate().find_map(|(b, state)| {
            let owners = &state.shape.owners;
            let entry = owners.iter().position(|&o| o == (LayerId::from(layer), param))?;
            Some((b, entry))
        });
        found.unwrap_or_else(|| {
            let tied = self.buckets.iter().position(|b| b.shape.tied);
            (tied.expect("every parameter has a bucket"), 0)
        })
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
        backward: bool,
        microbatch: Microbatch,
        fresh: bool,
        after: &mut Vec<OpId>,
    ) {
        let bound = std::mem::take(&mut self.passes[layer][usize::from(backward)]);
        let mut done: Vec<Option<OpId>> = vec![None; bound.pieces.len()];
        let mut waits: Vec<OpId> = Vec::new();
        for (at, piece) in bound.pieces.iter().enumerate() {
            match piece {
                Bound::Run { segment, waits: exchanges } => {
                    waits.clear();
                    waits.extend(exchanges.iter().filter_map(|&e| done[e]));
                    waits.append(&mut self.pending);
                    waits.append(after);
                    let op = Op::Compute { segment: *segment, microbatch, fresh };
                    self.compute(op, &waits);
                }
                Bound::Exchange { call } => {
                    waits.clear();
                    waits.extend(self.last_compute);
                    waits.extend_from_slice(after);
                    let lane = self.lane("tensor");
                    let op = Op::Collective { call: *call, microbatch };
                    done[at] = Some(self.body.push(lane, op, &waits));
                }
            }
        }
        self.pending.extend(bound.open.iter().filter_map(|&e| done[e]));
        self.passes[layer][usize::from(backward)] = bound;
    }

    /// What a send must wait for: the last computation, or the exchange behind it.
    fn produced(&mut self) -> Vec<OpId> {
        self.last_compute.into_iter().chain(self.pending.iter().copied()).collect()
    }

    fn forward(&mut self, at: usize, microbatch: Microbatch) {
        let k = microbatch.index();
        let state = &self.stages[at];
        let (stage, layers) = (state.stage, state.layers.clone());
        let (received, sent, copies) = (state.received, state.sent, state.copies);
        let loads = [(state.tokens, LoadKind::Tokens), (state.targets, LoadKind::Targets)];
        let freed = |state: &StageState, copies: u32| -> Vec<OpId> {
            k.checked_sub(copies as usize).map(|old| state.freed[old]).into_iter().collect()
        };
        let mut after = Vec::new();
        if let Some(view) = received {
            let free = freed(&self.stages[at], self.buffers[view.buffer.index()].copies);
            let from = Peer::Stage(self.neighbour(stage.0 - 1));
            let lane = self.lane("forward-recv");
            let op = Op::Recv { from, channel: 2 * (stage.0 - 1), view, microbatch };
            after.push(self.body.push(lane, op, &free));
        }
        for (buffer, what) in loads {
            if let Some(into) = buffer {
                let free = freed(&self.stages[at], copies);
                let lane = self.lane("load");
                after.push(self.body.push(lane, Op::Load { what, into, microbatch }, &free));
            }
        }
        for layer in layers.clone() {
            self.gather(layer, &mut after);
            if let (true, Some(view)) = (layer + 1 == layers.end, sent) {
                after.extend(self.reusable(&self.stages[at].forward_sends, view, k));
            }
            self.pass(layer, false, microbatch, self.is_fresh(k), &mut after);
            self.used(layer);
        }
        if let Some(view) = sent {
            let produced = self.produced();
            let to = Peer::Stage(self.neighbour(stage.0 + 1));
            let lane = self.lane("forward-send");
            let op = Op::Send { to, channel: 2 * stage.0, view, microbatch };
            let id = self.body.push(lane, op, &produced);
            self.stages[at].forward_sends.push(id);
        }
    }

    fn backward(&mut self, at: usize, microbatch: Microbatch) {
        let k = microbatch.index();
        let state = &self.stages[at];
        let (stage, layers) = (state.stage, state.layers.clone());
        let (received, sent) = (state.received_grad, state.sent_grad);
        let mut after = Vec::new();
        if let Some(view) = received {
            let copies = self.buffers[view.buffer.index()].copies as usize;
            let free: Vec<OpId> =
                k.checked_sub(copies).map(|old| self.stages[at].freed[old]).into_iter().collect();
            let from = Peer::Stage(self.neighbour(stage.0 + 1));
            let lane = self.lane("backward-recv");
            let op = Op::Recv { from, channel: 2 * stage.0 + 1, view, microbatch };
            after.push(self.body.push(lane, op, &free));
        }
        for layer in layers.clone().rev() {
            self.gather(layer, &mut after);
            self.reserve_gradients(layer, &mut after);
            if let (true, Some(view)) = (layer == layers.start, sent) {
                after.extend(self.reusable(&self.stages[at].backward_sends, view, k));
            }
            self.pass(layer, true, microbatch, self.is_fresh(k), &mut after);
            self.used(layer);
            self.layer_done(layer, k);
        }
        if let Some(view) = sent {
            let produced = self.produced();
            let to = Peer::Stage(self.neighbour(stage.0 - 1));
            let lane = self.lane("backward-send");
            let op = Op::Send { to, channel: 2 * (stage.0 - 1) + 1, view, microbatch };
            let id = self.body.push(lane, op, &produced);
            self.stages[at].backward_sends.push(id);
        }
        let frame = at as u32;
        // Nothing may be freed under an exchange that still reads it.
        let open = std::mem::take(&mut self.pending);
        let id = self.compute(Op::Free { frame, microbatch }, &open);
        self.stages[at].freed.push(id);
        self.action_done(layers, k);
    }

    /// The send that used the same copy of a double buffer, which must be done before it is written.
    fn reusable(&self, sends: &[OpId], view: View, k: usize) -> Option<OpId> {
        let copies = self.buffers[view.buffer.index()].copies as usize;
        k.checked_sub(copies).map(|old| sends[old])
    }

    /// Whether gradients start anew with this microbatch: the first of a leaf.
    pub(super) fn is_fresh(&self, k: usize) -> bool {
        let strategy = &self.context.strategy;
        let leaf = (strategy.microbatches() / strategy.local_leaves()).max(1) as usize;
        self.transient_gradients() || k % leaf == 0
    }

    fn neighbour(&self, stage: u16) -> StageRank {
        rank_of(Stage(stage), self.context.strategy.pp as u16)
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
        let buckets = self.buckets.iter().map(|state| state.finish()).collect();
        Program {
            name: format!("pipeline rank {} ({})", self.rank, spans.join(", ")),
            lanes: self.lanes,
            buffers: self.buffers,
            frames: self.stages.into_iter().map(|s| s.frame).collect(),
            segments: self.segments,
            calls: self.calls,
            buckets,
            services: Vec::new(),
            prologue: Section::default(),
            body: self.body,
            epilogue: Section::default(),
            in_flight: Vec::new(),
            outputs: self.outputs,
            memory,
        }
    }
}
