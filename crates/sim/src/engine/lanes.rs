//! Worklist: lanes advance until they have to wait, and resume when the awaited op is done.
//!
//! The end of a compute op is known as soon as its start is. A lane therefore runs ahead until it
//! must synchronise with others. Once all ops of an op match are posted, the exchange is posted to
//! the network, which answers at once or when its traffic has ended.
//!
//! Times that a lane computes on the way are never before the network's time. An op is posted when
//! the last op it waits for has ended, and that op ended just now or computes until later.

use super::async_servers::{MeanIteration, Servers};
use super::copy_engines::{EngineQueue, EngineRequest, computes};
use super::events::{Coming, Event, Events};
use super::matching::{MatchKind, MatchedOps};
use super::network::{Completion, Network, Posting};
use super::workload::Workload;
use crate::error::SimError;
use paceline_plan::ids::OpId;
use paceline_plan::program::Section;

/// Start and end of every op of a workload.
#[derive(Debug)]
pub(super) struct Times {
    pub(super) start: Vec<f64>,
    pub(super) end: Vec<f64>,
    /// By job, the mean iteration of one with asynchronous servers.
    pub(super) means: Vec<Option<MeanIteration>>,
}

impl Times {
    /// Times from `start` on.
    pub(super) fn since(mut self, start: f64) -> Self {
        if start != 0.0 {
            self.start.iter_mut().chain(&mut self.end).for_each(|time| *time -= start);
        }
        self
    }
}

/// Runs all lanes against each other.
pub(super) fn run<N: Network>(
    load: &Workload<'_>,
    matches: &MatchedOps,
    net: &mut N,
) -> Result<Times, SimError> {
    let mut run = LaneRun::new(load, matches, net);
    loop {
        while let Some(lane) = run.ready.pop() {
            while run.advance(lane) {}
        }
        if let Some(done) = run.net.next(run.events.due()) {
            run.arrive(done);
            continue;
        }
        let Some(Coming { at, what }) = run.events.next() else { break };
        run.now = at;
        match what {
            Event::Done(class) => run.engines.release(class),
            Event::Wants(who) => run.engines.wait(who),
            Event::Through(request) | Event::Applied(request) | Event::Arrives(request) => {
                run.request(what, request);
            }
            Event::Repeats(class) => run.repeat(class),
        }
        run.serve();
    }
    if let Some(number) = run.stuck() {
        return Err(load.stuck(number));
    }
    let mut times = Times { start: run.start, end: run.end, means: Vec::new() };
    run.servers.finish(load, &mut times);
    Ok(times)
}

/// No op or no lane.
const NONE: u32 = u32::MAX;

/// End time of an op that has not ended.
const OPEN: f64 = f64::NEG_INFINITY;

struct LaneRun<'a, N> {
    load: &'a Workload<'a>,
    matches: &'a MatchedOps,
    net: &'a mut N,
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
    /// Copy engines and the queue for them.
    engines: EngineQueue,
    servers: Servers,
    events: Events,
    /// Time of the last event.
    now: f64,
    /// Lanes whose head may be able to advance.
    ready: Vec<u32>,
    /// Scratch buffer, reused between postings.
    done: Vec<Completion>,
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

impl<'a, N: Network> LaneRun<'a, N> {
    fn new(load: &'a Workload<'a>, matches: &'a MatchedOps, net: &'a mut N) -> Self {
        let all = load.classes.ops as usize;
        let classes = 0..load.classes.len() as u32;
        let gatherings =
            matches.all.iter().map(|m| Gathering { missing: m.expected, ready: 0.0 }).collect();
        let mut run = Self {
            load,
            matches,
            net,
            bodies: classes.clone().map(|class| &load.program(class).body).collect(),
            start: vec![OPEN; all],
            end: vec![OPEN; all],
            next: vec![NONE; all],
            lane: Vec::with_capacity(all),
            waiter: vec![NONE; all],
            lanes: Vec::new(),
            gatherings,
            engines: EngineQueue::new(load.classes),
            servers: Servers::new(load, matches, N::SHARES_LINKS),
            events: Events::default(),
            now: OPEN,
            ready: Vec::new(),
            done: Vec::new(),
        };
        for class in classes {
            run.add_lanes(class);
        }
        run.ready.extend((0..run.lanes.len() as u32).rev());
        run
    }

