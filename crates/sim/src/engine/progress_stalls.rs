//! Progress stalls: compute delayed because its thread drives an exchange inside a measured host.
//!
//! A rank's compute thread polls its exchanges before each computation and hands them to the
//! progress thread only during long computations. The last rank to arrive at an exchange therefore
//! drives its part before it continues, even if the plan would allow compute meanwhile. For ranks
//! that arrived earlier, the progress thread does so concurrently with their compute.
//!
//! Ranks that run the same program reach an exchange at about the same time, but not in lockstep.
//! The longer ago they last synchronised, the longer the first rank has computed before the
//! exchange begins, and the less compute it has left to overlap with it. Each rank is charged the
//! average stall.

use super::{Costs, Timeline};
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::{Op, PROGRESS_HANDOFF_MIN, Plan, Section};
use std::collections::BTreeMap;

/// Returns stalls by class and body op: the time that a ready computation is delayed because its
/// thread drives an exchange.
pub(super) fn compute_stalls(plan: &Plan, costs: &Costs<'_>, timeline: &Timeline) -> Vec<Vec<f64>> {
    (0..timeline.classes().len() as u32)
        .map(|class| Rank::new(plan, costs, timeline, class).stalls())
        .collect()
}

/// Exchanges and computations of a class's rank, in time order.
struct Rank {
    exchanges: Vec<DrivenExchange>,
    works: Vec<Work>,
    /// Number of ops of its body.
    ops: usize,
    /// Rank skew, as a fraction of the time since ranks last synchronised.
    rank_skew: f64,
}

/// Exchange that the compute thread may have to drive.
struct DrivenExchange {
    begun: f64,
    /// Duration without concurrent work.
    lasts: f64,
    /// Fraction of ranks that arrive last, find all others waiting, and so drive it themselves.
    last: f64,
    /// Index of the first computation that needs it.
    needed: usize,
}

/// Computation of the rank.
struct Work {
    id: OpId,
    /// Time at which it could have started.
    posted: f64,
    start: f64,
    end: f64,
}

impl Rank {
    fn new(plan: &Plan, costs: &Costs<'_>, timeline: &Timeline, class: u32) -> Self {
        let role = timeline.classes().get(class).role;
        let body = &plan.programs[role.index()].body;
        let span = |op: OpId| {
            let (start, end) = timeline.span_of(class, op);
            (start.0, end.0)
        };
        let (mut exchanges, mut works) = (Vec::new(), Vec::new());
        let mut numbers: BTreeMap<OpId, usize> = BTreeMap::new();
        for ((id, node), posted) in (0..).map(OpId).zip(&body.nodes).zip(posted(body, costs, span))
        {
            let (start, end) = span(id);
            if end <= start {
                continue;
            }
            if let Some(moving) = costs.exchange_cost(role, id) {
                let lasts = (end - start) / costs.slowdown(class, id) * moving.cold_factor;
                let all_cores = matches!(node.op, Op::Collective { .. });
                // A send waits for no other rank; of ranks that arrive together, one is the last.
                let last = if all_cores { 1.0 / moving.ranks.max(1.0) } else { 1.0 };
                let last = if start > posted + INSTANT { 0.0 } else { last };
                let needed = usize::MAX;
                numbers.insert(id, exchanges.len());
                exchanges.push(DrivenExchange { begun: start, lasts, last, needed });
            } else if computes(costs, role, &node.op) {
                works.push(Work { id, posted, start, end });
            }
        }
        works.sort_by(|a: &Work, b| a.start.total_cmp(&b.start));
        for (at, work) in works.iter().enumerate() {
            for number in body.after(work.id).iter().filter_map(|after| numbers.get(after)) {
                let carried: &mut DrivenExchange = &mut exchanges[*number];
                carried.needed = carried.needed.min(at);
            }
        }
        exchanges.sort_by(|a, b| a.begun.total_cmp(&b.begun));
        Self { exchanges, works, ops: body.nodes.len(), rank_skew: costs.rank_skew() }
    }

