//! Splits the chain of layers into stages.

use crate::graph::Graph;
use crate::ids::LayerId;
use crate::strategy::Split;
use std::ops::Range;

/// Contiguous ranges of layers, one per virtual stage. All layers from the head on stay together:
/// prediction modules share its table, and stages after the loss would have nothing to overlap
/// with.
///
/// The chain must have at least as many layers as there are stages.
pub(super) fn partition(graph: &Graph, stages: usize, split: &Split) -> Vec<Range<usize>> {
    let units = graph.head() + 1;
    let mut cut = match split {
        Split::Cost => by_cost(graph, units, stages),
        Split::Count => by_count(units, stages),
        Split::At(starts) => by_starts(units, starts),
    };
    if let Some(last) = cut.last_mut() {
        last.end = graph.layers.len();
    }
    cut
}

fn by_starts(layers: usize, starts: &[u32]) -> Vec<Range<usize>> {
    let starts: Vec<usize> = starts.iter().map(|&start| start as usize).collect();
    let from = std::iter::once(0).chain(starts.iter().copied());
    from.zip(starts.iter().copied().chain([layers])).map(|(from, until)| from..until).collect()
}

/// First layers of all stages but the first, such that the stages' costs are as equal as whole
/// layers allow; `costs` are per layer.
///
/// There must be at least as many layers as stages, and one stage.
pub fn balance(costs: &[f64], stages: usize) -> Split {
    let cut = even(costs, stages);
    Split::At(cut.iter().skip(1).map(|stage| stage.start as u32).collect())
}

/// Equal numbers of blocks, as defined by [`Split::Count`]. The chain's first layer is the
/// embedding and its last the head. If neither rule divides evenly, embedding and head count as
/// layers and earlier stages have one layer more.
fn by_count(layers: usize, stages: usize) -> Vec<Range<usize>> {
    let blocks = layers.saturating_sub(2);
    let ends = |stage: usize| usize::from(stage == 0) + usize::from(stage + 1 == stages);
    let sizes: Vec<usize> = if blocks > 0 && blocks.is_multiple_of(stages) {
        (0..stages).map(|stage| blocks / stages + ends(stage)).collect()
    } else {
        (0..stages).map(|stage| (layers + stages - 1 - stage) / stages).collect()
    };
    let mut start = 0;
    let range = |size: usize| {
        start += size;
        start - size..start
    };
    sizes.into_iter().map(range).collect()
}

/// Stages of nearly equal cost, embedding and head included: minimises the largest cost, then the
/// sum of squares.
fn by_cost(graph: &Graph, units: usize, stages: usize) -> Vec<Range<usize>> {
    let mut costs: Vec<f64> =
        (0..graph.layers.len()).map(|i| layer_cost(graph, LayerId::from(i))).collect();
    let behind: f64 = costs.drain(units..).sum();
    if let Some(head) = costs.last_mut() {
        *head += behind;
    }
    even(&costs, stages)
}

fn even(costs: &[f64], stages: usize) -> Vec<Range<usize>> {
    if stages == costs.len() {
        return (0..stages).map(|stage| stage..stage + 1).collect();
    }
    let ceiling = best(costs, stages, f64::INFINITY, f64::max).0;
    best(costs, stages, ceiling * (1.0 + 1e-9), |sum, cost| sum + cost * cost).1
}

/// GEMM operations of forward and backward, plus one operation per tensor element for copying.
fn layer_cost(graph: &Graph, layer: LayerId) -> f64 {
    let kind = graph.layer(layer);
    let ops = kind.forward.iter().chain(&kind.backward);
    let copying: f64 = kind.tensors.iter().map(|t| t.dims[0] as f64 * t.dims[1] as f64).sum();
    ops.map(|op| kind.matrix_flops(op).0).sum::<f64>() + copying
}