    fn add_lanes(&mut self, class: u32) {
        let (program, job) = (self.load.program(class), self.load.job(class));
        let first = self.lanes.len();
        let mut last = vec![NONE; program.lanes.len()];
        self.lanes.extend(last.iter().map(|_| LaneState {
            class,
            head: NONE,
            free: job.start,
            open: None,
            met: (0.0, OPEN),
            next_waiter: NONE,
        }));
        for node in &program.body.nodes {
            let number = self.lane.len() as u32;
            let own = job.costs.lane(node).index();
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
        let LaneState { class, head, free, open, .. } = self.lanes[at as usize];
        if head == NONE || open.is_some() {
            return false;
        }
        let body = self.bodies[class as usize];
        let first = self.load.classes.number(class, OpId(0));
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
        if !matches.is_empty() {
            self.lanes[at as usize].open = Some(matches.len() as u32);
            for &op_match in matches {
                self.join(op_match, posted, at);
            }
            return self.lanes[at as usize].open.is_none();
        }
        if self.engines.is_limited(class) && computes(&body.nodes[op.index()].op) {
            self.events.come(posted, Event::Wants(EngineRequest::Op(head)));
            self.lanes[at as usize].open = Some(1);
            return false;
        }
        let start = posted + self.load.job(class).costs.held(class, op);
        self.finish(head, start, self.compute(class, op, start), None);
        true
    }

    /// End time of a local op that starts at `start`.
    fn compute(&self, class: u32, op: OpId, start: f64) -> f64 {
        let node = &self.bodies[class as usize].nodes[op.index()];
        let classes = self.load.classes;
        let work = self.load.job(class).costs.op(classes, class, op, &node.op);
        classes.pace(class).end(start, work.0)
    }

    /// Posts an op. Its exchange starts when the last op of the match is posted.
    fn join(&mut self, op_match: u32, posted: f64, came: u32) {
        let gathering = &mut self.gatherings[op_match as usize];
        gathering.missing -= 1;
        gathering.ready = gathering.ready.max(posted);
        if gathering.missing > 0 {
            return;
        }
        let start = gathering.ready;
        match self.matches.kind(op_match) {
            MatchKind::Request => self.events.come(start, Event::Arrives(op_match)),
            MatchKind::Message => self.send(op_match, start, came),
            MatchKind::Collective => self.begin(op_match, start, came),
        }
    }

    /// Starts a message, or has it wait for copy engines.
    fn send(&mut self, op_match: u32, start: f64, came: u32) {
        if self.engines.any() && self.engines.counts(self.ends(op_match)) {
            self.events.come(start, Event::Wants(EngineRequest::Message(op_match)));
        } else {
            self.begin(op_match, start, came);
        }
    }

    /// Starts an exchange. The lane `came` that completed the match continues by itself.
    fn begin(&mut self, op_match: u32, start: f64, came: u32) {
        let ops = self.matches.ops(op_match);
        for &op in ops {
            let first = &mut self.start[op as usize];
            *first = if *first == OPEN { start } else { first.min(start) };
        }
        let mut done = std::mem::take(&mut self.done);
        self.net.post(Posting { op_match, ops }, start, &mut done);
        for end in done.drain(..) {
            self.complete(end, came);
        }
        self.done = done;
    }

    /// Handles an end that the network reports.
    fn arrive(&mut self, done: Completion) {
        let moves = self.engines.any() && self.matches.kind(done.op_match).moves();
        if moves {
            self.now = done.at;
        }
        self.complete(done, NONE);
        if moves {
            self.serve();
        }
    }

    /// Ends an op's part in an exchange.
    ///
    /// An op with several matches represents the ranks of a role that a server handles one by one.
    /// It ends with the last match, because ops that depend on it reflect the slowest rank. Its
    /// lane continues with the first match, because a finished rank need not wait for the others.
    fn complete(&mut self, Completion { op_match, op, at }: Completion, came: u32) {
        let number = op as usize;
        let kind = self.matches.kind(op_match);
        if self.engines.any() && kind.moves() {
            let (class, _) = self.load.classes.op(op);
            match at > self.now {
                true => self.events.come(at, Event::Done(class)),
                false => self.engines.release(class),
            }
        }
        if kind == MatchKind::Request {
            self.events.come(at, Event::Through(op_match));
        }
        let end = at.max(self.start[number]);
        let lane = &mut self.lanes[self.lane[number] as usize];
        let open = lane.open.map_or(0, |open| open - 1);
        lane.met = match lane.met {
            // Nothing has ended yet.
            (_, OPEN) => (end, end),
            (first, last) => (first.min(end), last.max(end)),
        };
        lane.open = (open > 0).then_some(open);
        if open == 0 {
            let (first, last) = lane.met;
            self.finish(op, self.start[number], last, Some(first));
            if self.lane[number] != came {
                self.ready.push(self.lane[number]);
            }
        }
    }

    /// Classes whose engines a message needs.
    fn ends(&self, op_match: u32) -> impl Iterator<Item = u32> + Clone + use<'a, N> {
        let classes = self.load.classes;
        self.matches.ops(op_match).iter().map(|&op| classes.op(op).0)
    }

