//! Worklist of the flow engine: lanes advance through compute; the network determines the time of
//! messages.
//!
//! The end of a compute op is known as soon as its start is. A lane therefore runs ahead until it
//! must synchronise with others. Once all ops of an op match are posted, the exchange is posted to
//! the network. When the network reports that a party has ended, that party's lane continues.
//!
//! Times that a lane computes on the way are never before the network's time. An op is posted when
//! the last op it waits for has ended, and that op ended just now or computes until later.

use super::engine_queue::{Coming, EngineQueue, EngineRequest, Event};
use super::matching::{MatchedOps, NONE};
use crate::engine::classes::{Class, Classes};
use crate::engine::copy_engines::computes;
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
    matches: &MatchedOps,
) -> Result<Timeline, SimError> {
    let mut run = FlowRun::new(plan, costs, folded, &classes, matches);
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
            Event::Done(class) => run.line.release(class),
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

/// End time of an op that has not ended.
const OPEN: f64 = f64::NEG_INFINITY;

struct FlowRun<'a> {
    plan: &'a Plan,
    costs: &'a Costs<'a>,
    classes: &'a Classes,
    matches: &'a MatchedOps,
    fluid: Fluid<'a>,
    start: Vec<f64>,
    end: Vec<f64>,
    /// Next op on the lane of each op.
    next: Vec<u32>,
    /// Lane of each op.
    lane: Vec<u32>,
    /// First lane whose head waits for this op; the others follow by [`LaneState::next_waiter`].
    waiter: Vec<u32>,
    lanes: Vec<LaneState>,
    /// By op match: number of ops not yet posted, and time of the latest posting so far.
    gatherings: Vec<(u32, f64)>,
    /// By op match: the unexposed rest that follows it, until it is in flight.
    rests: Vec<Option<u32>>,
    /// By server: number of unanswered requests, and posted ops that wait for them.
    services: BTreeMap<u32, (u32, Vec<u32>)>,
    /// Queue for copy engines.
    line: EngineQueue,
    /// Lanes whose head may be able to advance.
    ready: Vec<u32>,
}

struct LaneState {
    class: u32,
    /// Next op.
    head: u32,
    /// End time of the previous op.
    free: f64,
    /// True if the head is posted and waits for others or is in flight.
    meets: bool,
    next_waiter: u32,
}

