use super::{Action, Pass};
use crate::ids::{Microbatch, Stage};
use thiserror::Error;

/// Idle time of an order on an ideal machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bubble {
    /// Slots from the first action's start to the last action's end.
    pub makespan: u64,
    /// Slots in which a rank computes, summed over ranks.
    pub busy: u64,
    /// Idle fraction of all ranks' slots, from 0 to 1.
    pub fraction: f64,
}

/// Number of slots per pass of one microbatch through one virtual stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// A forward pass.
    pub forward: u32,
    /// The half of a backward pass that computes the input gradient.
    pub input: u32,
    /// The half that computes the weight gradients.
    pub weight: u32,
}

impl Slots {
    /// Creates slots for a forward pass of `f` and a backward pass of `b` slots. If `b` is odd, the
    /// input half gets the larger part.
    pub const fn new(f: u32, b: u32) -> Self {
        Self { forward: f, input: b - b / 2, weight: b / 2 }
    }

    /// Number of slots of a pass.
    pub const fn of(self, pass: Pass) -> u64 {
        match pass {
            Pass::Forward => self.forward as u64,
            Pass::Backward => self.input as u64 + self.weight as u64,
            Pass::BackwardInput => self.input as u64,
            Pass::BackwardWeight => self.weight as u64,
        }
    }
}

/// Runs an order on ideal ranks: passes take the given slots, communication takes none.
///
/// Each rank starts its next action as soon as its inputs exist. An order that is incomplete or
/// deadlocks is an error that names the action.
///
/// For `p` ranks and `m` microbatches this gives the published `(p − 1)/(m + p − 1)` for GPipe and
/// 1F1B. With `V` chunks and `m` a multiple of `p` it gives `(p − 1)/(V·m + p − 1)` (Narayanan et
/// al., 2021, arXiv 2104.04473, sections 2.2.1 and 2.2.2; they state the bubble relative to the
/// ideal time: `(p − 1)/(V·m)`). With passes of `F`, `B` and `W` slots, ranks idle `(p − 1)(F + B −
/// W)` slots under ZB-H1 (Qi et al., 2023, arXiv 2401.10241, table 1).
pub fn bubble(order: &[Vec<Action>], slots: Slots) -> Result<Bubble, DryRunError> {
    let (mut makespan, mut busy) = (0, 0);
    for (rank, ends) in ends(order, |pass| slots.of(pass))?.iter().enumerate() {
        makespan = makespan.max(ends.last().copied().unwrap_or(0));
        busy += order[rank].iter().map(|action| slots.of(action.pass)).sum::<u64>();
    }
    let all = u128::from(makespan) * order.len() as u128;
    let idle = all - u128::from(busy);
    let fraction = if all == 0 { 0.0 } else { idle as f64 / all as f64 };
    Ok(Bubble { makespan, busy, fraction })
}

/// Slot in which each action ends, counted from 1, if each starts as early as possible.
pub(super) fn ends(
    order: &[Vec<Action>],
    slots: impl Fn(Pass) -> u64,
) -> Result<Vec<Vec<u64>>, DryRunError> {
    let mut run = DryRun::new(order)?;
    let mut ends: Vec<Vec<u64>> = order.iter().map(|row| Vec::with_capacity(row.len())).collect();
    loop {
        let mut progressed = false;
        // Down the ranks and back up: forwards and backwards each traverse the whole pipeline.
        for rank in (0..order.len()).chain((0..order.len()).rev()) {
            while let Some(&action) = order[rank].get(ends[rank].len()) {
                let Ok(ready) = run.ready(action) else { break };
                let free = ends[rank].last().copied().unwrap_or(0);
                let end = free.max(ready) + slots(action.pass);
                run.finish(action, end);
                ends[rank].push(end);
                progressed = true;
            }
        }
        if !progressed {
            break;
        }
    }
    for (rank, row) in order.iter().enumerate() {
        if let Some(&action) = row.get(ends[rank].len())
            && let Err(awaited) = run.ready(action)
        {
            return Err(DryRunError::Stuck { rank, action, awaited });
        }
    }
    Ok(ends)
}

