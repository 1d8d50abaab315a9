//! Activations that a layer saves for its backward pass, and the operators it therefore recomputes.

use super::shard::{Item, ValueId};
use crate::graph::{Graph, LayerGraph, LinearRole, OpKind, Operator};
use crate::strategy::Recompute;
use std::ops::Range;

/// Activations saved by the layers of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SavedActivations {
    /// Everything that the backward pass reads.
    All,
    /// All but attention's core.
    AllButAttention,
    /// Attention, its queries, keys and values, and the input of the feed-forward part's
    /// activation.
    AttentionAndUp,
    /// Attention, its queries, keys and values.
    Attention,
    /// The layer's input.
    Input,
    /// The layer's input; the whole forward pass is recomputed, needed or not.
    InputOfAll,
}

impl SavedActivations {
    /// Returns true if an operator of the forward pass is recomputed before the gradients.
    /// `exchanged` is true if the outputs of row-parallel GEMMs are summed over ranks.
    pub(super) fn is_recomputed(self, layer: &LayerGraph, op: &Operator, exchanged: bool) -> bool {
        // The first layer has no input to start from, and a loss must be counted once.
        let inner = layer.is_block();
        let attention = matches!(op.kind, OpKind::Attention { .. } | OpKind::AttentionBlock { .. });
        let kept = |up: bool| {
            attention
                || product(layer, op).is_some_and(|role| match role {
                    LinearRole::Qkv | LinearRole::Head => true,
                    LinearRole::AttentionOut | LinearRole::Down => exchanged,
                    LinearRole::Router | LinearRole::Latent | LinearRole::Join => false,
                    LinearRole::Up => up,
                })
        };
        match self {
            Self::All => false,
            Self::AllButAttention => attention,
            Self::AttentionAndUp => inner && !kept(true),
            Self::Attention => inner && !kept(false),
            Self::Input | Self::InputOfAll => inner,
        }
    }
}

/// Role of the GEMM that an operator is, or to which it adds the bias: a bias belongs to the GEMM
/// before it, since the output of both is saved.
fn product(layer: &LayerGraph, op: &Operator) -> Option<LinearRole> {
    let mut forward = layer.forward.iter();
    match op.kind {
        OpKind::Linear { role } | OpKind::ExpertLinear { role, .. } => Some(role),
        OpKind::Bias => {
            let before = forward.find(|before| before.outputs.first() == op.inputs.first());
            before.and_then(|before| product(layer, before))
        }
        _ => None,
    }
}

/// Creates separate kinds for layers that save less than others of their kind. Returns the saved
/// activations of each kind.
pub(super) fn specialize_layers(
    graph: &mut Graph,
    stages: &[Range<usize>],
    recompute: Recompute,
) -> Vec<SavedActivations> {
    let (first, other) = match recompute {
        Recompute::None => (SavedActivations::All, None),
        Recompute::Selective => (SavedActivations::AllButAttention, None),
        Recompute::SelectiveOp => {
            (SavedActivations::AttentionAndUp, Some(SavedActivations::Attention))
        }
        Recompute::Full => (SavedActivations::Input, None),
        Recompute::FullOf(_) => (SavedActivations::All, Some(SavedActivations::Input)),
        Recompute::FullForward => (SavedActivations::InputOfAll, None),
    };
    let mut keeps = vec![first; graph.kinds.len()];
    let Some(other) = other else { return keeps };
    for stage in stages {
        let inner = |graph: &Graph, layer: usize| graph.kinds[graph.layers[layer].kind].is_block();
        let blocks: Vec<usize> = stage.clone().filter(|&layer| inner(graph, layer)).collect();
        for (at, layer) in blocks.into_iter().enumerate() {
            let recomputed = match recompute {
                Recompute::FullOf(layers) => at < usize::from(layers),
                Recompute::SelectiveOp => layer % 2 == 0,
                Recompute::None
                | Recompute::Selective
                | Recompute::Full
                | Recompute::FullForward => false,
            };
            if recomputed {
                graph.layers[layer].kind = twin(graph, &mut keeps, graph.layers[layer].kind, other);
            }
        }
    }
    keeps
}