impl<'a> FlowRun<'a> {
    fn new(
        plan: &'a Plan,
        costs: &'a Costs<'a>,
        folded: &'a Folded,
        classes: &'a Classes,
        matches: &'a MatchedOps,
    ) -> Self {
        let all = classes.ops as usize;
        let mut fluid = Fluid::new(folded);
        matches.tables.iter().for_each(|table| {
            fluid.table(table.clone());
        });
        let services = matches.servers.iter();
        let mut run = Self {
            plan,
            costs,
            classes,
            matches,
            fluid,
            start: vec![OPEN; all],
            end: vec![OPEN; all],
            next: vec![NONE; all],
            lane: Vec::with_capacity(all),
            waiter: vec![NONE; all],
            lanes: Vec::new(),
            gatherings: matches.all.iter().map(|m| (m.expected, 0.0)).collect(),
            rests: matches.all.iter().map(|op_match| op_match.rest).collect(),
            services: services.map(|(&server, s)| (server, (s.requests, Vec::new()))).collect(),
            line: EngineQueue::new(classes),
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
        let idle =
            |_: &u32| LaneState { class, head: NONE, free: 0.0, meets: false, next_waiter: NONE };
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

    /// Advances the head of a lane; returns `false` if the lane has to wait or is at its end.
    fn advance(&mut self, at: u32) -> bool {
        let LaneState { class, head, free, meets, .. } = self.lanes[at as usize];
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
        match self.matches.of[head as usize] {
            NONE if self.serves(role, head) => self.serve(role, head, posted),
            NONE if self.line.is_limited(class) && computes(&body.nodes[op.index()].op) => {
                self.line.come(posted, Event::Wants(EngineRequest::Op(head)));
            }
            NONE => {
                let work = self.costs.op(self.classes, class, op, &body.nodes[op.index()].op);
                self.finish(head, posted, self.classes.pace(class).end(posted, work.0));
                return true;
            }
            op_match => self.join(op_match, posted),
        }
        self.lanes[at as usize].meets = self.end[head as usize] == OPEN;
        self.end[head as usize] != OPEN
    }

    /// Posts an op. Its exchange starts when the last op of the match is posted.
    fn join(&mut self, op_match: u32, posted: f64) {
        let (missing, ready) = &mut self.gatherings[op_match as usize];
        *missing -= 1;
        *ready = ready.max(posted);
        if *missing > 0 {
            return;
        }
        let start = *ready;
        let message = self.matches.all[op_match as usize].message;
        if message && self.line.counts(self.needs(EngineRequest::Message(op_match)).into_iter()) {
            self.line.come(start, Event::Wants(EngineRequest::Message(op_match)));
        } else {
            self.begin(op_match, start);
        }
    }

    /// Starts the exchange of an op match.
    fn begin(&mut self, op_match: u32, start: f64) {
        let ops = self.matches.ops(op_match);
        for &op in ops.iter().filter(|&&op| op != NONE) {
            self.start[op as usize] = start;
        }
        let meeting_of = &self.matches.all[op_match as usize];
        self.fluid.post(meeting_of.exchange, meeting_of.table, op_match, start);
    }

    /// Classes whose engines a request needs.
    fn needs(&self, who: EngineRequest) -> Vec<u32> {
        let class = |op: u32| self.classes.op(op).0;
        match who {
            EngineRequest::Op(op) => vec![class(op)],
            EngineRequest::Message(op_match) => {
                let ops = self.matches.ops(op_match).iter().filter(|&&op| op != NONE);
                ops.map(|&op| class(op)).collect()
            }
        }
    }

    /// Serves all queued requests that can be served.
    fn serve_line(&mut self, now: f64) {
        let mut line = std::mem::replace(&mut self.line, EngineQueue::empty());
        while let Some(who) = line.serve(|who| self.needs(who)) {
            match who {
                EngineRequest::Message(op_match) => self.begin(op_match, now),
                EngineRequest::Op(number) => {
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

    /// Handles the end of one party of an op match.
    fn end(&mut self, op_match: u32, party: u32, at: f64) {
        if op_match == NONE {
            return;
        }
        if let Some(rest) = self.rests[op_match as usize].take() {
            let exchange = self.matches.all[op_match as usize].exchange;
            self.fluid.post(exchange, rest, NONE, at);
        }
        let op = self.matches.ops(op_match)[party as usize];
        if op == NONE {
            return;
        }
        if self.matches.all[op_match as usize].message {
            self.line.release(self.classes.op(op).0);
        }
        self.go_on(op, at + self.copies(op));
        let Some(server) = self.matches.all[op_match as usize].server else { return };
        let Some((open, waiting)) = self.services.get_mut(&server) else { return };
        *open -= 1;
        if *open == 0 {
            for op in std::mem::take(waiting) {
                self.go_on(op, at);
            }
        }
    }

    /// Time of the copies before and after a collective.
    fn copies(&self, number: u32) -> f64 {
        let (class, op) = self.classes.op(number);
        let class = self.classes.get(class);
        let program = &self.plan.programs[class.role.index()];
        let call = program.body.nodes[op.index()].op.call();
        call.map_or(0.0, |call| self.costs.exposure(&class, program.call(call)).copies.0)
    }

    /// Ends a posted op and lets its lane continue.
    fn go_on(&mut self, op: u32, at: f64) {
        let lane = self.lane[op as usize];
        self.lanes[lane as usize].meets = false;
        self.finish(op, self.start[op as usize], at.max(self.start[op as usize]));
        self.ready.push(lane);
    }

    /// Returns true if an op of a server answers requests.
    fn serves(&self, role: RoleId, op: u32) -> bool {
        let server = role.0.checked_sub(self.plan.mesh.pp);
        let service = server.and_then(|server| self.matches.servers.get(&server));
        service.is_some_and(|service| service.ops.contains(&op))
    }

    /// Lets a server answer until the last request has finished.
    fn serve(&mut self, role: RoleId, op: u32, posted: f64) {
        self.start[op as usize] = posted;
        let service = self.services.get_mut(&(role.0 - self.plan.mesh.pp));
        match service.filter(|(open, _)| *open > 0) {
            Some((_, waiting)) => waiting.push(op),
            None => self.finish(op, posted, posted),
        }
    }

    /// Ends an op: its lane and the lanes that wait for it continue.
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

    /// Op that never ends and blocks others; preferably one that was posted and has no match.
    fn stuck(&self) -> Option<u32> {
        let heads = || self.lanes.iter().filter(|lane| lane.head != NONE);
        heads().find(|lane| lane.meets).or_else(|| heads().next()).map(|lane| lane.head)
    }
}