/// Split with the least total, where `join` adds a stage's cost to the total so far and no stage
/// costs more than `ceiling`.
fn best(
    costs: &[f64],
    stages: usize,
    ceiling: f64,
    join: impl Fn(f64, f64) -> f64,
) -> (f64, Vec<Range<usize>>) {
    let layers = costs.len();
    let mut prefix = vec![0.0; layers + 1];
    for (i, cost) in costs.iter().enumerate() {
        prefix[i + 1] = prefix[i] + cost;
    }
    let at = |s: usize, end: usize| s * (layers + 1) + end;
    // Least total for the first `end` layers in s + 1 stages, and where the last of them begins.
    let mut total = vec![f64::INFINITY; stages * (layers + 1)];
    let mut cut = vec![0u32; stages * (layers + 1)];
    for end in 1..=layers + 1 - stages {
        if prefix[end] <= ceiling {
            total[at(0, end)] = join(0.0, prefix[end]);
        }
    }
    for s in 1..stages {
        // Every stage behind needs a layer.
        for end in s + 1..=layers + 1 + s - stages {
            let mut least = (f64::INFINITY, 0);
            for start in (s..end).rev() {
                let cost = prefix[end] - prefix[start];
                // Costs only grow from here, and so do totals.
                if cost > ceiling || join(0.0, cost) >= least.0 {
                    break;
                }
                let candidate = join(total[at(s - 1, start)], cost);
                if candidate < least.0 {
                    least = (candidate, start);
                }
            }
            (total[at(s, end)], cut[at(s, end)]) = (least.0, least.1 as u32);
        }
    }
    let mut ranges = vec![0..0; stages];
    let mut end = layers;
    for s in (0..stages).rev() {
        let start = if s == 0 { 0 } else { cut[at(s, end)] as usize };
        ranges[s] = start..end;
        end = start;
    }
    (total[at(stages - 1, layers)], ranges)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph;
    use crate::model::built_in;

    fn sizes(name: &str, stages: usize) -> Vec<usize> {
        let model = built_in::get(name).unwrap().unwrap();
        let graph = graph::build(&model, 1, model.seq, model.seq);
        partition(&graph, stages, &Split::Cost).into_iter().map(|r| r.len()).collect()
    }

    #[test]
    fn counting_ignores_what_the_ends_cost() {
        let sizes = |layers, stages| {
            by_count(layers, stages).into_iter().map(|r| r.len()).collect::<Vec<_>>()
        };
        // 32 blocks between an embedding and a head.
        assert_eq!(sizes(34, 4), [9, 8, 8, 9]);
        assert_eq!(sizes(34, 32)[..2], [2, 1]);
        // 126 blocks: 128 with the ends.
        assert_eq!(sizes(128, 64), [2; 64]);
        assert_eq!(sizes(12, 4), [3; 4], "ten blocks and the two ends");
        assert_eq!(sizes(13, 4), [4, 3, 3, 3]);
        assert_eq!(sizes(14, 14), [1; 14]);
        assert_eq!(sizes(7, 1), [7]);
        for (layers, stages) in [(34, 4), (128, 64), (13, 4), (13, 5), (3, 3)] {
            let cut = by_count(layers, stages);
            assert_eq!((cut[0].start, cut[stages - 1].end), (0, layers));
            assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(cut.iter().all(|stage| !stage.is_empty()), "{layers} in {stages}");
        }
    }

    #[test]
    fn told_costs_decide_where_stages_begin() {
        let costs = [1.0, 2.0, 2.0, 2.0, 2.0, 6.0];
        assert_eq!(balance(&costs, 1), Split::At(vec![]));
        assert_eq!(balance(&costs, 2), Split::At(vec![4]));
        assert_eq!(balance(&costs, 3), Split::At(vec![3, 5]));
        assert_eq!(by_starts(6, &[3, 5]), [0..3, 3..5, 5..6]);
        for split in [balance(&costs, 1), balance(&costs, 3), Split::Cost, Split::Count] {
            assert_eq!(split.to_string().parse(), Ok(split));
        }
    }

    #[test]
    fn equal_blocks_are_dealt_out_equally() {
        // Embedding and head are added to the first and the last stage.
        let mut expected = vec![4; 24];
        expected[0] += 1;
        expected[23] += 1;
        assert_eq!(sizes("gpt3-175b", 24), expected);
    }

    #[test]
    fn a_heavy_head_takes_blocks_off_the_last_stage() {
        // GPT-2's head costs as much as several blocks.
        let cut = sizes("gpt2-124m", 4);
        assert_eq!(cut.iter().sum::<usize>(), 14);
        assert!(cut[3] < cut[1], "{cut:?}");
    }

    #[test]
    fn every_stage_gets_a_layer() {
        assert_eq!(sizes("gpt2-124m", 14), vec![1; 14]);
    }
}