/// Kind that equals another except for its saved activations.
fn twin(
    graph: &mut Graph,
    keeps: &mut Vec<SavedActivations>,
    of: usize,
    other: SavedActivations,
) -> usize {
    let name = format!("{}.again", graph.kinds[of].name);
    let known = graph.kinds.iter().position(|kind| kind.name == name);
    known.unwrap_or_else(|| {
        let kind = LayerGraph { name, ..graph.kinds[of].clone() };
        graph.kinds.push(kind);
        keeps.push(other);
        graph.kinds.len() - 1
    })
}

/// Removes recomputed items whose results are not read, neither by another item nor by the backward
/// pass, which reads `needed`.
pub(super) fn prune(items: &mut Vec<Item>, needed: &[ValueId]) {
    let mut needed = needed.to_vec();
    let mut kept = Vec::with_capacity(items.len());
    for item in items.drain(..).rev() {
        let (reads, writes): (&[ValueId], &[ValueId]) = match &item {
            Item::Op { inputs, outputs, .. } => (inputs, outputs),
            Item::Convert { from, to, .. } | Item::Shift { from, to } => {
                (std::slice::from_ref(from), std::slice::from_ref(to))
            }
        };
        if writes.iter().any(|value| needed.contains(value)) {
            needed.extend_from_slice(reads);
            kept.push(item);
        }
    }
    kept.reverse();
    *items = kept;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph;
    use crate::lower::lower;
    use crate::model::built_in;
    use crate::program::{ComputePass, MemoryKind};
    use crate::strategy::Strategy;

    fn plan(name: &str, recompute: Recompute) -> crate::program::Plan {
        let model = built_in::get(name).unwrap().unwrap();
        lower(&model, &Strategy { recompute, seq: model.seq, ..Strategy::default() }).unwrap()
    }

    /// Bytes of activations, and recomputed GEMM operations.
    fn price(name: &str, recompute: Recompute) -> (u64, f64) {
        let plan = plan(name, recompute);
        let program = &plan.programs[0];
        let recomputed = program.body.nodes.iter().filter_map(|node| match node.op {
            crate::program::Op::Compute { segment, .. } => {
                Some(&plan.templates[program.segment(segment).template as usize])
            }
            _ => None,
        });
        let recomputed = recomputed.filter(|template| template.pass == ComputePass::Recompute);
        let flops = recomputed.flat_map(|t| t.ops.iter().map(|op| t.cost(op).matrix.0)).sum();
        (program.memory.of(MemoryKind::Activations).0, flops)
    }

    #[test]
    fn the_more_is_kept_the_less_is_computed_again() {
        for name in ["mini", "mini-llama", "llama3-8b"] {
            let prices = [Recompute::Full, Recompute::SelectiveOp, Recompute::None]
                .map(|recompute| price(name, recompute));
            for pair in prices.windows(2) {
                assert!(pair[0].0 < pair[1].0, "{name}: {prices:?}");
                assert!(pair[0].1 > pair[1].1, "{name}: {prices:?}");
            }
            let (bytes, forward) = price(name, Recompute::FullForward);
            assert_eq!(bytes, prices[0].0);
            assert!(forward > prices[0].1, "the last product is computed recomputed too");
        }
    }

    /// Of llama3-8b's 218 million weights per layer, torchtitan recomputes the GEMMs of k, o and
    /// up: 4.2 + 16.8 + 58.7 million.
    #[test]
    fn every_second_product_is_computed_again() {
        let recomputed = price("llama3-8b", Recompute::SelectiveOp).1 / (2.0 * 8192.0 * 32.0);
        assert!((recomputed / 79.7e6 - 1.0).abs() < 0.07, "{recomputed} weights a layer");
    }

    #[test]
    fn a_count_of_layers_is_taken_from_each_stage() {
        let model = built_in::get("mini").unwrap().unwrap();
        let batch = graph::build(&model, 1, model.seq, model.seq);
        let blocks = model.layers as usize;
        let kinds = |layers: u16| {
            let mut graph = batch.clone();
            let stages = [0..blocks / 2 + 1, blocks / 2 + 1..blocks + 2];
            let keeps = specialize_layers(&mut graph, &stages, Recompute::FullOf(layers));
            graph.layers.iter().filter(|l| keeps[l.kind] == SavedActivations::Input).count()
        };
        assert_eq!(kinds(0), 0);
        assert_eq!(kinds(1), 2);
        assert_eq!(kinds(1000), blocks);
    }
}
