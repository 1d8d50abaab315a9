//! Outline of a plan: the segments, exchanges and sizes of each kind of layer, without programs.
//!
//! It is what [`lower`](super::lower) itself starts from, so an estimate that is made of an outline
//! cannot differ from the plan in the shape of a kernel or in the size of a message. It costs a few
//! distinct layers instead of all layers of all microbatches.

use super::bucket::norm_entries;
use super::grad_norm::update_template;
use super::segment::{Exchange, Piece, aliases};
use super::shard::ShardedLayer;
use super::{Layers, Problems, check, partition};
use crate::collective::CollectiveKind;
use crate::dtype::DType;
use crate::graph::{self, BLOCK, LayerGraph, OpKind};
use crate::mesh::Axis;
use crate::model::Model;
use crate::program::Template;
use crate::schedule::Pass;
use crate::strategy::Strategy;
use crate::units::Bytes;
use std::ops::Range;

/// Layers of one rank under a strategy.
#[derive(Clone, Debug)]
pub struct Outline {
    /// Templates that the passes refer to.
    pub templates: Vec<Template>,
    /// The distinct layers.
    pub kinds: Vec<LayerOutline>,
    /// Kind of each layer of the model.
    pub layers: Vec<usize>,
    /// Layers by virtual stage.
    pub stages: Vec<Range<usize>>,
    /// Number of entries of the gradient norm.
    pub norm_entries: u64,
}

/// One kind of layer.
#[derive(Clone, Debug, Default)]
pub struct LayerOutline {
    /// Passes by [`Pass`]; those that the schedule does not run are empty.
    pub passes: [OutlinePass; 4],
    /// Parameters that a rank holds.
    pub parameters: Parameters,
    /// Bytes that a microbatch keeps from the forward pass to the input gradient, by dtype size:
    /// of two bytes, and of others.
    pub kept: [Bytes; 2],
    /// The same for what is kept until the weight gradients.
    pub kept_late: [Bytes; 2],
    /// Largest working memory of a pass.
    pub scratch: Bytes,
    /// Message to the next stage, if this layer is the last of its stage.
    pub output: Bytes,
    /// True for the layers between the embedding and the head.
    pub is_block: bool,
}

/// One pass over a layer.
#[derive(Clone, Debug, Default)]
pub struct OutlinePass {
    /// Segments and exchanges, in order.
    pub pieces: Vec<PassPiece>,
    /// Exchanges that the next compute op must wait for, as indices into `pieces`.
    pub open: Vec<usize>,
}

/// Segment or exchange of a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PassPiece {
    /// A segment.
    Run {
        /// Index of its template.
        template: usize,
        /// Exchanges that must complete first, as indices into the pieces.
        waits: Vec<usize>,
    },
    /// A collective along an axis of the mesh.
    Collective {
        /// The axis.
        axis: Axis,
        /// Kind of collective.
        kind: CollectiveKind,
        /// Elements of the whole vector.
        elements: u64,
        /// Type of the elements.
        dtype: DType,
    },
    /// A message to the next rank along the context-parallel axis.
    Shift(Bytes),
}

/// Elements of parameters by how they are held, each tensor padded to whole blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Reduced among the replicas.
    pub dense: u64,
    /// The same without padding; buckets fill up by it.
    pub unpadded: u64,
    /// Part of `unpadded` that is in separate experts.
    pub unpadded_experts: u64,
    /// Experts on other ranks than the rest of their layer.
    pub experts: u64,
    /// Table that embedding and head share; each stage with a use holds it.
    pub tied: u64,
    /// Embedding tables with sparse lookups.
    pub sparse: u64,
}

/// Outlines a model's plan under a strategy, or returns all problems of the request.
pub fn outline(model: &Model, strategy: &Strategy) -> Result<Outline, Problems> {
    check::check(model, strategy)?;
    let Layers { graph, stages, sharded, kinds, templates } = Layers::new(model, strategy);
    let outlined = graph.kinds.iter().zip(&sharded).zip(&kinds).map(|((layer, sharded), kind)| {
        let roots = roots(sharded);
        let mut outline = LayerOutline {
            parameters: parameters(layer, sharded, strategy),
            output: sharded.output.map_or(Bytes::ZERO, |value| bytes(sharded, value)),
            is_block: layer.is_block(),
            ..LayerOutline::default()
        };
        for &pass in strategy.schedule.passes() {
            let walk = &kind.walks[pass as usize];
            let pieces =
                walk.steps.pieces.iter().map(|piece| outlined_piece(piece, sharded, &roots));
            outline.passes[pass as usize] =
                OutlinePass { pieces: pieces.collect(), open: walk.steps.open.clone() };
            outline.scratch = outline.scratch.max(walk.scratch.size);
        }
        (outline.kept, outline.kept_late) = kept(sharded, &roots, strategy);
        outline
    });
    Ok(Outline {
        kinds: outlined.collect(),
        layers: graph.layers.iter().map(|layer| layer.kind).collect(),
        norm_entries: norm_entries(&graph).into(),
        templates,
        stages,
    })
}

