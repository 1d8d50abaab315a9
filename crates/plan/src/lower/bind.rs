//! Binds a layer's values to the buffers of one role: what is kept from forward to backward, what crosses
//! stages, what lives in scratch memory.

use super::TENSOR;
use super::arena::Home;
use super::role::{Bound, BoundPass, Role, StageState};
use super::segment::{Piece, Scratch, Source, aliases};
use super::shard::ValueId;
use crate::dtype::DType;
use crate::graph::TensorClass;
use crate::ids::{BufferId, LayerId, ParamId, SegmentId, Stage};
use crate::program::{MemoryKind, Segment, View};
use std::collections::BTreeMap;

/// Where a layer's values go that do not live in scratch memory.
#[derive(Clone, Default)]
struct LayerBuffers {
    /// By root of the alias class.
    values: BTreeMap<ValueId, BufferId>,
}

impl Role<'_> {
    fn value_elements(&self, kind: usize, value: ValueId) -> (u64, DType) {
        let value = &self.context.sharded[kind].values[value];
        (value.dims[0] * value.dims[1], value.dtype)
    }

    /// Buffers and bound passes of one virtual stage.
    pub(super) fn declare_stage(&mut self, stage: Stage, copies: u32) {
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
}
