//! The worklist: lanes advance until they have to wait, and go on when what they wait for is done.

use super::calls::Calls;
use super::classes::{Class, Classes};
use super::engines::{Engines, Request, Wanting, computes};
use super::meetings::{Meeting, Meetings};
use super::timeline::Timeline;
use super::{Costs, describe_op};
use crate::error::SimError;
use paceline_plan::ids::OpId;
use paceline_plan::program::{Op, Plan, Section};

pub(super) fn run(
    plan: &Plan,
    classes: Classes,
    meetings: &Meetings,
    costs: &Costs<'_>,
    calls: &Calls,
) -> Result<Timeline, SimError> {
    let mut run = Run::new(plan, &classes, meetings, costs, calls);
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

/// No op, no lane.
const NONE: u32 = u32::MAX;

/// The end of an op that has not ended.
const OPEN: f64 = f64::NEG_INFINITY;

struct Run<'a> {
    classes: &'a Classes,
    costs: &'a Costs<'a>,
    calls: &'a Calls,
    meetings: &'a Meetings,
    /// By class.
    bodies: Vec<&'a Section>,
    start: Vec<f64>,
    end: Vec<f64>,
    /// The op behind each op on its lane.
    next: Vec<u32>,
    /// The lane that each op stands on.
    lane: Vec<u32>,
    /// A lane whose head waits for this op; others follow by [`Lane::next_waiter`].
    waiter: Vec<u32>,
    lanes: Vec<Lane>,
    gatherings: Vec<Gathering>,
    /// Where copy engines are counted.
    engines: Option<Engines>,
    /// Lanes whose head may be able to go on.
    ready: Vec<u32>,
}

struct Lane {
    class: u32,
    /// The op that is next.
    head: u32,
    /// When the op before it ended.
    free: f64,
    /// Meetings of a posted head that have not taken place; none while it is not posted.
    open: Option<u32>,
    /// When the first and the last meeting of the head so far ended.
    met: (f64, f64),
    next_waiter: u32,
}

/// A meeting while its ops come in.
struct Gathering {
    missing: u32,
    ready: f64,
}

impl<'a> Run<'a> {
    fn new(
        plan: &'a Plan,
        classes: &'a Classes,
        meetings: &'a Meetings,
        costs: &'a Costs<'a>,
        calls: &'a Calls,
    ) -> Self {
        let all = classes.ops as usize;
        let program = |class: u32| &plan.programs[classes.get(class).role.index()];
        let numbers = 0..classes.len() as u32;
        let gatherings =
            meetings.all.iter().map(|m| Gathering { missing: m.expected, ready: 0.0 }).collect();
        let mut run = Self {
            classes,
            costs,
            calls,
            meetings,
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
            let idle = |_: &u32| Lane {
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

    /// Lets the head of a lane go on; `false` if the lane has to wait, or is at its end.
    fn advance(&mut self, at: u32) -> bool {
        let Lane { class, head, free, open, .. } = self.lanes[at as usize];
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
        let meetings = self.meetings.of(head);
        if meetings.is_empty() {
            let turns = self.engines.as_mut().filter(|engines| engines.takes_turns(class));
            if let Some(engines) = turns.filter(|_| computes(&body.nodes[op.index()].op)) {
                engines.wait(posted, Wanting::Op(head));
                self.lanes[at as usize].open = Some(1);
                return false;
            }
            let start = posted + self.costs.held(class, op);
            let end = self.alone(class, op, &body.nodes[op.index()].op, start);
            self.finish(head, start, end, end);
            return true;
        }
        self.lanes[at as usize].open = Some(meetings.len() as u32);
        for &meeting in meetings {
            let gathering = &mut self.gatherings[meeting as usize];
            gathering.missing -= 1;
            gathering.ready = gathering.ready.max(posted);
            if gathering.missing == 0 {
                let start = gathering.ready;
                let message = self.meetings.all[meeting as usize].message;
                match self.engines.as_mut().filter(|_| message) {
                    Some(engines) => engines.wait(start, Wanting::Message(meeting)),
                    None => self.hold(meeting, start, at),
                }
            }
        }
        self.lanes[at as usize].open.is_none()
    }

    /// What is first in line for engines gets them as soon as they are free.
    fn serve(&mut self, Request { ready, what }: Request) {
        let Some(engines) = &mut self.engines else { return };
        match what {
            Wanting::Op(number) => {
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
            Wanting::Message(meeting) => {
                let ends = self.meetings.ops(meeting).iter().map(|&op| self.classes.op(op).0);
                let start = ends.clone().map(|class| engines.free(class)).fold(ready, f64::max);
                let end = self.meetings.all[meeting as usize].duration.end(start);
                ends.for_each(|class| engines.keep(class, end));
                self.hold(meeting, start, NONE);
            }
        }
    }

    /// When an op ends that meets no other class and starts at a moment.
    fn alone(&self, class: u32, id: OpId, op: &Op, start: f64) -> f64 {
        match op.call() {
            Some(call) => {
                let stretch = self.costs.stretched(class, id);
                self.calls.get(class, call).map(|time| time * stretch).end(start)
            }
            None => {
                let work = self.costs.op(self.classes, class, id, op);
                self.classes.pace(class).end(start, work.0)
            }
        }
    }

    /// A meeting takes place. The lane that just came goes on by itself; the others, which waited,
    /// become ready.
    ///
    /// An op with several meetings stands for the ranks of a role that a server deals with one by
    /// one. It ends with the last of them, because what depends on it is told of the slowest rank.
    /// Its lane goes on with the first, because a rank that is through need not wait for the
    /// others.
    fn hold(&mut self, meeting: u32, start: f64, came: u32) {
        let Meeting { duration, handed, .. } = &self.meetings.all[meeting as usize];
        let end = duration.end(start);
        let mut first = handed.as_ref().map(|handed| handed.end(start));
        for &op in self.meetings.ops(meeting) {
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

    /// An op is done: its lane goes on from `free`, and so do the lanes that wait for it.
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

    /// The op that never ends and that others wait for: one that was posted and met nobody, if any.
    fn stuck(&self) -> Option<u32> {
        let heads = || self.lanes.iter().filter(|lane| lane.head != NONE);
        let first = heads().find(|lane| lane.open.is_some()).or_else(|| heads().next());
        first.map(|lane| lane.head)
    }
}
