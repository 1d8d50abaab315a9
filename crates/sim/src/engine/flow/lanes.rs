//! Lanes advance as far as computing takes them; from one end of a message to the next, time is the
//! network's.
//!
//! An op's end is known as soon as its start is, if it computes. A lane therefore runs ahead until
//! it meets others; when all of a meeting are posted, the network is told, and when it says that a
//! party has ended, that party's lane goes on. What a lane finds out on the way is never before the
//! network's time: an op is posted when the last of those it waits for has ended, and that one ended
//! just now or computes until later.

use super::line::{Coming, Event, Line, Wanting};
use super::meetings::{Meetings, NONE};
use crate::engine::classes::{Class, Classes};
use crate::engine::engines::computes;
use crate::engine::{Costs, Timeline, describe_op};
use crate::error::SimError;
use crate::network::flow::{Fluid, Folded};
use paceline_plan::ids::RoleId;
use paceline_plan::program::Plan;
use std::collections::BTreeMap;

pub(super) fn run(
    plan: &Plan,
    costs: &Costs<'_>,
    folded: &Folded,
    classes: Classes,
    meetings: &Meetings,
) -> Result<Timeline, SimError> {
    let mut run = Run::new(plan, costs, folded, &classes, meetings);
    loop {
        while let Some(lane) = run.ready.pop() {
            while run.advance(lane) {}
        }
        if let Some(ended) = run.fluid.next_until(run.line.due()) {
            run.end(ended.tag, ended.party, ended.at);
            run.serve_line(ended.at);
            continue;
        }
        let Some(Coming { at, what }) = run.line.next() else { break };
        match what {
            Event::Done(class) => run.line.give_back(class),
            Event::Wants(who) => run.line.wait(who),
        }
        run.serve_line(at);
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

/// The end of an op that has not ended.
const OPEN: f64 = f64::NEG_INFINITY;

struct Run<'a> {
    plan: &'a Plan,
    costs: &'a Costs<'a>,
    classes: &'a Classes,
    meetings: &'a Meetings,
    fluid: Fluid<'a>,
    start: Vec<f64>,
    end: Vec<f64>,
    /// The op behind each op on its lane.
    next: Vec<u32>,
    /// The lane that each op stands on.
    lane: Vec<u32>,
    /// A lane whose head waits for this op; others follow by [`Lane::next_waiter`].
    waiter: Vec<u32>,
    lanes: Vec<Lane>,
    /// By meeting: how many ops are not posted yet, and when the last so far was.
    gatherings: Vec<(u32, f64)>,
    /// By meeting: what follows behind it, while that is not under way.
    rests: Vec<Option<u32>>,
    /// By server: requests that are not answered yet, and posted ops that wait for them.
    services: BTreeMap<u32, (u32, Vec<u32>)>,
    /// Who waits for copy engines.
    line: Line,
    /// Lanes whose head may be able to go on.
    ready: Vec<u32>,
}

struct Lane {
    class: u32,
    /// The op that is next.
    head: u32,
    /// When the op before it ended.
    free: f64,
    /// Whether the head is posted and waits for others, or moves bytes.
    meets: bool,
    next_waiter: u32,
}

impl<'a> Run<'a> {
    fn new(
        plan: &'a Plan,
        costs: &'a Costs<'a>,
        folded: &'a Folded,
        classes: &'a Classes,
        meetings: &'a Meetings,
    ) -> Self {
        let all = classes.ops as usize;
        let mut fluid = Fluid::new(folded);
        meetings.tables.iter().for_each(|table| {
            fluid.table(table.clone());
        });
        let services = meetings.servers.iter();
        let mut run = Self {
            plan,
            costs,
            classes,
            meetings,
            fluid,
            start: vec![OPEN; all],
            end: vec![OPEN; all],
            next: vec![NONE; all],
            lane: Vec::with_capacity(all),
            waiter: vec![NONE; all],
            lanes: Vec::new(),
            gatherings: meetings.all.iter().map(|m| (m.expected, 0.0)).collect(),
            rests: meetings.all.iter().map(|meeting| meeting.rest).collect(),
            services: services.map(|(&server, s)| (server, (s.requests, Vec::new()))).collect(),
            line: Line::new(classes),
            ready: Vec::new(),
        };
        for class in 0..classes.all.len() as u32 {
            run.add_lanes(class);
        }
        run.ready.extend((0..run.lanes.len() as u32).rev());
        run
    }

    fn add_lanes(&mut self, class: u32) {
        let program = &self.plan.programs[self.classes.all[class as usize].role.index()];
        let first = self.lanes.len();
        let mut last = vec![NONE; program.lanes.len()];
        let idle = |_: &u32| Lane { class, head: NONE, free: 0.0, meets: false, next_waiter: NONE };
        self.lanes.extend(last.iter().map(idle));
        for node in &program.body.nodes {
            let number = self.lane.len() as u32;
            let own = self.costs.lane(node).index();
            let lane = first + own;
            match std::mem::replace(&mut last[own], number) {
                NONE => self.lanes[lane].head = number,
                before => self.next[before as usize] = number,
            }
            self.lane.push(lane as u32);
        }
    }

    /// Lets the head of a lane go on; `false` if the lane has to wait, or is at its end.
    fn advance(&mut self, at: u32) -> bool {
        let Lane { class, head, free, meets, .. } = self.lanes[at as usize];
        if head == NONE || meets {
            return false;
        }
        let Class { role, first, .. } = self.classes.all[class as usize];
        let body = &self.plan.programs[role.index()].body;
        let op = paceline_plan::ids::OpId(head - first);
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
        match self.meetings.of[head as usize] {
            NONE if self.serves(role, head) => self.serve(role, head, posted),
            NONE if self.line.takes_turns(class) && computes(&body.nodes[op.index()].op) => {
                self.line.come(posted, Event::Wants(Wanting::Op(head)));
            }
            NONE => {
                let work = self.costs.op(self.classes, class, op, &body.nodes[op.index()].op);
                self.finish(head, posted, self.classes.pace(class).end(posted, work.0));
                return true;
            }
            meeting => self.join(meeting, posted),
        }
        self.lanes[at as usize].meets = self.end[head as usize] == OPEN;
        self.end[head as usize] != OPEN
    }

    /// An op is posted. What it takes part in starts with the last one.
    fn join(&mut self, meeting: u32, posted: f64) {
        let (missing, ready) = &mut self.gatherings[meeting as usize];
        *missing -= 1;
        *ready = ready.max(posted);
        if *missing > 0 {
            return;
        }
        let start = *ready;
        let message = self.meetings.all[meeting as usize].message;
        if message && self.line.counts(self.needs(Wanting::Message(meeting)).into_iter()) {
            self.line.come(start, Event::Wants(Wanting::Message(meeting)));
        } else {
            self.begin(meeting, start);
        }
    }

    /// What a meeting exchanges starts to move.
    fn begin(&mut self, meeting: u32, start: f64) {
        let ops = self.meetings.ops(meeting);
        for &op in ops.iter().filter(|&&op| op != NONE) {
            self.start[op as usize] = start;
        }
        let meeting_of = &self.meetings.all[meeting as usize];
        self.fluid.post(meeting_of.exchange, meeting_of.table, meeting, start);
    }

    /// The classes of which someone needs an engine.
    fn needs(&self, who: Wanting) -> Vec<u32> {
        let class = |op: u32| self.classes.op(op).0;
        match who {
            Wanting::Op(op) => vec![class(op)],
            Wanting::Message(meeting) => {
                let ops = self.meetings.ops(meeting).iter().filter(|&&op| op != NONE);
                ops.map(|&op| class(op)).collect()
            }
        }
    }

    /// Serves whoever in line can be.
    fn serve_line(&mut self, now: f64) {
        let mut line = std::mem::replace(&mut self.line, Line::empty());
        while let Some(who) = line.serve(|who| self.needs(who)) {
            match who {
                Wanting::Message(meeting) => self.begin(meeting, now),
                Wanting::Op(number) => {
                    let (class, op) = self.classes.op(number);
                    let role = self.classes.get(class).role;
                    let node = &self.plan.programs[role.index()].body.nodes[op.index()];
                    let work = self.costs.op(self.classes, class, op, &node.op);
                    let end = self.classes.pace(class).end(now, work.0);
                    line.come(end, Event::Done(class));
                    self.start[number as usize] = now;
                    self.go_on(number, end);
                }
            }
        }
        self.line = line;
    }

    /// A party of a meeting has ended.
    fn end(&mut self, meeting: u32, party: u32, at: f64) {
        if meeting == NONE {
            return;
        }
        if let Some(rest) = self.rests[meeting as usize].take() {
            let exchange = self.meetings.all[meeting as usize].exchange;
            self.fluid.post(exchange, rest, NONE, at);
        }
        let op = self.meetings.ops(meeting)[party as usize];
        if op == NONE {
            return;
        }
        if self.meetings.all[meeting as usize].message {
            self.line.give_back(self.classes.op(op).0);
        }
        self.go_on(op, at + self.copies(op));
        let Some(server) = self.meetings.all[meeting as usize].server else { return };
        let Some((open, waiting)) = self.services.get_mut(&server) else { return };
        *open -= 1;
        if *open == 0 {
            for op in std::mem::take(waiting) {
                self.go_on(op, at);
            }
        }
    }

    /// What copies before and after a collective add to it.
    fn copies(&self, number: u32) -> f64 {
        let (class, op) = self.classes.op(number);
        let class = self.classes.get(class);
        let program = &self.plan.programs[class.role.index()];
        let call = program.body.nodes[op.index()].op.call();
        call.map_or(0.0, |call| self.costs.exposure(&class, program.call(call)).copies.0)
    }

    /// Ends a posted op, and its lane goes on.
    fn go_on(&mut self, op: u32, at: f64) {
        let lane = self.lane[op as usize];
        self.lanes[lane as usize].meets = false;
        self.finish(op, self.start[op as usize], at.max(self.start[op as usize]));
        self.ready.push(lane);
    }

    /// Whether an op of a server answers requests.
    fn serves(&self, role: RoleId, op: u32) -> bool {
        let server = role.0.checked_sub(self.plan.mesh.pp);
        let service = server.and_then(|server| self.meetings.servers.get(&server));
        service.is_some_and(|service| service.ops.contains(&op))
    }

    /// A server answers until the last request is through.
    fn serve(&mut self, role: RoleId, op: u32, posted: f64) {
        self.start[op as usize] = posted;
        let service = self.services.get_mut(&(role.0 - self.plan.mesh.pp));
        match service.filter(|(open, _)| *open > 0) {
            Some((_, waiting)) => waiting.push(op),
            None => self.finish(op, posted, posted),
        }
    }

    /// An op is done: its lane goes on, and so do the lanes that wait for it.
    fn finish(&mut self, op: u32, start: f64, end: f64) {
        let number = op as usize;
        self.start[number] = start;
        self.end[number] = end;
        let lane = &mut self.lanes[self.lane[number] as usize];
        lane.free = end;
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
        heads().find(|lane| lane.meets).or_else(|| heads().next()).map(|lane| lane.head)
    }
}