    /// Times at which ranks synchronised: starts of computations that needed an exchange, preceded
    /// by the last such time of the previous iteration.
    fn last_arrivals(&self) -> Vec<f64> {
        let needing = self.exchanges.iter().filter(|carried| carried.last < 1.0);
        let needing = needing.filter_map(|carried| self.works.get(carried.needed));
        let mut here: Vec<f64> = needing.map(|work| work.start).collect();
        here.sort_by(f64::total_cmp);
        let whole = self.works.iter().map(|work| work.end).fold(0.0, f64::max);
        here.last().map(|last| last - whole).into_iter().chain(here.iter().copied()).collect()
    }

    fn stalls(&self) -> Vec<f64> {
        let longest = self.exchanges.iter().map(|carried| carried.lasts).fold(0.0, f64::max);
        let matches = self.last_arrivals();
        let mut held = vec![0.0; self.ops];
        // `idle`: end of the last computation long enough for a hand-off. `own`: fraction of ranks
        // that have handed nothing to their progress thread since they last had nothing to compute.
        let (mut idle, mut own) = (0.0, 1.0_f64);
        let mut busy = 0.0;
        for (at, work) in self.works.iter().enumerate() {
            if work.posted > busy + INSTANT {
                own = 1.0;
            }
            busy = work.end;
            let short = work.end - work.start < PROGRESS_HANDOFF_MIN.0;
            let first = self.exchanges.partition_point(|x| x.begun < work.posted - longest);
            // Time until which a last-arriving rank drives exchanges.
            let mut front = work.posted;
            for carried in &self.exchanges[first..] {
                if carried.begun > front + INSTANT {
                    break;
                }
                let rest = carried.begun + carried.lasts - front;
                if rest <= 0.0 || carried.begun < idle - INSTANT {
                    continue;
                }
                // Begun without anything to compute, or driven again after short computations.
                let at_it = carried.begun < work.posted - INSTANT || short;
                let share = if at_it { own } else { own * carried.last };
                held[work.id.index()] += share * rest;
                if !at_it && carried.last > 0.0 {
                    let until = carried.needed.clamp(at, self.works.len());
                    let left: f64 = self.works[at..until].iter().map(|w| w.end - w.start).sum();
                    let met = matches.partition_point(|&met| met <= carried.begun);
                    let met = met.checked_sub(1).map_or(carried.begun, |before| matches[before]);
                    let skewed = self.rank_skew * (carried.begun - met);
                    let overlapped = (left - skewed).clamp(0.0, rest);
                    held[work.id.index()] += (1.0 - share) * (rest - overlapped);
                }
                own = if short { own } else { share };
                front += rest;
            }
            if !short {
                idle = work.end;
            }
        }
        held
    }
}

/// Tolerance below which times are equal: the same durations may be summed in another order.
const INSTANT: f64 = 1e-9;

/// Times at which each op of a body could have begun on its own.
fn posted(body: &Section, costs: &Costs<'_>, span: impl Fn(OpId) -> (f64, f64)) -> Vec<f64> {
    let mut free: Vec<f64> = Vec::new();
    let ops = body.nodes.iter().enumerate();
    ops.map(|(at, node)| {
        let (id, lane) = (OpId::from(at), costs.lane(node).index());
        if free.len() <= lane {
            free.resize(lane + 1, 0.0);
        }
        let after = body.after(id).iter().map(|after| span(*after).1);
        let posted = after.fold(free[lane], f64::max);
        free[lane] = span(id).1;
        posted
    })
    .collect()
}

