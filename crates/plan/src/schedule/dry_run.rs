use super::{Action, Pass};
use crate::ids::{Microbatch, Stage, StageRank};
use std::collections::BTreeMap;
use thiserror::Error;

/// How much of an ideal machine an order leaves idle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bubble {
    /// Slots from the first action's start to the last action's end.
    pub makespan: u64,
    /// Slots in which a rank computes, summed over ranks.
    pub busy: u64,
    /// The share of all ranks' slots that is idle, from 0 to 1.
    pub fraction: f64,
}

/// Runs an order on ideal ranks: passes take the slots given, communication takes none.
///
/// A forward takes `f` slots and a backward `b`; where a backward is split, its input half takes
/// the larger half of them and its weight half the rest. Each rank starts its next action as soon
/// as what it needs exists. An order that is incomplete or waits for itself is an error that says
/// where.
///
/// For `p` ranks and `m` microbatches this gives the published `(p − 1)/(m + p − 1)` for GPipe and
/// 1F1B, and `(p − 1)/(V·m + p − 1)` with `V` chunks when `m` is a multiple of `p` (Narayanan et
/// al., 2021, arXiv 2104.04473, sections 2.2.1 and 2.2.2, which state the bubble over the ideal
/// time: `(p − 1)/(V·m)`).
pub fn bubble(order: &[Vec<Action>], f: u32, b: u32) -> Result<Bubble, DryRunError> {
    let mut run = DryRun::new(order)?;
    let mut clocks = vec![0u64; order.len()];
    let mut next = vec![0usize; order.len()];
    let mut busy = 0u64;
    loop {
        let mut progressed = false;
        // Down the ranks and up again: forwards and backwards each travel the whole pipeline.
        for rank in (0..order.len()).chain((0..order.len()).rev()) {
            while let Some(&action) = order[rank].get(next[rank]) {
                let Ok(ready) = run.ready(action) else { break };
                let slots = match action.pass {
                    Pass::Forward => f,
                    Pass::Backward => b,
                    Pass::BackwardInput => b - b / 2,
                    Pass::BackwardWeight => b / 2,
                };
                clocks[rank] = clocks[rank].max(ready) + u64::from(slots);
                busy += u64::from(slots);
                run.finish(action, clocks[rank]);
                next[rank] += 1;
                progressed = true;
            }
        }
        if !progressed {
            break;
        }
    }
    for (rank, row) in order.iter().enumerate() {
        if let Some(&action) = row.get(next[rank])
            && let Err(awaited) = run.ready(action)
        {
            return Err(DryRunError::Stuck { rank, action, awaited });
        }
    }
    let makespan = clocks.iter().copied().max().unwrap_or(0);
    let slots = u128::from(makespan) * order.len() as u128;
    let idle = slots - u128::from(busy);
    let fraction = if slots == 0 { 0.0 } else { idle as f64 / slots as f64 };
    Ok(Bubble { makespan, busy, fraction })
}

/// The most microbatches whose activations each virtual stage of a rank holds at once: forwards
/// whose weight gradients are not yet made. A rank that the order does not have holds none.
pub fn in_flight(order: &[Vec<Action>], rank: StageRank) -> BTreeMap<Stage, u32> {
    let mut now: BTreeMap<Stage, u32> = BTreeMap::new();
    let mut most = BTreeMap::new();
    for action in order.get(rank.index()).into_iter().flatten() {
        let held = now.entry(action.stage).or_default();
        match action.pass {
            Pass::Forward => *held += 1,
            Pass::Backward | Pass::BackwardWeight => *held = held.saturating_sub(1),
            Pass::BackwardInput => {}
        }
        let peak = most.entry(action.stage).or_default();
        *peak = (*held).max(*peak);
    }
    most
}

