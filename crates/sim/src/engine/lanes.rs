//! Worklist: lanes advance until they have to wait, and resume when the awaited op is done.

use super::calls::Calls;
use super::classes::{Class, Classes};
use super::copy_engines::{EngineRequest, Engines, Request, computes};
use super::matching::{MatchedOps, OpMatch};
use super::timeline::Timeline;
use super::{Costs, describe_op};
use crate::error::SimError;
use paceline_plan::ids::OpId;
use paceline_plan::program::{Op, Plan, Section};

pub(super) fn run(
    plan: &Plan,
    classes: Classes,
    matches: &MatchedOps,
    costs: &Costs<'_>,
    calls: &Calls,
) -> Result<Timeline, SimError> {
    let mut run = LaneRun::new(plan, &classes, matches, costs, calls);
    loop {
        while let Some(lane) = run.ready.pop() {
            while run.advance(lane) {}
        }
        let Some(first) = run.engines.as_mut().and_then(Engines::next) else { break };
        run.serve(first);
    }
    if let Some(number) = run.stuck() {
        let (class, op) = classes.op(number);
        let Class { rank, role, .. } = classes.get(class);
        let what = describe_op(plan, role, op);
        let role = plan.programs[role.index()].name.clone();
        return Err(SimError::Stuck { rank, role, op, what });
    }
    let (start, end) = (run.start, run.end);
    Ok(Timeline::new(plan, classes, start, end))
}

/// No op or no lane.
const NONE: u32 = u32::MAX;

/// End time of an op that has not ended.
const OPEN: f64 = f64::NEG_INFINITY;

struct LaneRun<'a> {
    classes: &'a Classes,
    costs: &'a Costs<'a>,
    calls: &'a Calls,
    matches: &'a MatchedOps,
    /// Indexed by class.
    bodies: Vec<&'a Section>,
    start: Vec<f64>,
    end: Vec<f64>,
    /// Next op on the lane of each op.
    next: Vec<u32>,
    /// Lane of each op.
    lane: Vec<u32>,
    /// First lane whose head waits for this op; the others follow by [`LaneState::next_waiter`].
    waiter: Vec<u32>,
    lanes: Vec<LaneState>,
    gatherings: Vec<Gathering>,
    /// Copy engines, if they are limited.
    engines: Option<Engines>,
    /// Lanes whose head may be able to advance.
    ready: Vec<u32>,
}

struct LaneState {
    class: u32,
    /// Next op.
    head: u32,
    /// End time of the previous op.
    free: f64,
    /// Number of outstanding op matches of a posted head; `None` while it is not posted.
    open: Option<u32>,
    /// End of the first and of the last op match of the head so far.
    met: (f64, f64),
    next_waiter: u32,
}

/// Op match while its ops are being posted.
struct Gathering {
    missing: u32,
    ready: f64,
}

impl<'a> LaneRun<'a> {
    fn new(
        plan: &'a Plan,
        classes: &'a Classes,
        matches: &'a MatchedOps,
        costs: &'a Costs<'a>,
        calls: &'a Calls,
    ) -> Self {
        let all = classes.ops as usize;
        let program = |class: u32| &plan.programs[classes.get(class).role.index()];
        let numbers = 0..classes.len() as u32;
        let gatherings =
            matches.all.iter().map(|m| Gathering { missing: m.expected, ready: 0.0 }).collect();
        let mut run = Self {
            classes,
            costs,
            calls,
            matches,
            bodies: numbers.clone().map(|class| &program(class).body).collect(),
            start: vec![OPEN; all],
            end: vec![OPEN; all],
            next: vec![NONE; all],
            lane: Vec::with_capacity(all),
            waiter: vec![NONE; all],
            lanes: Vec::new(),
            gatherings,
            engines: Engines::of(classes),
            ready: Vec::new(),
        };
        for class in numbers {
            let program = program(class);
            let first = run.lanes.len();
            let mut last = vec![NONE; program.lanes.len()];
            let idle = |_: &u32| LaneState {
                class,
                head: NONE,
                free: 0.0,
                open: None,
                met: (0.0, 0.0),
                next_waiter: NONE,
            };
            run.lanes.extend(last.iter().map(idle));
            for node in &program.body.nodes {
                let number = run.lane.len() as u32;
                let own = costs.lane(node).index();
                let lane = first + own;
                match std::mem::replace(&mut last[own], number) {
                    NONE => run.lanes[lane].head = number,
                    before => run.next[before as usize] = number,
                }
                run.lane.push(lane as u32);
            }
        }
        run.ready.extend((0..run.lanes.len() as u32).rev());
        run
    }