/// Returns true if an op occupies the rank's compute thread.
fn computes(costs: &Costs<'_>, role: RoleId, op: &Op) -> bool {
    match op {
        Op::Stash { .. } | Op::Restore { .. } => !costs.offloads(role, op),
        Op::Compute { .. } | Op::Accumulate { .. } | Op::Step { .. } => true,
        Op::Load { .. }
        | Op::Collective { .. }
        | Op::Send { .. }
        | Op::Recv { .. }
        | Op::Free { .. }
        | Op::Serve { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: f64 = 10.0 * PROGRESS_HANDOFF_MIN.0;
    const SHORT: f64 = 0.1 * PROGRESS_HANDOFF_MIN.0;

    /// Rank with back-to-back computations, each ready when the previous one ends.
    fn rank(exchanges: &[(f64, f64, f64)], works: &[f64]) -> Rank {
        let carried =
            |&(begun, lasts, last)| DrivenExchange { begun, lasts, last, needed: usize::MAX };
        let mut end = 0.0;
        let work = |(number, lasts): (u32, &f64)| {
            let start = end;
            end += lasts;
            Work { id: OpId(number), posted: start, start, end }
        };
        Rank {
            exchanges: exchanges.iter().map(carried).collect(),
            works: (0..).zip(works).map(work).collect(),
            ops: works.len(),
            rank_skew: 0.0,
        }
    }

    /// Duration of an exchange.
    const PART: f64 = 0.1 * LONG;

    /// Stall of each computation, in units of an exchange.
    fn held(rank: &Rank) -> Vec<f64> {
        rank.stalls().iter().map(|held| (held / PART * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn the_last_of_two_moves_it_before_it_computes_on() {
        let rank = rank(&[(LONG, PART, 0.5)], &[LONG, LONG, LONG]);
        assert_eq!(held(&rank), [0.0, 0.5, 0.0]);
    }

    #[test]
    fn a_short_computation_is_not_worth_a_second_thread() {
        assert_eq!(held(&rank(&[(LONG, PART, 0.5)], &[LONG, SHORT])), [0.0, 1.0]);
    }

    #[test]
    fn whoever_came_before_is_not_held_up() {
        assert_eq!(held(&rank(&[(0.95 * LONG, PART, 0.0)], &[LONG, LONG])), [0.0, 0.0]);
    }

    /// One of two ranks hands the first exchange to its progress thread, and so the next ones.
    #[test]
    fn a_second_thread_keeps_what_it_was_given_until_there_is_nothing_to_compute() {
        let exchanges = [(LONG, PART, 0.5), (2.0 * LONG, PART, 0.5)];
        assert_eq!(held(&rank(&exchanges, &[LONG, LONG, LONG])), [0.0, 0.5, 0.25]);
        let mut idle = rank(&exchanges, &[LONG, 0.5 * LONG, LONG]);
        let late = idle.works.last_mut().unwrap();
        (late.posted, late.start, late.end) = (2.0 * LONG, 2.0 * LONG, 3.0 * LONG);
        assert_eq!(held(&idle), [0.0, 0.5, 0.5]);
    }

    #[test]
    fn what_follows_on_a_lane_is_carried_along() {
        let exchanges =
            [(LONG, PART, 1.0), (LONG + PART, PART, 1.0), (LONG + 5.0 * PART, PART, 1.0)];
        assert_eq!(held(&rank(&exchanges, &[LONG, LONG])), [0.0, 2.0]);
    }

    /// The first rank to arrive has computed for as long as the last one lagged.
    #[test]
    fn who_comes_first_has_less_left_to_compute_beside_it() {
        // Ranks synchronised at the start of the iteration; the compute left lasts two exchanges.
        let mut rank = rank(&[(-PART, PART, 0.5), (LONG, PART, 0.5)], &[LONG, 2.0 * PART, LONG]);
        (rank.exchanges[0].needed, rank.exchanges[1].needed) = (0, 2);
        assert_eq!(held(&rank), [0.0, 0.5, 0.0], "in step");
        rank.rank_skew = 1.5 * PART / LONG;
        assert_eq!(held(&rank), [0.0, 0.75, 0.0], "half of it is hidden by the first");
        rank.rank_skew = 5.0 * PART / LONG;
        assert_eq!(held(&rank), [0.0, 1.0, 0.0], "and nothing");
        rank.rank_skew = PART / LONG;
        assert_eq!(held(&rank), [0.0, 0.5, 0.0], "all of it");
    }
}