/// Why an order cannot run to its end.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DryRunError {
    /// A pass that has already run.
    #[error("rank {rank}: {action} repeats a pass that already stands in the order")]
    Repeated {
        /// The pipeline rank.
        rank: usize,
        /// Its action.
        action: Action,
    },
    /// A pass that no rank runs.
    #[error(
        "no rank runs {missing}, though stages up to {last_stage} \
         and microbatches up to {last_microbatch} occur"
    )]
    Missing {
        /// The first action that is missing.
        missing: Action,
        /// The largest stage that occurs.
        last_stage: Stage,
        /// The largest microbatch that occurs.
        last_microbatch: Microbatch,
    },
    /// Ranks that wait for each other.
    #[error("rank {rank}: {action} waits for {awaited}, which cannot run before it")]
    Stuck {
        /// The first pipeline rank that waits.
        rank: usize,
        /// Its next action.
        action: Action,
        /// What that needs.
        awaited: Action,
    },
}

/// When each pass ended, per stage and microbatch.
struct DryRun {
    stages: usize,
    microbatches: usize,
    forward: Vec<Option<u64>>,
    input_gradient: Vec<Option<u64>>,
}

impl DryRun {
    fn new(order: &[Vec<Action>]) -> Result<Self, DryRunError> {
        let (stages, microbatches) = complete(order)?;
        let unfinished = vec![None; stages * microbatches];
        Ok(Self { stages, microbatches, forward: unfinished.clone(), input_gradient: unfinished })
    }

    /// The slot from which the action can run, or what it still waits for.
    fn ready(&self, action: Action) -> Result<u64, Action> {
        let Action { stage, microbatch, .. } = action;
        let forward = |stage: Stage| {
            self.forward[self.cell(stage, microbatch)].ok_or(Action {
                stage,
                pass: Pass::Forward,
                microbatch,
            })
        };
        let input_gradient = |stage: Stage, pass| {
            self.input_gradient[self.cell(stage, microbatch)].ok_or(Action {
                stage,
                pass,
                microbatch,
            })
        };
        match action.pass {
            Pass::Forward if stage.0 == 0 => Ok(0),
            Pass::Forward => forward(Stage(stage.0 - 1)),
            Pass::Backward | Pass::BackwardInput => {
                let activations = forward(stage)?;
                if stage.index() + 1 == self.stages {
                    return Ok(activations);
                }
                Ok(activations.max(input_gradient(Stage(stage.0 + 1), action.pass)?))
            }
            Pass::BackwardWeight => input_gradient(stage, Pass::BackwardInput),
        }
    }

    fn finish(&mut self, action: Action, slot: u64) {
        let cell = self.cell(action.stage, action.microbatch);
        match action.pass {
            Pass::Forward => self.forward[cell] = Some(slot),
            Pass::Backward | Pass::BackwardInput => self.input_gradient[cell] = Some(slot),
            Pass::BackwardWeight => {}
        }
    }

    fn cell(&self, stage: Stage, microbatch: Microbatch) -> usize {
        stage.index() * self.microbatches + microbatch.index()
    }
}

