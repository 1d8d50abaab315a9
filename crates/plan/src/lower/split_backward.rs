//! Splits a backward pass in two: the part that the previous layer waits for, and the part needed
//! only by the optimizer.

use super::bucket_plan::transient_gradients;
use super::shard::{Item, ValueId, external};
use crate::graph::{OpKind, OpPass};
use crate::strategy::Strategy;

/// The two halves of a layer's backward pass.
#[derive(Clone, Debug)]
pub(super) struct Halves {
    /// The input gradient and all items it depends on.
    pub(super) input: Vec<Item>,
    /// The weight gradients.
    pub(super) weight: Vec<Item>,
    /// Values that the second half reads but does not produce; they are kept until then.
    pub(super) late: Vec<ValueId>,
}

/// Splits a backward pass.
///
/// Weight gradients of GEMMs are in the second half: they are half of the work. Those of norms and
/// biases are negligible, but would keep the norms' inputs and gradients alive. They are therefore
/// computed with the input gradient if possible, as in Qi et al.'s own implementation: if a
/// gradient stays in its buffer until the end of the iteration. Otherwise the gradient of the next
/// leaf or microbatch would start before this one is complete.
pub(super) fn halves(
    backward: &[Item],
    input_grad: Option<ValueId>,
    strategy: &Strategy,
) -> Halves {
    let along = strategy.local_leaves() == 1 && !transient_gradients(strategy);
    let (mut input, mut weight) = (Vec::new(), Vec::new());
    let mut awaited: Vec<ValueId> = input_grad.into_iter().collect();
    for item in backward.iter().rev() {
        let first = match item {
            Item::Op { kind, part, .. } => !is_late(kind, *part, along),
            // An exchange belongs to the half that reads its result first.
            Item::Convert { to, .. } | Item::Shift { to, .. } => awaited.contains(to),
        };
        if first {
            match item {
                Item::Op { inputs, .. } => awaited.extend(inputs),
                Item::Convert { from, .. } | Item::Shift { from, .. } => awaited.push(*from),
            }
            input.push(item.clone());
        } else {
            weight.push(item.clone());
        }
    }
    input.reverse();
    weight.reverse();
    let late = external(weight.iter(), None);
    Halves { input, weight, late }
}

fn is_late(kind: &OpKind, part: OpPass, along: bool) -> bool {
    let product = matches!(
        kind,
        OpKind::Linear { .. }
            | OpKind::ExpertLinear { .. }
            | OpKind::Conv { .. }
            | OpKind::Embedding
    );
    part == OpPass::BackwardWeight && (product || !along)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::CollectiveKind;
    use crate::graph;
    use crate::lower::recompute::SavedActivations;
    use crate::lower::shard::{ShardedLayer, shard};
    use crate::model::built_in;
    use crate::schedule::ScheduleKind;

    fn block(strategy: Strategy) -> (ShardedLayer, Halves) {
        let model = built_in::get("mini").unwrap().unwrap();
        let schedule = ScheduleKind::ZbH1 { chunks: 1 };
        let strategy = Strategy { seq: model.seq, schedule, ..strategy };
        let graph = graph::build(&model, 1, model.seq, model.seq);
        let kind = graph.kinds.iter().find(|k| k.name == "block").unwrap();
        let layer = shard(&graph, kind, &strategy, SavedActivations::All);
        let halves = layer.halves.clone().unwrap();
        (layer, halves)
    }

    fn operators(items: &[Item]) -> usize {
        items.iter().filter(|item| matches!(item, Item::Op { .. })).count()
    }

    #[test]
    fn the_halves_are_the_whole() {
        for strategy in [
            Strategy::default(),
            Strategy { tp: 2, ..Strategy::default() },
            Strategy { tp: 2, sp: true, ..Strategy::default() },
            Strategy { leaves: 4, global_batch: 4, ..Strategy::default() },
        ] {
            let (layer, halves) = block(strategy);
            let both = halves.input.len() + halves.weight.len();
            assert_eq!(both, layer.backward.len());
            // The previous layer gets its gradient from the first half alone.
            let made = halves.input.iter().any(|item| match item {
                Item::Op { outputs, .. } => outputs.contains(&layer.input_grad.unwrap()),
                Item::Convert { to, .. } | Item::Shift { to, .. } => {
                    *to == layer.input_grad.unwrap()
                }
            });
            assert!(made);
        }
    }

    #[test]
    fn products_come_late_and_norms_only_where_they_must() {
        let (_, halves) = block(Strategy::default());
        assert_eq!(operators(&halves.weight), 4, "qkv, attention's output, up and down");
        let (_, leaves) = block(Strategy { leaves: 4, global_batch: 4, ..Strategy::default() });
        assert_eq!(operators(&leaves.weight), 4 + 4 + 2, "and four biases and two norms");
        assert!(leaves.late.len() > halves.late.len());
    }

    #[test]
    fn what_only_weights_read_is_gathered_late() {
        let (_, halves) = block(Strategy { tp: 2, sp: true, ..Strategy::default() });
        let gathers = |items: &[Item]| {
            let of = |item: &&Item| {
                matches!(item, Item::Convert { kind: CollectiveKind::AllGather, .. })
            };
            items.iter().filter(of).count()
        };
        assert_eq!((gathers(&halves.input), gathers(&halves.weight)), (2, 2));
    }
}
