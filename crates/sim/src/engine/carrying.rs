//! Who moves an exchange inside a measured host, and who waits for that.
//!
//! A rank's thread looks after its exchanges before each computation, and leaves them to a second
//! thread only while it computes for long. So whoever comes to an exchange last, and finds all others
//! there, moves its part before it goes on, however well the plan would let it compute meanwhile; for
//! those who came before, the second thread does so beside their computations. Ranks that run the same
//! program come to an exchange at about the same time, but not in step: the longer ago they met, the
//! longer whoever is first has computed on before it begins, and has the less left to compute beside it.
//! Each is told to wait for what they wait for on average.

use super::{Costs, Timeline};
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::{Op, Plan, Section, WORTH_A_THREAD};
use std::collections::BTreeMap;

/// By class and op of the body: how long a computation that could start is kept waiting because the
/// thread that is to do it moves an exchange.
pub(super) fn held(plan: &Plan, costs: &Costs<'_>, timeline: &Timeline) -> Vec<Vec<f64>> {
    (0..timeline.classes().len() as u32)
        .map(|class| Rank::new(plan, costs, timeline, class).held())
        .collect()
}

/// What a rank of a class has to do, in the order in which it comes.
struct Rank {
    exchanges: Vec<Carried>,
    works: Vec<Work>,
    /// Ops of its body.
    ops: usize,
    /// How far ranks that met come apart, in parts of the time since.
    uneven: f64,
}

/// An exchange, as the thread that computes has to do with it.
struct Carried {
    begun: f64,
    /// What it takes where nothing runs beside it.
    lasts: f64,
    /// The share of ranks that find all others there when they come, and so move it themselves.
    last: f64,
    /// The first computation that needs it, among all computations.
    needed: usize,
}

/// A computation.
struct Work {
    id: OpId,
    /// When it could have started.
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
            if let Some(moving) = costs.moving(role, id) {
                let lasts = (end - start) / costs.stretched(class, id) * moving.slower;
                let together = matches!(node.op, Op::Collective { .. });
                // What is sent waits for nobody; of ranks that come together one is the last.
                let last = if together { 1.0 / moving.ranks.max(1.0) } else { 1.0 };
                let last = if start > posted + INSTANT { 0.0 } else { last };
                let needed = usize::MAX;
                numbers.insert(id, exchanges.len());
                exchanges.push(Carried { begun: start, lasts, last, needed });
            } else if computes(costs, role, &node.op) {
                works.push(Work { id, posted, start, end });
            }
        }
        works.sort_by(|a: &Work, b| a.start.total_cmp(&b.start));
        for (at, work) in works.iter().enumerate() {
            for number in body.after(work.id).iter().filter_map(|after| numbers.get(after)) {
                let carried: &mut Carried = &mut exchanges[*number];
                carried.needed = carried.needed.min(at);
            }
        }
        exchanges.sort_by(|a, b| a.begun.total_cmp(&b.begun));
        Self { exchanges, works, ops: body.nodes.len(), uneven: costs.uneven() }
    }

    /// When the ranks met: when computations began that needed an exchange. First, the last time of the
    /// iteration before.
    fn meetings(&self) -> Vec<f64> {
        let needing = self.exchanges.iter().filter(|carried| carried.last < 1.0);
        let needing = needing.filter_map(|carried| self.works.get(carried.needed));
        let mut here: Vec<f64> = needing.map(|work| work.start).collect();
        here.sort_by(f64::total_cmp);
        let whole = self.works.iter().map(|work| work.end).fold(0.0, f64::max);
        here.last().map(|last| last - whole).into_iter().chain(here.iter().copied()).collect()
    }

    fn held(&self) -> Vec<f64> {
        let longest = self.exchanges.iter().map(|carried| carried.lasts).fold(0.0, f64::max);
        let meetings = self.meetings();
        let mut held = vec![0.0; self.ops];
        // When the rank had nothing to compute before, or computed nothing worth a second thread; and
        // what part of the ranks have left nothing to their second thread since they had nothing to do.
        let (mut idle, mut own) = (0.0, 1.0_f64);
        let mut busy = 0.0;
        for (at, work) in self.works.iter().enumerate() {
            if work.posted > busy + INSTANT {
                own = 1.0;
            }
            busy = work.end;
            let short = work.end - work.start < WORTH_A_THREAD.0;
            let first = self.exchanges.partition_point(|x| x.begun < work.posted - longest);
            // Up to when a rank that came last carries.
            let mut front = work.posted;
            for carried in &self.exchanges[first..] {
                if carried.begun > front + INSTANT {
                    break;
                }
                let rest = carried.begun + carried.lasts - front;
                if rest <= 0.0 || carried.begun < idle - INSTANT {
                    continue;
                }
                // Begun while there was nothing to compute, or carried again after each short computation.
                let at_it = carried.begun < work.posted - INSTANT || short;
                let share = if at_it { own } else { own * carried.last };
                held[work.id.index()] += share * rest;
                if !at_it && carried.last > 0.0 {
                    let until = carried.needed.clamp(at, self.works.len());
                    let left: f64 = self.works[at..until].iter().map(|w| w.end - w.start).sum();
                    let met = meetings.partition_point(|&met| met <= carried.begun);
                    let met = met.checked_sub(1).map_or(carried.begun, |before| meetings[before]);
                    let apart = self.uneven * (carried.begun - met);
                    let beside = (left - apart).clamp(0.0, rest);
                    held[work.id.index()] += (1.0 - share) * (rest - beside);
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

/// Times that differ by less are the same: sums of the same durations in another order.
const INSTANT: f64 = 1e-9;

/// When each op of a body could have begun, if by itself.
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

/// Whether the thread of a rank does an op, and nothing else meanwhile.
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

    const LONG: f64 = 10.0 * WORTH_A_THREAD.0;
    const SHORT: f64 = 0.1 * WORTH_A_THREAD.0;

    /// Computations one after the other, each of which could start when the one before ends.
    fn rank(exchanges: &[(f64, f64, f64)], works: &[f64]) -> Rank {
        let carried = |&(begun, lasts, last)| Carried { begun, lasts, last, needed: usize::MAX };
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
            uneven: 0.0,
        }
    }

    /// An exchange.
    const PART: f64 = 0.1 * LONG;

    /// What each computation waits, in parts of an exchange.
    fn held(rank: &Rank) -> Vec<f64> {
        rank.held().iter().map(|held| (held / PART * 1e6).round() / 1e6).collect()
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

    /// Of two ranks, one has left the first exchange to its second thread, which has the next ones too.
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

    /// The first to come has computed on for as long as the last was behind.
    #[test]
    fn who_comes_first_has_less_left_to_compute_beside_it() {
        // They met when the iteration began, and what is left to compute is as long as two exchanges.
        let mut rank = rank(&[(-PART, PART, 0.5), (LONG, PART, 0.5)], &[LONG, 2.0 * PART, LONG]);
        (rank.exchanges[0].needed, rank.exchanges[1].needed) = (0, 2);
        assert_eq!(held(&rank), [0.0, 0.5, 0.0], "in step");
        rank.uneven = 1.5 * PART / LONG;
        assert_eq!(held(&rank), [0.0, 0.75, 0.0], "half of it is hidden by the first");
        rank.uneven = 5.0 * PART / LONG;
        assert_eq!(held(&rank), [0.0, 1.0, 0.0], "and nothing");
        rank.uneven = PART / LONG;
        assert_eq!(held(&rank), [0.0, 0.5, 0.0], "all of it");
    }
}
