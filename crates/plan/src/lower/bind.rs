//! Binds a layer's values to the buffers of one role: values saved from forward to backward, values
//! that cross stages, and values in scratch memory.

use super::arena::Home;
use super::layer::{Bound, BoundPass};
use super::pipeline::{Life, StageState};
use super::role::RoleIr;
use super::segment::{Exchange, Piece, Source, aliases};
use super::shard::ValueId;
use super::weight_stash::WeightVersion;
use crate::dtype::DType;
use crate::graph::TensorClass;
use crate::ids::{BufferId, LayerId, Microbatch, ParamId, SegmentId, Stage};
use crate::mesh::GroupKind;
use crate::program::{LoadKind, MemoryKind, Segment, View};
use crate::schedule::{Pass, PassOutput};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Buffers of a layer's values that are not in scratch memory.
#[derive(Clone, Default)]
struct LayerBuffers {
    /// Buffer by root of the alias class.
    values: BTreeMap<ValueId, BufferId>,
}

impl RoleIr<'_> {
    fn value_elements(&self, kind: usize, value: ValueId) -> (u64, DType) {
        let value = &self.context.sharded[kind].values[value];
        (value.dims[0] * value.dims[1], value.dtype)
    }

    /// Declares the buffers and bound passes of one virtual stage.
    pub(super) fn declare_stage(&mut self, stage: Stage) {
        let layers = self.context.stages[stage.index()].clone();
        let mut state = StageState::new(stage, layers.clone());
        let mut homes: Vec<LayerBuffers> = vec![LayerBuffers::default(); layers.len()];
        // Gradients between two layers that the second half of a split backward pass reads, by the
        // later layer.
        let mut late_grads: BTreeMap<usize, BufferId> = BTreeMap::new();
        for layer in layers.clone() {
            let at = layer - layers.start;
            let kind = self.context.graph.layers[layer].kind;
            let root = self.roots(kind);
            let late = self.late(kind, &root);
            let name = self.context.graph.layers[layer].name.clone();
            let sharded = &self.context.sharded[kind];
            let (input, saved) = (sharded.input, sharded.saved.clone());
            let (output, output_grad, input_grad) =
                (sharded.output, sharded.output_grad, sharded.input_grad);
            if let Some(value) = input {
                let life = self.kept(late[root[value]]);
                let id = if layer == layers.start {
                    self.arriving(&name, kind, value, life, &mut state)
                } else {
                    // It is the output of the previous layer, which may save it for its own weight
                    // gradients.
                    let before = self.context.graph.layers[layer - 1].kind;
                    let from =
                        self.context.sharded[before].output.expect("inner layers have outputs");
                    let from = self.roots(before)[from];
                    let id = match homes[at - 1].values.get(&from) {
                        Some(&kept) => kept,
                        None => self.kept_buffer(layer, value, life, &mut state),
                    };
                    homes[at - 1].values.insert(from, id);
                    id
                };
                homes[at].values.insert(root[value], id);
            }
            for value in saved {
                if homes[at].values.contains_key(&root[value]) {
                    continue;
                }
                let life = self.kept(late[root[value]]);
                let id = self.kept_buffer(layer, value, life, &mut state);
                homes[at].values.insert(root[value], id);
                if let Some(what) = loaded(self.context.sharded[kind].values[value].class) {
                    state.loads.push((what, id));
                }
            }
            if let (Some(value), true) = (output, layer + 1 == layers.end) {
                let id = self.leaving(&name, kind, value, &mut state);
                homes[at].values.insert(root[value], id);
            }
            if let Some(value) = output_grad {
                let late = late[root[value]];
                let id = if layer + 1 == layers.end {
                    self.arriving_gradient(&name, kind, value, late, &mut state)
                } else if late {
                    let id = self.frame_buffer(&name, kind, value, Life::Gradient, &mut state);
                    late_grads.insert(layer + 1, id);
                    id
                } else {
                    self.gradient_buffer(layer + 1, kind, value)
                };
                homes[at].values.insert(root[value], id);
            }
            if let Some(value) = input_grad {
                let id = if layer == layers.start {
                    self.leaving_gradient(&name, kind, value, &mut state)
                } else if let Some(&id) = late_grads.get(&layer) {
                    id
                } else {
                    self.gradient_buffer(layer, kind, value)
                };
                homes[at].values.insert(root[value], id);
            }
            for value in (0..late.len()).filter(|&value| late[value]) {
                if let Entry::Vacant(home) = homes[at].values.entry(value) {
                    home.insert(self.frame_buffer(&name, kind, value, Life::Gradient, &mut state));
                }
            }
        }
        state.loads.sort_by_key(|&(what, _)| what);
        for layer in layers.clone() {
            let homes = &homes[layer - layers.start];
            for &pass in self.context.strategy.schedule.passes() {
                let reads = if pass == Pass::Forward {
                    WeightVersion::Latest
                } else {
                    self.backward_reads()
                };
                self.passes[layer][pass as usize] = self.bind(layer, homes, (pass, reads));
            }
            if self.forward_reads(Microbatch(0)) == WeightVersion::Stashed {
                self.kept_forwards[layer] =
                    self.bind(layer, homes, (Pass::Forward, WeightVersion::Stashed));
            }
        }
        self.stages.push(state);
    }

    /// For each representative of an alias class: true if the second half of a split backward pass
    /// reads it.
    fn late(&self, kind: usize, root: &[ValueId]) -> Vec<bool> {
        let mut late = vec![false; root.len()];
        for &value in self.context.sharded[kind].halves.iter().flat_map(|halves| &halves.late) {
            late[root[value]] = true;
        }
        late
    }

    /// Lifetime of a value that the forward pass produces.
    fn kept(&self, late: bool) -> Life {
        let split = self.context.strategy.schedule.splits_backward();
        if late || !split { Life::Whole } else { Life::Input }
    }

    /// Buffer for the output of the previous stage.
    fn arriving(
        &mut self,
        name: &str,
        kind: usize,
        value: ValueId,
        life: Life,
        state: &mut StageState,
    ) -> BufferId {
        if let Some((_, id)) = self.handed.take_if(|(by, _)| by.0 + 1 == state.stage.0) {
            self.keep(id, life, state);
            return id;
        }
        let copies = self.copies(state.stage, life);
        let id = self.frame_buffer(name, kind, value, life, state);
        self.buffers[id.index()].copies = copies + self.spare(copies);
        state.received = Some(self.whole(id));
        id
    }

    /// Buffer for the output to the next stage: its input buffer if that stage is on this rank too.
    fn leaving(
        &mut self,
        name: &str,
        kind: usize,
        value: ValueId,
        state: &mut StageState,
    ) -> BufferId {
        let next = Stage(state.stage.0 + 1);
        if !self.is_mine(next) {
            let id = self.edge_buffer(&format!("{name}.sent"), kind, value);
            state.sent = Some(self.whole(id));
            return id;
        }
        let layer = self.context.stages[next.index()].start;
        let behind = self.context.graph.layers[layer].kind;
        let read = self.context.sharded[behind].input.expect("only the first layer has none");
        let root = self.roots(behind);
        let until = self.kept(self.late(behind, &root)[root[read]]).end();
        let copies = self.in_flight((state.stage, PassOutput::Activations), (next, until));
        let (elements, dtype) = self.value_elements(kind, value);
        let name = format!("{}.x", self.context.graph.layers[layer].name);
        let id = self.buffer(name, dtype, elements, copies, MemoryKind::Activations);
        self.handed = Some((state.stage, id));
        id
    }

    /// Buffer for the gradient received from the next stage.
    fn arriving_gradient(
        &mut self,
        name: &str,
        kind: usize,
        value: ValueId,
        late: bool,
        state: &mut StageState,
    ) -> BufferId {
        let next = Stage(state.stage.0 + 1);
        let made = if self.is_mine(next) { next } else { state.stage };
        let until = if late { PassOutput::WeightGradients } else { PassOutput::InputGradient };
        let copies = self.in_flight((made, PassOutput::InputGradient), (state.stage, until));
        let name = format!("{name}.received.grad");
        let id = match (made == next, late) {
            (false, false) => self.edge_buffer(&name, kind, value),
            (here, _) => {
                let (elements, dtype) = self.value_elements(kind, value);
                let copies = if here { copies } else { copies + self.spare(copies) };
                self.buffer(name, dtype, elements, copies, MemoryKind::Activations)
            }
        };
        if late {
            self.keep(id, Life::Gradient, state);
        }
        if made == next {
            self.handed_grad = Some((state.stage, id));
        } else {
            state.received_grad = Some(self.whole(id));
        }
        id
    }

    /// Buffer for the gradient passed to the previous stage.
    fn leaving_gradient(
        &mut self,
        name: &str,
        kind: usize,
        value: ValueId,
        state: &mut StageState,
    ) -> BufferId {
        if let Some((_, id)) = self.handed_grad.take_if(|(to, _)| to.0 + 1 == state.stage.0) {
            return id;
        }
        let id = self.edge_buffer(&format!("{name}.sent.grad"), kind, value);
        state.sent_grad = Some(self.whole(id));
        id
    }

    /// Number of spare copies: one lets the next microbatch arrive while the oldest is in use.
    fn spare(&self, copies: u32) -> u32 {
        let strategy = &self.context.strategy;
        if !strategy.schedule.flushes() {
            // The next microbatch is requested before the oldest is released.
            return 1;
        }
        u32::from(strategy.overlap && copies < strategy.microbatches())
    }

    fn copies(&self, stage: Stage, life: Life) -> u32 {
        self.in_flight((stage, life.start()), (stage, life.end()))
    }

    /// Adds a buffer to the frame of buffers that are freed together.
    fn keep(&mut self, id: BufferId, life: Life, state: &mut StageState) {
        let frame = *state.frames[life as usize].get_or_insert_with(|| {
            self.frames.push(Vec::new());
            self.frames.len() as u32 - 1
        });
        self.frames[frame as usize].push(id);
        self.lives.insert(id, life);
    }

    /// Representative of each value's alias class.
    fn roots(&self, kind: usize) -> Vec<ValueId> {
        let layer = &self.context.sharded[kind];
        let items: Vec<_> =
            layer.forward.iter().chain(&layer.recompute).chain(&layer.backward).cloned().collect();
        aliases(&items, layer.values.len())
    }

    /// Buffer of a value that the backward pass reads: in a frame, or in a slot if it is offloaded
    /// in the meantime.
    fn kept_buffer(
        &mut self,
        layer: usize,
        value: ValueId,
        life: Life,
        state: &mut StageState,
    ) -> BufferId {
        let kind = self.context.graph.layers[layer].kind;
        let moved = match self.context.sharded[kind].values[value].class {
            TensorClass::Activation
            | TensorClass::Statistic
            | TensorClass::Index
            | TensorClass::Dispatched
            | TensorClass::Counts => self.offloads(layer),
            TensorClass::Tokens
            | TensorClass::Features
            | TensorClass::Targets
            | TensorClass::Lookahead(_)
            | TensorClass::Loss
            | TensorClass::Dropped => false,
        };
        if moved {
            let copies = self.copies(state.stage, life);
            return self.slot_buffer(layer, value, self.value_elements(kind, value), copies);
        }
        let name = self.context.graph.layers[layer].name.clone();
        self.frame_buffer(&name, kind, value, life, state)
    }

    fn frame_buffer(
        &mut self,
        layer: &str,
        kind: usize,
        value: ValueId,
        life: Life,
        state: &mut StageState,
    ) -> BufferId {
        let (elements, dtype) = self.value_elements(kind, value);
        let name = format!("{layer}.{}", self.context.sharded[kind].values[value].name);
        let copies = self.copies(state.stage, life);
        let id = self.buffer(name, dtype, elements, copies, MemoryKind::Activations);
        self.keep(id, life, state);
        id
    }

    /// Buffer that another stage fills or reads, double so that compute does not wait for it.
    fn edge_buffer(&mut self, name: &str, kind: usize, value: ValueId) -> BufferId {
        let (elements, dtype) = self.value_elements(kind, value);
        let strategy = &self.context.strategy;
        let one = strategy.microbatches() == 1 && strategy.schedule.flushes();
        let copies = if one { 1 } else { 2 };
        self.buffer(name.to_string(), dtype, elements, copies, MemoryKind::Communication)
    }

    /// Gradient between two layers of a stage: two buffers, used alternately.
    fn gradient_buffer(&mut self, layer: usize, kind: usize, value: ValueId) -> BufferId {
        let (elements, dtype) = self.value_elements(kind, value);
        let stream = (layer % 2, elements);
        if let Some(known) = self.grad_streams.get(&stream) {
            return *known;
        }
        let name = format!("stream.grad.{}", layer % 2);
        let buffer = self.buffer(name, dtype, elements, 1, MemoryKind::Activations);
        self.grad_streams.insert(stream, buffer);
        buffer
    }

    /// Buffer of a value that lives only within a pass over a layer of this kind.
    fn scratch_buffer(&mut self, kind: usize, pass: Pass, value: ValueId) -> BufferId {
        if let Some(&known) = self.scratch.get(&(kind, pass, value)) {
            return known;
        }
        let scratch = &self.context.kinds[kind].walks[pass as usize].scratch;
        let (offset, size) = (scratch.offsets[value].expect("a scratch value"), scratch.size);
        let (elements, dtype) = self.value_elements(kind, value);
        let word = match pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
            Pass::BackwardInput => "backward-input",
            Pass::BackwardWeight => "backward-weight",
        };
        let layer = &self.context.graph.kinds[kind].name;
        let name = format!("{layer}.{word}.{}", self.context.sharded[kind].values[value].name);
        let id = self.buffer(name, dtype, elements, 1, MemoryKind::Activations);
        self.homes[id.index()] = Home::Scratch(offset);
        self.scratch_size = self.scratch_size.max(size);
        self.scratch.insert((kind, pass, value), id);
        id
    }

    /// Binds a pass over a layer to this role's buffers.
    fn bind(
        &mut self,
        layer: usize,
        homes: &LayerBuffers,
        (pass, reads): (Pass, WeightVersion),
    ) -> BoundPass {
        let kind = self.context.graph.layers[layer].kind;
        let steps = self.context.kinds[kind].walks[pass as usize].steps.clone();
        let root = self.roots(kind);
        let mut pieces = Vec::new();
        for piece in &steps.pieces {
            pieces.push(match piece {
                Piece::Run { template, sources, waits } => {
                    let operands = sources
                        .iter()
                        .map(|&source| match source {
                            Source::Value(v) => match self.counted(kind, v, layer) {
                                Some(view) => view,
                                None => self.value_view(kind, pass, root[v], homes),
                            },
                            Source::Param(p) => self.param_view(layer, p, reads),
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
                Piece::Exchange { what: Exchange::Shift, from, to } => Bound::Shift {
                    sent: self.value_view(kind, pass, root[*from], homes),
                    received: self.value_view(kind, pass, root[*to], homes),
                },
                Piece::Exchange {
                    what: Exchange::Collective(axis, collective, reduction),
                    from,
                    to,
                } => {
                    let input = self.value_view(kind, pass, root[*from], homes);
                    let output = self.value_view(kind, pass, root[*to], homes);
                    let what = &self.context.sharded[kind].values[*to].name;
                    let name = format!("{}.{what}", self.context.graph.layers[layer].name);
                    let group = GroupKind::Axis(*axis);
                    let call = self.call(&name, *collective, *reduction, group, input, output, 1);
                    Bound::Exchange { call, axis: *axis }
                }
            });
        }
        BoundPass { pieces, open: steps.open }
    }

    /// Location of a layer's loss or dropped-token count, if the value is one of these.
    fn counted(&self, kind: usize, value: ValueId, layer: usize) -> Option<View> {
        match self.context.sharded[kind].values[value].class {
            TensorClass::Dropped => self.dropped_place(layer),
            TensorClass::Loss => self.loss_place(layer),
            _ => None,
        }
    }

    fn value_view(&mut self, kind: usize, pass: Pass, root: ValueId, homes: &LayerBuffers) -> View {
        let id = match homes.values.get(&root) {
            Some(&id) => id,
            None => self.scratch_buffer(kind, pass, root),
        };
        self.whole(id)
    }

    fn param_view(&self, layer: usize, param: ParamId, reads: WeightVersion) -> View {
        if let Some(view) = self.table_view(layer, param) {
            return view;
        }
        let (bucket, entry) = self.owner(layer, param);
        let state = &self.buckets[bucket];
        let entry = &state.shape.entries[entry];
        let base = match reads {
            WeightVersion::Latest => state.weights.read(),
            WeightVersion::Stashed => state.weights.versions().unwrap_or(state.weights.read()),
        };
        View { offset: entry.offset, len: entry.elements(), ..base }
    }

    fn gradient_view(&self, layer: usize, param: ParamId) -> View {
        let (bucket, entry) = self.owner(layer, param);
        let state = &self.buckets[bucket];
        let entry = &state.shape.entries[entry];
        // If this rank also holds the table for the embedding, uses from the head on have a
        // separate gradient.
        let behind = self.context.graph.layer(layer.into()).input.is_some();
        let second = state.tied.as_ref().and_then(|tied| tied.second.as_ref()).filter(|_| behind);
        let base = second.map_or(state.grads, |second| second.grads);
        View { offset: entry.offset, len: entry.elements(), ..base }
    }

    /// Bucket and entry that hold a parameter.
    fn owner(&self, layer: usize, param: ParamId) -> (usize, usize) {
        let holder = self.context.graph.holder(LayerId::from(layer), param);
        self.index
            .owners
            .get(&holder)
            .copied()
            .unwrap_or_else(|| (*self.index.tied.first().expect("every parameter has a bucket"), 0))
    }
}

/// Kind of data loaded for a value, if it is an input of the model.
fn loaded(class: TensorClass) -> Option<LoadKind> {
    match class {
        TensorClass::Tokens => Some(LoadKind::Tokens),
        TensorClass::Features => Some(LoadKind::Features),
        TensorClass::Targets => Some(LoadKind::Targets),
        TensorClass::Lookahead(places) => Some(LoadKind::Lookahead(places)),
        TensorClass::Activation
        | TensorClass::Statistic
        | TensorClass::Loss
        | TensorClass::Index
        | TensorClass::Dispatched
        | TensorClass::Counts
        | TensorClass::Dropped => None,
    }
}