    /// Serves all queued requests for engines that can be served now.
    fn serve(&mut self) {
        let classes = self.load.classes;
        let matches = self.matches;
        let needs = |who: EngineRequest| -> Vec<u32> {
            match who {
                EngineRequest::Op(op) => vec![classes.op(op).0],
                EngineRequest::Message(op_match) => {
                    matches.ops(op_match).iter().map(|&op| classes.op(op).0).collect()
                }
            }
        };
        while let Some(who) = self.engines.serve(needs) {
            match who {
                EngineRequest::Message(op_match) => self.begin(op_match, self.now, NONE),
                EngineRequest::Op(number) => {
                    let (class, op) = classes.op(number);
                    let end = self.compute(class, op, self.now);
                    self.events.come(end, Event::Done(class));
                    let lane = self.lane[number as usize];
                    self.lanes[lane as usize].open = None;
                    self.finish(number, self.now, end, None);
                    self.ready.push(lane);
                }
            }
        }
    }

    /// Handles an event of a request to an asynchronous server.
    fn request(&mut self, what: Event, op_match: u32) {
        let (load, matches, now) = (self.load, self.matches, self.now);
        let Some(request) = matches.request(op_match) else { return };
        let Some(job) = self.servers.job(request.job) else { return };
        match what {
            Event::Arrives(_) => job.arrive(request, op_match),
            Event::Applied(_) => job.applied(request, now),
            Event::Through(_) => {
                if let Some(applied) = job.through(request, load, now) {
                    self.events.come(applied, Event::Applied(op_match));
                }
            }
            Event::Done(_) | Event::Wants(_) | Event::Repeats(_) => {}
        }
        let next =
            |servers: &mut Servers| servers.job(request.job)?.next(request.server, matches, now);
        while let Some(next) = next(&mut self.servers) {
            self.send(next, now, NONE);
        }
    }

    /// Lets a class run its body again, unless its job has run enough of them.
    fn repeat(&mut self, class: u32) {
        let of = self.load.classes.get(class);
        let ops = of.first as usize..of.first as usize + self.bodies[class as usize].nodes.len();
        let Some(job) = self.servers.job(of.job) else { return };
        if !job.repeat(class, self.now, &self.start[ops.clone()], &self.end[ops.clone()]) {
            return;
        }
        self.start[ops.clone()].fill(OPEN);
        self.end[ops.clone()].fill(OPEN);
        for op in ops.rev() {
            for &op_match in self.matches.of(op as u32) {
                let missing = self.matches.all[op_match as usize].expected;
                self.gatherings[op_match as usize] = Gathering { missing, ready: 0.0 };
            }
            // The first op of a lane is the last to be seen.
            let lane = &mut self.lanes[self.lane[op] as usize];
            (lane.head, lane.free) = (op as u32, self.now);
        }
        let lanes = self.lanes.iter().enumerate().filter(|(_, lane)| lane.class == class);
        self.ready.extend(lanes.map(|(lane, _)| lane as u32).rev());
    }

    /// Ends an op: its lane continues from `free`, or else from the end, and the lanes that wait
    /// for it become ready.
    fn finish(&mut self, op: u32, start: f64, end: f64, free: Option<f64>) {
        let number = op as usize;
        self.start[number] = start;
        self.end[number] = end;
        let lane = &mut self.lanes[self.lane[number] as usize];
        lane.free = free.unwrap_or(end);
        lane.met = (0.0, OPEN);
        lane.head = self.next[number];
        let class = lane.class;
        if self.servers.any()
            && let Some(job) = self.servers.job(self.load.classes.get(class).job)
            && let Some(over) = job.end_op(class, end)
        {
            self.events.come(over, Event::Repeats(class));
        }
        let mut waiter = std::mem::replace(&mut self.waiter[number], NONE);
        while waiter != NONE {
            self.ready.push(waiter);
            waiter = self.lanes[waiter as usize].next_waiter;
        }
    }

    /// Op that never ends and blocks others; preferably one that was posted and has no match.
    fn stuck(&self) -> Option<u32> {
        let over = |lane: &&LaneState| self.servers.is_over(self.load.classes.get(lane.class).job);
        let heads = || self.lanes.iter().filter(|lane| lane.head != NONE && !over(lane));
        let first = heads().find(|lane| lane.open.is_some()).or_else(|| heads().next());
        first.map(|lane| lane.head)
    }
}
