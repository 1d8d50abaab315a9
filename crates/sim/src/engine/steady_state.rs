//! Steady state of overlapping iterations.
//!
//! A pipeline without flush never starts from idle again. Its prologue and several bodies are
//! therefore concatenated as the executor would run them and timed as one; the last body gives the
//! iteration time. Ranks are in different iterations at the same time; times of each rank are
//! relative to the start of its own iteration.

use super::async_servers::has_servers;
use super::lanes::Times;
use super::timeline::Timeline;
use paceline_plan::ids::{LaneId, Microbatch, OpId};
use paceline_plan::program::{Op, Plan, Program, Section};

/// Plan whose body is several iterations of another plan, from the start of a run.
pub(crate) struct Unrolled {
    /// Plan to simulate.
    pub(crate) plan: Plan,
    iterations: u32,
}

impl Unrolled {
    /// Unrolls iterations of a plan if they overlap, or else `iterations` of them if these are
    /// several. Asynchronous replicas repeat their bodies anyway.
    pub(crate) fn of(plan: &Plan, iterations: u32) -> Option<Self> {
        // The pipeline is full after as many iterations as its first rank runs ahead. Iterations
        // are equal only once the slowest stage has set the pace everywhere.
        let overlapping = plan.programs.iter().any(|program| !program.in_flight.is_empty());
        let least = if overlapping { 2 * plan.iterations_ahead() + 6 } else { 1 };
        let iterations = iterations.max(least);
        if iterations < 2 || has_servers(plan) {
            return None;
        }
        let mut long = plan.clone();
        for program in &mut long.programs {
            program.body = unroll(program, iterations, plan.strategy.microbatches());
            program.prologue = Section::default();
            program.in_flight.clear();
        }
        Some(Self { plan: long, iterations })
    }

    /// Returns the last iteration of a run, as a timeline of the original plan.
    pub(crate) fn last(&self, plan: &Plan, run: &Timeline) -> Timeline {
        let classes = run.classes().with_plan(0, plan);
        let mut start = vec![0.0; classes.ops as usize];
        let mut end = start.clone();
        let mut period = 0.0f64;
        for class in 0..classes.len() as u32 {
            let program = plan.program(classes.get(class).rank);
            let body = program.body.nodes.len();
            let first = |iteration: u32| program.prologue.nodes.len() + iteration as usize * body;
            let times = |op: usize| {
                let (start, end) = run.span_of(class, OpId::from(op));
                (start.0, end.0)
            };
            // An iteration ends when all its ops except carryover ops have ended.
            let over = |iteration: u32| {
                let required = (0..body).filter(|&op| !lasts(program, op));
                required.map(|op| times(first(iteration) + op).1).fold(0.0, f64::max)
            };
            let (begun, done) = (over(self.iterations - 2), over(self.iterations - 1));
            period = period.max(done - begun);
            for op in 0..body {
                let (from, until) = times(first(self.iterations - 1) + op);
                let number = classes.number(class, OpId::from(op)) as usize;
                start[number] = from - begun;
                end[number] = until - begun;
            }
        }
        let mut timeline = Timeline::new(plan, classes, Times { start, end, means: Vec::new() });
        timeline.cut(period);
        timeline
    }
}

/// Returns true if a body op may still be in flight in the next iteration.
fn lasts(program: &Program, op: usize) -> bool {
    program.in_flight.iter().any(|flight| flight.op.index() == op)
}

/// Concatenates the prologue and `iterations` bodies into one section.
fn unroll(program: &Program, iterations: u32, microbatches: u32) -> Section {
    let mut long = Section::default();
    copy(&mut long, &program.prologue, 0, &[], |_| Vec::new());
    let mut before = ends(program, &program.prologue, 0, false);
    for iteration in 0..iterations {
        let first = long.nodes.len() as u32;
        let bodies = program.body.nodes.len() as u32;
        let carried = |op: OpId| -> Vec<OpId> {
            let flights = program.in_flight.iter().filter(|flight| flight.before.contains(&op));
            // In the first iteration, the prologue has provided it.
            let last = first.checked_sub(bodies).filter(|_| iteration > 0);
            flights.filter_map(|flight| Some(OpId(last? + flight.op.0))).collect()
        };
        copy(&mut long, &program.body, iteration * microbatches, &before, carried);
        before = ends(program, &program.body, first, true);
    }
    long
}

/// Appends a section. Every lane's first op also waits for all ops of `before`.
fn copy(
    long: &mut Section,
    section: &Section,
    microbatches: u32,
    before: &[OpId],
    carryover: impl Fn(OpId) -> Vec<OpId>,
) {
    let first = long.nodes.len() as u32;
    let mut begun: Vec<LaneId> = Vec::new();
    for (index, node) in section.nodes.iter().enumerate() {
        let op = OpId::from(index);
        let mut after: Vec<OpId> = section.after(op).iter().map(|op| OpId(first + op.0)).collect();
        after.extend(carryover(op));
        if !begun.contains(&node.lane) {
            begun.push(node.lane);
            after.extend_from_slice(before);
        }
        long.push(node.lane, later(node.op, microbatches), &after);
    }
}

/// Last op of each lane that must end with its section, numbered from `first`.
fn ends(program: &Program, section: &Section, first: u32, may_last: bool) -> Vec<OpId> {
    let lanes = (0..program.lanes.len()).map(LaneId::from);
    let last = lanes.filter_map(|lane| {
        let required = |&(op, node): &(usize, &paceline_plan::program::Node)| {
            node.lane == lane && !(may_last && lasts(program, op))
        };
        section.nodes.iter().enumerate().rev().find(required).map(|(op, _)| op as u32)
    });
    last.map(|op| OpId(first + op)).collect()
}

/// Shifts an op to a later iteration by adding `by` to its microbatch.
fn later(op: Op, by: u32) -> Op {
    let shifted = |microbatch: Microbatch| Microbatch(microbatch.0 + by);
    match op {
        Op::Load { what, into, microbatch } => {
            Op::Load { what, into, microbatch: shifted(microbatch) }
        }
        Op::Compute { segment, microbatch, fresh } => {
            Op::Compute { segment, microbatch: shifted(microbatch), fresh }
        }
        Op::Send { to, channel, view, microbatch } => {
            Op::Send { to, channel, view, microbatch: shifted(microbatch) }
        }
        Op::Recv { from, channel, view, microbatch } => {
            Op::Recv { from, channel, view, microbatch: shifted(microbatch) }
        }
        Op::Collective { call, microbatch } => {
            Op::Collective { call, microbatch: shifted(microbatch) }
        }
        Op::Stash { from, into, microbatch } => {
            Op::Stash { from, into, microbatch: shifted(microbatch) }
        }
        Op::Restore { from, into, microbatch } => {
            Op::Restore { from, into, microbatch: shifted(microbatch) }
        }
        Op::Free { frame, microbatch } => Op::Free { frame, microbatch: shifted(microbatch) },
        Op::Accumulate { .. } | Op::Step { .. } | Op::Serve { .. } => op,
    }
}