    /// Advances the head of a lane; returns `false` if the lane has to wait or is at its end.
    fn advance(&mut self, at: u32) -> bool {
        let LaneState { class, head, free, open, .. } = self.lanes[at as usize];
        if head == NONE || open.is_some() {
            return false;
        }
        let body = self.bodies[class as usize];
        let first = self.classes.number(class, OpId(0));
        let op = OpId(head - first);
        let mut posted = free;
        for after in body.after(op) {
            let number = first + after.0;
            let end = self.end[number as usize];
            if end == OPEN {
                self.lanes[at as usize].next_waiter = self.waiter[number as usize];
                self.waiter[number as usize] = at;
                return false;
            }
            posted = posted.max(end);
        }
        let matches = self.matches.of(head);
        if matches.is_empty() {
            let turns = self.engines.as_mut().filter(|engines| engines.is_limited(class));
            if let Some(engines) = turns.filter(|_| computes(&body.nodes[op.index()].op)) {
                engines.wait(posted, EngineRequest::Op(head));
                self.lanes[at as usize].open = Some(1);
                return false;
            }
            let start = posted + self.costs.held(class, op);
            let end = self.alone(class, op, &body.nodes[op.index()].op, start);
            self.finish(head, start, end, end);
            return true;
        }
        self.lanes[at as usize].open = Some(matches.len() as u32);
        for &op_match in matches {
            let gathering = &mut self.gatherings[op_match as usize];
            gathering.missing -= 1;
            gathering.ready = gathering.ready.max(posted);
            if gathering.missing == 0 {
                let start = gathering.ready;
                let message = self.matches.all[op_match as usize].message;
                match self.engines.as_mut().filter(|_| message) {
                    Some(engines) => engines.wait(start, EngineRequest::Message(op_match)),
                    None => self.hold(op_match, start, at),
                }
            }
        }
        self.lanes[at as usize].open.is_none()
    }

    /// Serves the first request for engines as soon as they are free.
    fn serve(&mut self, Request { ready, what }: Request) {
        let Some(engines) = &mut self.engines else { return };
        match what {
            EngineRequest::Op(number) => {
                let (class, op) = self.classes.op(number);
                let start = engines.free(class).max(ready);
                let node = &self.bodies[class as usize].nodes[op.index()];
                let end = self.alone(class, op, &node.op, start);
                if let Some(engines) = &mut self.engines {
                    engines.keep(class, end);
                }
                let lane = self.lane[number as usize];
                self.lanes[lane as usize].open = None;
                self.finish(number, start, end, end);
                self.ready.push(lane);
            }
            EngineRequest::Message(op_match) => {
                let ends = self.matches.ops(op_match).iter().map(|&op| self.classes.op(op).0);
                let start = ends.clone().map(|class| engines.free(class)).fold(ready, f64::max);
                let end = self.matches.all[op_match as usize].duration.end(start);
                ends.for_each(|class| engines.keep(class, end));
                self.hold(op_match, start, NONE);
            }
        }
    }

    /// End time of an op that matches no other class and starts at `start`.
    fn alone(&self, class: u32, id: OpId, op: &Op, start: f64) -> f64 {
        match op.call() {
            Some(call) => {
                let stretch = self.costs.slowdown(class, id);
                self.calls.get(class, call).map(|time| time * stretch).end(start)
            }
            None => {
                let work = self.costs.op(self.classes, class, id, op);
                self.classes.pace(class).end(start, work.0)
            }
        }
    }

    /// Executes an op match. The lane `came` that completed it continues by itself; the other
    /// lanes, which waited, become ready.
    ///
    /// An op with several matches represents the ranks of a role that a server handles one by one.
    /// It ends with the last match, because ops that depend on it reflect the slowest rank. Its
    /// lane continues with the first match, because a finished rank need not wait for the others.
    fn hold(&mut self, op_match: u32, start: f64, came: u32) {
        let OpMatch { duration, handed, .. } = &self.matches.all[op_match as usize];
        let end = duration.end(start);
        let mut first = handed.as_ref().map(|handed| handed.end(start));
        for &op in self.matches.ops(op_match) {
            let (number, end) = (op as usize, first.take().unwrap_or(end));
            let lane = &mut self.lanes[self.lane[number] as usize];
            let open = lane.open.map_or(0, |open| open - 1);
            if self.start[number] == OPEN {
                self.start[number] = start;
                lane.met = (end, end);
            }
            self.start[number] = self.start[number].min(start);
            lane.met = (lane.met.0.min(end), lane.met.1.max(end));
            lane.open = (open > 0).then_some(open);
            if open == 0 {
                let (first, last) = lane.met;
                self.finish(op, self.start[number], last, first);
                if self.lane[number] != came {
                    self.ready.push(self.lane[number]);
                }
            }
        }
    }

    /// Ends an op: its lane continues from `free`, and the lanes that wait for it become ready.
    fn finish(&mut self, op: u32, start: f64, end: f64, free: f64) {
        let number = op as usize;
        self.start[number] = start;
        self.end[number] = end;
        let lane = &mut self.lanes[self.lane[number] as usize];
        lane.free = free;
        lane.head = self.next[number];
        let mut waiter = std::mem::replace(&mut self.waiter[number], NONE);
        while waiter != NONE {
            self.ready.push(waiter);
            waiter = self.lanes[waiter as usize].next_waiter;
        }
    }

    /// Op that never ends and blocks others; preferably one that was posted and has no match.
    fn stuck(&self) -> Option<u32> {
        let heads = || self.lanes.iter().filter(|lane| lane.head != NONE);
        let first = heads().find(|lane| lane.open.is_some()).or_else(|| heads().next());
        first.map(|lane| lane.head)
    }
}
