//! What a layer keeps for its backward pass, and what it therefore computes again.

use super::shard::{Item, ValueId};
use crate::graph::{Graph, LayerGraph, LinearRole, OpKind, Operator};
use crate::strategy::Recompute;
use std::ops::Range;

/// What the layers of one kind keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keeps {
    /// Everything that the backward pass reads.
    All,
    /// All but attention's core.
    AllButAttention,
    /// Attention, its queries, keys and values, and what goes into the feed-forward part's
    /// activation.
    AttentionAndUp,
    /// Attention, its queries, keys and values.
    Attention,
    /// The layer's input.
    Input,
    /// The layer's input; what is computed again is the whole forward pass, needed or not.
    InputOfAll,
}

impl Keeps {
    /// Whether an operator of the forward pass runs again before the gradients. `exchanged` says
    /// whether what comes out of the row-parallel products is summed over ranks.
    pub(super) fn computes_again(self, layer: &LayerGraph, op: &Operator, exchanged: bool) -> bool {
        // The first layer has no input to start from, and a loss counts once.
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

/// The product that an operator is, or that it adds the bias to: a bias belongs to the product
/// before it, since it is what comes out of both that is kept.
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

/// Gives layers that keep less than others of their kind a kind of their own, and says of each kind
/// what it keeps.
pub(super) fn tell_apart(
    graph: &mut Graph,
    stages: &[Range<usize>],
    recompute: Recompute,
) -> Vec<Keeps> {
    let (first, other) = match recompute {
        Recompute::None => (Keeps::All, None),
        Recompute::Selective => (Keeps::AllButAttention, None),
        Recompute::SelectiveOp => (Keeps::AttentionAndUp, Some(Keeps::Attention)),
        Recompute::Full => (Keeps::Input, None),
        Recompute::FullOf(_) => (Keeps::All, Some(Keeps::Input)),
        Recompute::FullForward => (Keeps::InputOfAll, None),
    };
    let mut keeps = vec![first; graph.kinds.len()];
    let Some(other) = other else { return keeps };
    for stage in stages {
        let inner = |graph: &Graph, layer: usize| graph.kinds[graph.layers[layer].kind].is_block();
        let blocks: Vec<usize> = stage.clone().filter(|&layer| inner(graph, layer)).collect();
        for (at, layer) in blocks.into_iter().enumerate() {
            let again = match recompute {
                Recompute::FullOf(layers) => at < usize::from(layers),
                Recompute::SelectiveOp => layer % 2 == 0,
                Recompute::None
                | Recompute::Selective
                | Recompute::Full
                | Recompute::FullForward => false,
            };
            if again {
                graph.layers[layer].kind = twin(graph, &mut keeps, graph.layers[layer].kind, other);
            }
        }
    }
    keeps
}

/// The kind that equals another but for what it keeps.
fn twin(graph: &mut Graph, keeps: &mut Vec<Keeps>, of: usize, other: Keeps) -> usize {
    let name = format!("{}.again", graph.kinds[of].name);
    let known = graph.kinds.iter().position(|kind| kind.name == name);
    known.unwrap_or_else(|| {
        let kind = LayerGraph { name, ..graph.kinds[of].clone() };
        graph.kinds.push(kind);
        keeps.push(other);
        graph.kinds.len() - 1
    })
}

/// Drops what nobody reads: of what is computed again, neither another part nor the backward pass,
/// which reads the `needed`.
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
    use crate::program::{MemoryKind, SegmentPass};
    use crate::strategy::Strategy;

    fn plan(name: &str, recompute: Recompute) -> crate::program::Plan {
        let model = built_in::get(name).unwrap().unwrap();
        lower(&model, &Strategy { recompute, seq: model.seq, ..Strategy::default() }).unwrap()
    }

    /// Bytes of activations, and matrix operations that are done a second time.
    fn price(name: &str, recompute: Recompute) -> (u64, f64) {
        let plan = plan(name, recompute);
        let program = &plan.programs[0];
        let again = program.body.nodes.iter().filter_map(|node| match node.op {
            crate::program::Op::Compute { segment, .. } => {
                Some(&plan.templates[program.segment(segment).template as usize])
            }
            _ => None,
        });
        let again = again.filter(|template| template.pass == SegmentPass::Recompute);
        let flops = again.flat_map(|t| t.ops.iter().map(|op| t.cost(op).matrix.0)).sum();
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
            assert!(forward > prices[0].1, "the last product is computed again too");
        }
    }

    /// Of llama3-8b's 218 million weights per layer, torchtitan computes with those of k, o and up
    /// again: 4.2 + 16.8 + 58.7 million.
    #[test]
    fn every_second_product_is_computed_again() {
        let again = price("llama3-8b", Recompute::SelectiveOp).1 / (2.0 * 8192.0 * 32.0);
        assert!((again / 79.7e6 - 1.0).abs() < 0.07, "{again} weights a layer");
    }

    #[test]
    fn a_count_of_layers_is_taken_from_each_stage() {
        let model = built_in::get("mini").unwrap().unwrap();
        let batch = graph::build(&model, 1, model.seq, model.seq);
        let blocks = model.layers as usize;
        let kinds = |layers: u16| {
            let mut graph = batch.clone();
            let stages = [0..blocks / 2 + 1, blocks / 2 + 1..blocks + 2];
            let keeps = tell_apart(&mut graph, &stages, Recompute::FullOf(layers));
            graph.layers.iter().filter(|l| keeps[l.kind] == Keeps::Input).count()
        };
        assert_eq!(kinds(0), 0);
        assert_eq!(kinds(1), 2);
        assert_eq!(kinds(1000), blocks);
    }
}
