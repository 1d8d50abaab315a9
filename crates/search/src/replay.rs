//! Replay of a schedule with the passes of a strategy's stages: every pass one op, every message
//! one edge.

use crate::bound::Staged;
use paceline_plan::schedule::{Action, Pass};
use paceline_plan::strategy::Strategy;

/// End of each rank's last pass, if compute takes `slow` times as long and no pass is before its
/// rank's start. `waits` is what each turn of each rank takes besides; it is empty
/// if no turn takes more.
pub(crate) fn ends(
    s: &Strategy,
    staged: &Staged,
    order: &[Vec<Action>],
    (edges, waits): (&[(f64, f64)], &[Vec<f64>]),
    (slow, starts): (&[f64], Vec<f64>),
) -> Vec<f64> {
    let microbatches = s.microbatches() as usize;
    let stages = staged.stages.len();
    // Arrival of each stage's input and of its output's gradient, by stage and microbatch.
    let mut inputs = vec![f64::NAN; stages * microbatches];
    let mut gradients = vec![f64::NAN; stages * microbatches];
    inputs[..microbatches].fill(0.0);
    let mut ends = starts;
    let mut opens = vec![0.0f64; order.len()];
    let mut next = vec![0usize; order.len()];
    let turns: Vec<Vec<[(f64, f64, f64); 4]>> = slow
        .iter()
        .map(|&slow| {
            let turn = |turn: &crate::form::Turn| {
                (turn.whole.at(slow), turn.inner.at(slow), turn.open.at(1.0))
            };
            (0..stages).map(|stage| staged.turns(stage).each_ref().map(turn)).collect()
        })
        .collect();
    let last = stages - 1;
    loop {
        let mut moved = false;
        for (rank, row) in order.iter().enumerate() {
            while let Some(&Action { stage, pass, microbatch }) = row.get(next[rank]) {
                let (stage, k) = (stage.index(), microbatch.index());
                let at = stage * microbatches + k;
                let arrived = match pass {
                    Pass::Forward => inputs[at],
                    Pass::Backward | Pass::BackwardInput if stage < last => gradients[at],
                    Pass::Backward | Pass::BackwardInput | Pass::BackwardWeight => 0.0,
                };
                if arrived.is_nan() {
                    break;
                }
                let (whole, inner, open) = turns[rank][stage][pass as usize];
                let wait = waits.get(rank).and_then(|row| row.get(next[rank])).copied();
                // What a turn takes besides may begin before its input arrives.
                let after = (ends[rank] + whole).max(ends[rank] + opens[rank] + inner);
                let arrival = (arrived + whole).max(arrived + inner);
                let end = (after + wait.unwrap_or(0.0)).max(arrival);
                (ends[rank], opens[rank]) = (end, open);
                match pass {
                    Pass::Forward if stage < last => {
                        inputs[at + microbatches] = end + open + edges[stage].0;
                    }
                    Pass::Backward | Pass::BackwardInput if stage > 0 => {
                        gradients[at - microbatches] = end + open + edges[stage - 1].1;
                    }
                    Pass::Forward | Pass::Backward | Pass::BackwardInput | Pass::BackwardWeight => {
                    }
                }
                next[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            return ends;
        }
    }
}