/// Reason that an order cannot run to its end.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DryRunError {
    /// A pass occurs more than once.
    #[error("rank {rank}: {action} repeats a pass that is already in the order")]
    Repeated {
        /// The pipeline rank.
        rank: usize,
        /// The repeated action.
        action: Action,
    },
    /// No rank runs a required pass.
    #[error(
        "no rank runs {missing}, though stages up to {last_stage} \
         and microbatches up to {last_microbatch} occur"
    )]
    Missing {
        /// The first missing action.
        missing: Action,
        /// The largest stage that occurs.
        last_stage: Stage,
        /// The largest microbatch that occurs.
        last_microbatch: Microbatch,
    },
    /// Ranks wait for each other.
    #[error("rank {rank}: {action} waits for {awaited}, which cannot run before it")]
    Stuck {
        /// The first pipeline rank that waits.
        rank: usize,
        /// Its next action.
        action: Action,
        /// The action it waits for.
        awaited: Action,
    },
}

/// End slot of each pass, per stage and microbatch.
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

    /// Slot from which the action can run, or the action it still waits for.
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

/// Returns the numbers of stages and microbatches, after checking that every stage runs every pass
/// of every microbatch exactly once.
///
/// After this check a run can only fail by deadlock, and tables of stages × microbatches are no
/// larger than the order.
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
        // The sort puts the passes in enum order.
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

    /// Asserts the published bubble, `(p − 1)/(V·m + p − 1)`, without rounding.
    fn assert_published(kind: ScheduleKind, ranks: u16, microbatches: u32, f: u32, b: u32) {
        let found = bubble(&order(kind, ranks, microbatches).unwrap(), Slots::new(f, b)).unwrap();
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

    /// Costs of a forward pass and of both halves of a backward pass.
    const SPLIT: [Slots; 4] = [
        Slots { forward: 1, input: 1, weight: 1 },
        Slots { forward: 2, input: 2, weight: 1 },
        Slots { forward: 4, input: 5, weight: 3 },
        Slots { forward: 3, input: 3, weight: 3 },
    ];

    /// Idle slots per rank; the same on every rank, since all have equal work.
    fn idle(found: &Bubble, ranks: u16) -> u64 {
        let all = found.makespan * u64::from(ranks);
        assert_eq!((all - found.busy) % u64::from(ranks), 0);
        (all - found.busy) / u64::from(ranks)
    }

    /// Qi et al., 2023, arXiv 2401.10241, table 1: (p − 1)(F + B − W), where B is the input half.
    /// Chunks shorten the passes, and the bubble in proportion.
    #[test]
    fn zero_bubble_idles_as_published() {
        for slots in SPLIT {
            for ranks in 1..9u16 {
                for chunks in 1..4 {
                    for rounds in 1..4 {
                        let kind = ScheduleKind::ZbH1 { chunks };
                        let order = order(kind, ranks, u32::from(ranks) * rounds).unwrap();
                        let found = bubble(&order, slots).unwrap();
                        let one = u64::from(slots.forward + slots.input - slots.weight);
                        let case = format!("{kind}, {ranks} ranks, {rounds} rounds, {slots:?}");
                        assert_eq!(idle(&found, ranks), u64::from(ranks - 1) * one, "{case}");
                    }
                }
            }
        }
        // A third of 1F1B's bubble if all passes cost the same, as the paper states.
        let slots = SPLIT[0];
        let of = |kind| idle(&bubble(&order(kind, 4, 8).unwrap(), slots).unwrap(), 4);
        assert_eq!(of(ScheduleKind::OneFOneB), 3 * of(ScheduleKind::ZbH1 { chunks: 1 }));
    }

    /// deepseek-ai/DualPipe states (PP/2 − 1)(F&B + B − 3W) with PP stages. F&B is the time of a
    /// fused forward and backward pass, whose results become available together. Run one after the
    /// other, the first result is available earlier, and ranks idle less.
    #[test]
    fn a_v_idles_as_published_or_less() {
        for slots in SPLIT.into_iter().filter(|slots| slots.forward == slots.input) {
            for ranks in 2..9u16 {
                for more in [0, 1, 5] {
                    let microbatches = u32::from(2 * ranks) + more;
                    let order = order(ScheduleKind::DualPipeV, ranks, microbatches).unwrap();
                    let [f, b, w] = [slots.forward, slots.input + slots.weight, slots.weight];
                    let published = u64::from(ranks - 1) * u64::from(f + b + b - 3 * w);
                    let case = format!("{ranks} ranks, {microbatches} microbatches, {slots:?}");
                    assert_eq!(idle(&paired(&order, slots), ranks), published, "{case}");
                    let apart = idle(&bubble(&order, slots).unwrap(), ranks);
                    assert_eq!(apart, u64::from(ranks - 1) * u64::from(2 * f - w), "{case}");
                }
            }
        }
    }

    /// Runs a V order with each forward pass fused with the backward pass after it. The exception
    /// is the last rank's first such pair, which the schedule runs separately.
    fn paired(order: &[Vec<Action>], slots: Slots) -> Bubble {
        let mut run = DryRun::new(order).unwrap();
        let (mut next, mut clocks) = (vec![0; order.len()], vec![0; order.len()]);
        let mut busy = 0;
        let mut apart = true;
        while (0..order.len()).any(|rank| next[rank] < order[rank].len()) {
            let before = next.clone();
            for rank in 0..order.len() {
                while let Some(&action) = order[rank].get(next[rank]) {
                    let behind = order[rank].get(next[rank] + 1);
                    let pair = behind.is_some_and(|b| b.pass == Pass::Backward)
                        && action.pass == Pass::Forward;
                    let first = pair && rank + 1 == order.len() && apart;
                    let passes = if pair && !first { 2 } else { 1 };
                    let block = &order[rank][next[rank]..][..passes];
                    let ready: Result<Vec<u64>, _> = block.iter().map(|&a| run.ready(a)).collect();
                    let Ok(ready) = ready else { break };
                    let cost: u64 = block.iter().map(|a| slots.of(a.pass)).sum();
                    clocks[rank] = ready.into_iter().fold(clocks[rank], u64::max) + cost;
                    block.iter().for_each(|&a| run.finish(a, clocks[rank]));
                    (busy, next[rank]) = (busy + cost, next[rank] + passes);
                    apart &= !first;
                }
            }
            assert_ne!(before, next, "stuck");
        }
        Bubble { makespan: clocks.into_iter().max().unwrap(), busy, fraction: 0.0 }
    }

    #[test]
    fn three_stages_and_three_microbatches_are_busy_three_fifths_of_the_time() {
        for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
            let found = bubble(&order(kind, 3, 3).unwrap(), Slots::new(1, 1)).unwrap();
            assert_eq!((found.makespan, found.busy), (10, 18));
            assert_eq!(found.fraction, 0.4);
        }
    }

    #[test]
    fn a_split_backward_shortens_the_way_back() {
        // Stage 0 waits only for the input half of stage 1: 2 forwards, then 1 + 1 slots of input
        // halves.
        let split = parsed("0F0,0I0,0W0\n1F0,1I0,1W0");
        assert_eq!(bubble(&split, Slots::new(1, 2)).unwrap().makespan, 5);
        let whole = parsed("0F0,0B0\n1F0,1B0");
        assert_eq!(bubble(&whole, Slots::new(1, 2)).unwrap().makespan, 6);
    }

    #[test]
    fn nothing_to_do_is_no_bubble() {
        let idle = Bubble { makespan: 0, busy: 0, fraction: 0.0 };
        assert_eq!(bubble(&[], Slots::new(1, 1)), Ok(idle));
        assert_eq!(bubble(&[Vec::new()], Slots::new(1, 1)), Ok(idle));
        assert_eq!(bubble(&order(ScheduleKind::GPipe, 2, 2).unwrap(), Slots::new(0, 0)), Ok(idle));
    }

    #[test]
    fn the_deepest_pipeline_and_the_dearest_passes_stay_in_range() {
        let deep = order(ScheduleKind::OneFOneB, u16::MAX, 4).unwrap();
        let found = bubble(&deep, Slots::new(u32::MAX, u32::MAX)).unwrap();
        assert_eq!(found.makespan, (4 + u64::from(u16::MAX) - 1) * 2 * u64::from(u32::MAX));
        assert!(found.fraction > 0.99 && found.fraction < 1.0);
    }

    #[test]
    fn orders_that_cannot_run_say_where() {
        let message = |text: &str| bubble(&parsed(text), Slots::new(1, 1)).unwrap_err().to_string();
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
            "rank 0: 0B0 repeats a pass that is already in the order"
        );
        assert_eq!(
            message("0F0,0B0,0W0"),
            "rank 0: 0W0 repeats a pass that is already in the order"
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

    fn parsed(text: &str) -> Vec<Vec<Action>> {
        let rows = parse_csv(text).unwrap();
        rows.into_iter().map(|row| row.into_iter().flatten().collect()).collect()
    }
}
