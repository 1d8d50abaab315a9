//! Iterations that run into each other: what one of many takes.
//!
//! A pipeline without flush never begins from a standing start again. So its prologue and several
//! bodies are written one after the other, as the executor would run them, timed as one, and the last
//! body is what an iteration is like. Ranks are in different iterations at the same time; each is
//! told from where its own begins.

use super::classes::Classes;
use super::timeline::Timeline;
use crate::cluster::Cluster;
use crate::error::SimError;
use paceline_plan::ids::{LaneId, Microbatch, OpId};
use paceline_plan::program::{Op, Plan, Program, Section};

/// A plan whose body is several iterations of another's, from the very start of a run.
pub(crate) struct Unrolled {
    /// The plan to time.
    pub(crate) plan: Plan,
    iterations: u32,
}

impl Unrolled {
    /// Writes iterations of a plan one after the other, if they run into each other.
    pub(crate) fn of(plan: &Plan) -> Option<Self> {
        if plan.programs.iter().all(|program| program.in_flight.is_empty()) {
            return None;
        }
        // The pipeline is full after as many as its first rank is ahead, and one more is like the
        // next only once the slowest stage has set the pace everywhere.
        let iterations = 2 * plan.iterations_ahead() + 6;
        let mut long = plan.clone();
        for program in &mut long.programs {
            program.body = unroll(program, iterations, plan.strategy.microbatches());
            program.prologue = Section::default();
            program.in_flight.clear();
        }
        Some(Self { plan: long, iterations })
    }

    /// The last iteration of a run, as a timeline of the plan that was written out.
    pub(crate) fn last(
        &self,
        plan: &Plan,
        cluster: &Cluster,
        run: &Timeline,
    ) -> Result<Timeline, SimError> {
        let classes = Classes::of(plan, cluster)?;
        let mut start = vec![0.0; classes.ops as usize];
        let mut end = start.clone();
        let mut period = 0.0f64;
        for class in 0..classes.len() as u32 {
            let rank = classes.get(class).rank;
            let program = plan.program(rank);
            let long = run.classes().of_rank(&self.plan, rank);
            let body = program.body.nodes.len();
            let first = |iteration: u32| program.prologue.nodes.len() + iteration as usize * body;
            let times = |op: usize| {
                let (start, end) = run.span_of(long, OpId::from(op));
                (start.0, end.0)
            };
            // An iteration is over when all of its ops are that must be.
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
        let mut timeline = Timeline::new(plan, classes, start, end);
        timeline.cut(period);
        Ok(timeline)
    }
}

/// Whether an op of the body may still be under way in the next one.
fn lasts(program: &Program, op: usize) -> bool {
    program.in_flight.iter().any(|flight| flight.op.index() == op)
}

/// The prologue and so many bodies as one section.
fn unroll(program: &Program, iterations: u32, microbatches: u32) -> Section {
    let mut long = Section::default();
    copy(&mut long, &program.prologue, 0, &[], |_| Vec::new());
    let mut before = ends(program, &program.prologue, 0, false);
    for iteration in 0..iterations {
        let first = long.nodes.len() as u32;
        let bodies = program.body.nodes.len() as u32;
        let carried = |op: OpId| -> Vec<OpId> {
            let flights = program.in_flight.iter().filter(|flight| flight.before.contains(&op));
            // In the first iteration, the prologue has brought it.
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
    carried: impl Fn(OpId) -> Vec<OpId>,
) {
    let first = long.nodes.len() as u32;
    let mut begun: Vec<LaneId> = Vec::new();
    for (index, node) in section.nodes.iter().enumerate() {
        let op = OpId::from(index);
        let mut after: Vec<OpId> = section.after(op).iter().map(|op| OpId(first + op.0)).collect();
        after.extend(carried(op));
        if !begun.contains(&node.lane) {
            begun.push(node.lane);
            after.extend_from_slice(before);
        }
        long.push(node.lane, later(node.op, microbatches), &after);
    }
}

/// The last op of each lane that must be done when a section is, numbered from `first`.
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

/// An op of a later iteration.
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