/// The numbers of stages and microbatches, if every stage runs every pass of every microbatch
/// exactly once.
///
/// After this a run can only fail by waiting, and tables of stages × microbatches are no larger
/// than the order.
fn complete(order: &[Vec<Action>]) -> Result<(usize, usize), DryRunError> {
    let mut all: Vec<(Stage, Microbatch, Pass, usize)> = order
        .iter()
        .enumerate()
        .flat_map(|(rank, row)| {
            row.iter().map(move |action| (action.stage, action.microbatch, action.pass, rank))
        })
        .collect();
    all.sort_unstable();
    let Some(&(last_stage, ..)) = all.last() else { return Ok((0, 0)) };
    let last_microbatch = all.iter().map(|entry| entry.1).max().unwrap_or_default();
    let microbatches = last_microbatch.index() + 1;

    let mut cells = 0;
    for group in all.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
        let expected = (Stage::from(cells / microbatches), Microbatch::from(cells % microbatches));
        let missing = |pass| DryRunError::Missing {
            missing: Action { stage: expected.0, pass, microbatch: expected.1 },
            last_stage,
            last_microbatch,
        };
        if (group[0].0, group[0].1) != expected {
            return Err(missing(Pass::Forward));
        }
        // The sort has put the passes in the order of the enum.
        let passes: Vec<Pass> = group.iter().map(|entry| entry.2).collect();
        match passes.as_slice() {
            [Pass::Forward, Pass::Backward]
            | [Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight] => {}
            [Pass::Forward] => return Err(missing(Pass::Backward)),
            [Pass::Forward, Pass::BackwardInput] => return Err(missing(Pass::BackwardWeight)),
            [Pass::Forward, Pass::BackwardWeight] => return Err(missing(Pass::BackwardInput)),
            [Pass::Forward, ..] => {
                let &(stage, microbatch, pass, rank) = &group[group.len() - 1];
                let action = Action { stage, pass, microbatch };
                return Err(DryRunError::Repeated { rank, action });
            }
            _ => return Err(missing(Pass::Forward)),
        }
        cells += 1;
    }
    if cells % microbatches != 0 {
        return Err(DryRunError::Missing {
            missing: Action {
                stage: last_stage,
                pass: Pass::Forward,
                microbatch: Microbatch::from(cells % microbatches),
            },
            last_stage,
            last_microbatch,
        });
    }
    Ok((last_stage.index() + 1, microbatches))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::grid::parse_csv;
    use crate::schedule::{ScheduleKind, order};

    /// The bubble as published, `(p − 1)/(V·m + p − 1)`, compared without rounding.
    fn assert_published(kind: ScheduleKind, ranks: u16, microbatches: u32, f: u32, b: u32) {
        let found = bubble(&order(kind, ranks, microbatches).unwrap(), f, b).unwrap();
        let [p, v, m] = [ranks.into(), kind.chunks().into(), u64::from(microbatches)];
        let pass = u64::from(f + b);
        let case = format!("{kind}, {p} ranks, {m} microbatches, f = {f}, b = {b}");
        assert_eq!(found.makespan, (v * m + p - 1) * pass, "{case}");
        assert_eq!(found.busy, p * v * m * pass, "{case}");
        let fraction = (p - 1) as f64 / (v * m + p - 1) as f64;
        assert!((found.fraction - fraction).abs() < 1e-15, "{case}: {}", found.fraction);
    }

    const COSTS: [(u32, u32); 2] = [(1, 1), (1, 2)];

    #[test]
    fn gpipe_and_1f1b_idle_as_published() {
        for (f, b) in COSTS {
            for ranks in 1..9 {
                for microbatches in 1..20 {
                    assert_published(ScheduleKind::GPipe, ranks, microbatches, f, b);
                    assert_published(ScheduleKind::OneFOneB, ranks, microbatches, f, b);
                }
            }
        }
    }

    #[test]
    fn interleaving_divides_the_bubble_by_the_chunks() {
        for (f, b) in COSTS {
            for ranks in 1..9 {
                for chunks in 1..5 {
                    for rounds in 1..4 {
                        let kind = ScheduleKind::Interleaved { chunks };
                        assert_published(kind, ranks, u32::from(ranks) * rounds, f, b);
                    }
                }
            }
        }
    }

    #[test]
    fn three_stages_and_three_microbatches_are_busy_three_fifths_of_the_time() {
        for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
            let found = bubble(&order(kind, 3, 3).unwrap(), 1, 1).unwrap();
            assert_eq!((found.makespan, found.busy), (10, 18));
            assert_eq!(found.fraction, 0.4);
        }
    }

    #[test]
    fn a_split_backward_shortens_the_way_back() {
        // Stage 0 waits for the input half of stage 1 only: 2 forwards, then 1 + 1 of the input
        // halves.
        let split = parsed("0F0,0I0,0W0\n1F0,1I0,1W0");
        assert_eq!(bubble(&split, 1, 2).unwrap().makespan, 5);
        let whole = parsed("0F0,0B0\n1F0,1B0");
        assert_eq!(bubble(&whole, 1, 2).unwrap().makespan, 6);
    }

    #[test]
    fn nothing_to_do_is_no_bubble() {
        let idle = Bubble { makespan: 0, busy: 0, fraction: 0.0 };
        assert_eq!(bubble(&[], 1, 1), Ok(idle));
        assert_eq!(bubble(&[Vec::new()], 1, 1), Ok(idle));
        assert_eq!(bubble(&order(ScheduleKind::GPipe, 2, 2).unwrap(), 0, 0), Ok(idle));
    }

    #[test]
    fn the_deepest_pipeline_and_the_dearest_passes_stay_in_range() {
        let deep = order(ScheduleKind::OneFOneB, u16::MAX, 4).unwrap();
        let found = bubble(&deep, u32::MAX, u32::MAX).unwrap();
        assert_eq!(found.makespan, (4 + u64::from(u16::MAX) - 1) * 2 * u64::from(u32::MAX));
        assert!(found.fraction > 0.99 && found.fraction < 1.0);
    }

    #[test]
    fn orders_that_cannot_run_say_where() {
        let message = |text: &str| bubble(&parsed(text), 1, 1).unwrap_err().to_string();
        let tail = "though stages up to 1 and microbatches up to 0 occur";
        assert_eq!(
            message("0F0,0B0\n1B0,1F0"),
            "rank 0: 0B0 waits for 1B0, which cannot run before it"
        );
        assert_eq!(
            message("0B0,0F0\n1F0,1B0"),
            "rank 0: 0B0 waits for 0F0, which cannot run before it"
        );
        assert_eq!(
            message("0F0,0B0,0B0\n1F0,1B0"),
            "rank 0: 0B0 repeats a pass that already stands in the order"
        );
        assert_eq!(
            message("0F0,0B0,0W0"),
            "rank 0: 0W0 repeats a pass that already stands in the order"
        );
        assert_eq!(message("1F0,1B0"), format!("no rank runs 0F0, {tail}"));
        assert_eq!(message("0F0\n1F0,1B0"), format!("no rank runs 0B0, {tail}"));
        assert_eq!(message("0F0,0B0\n1F0,1I0"), format!("no rank runs 1W0, {tail}"));
        assert_eq!(message("0F0,0B0\n1F0,1W0"), format!("no rank runs 1I0, {tail}"));
        assert_eq!(message("0F0,0B0\n1B0"), format!("no rank runs 1F0, {tail}"));
        assert!(message("0F0,0B0,0F1,0B1\n1F0,1B0").starts_with("no rank runs 1F1, "));
        // A table of all stages × microbatches would not fit into memory.
        assert!(message("65535F4294967295").starts_with("no rank runs 0F0, "));
    }

    #[test]
    fn stages_keep_as_many_microbatches_as_published() {
        for ranks in 1..7u16 {
            for microbatches in 1..10 {
                let gpipe = order(ScheduleKind::GPipe, ranks, microbatches).unwrap();
                let one_f_one_b = order(ScheduleKind::OneFOneB, ranks, microbatches).unwrap();
                for rank in 0..ranks {
                    let kept = |order: &[Vec<Action>]| in_flight(order, StageRank(rank));
                    let only = |count| BTreeMap::from([(Stage(rank), count)]);
                    assert_eq!(kept(&gpipe), only(microbatches));
                    assert_eq!(kept(&one_f_one_b), only(microbatches.min((ranks - rank).into())));
                }
            }
        }
    }

    #[test]
    fn every_chunk_is_counted_by_itself() {
        let order = order(ScheduleKind::Interleaved { chunks: 2 }, 2, 4).unwrap();
        let kept = |rank| in_flight(&order, StageRank(rank));
        assert_eq!(kept(0), BTreeMap::from([(Stage(0), 4), (Stage(2), 2)]));
        assert_eq!(kept(1), BTreeMap::from([(Stage(1), 3), (Stage(3), 1)]));
        assert_eq!(kept(2), BTreeMap::new());
    }

    #[test]
    fn a_split_backward_keeps_the_activations_until_the_weight_gradient() {
        let order = parsed("0F0,0I0,0F1,0I1,0W0,0W1");
        assert_eq!(in_flight(&order, StageRank(0)), BTreeMap::from([(Stage(0), 2)]));
    }

    fn parsed(text: &str) -> Vec<Vec<Action>> {
        let rows = parse_csv(text).unwrap();
        rows.into_iter().map(|row| row.into_iter().flatten().collect()).collect()
    }
}
