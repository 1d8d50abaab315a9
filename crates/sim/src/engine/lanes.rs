//! The worklist: lanes advance until they have to wait, and go on when what they wait for is done.

use super::meetings::Meetings;
use super::{Costs, Numbering, describe_op};
use crate::error::SimError;
use paceline_plan::ids::{OpId, Rank, RoleId};
use paceline_plan::program::{Plan, Section};
use paceline_plan::units::Seconds;

/// When every op of every role's body starts and ends.
#[derive(Clone, Debug)]
pub struct Timeline {
    ops: Numbering,
    start: Vec<f64>,
    end: Vec<f64>,
    /// Of each role, the rank whose times these are.
    ranks: Vec<Rank>,
}

impl Timeline {
    pub(super) fn new(ops: Numbering, start: Vec<f64>, end: Vec<f64>, ranks: Vec<Rank>) -> Self {
        Self { ops, start, end, ranks }
    }

    /// The rank of a role whose times these are.
    pub fn rank(&self, role: RoleId) -> Rank {
        self.ranks[role.index()]
    }

    /// From an op's start to its end.
    pub fn span(&self, role: RoleId, op: OpId) -> (Seconds, Seconds) {
        let number = self.ops.number(role, op) as usize;
        (Seconds(self.start[number]), Seconds(self.end[number]))
    }

    /// Ends everything at a moment: what would run on is left to the next iteration.
    pub(super) fn cut(&mut self, at: f64) {
        let times = self.start.iter_mut().chain(&mut self.end);
        times.for_each(|time| *time = time.min(at));
    }

    /// The same for an op by its number over all roles.
    pub(crate) fn times(&self, number: u32) -> (f64, f64) {
        (self.start[number as usize], self.end[number as usize])
    }

    /// The role and op of a number.
    pub(crate) fn op(&self, number: u32) -> (RoleId, OpId) {
        self.ops.op(number)
    }

    /// When the last op of all ends.
    pub fn end(&self) -> Seconds {
        Seconds(self.end.iter().copied().fold(0.0, f64::max))
    }
}

pub(super) fn run(
    plan: &Plan,
    ops: Numbering,
    meetings: &Meetings,
    costs: &Costs<'_>,
) -> Result<Timeline, SimError> {
    let mut run = Run::new(plan, ops, meetings, costs);
    while let Some(lane) = run.ready.pop() {
        while run.advance(lane) {}
    }
    match run.stuck() {
        Some((role, op)) => Err(SimError::Stuck {
            rank: plan.representative(role),
            role: plan.programs[role.index()].name.clone(),
            op,
            what: describe_op(plan, role, op),
        }),
        None => {
            let roles = (0..plan.programs.len()).map(RoleId::from);
            let ranks = roles.map(|role| plan.representative(role)).collect();
            Ok(Timeline::new(run.ops, run.start, run.end, ranks))
        }
    }
}

/// No op, no lane.
const NONE: u32 = u32::MAX;

/// The end of an op that has not ended.
const OPEN: f64 = f64::NEG_INFINITY;

struct Run<'a> {
    costs: &'a Costs<'a>,
    meetings: &'a Meetings,
    bodies: Vec<&'a Section>,
    ops: Numbering,
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
    /// Lanes whose head may be able to go on.
    ready: Vec<u32>,
}

struct Lane {
    role: RoleId,
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
    fn new(plan: &'a Plan, ops: Numbering, meetings: &'a Meetings, costs: &'a Costs<'a>) -> Self {
        let all = ops.len();
        let gatherings =
            meetings.all.iter().map(|m| Gathering { missing: m.expected, ready: 0.0 }).collect();
        let mut run = Self {
            costs,
            meetings,
            bodies: plan.programs.iter().map(|program| &program.body).collect(),
            start: vec![OPEN; all],
            end: vec![OPEN; all],
            next: vec![NONE; all],
            lane: Vec::with_capacity(all),
            waiter: vec![NONE; all],
            lanes: Vec::new(),
            gatherings,
            ready: Vec::new(),
            ops,
        };
        for (role, program) in plan.programs.iter().enumerate() {
            let role = RoleId::from(role);
            let first = run.lanes.len();
            let mut last = vec![NONE; program.lanes.len()];
            let idle = |_: &u32| Lane {
                role,
                head: NONE,
                free: 0.0,
                open: None,
                met: (0.0, 0.0),
                next_waiter: NONE,
            };
            run.lanes.extend(last.iter().map(idle));
            for node in &program.body.nodes {
                let number = run.lane.len() as u32;
                let lane = first + node.lane.index();
                match std::mem::replace(&mut last[node.lane.index()], number) {
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
        let Lane { role, head, free, open, .. } = self.lanes[at as usize];
        if head == NONE || open.is_some() {
            return false;
        }
        let body = self.bodies[role.index()];
        let first = self.ops.number(role, OpId(0));
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
            let duration = self.costs.op(role, op, &body.nodes[op.index()].op);
            let end = posted + duration.0;
            self.finish(head, posted, end, end);
            return true;
        }
        self.lanes[at as usize].open = Some(meetings.len() as u32);
        for &meeting in meetings {
            let gathering = &mut self.gatherings[meeting as usize];
            gathering.missing -= 1;
            gathering.ready = gathering.ready.max(posted);
            if gathering.missing == 0 {
                let start = gathering.ready;
                self.hold(meeting, start, at);
            }
        }
        self.lanes[at as usize].open.is_none()
    }

    /// A meeting takes place. The lane that just came goes on by itself; the others, which waited,
    /// become ready.
    ///
    /// An op with several meetings stands for the ranks of a role that a server deals with one by
    /// one. It ends with the last of them, because what depends on it is told of the slowest rank.
    /// Its lane goes on with the first, because a rank that is through need not wait for the
    /// others.
    fn hold(&mut self, meeting: u32, start: f64, came: u32) {
        let end = start + self.meetings.all[meeting as usize].duration.0;
        for &op in self.meetings.ops(meeting) {
            let number = op as usize;
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
    fn stuck(&self) -> Option<(RoleId, OpId)> {
        let heads = || self.lanes.iter().filter(|lane| lane.head != NONE);
        let first = heads().find(|lane| lane.open.is_some()).or_else(|| heads().next());
        first.map(|lane| self.ops.op(lane.head))
    }
}