/// Layers by virtual stage, as [`lower`](super::lower) would split them.
pub fn stages(model: &Model, strategy: &Strategy) -> Vec<Range<usize>> {
    let batch = strategy.micro_batch * u64::from(strategy.dp);
    let graph = graph::build(model, batch, strategy.seq, strategy.tokens_of_update());
    let stages = usize::from(strategy.schedule.chunks()) * strategy.pp as usize;
    partition::partition(&graph, stages, &strategy.split)
}

/// Number of leading layers that stages are made of; layers behind the head stay with it.
pub fn units(model: &Model, strategy: &Strategy) -> usize {
    let batch = strategy.micro_batch * u64::from(strategy.dp);
    graph::build(model, batch, strategy.seq, strategy.tokens_of_update()).head() + 1
}

/// Representative of each value's alias class.
fn roots(sharded: &ShardedLayer) -> Vec<usize> {
    let passes = [&sharded.forward, &sharded.recompute, &sharded.backward];
    let items: Vec<_> = passes.into_iter().flatten().cloned().collect();
    aliases(&items, sharded.values.len())
}

fn bytes(sharded: &ShardedLayer, value: usize) -> Bytes {
    let value = &sharded.values[value];
    Bytes(value.dims[0] * value.dims[1] * value.dtype.size())
}

fn outlined_piece(piece: &Piece, sharded: &ShardedLayer, roots: &[usize]) -> PassPiece {
    let elements = |value: usize| {
        let [rows, width] = sharded.values[roots[value]].dims;
        rows * width
    };
    match piece {
        Piece::Run { template, waits, .. } => {
            PassPiece::Run { template: *template as usize, waits: waits.clone() }
        }
        Piece::Exchange { what: Exchange::Shift, from, .. } => {
            PassPiece::Shift(bytes(sharded, roots[*from]))
        }
        Piece::Exchange { what: Exchange::Collective(axis, kind, _), from, to } => {
            PassPiece::Collective {
                axis: *axis,
                kind: *kind,
                elements: elements(*from).max(elements(*to)),
                dtype: sharded.values[roots[*from]].dtype,
            }
        }
    }
}

fn parameters(layer: &LayerGraph, sharded: &ShardedLayer, strategy: &Strategy) -> Parameters {
    let mut found = Parameters::default();
    let separate = strategy.has_separate_experts();
    for (param, local) in layer.params.iter().zip(&sharded.params) {
        if param.borrowed {
            continue;
        }
        let elements: u64 = local.local.iter().product();
        let padded = elements.div_ceil(BLOCK) * BLOCK;
        if param.sparse {
            found.sparse += padded;
        } else if param.tied {
            found.tied += padded;
        } else if param.experts > 0 && separate {
            found.experts += padded;
            found.unpadded += elements;
            found.unpadded_experts += elements;
        } else {
            found.dense += padded;
            found.unpadded += elements;
        }
    }
    found
}

/// Bytes that a microbatch keeps between the passes over a layer, until the input gradient and until
/// the weight gradients. The layer's output counts as the input of the next one.
fn kept(sharded: &ShardedLayer, roots: &[usize], strategy: &Strategy) -> ([Bytes; 2], [Bytes; 2]) {
    let mut values: Vec<usize> =
        sharded.input.iter().chain(&sharded.saved).map(|&v| roots[v]).collect();
    values.sort_unstable();
    values.dedup();
    let output = sharded.output.map(|value| roots[value]);
    let late: Vec<usize> = (sharded.halves.iter())
        .flat_map(|halves| &halves.late)
        .map(|&value| roots[value])
        .collect();
    let (mut early, mut whole) = ([Bytes::ZERO; 2], [Bytes::ZERO; 2]);
    for value in values.into_iter().filter(|&value| Some(value) != output) {
        let until_weights = !strategy.schedule.splits_backward() || late.contains(&value);
        let sum = if until_weights { &mut whole } else { &mut early };
        let at = usize::from(sharded.values[value].dtype.size() != 2);
        sum[at] = Bytes(sum[at].0 + bytes(sharded, value).0);
    }
    (early, whole)
}

impl OutlinePass {
    /// Returns true if the layer has nothing to do in this pass.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }
}

impl LayerOutline {
    /// One pass over the layer.
    pub fn pass(&self, pass: Pass) -> &OutlinePass {
        &self.passes[pass as usize]
    }
}

/// Template of the segment that sums the squares of a gradient, for its norm.
pub fn squares(elements: u64, dtype: DType, parts: u32, experts: bool) -> Template {
    let kind = OpKind::BlockSquares { parts, experts };
    update_template(kind, (elements, dtype), (elements / BLOCK, DType::F32))
}
