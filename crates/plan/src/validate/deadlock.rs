//! Deadlock check: a dry run of all roles without any buffering.
//!
//! An op starts when it is next on its lane and everything in its `after` list is done. A send or
//! receive is done when its counterpart has started, a collective when all its members have: the
//! strictest rule any transport may have. All other ops are done at once. If the dry run gets
//! stuck, so can a real run. If it does not, no transport can hang, because starting or finishing
//! an op only ever enables more ops.

use super::links::Links;
use super::{Report, SectionKind, ViolationKind};
use crate::ids::{OpId, RoleId};
use crate::program::Section;

/// Dry-runs one section of all roles and reports the communicating ops at which it gets stuck.
pub(super) fn check(report: &mut Report<'_>, section: SectionKind, links: &Links) {
    let mut run = DryRun::new(report, section, links);
    run.run();
    for lane in 0..run.lanes.len() {
        run.report_stuck_lane(report, lane as u32);
    }
}

/// Marks a missing op or lane.
const NONE: u32 = u32::MAX;

struct DryRun<'a> {
    links: &'a Links,
    sections: Vec<&'a Section>,
    section: SectionKind,
    /// All lanes of all roles.
    lanes: Vec<Lane>,
    /// Index of each role's first lane.
    first_lane: Vec<u32>,
    ops: Vec<State>,
    /// Lanes whose head may be able to advance.
    ready: Vec<u32>,
}

struct Lane {
    /// Global number of the next op.
    head: u32,
    role: RoleId,
    /// The next lane that waits for the same op.
    next_waiter: u32,
}

struct State {
    /// The next op on the same lane.
    next: u32,
    /// Number of counterparts that have not started.
    missing: u32,
    /// A lane whose head waits for this op.
    waiter: u32,
    started: bool,
    done: bool,
}

impl<'a> DryRun<'a> {
    fn new(report: &Report<'a>, section: SectionKind, links: &'a Links) -> Self {
        let mut run = Self {
            links,
            sections: Vec::new(),
            section,
            lanes: Vec::new(),
            first_lane: Vec::new(),
            ops: Vec::with_capacity(links.ops.len()),
            ready: Vec::new(),
        };
        for (role, program) in report.plan.programs.iter().enumerate() {
            let first_lane = run.lanes.len();
            let role = RoleId::from(role);
            run.first_lane.push(first_lane as u32);
            run.sections.push(section.of(program));
            let mut last = vec![NONE; program.lanes.len()];
            run.lanes.extend(last.iter().map(|_| Lane { head: NONE, role, next_waiter: NONE }));
            for node in &section.of(program).nodes {
                let number = run.ops.len() as u32;
                let missing = links.of(number).len() as u32;
                let before = std::mem::replace(&mut last[node.lane.index()], number);
                match run.ops.get_mut(before as usize) {
                    Some(before) => before.next = number,
                    None => run.lanes[first_lane + node.lane.index()].head = number,
                }
                run.ops.push(State {
                    next: NONE,
                    missing,
                    waiter: NONE,
                    started: false,
                    done: false,
                });
            }
        }
        run.ready.extend((0..run.lanes.len() as u32).rev());
        run
    }

    fn run(&mut self) {
        while let Some(lane) = self.ready.pop() {
            while self.advance(lane) {}
        }
    }

    /// Advances the head of a lane; `false` if the lane has to wait or is at its end.
    fn advance(&mut self, lane: u32) -> bool {
        let head = self.lanes[lane as usize].head;
        if head == NONE {
            return false;
        }
        if !self.ops[head as usize].started {
            if let Some(blocker) = self.blocker(lane) {
                self.lanes[lane as usize].next_waiter = self.ops[blocker as usize].waiter;
                self.ops[blocker as usize].waiter = lane;
                return false;
            }
            self.start(head);
        }
        let state = &mut self.ops[head as usize];
        if state.missing > 0 {
            return false;
        }
        self.lanes[lane as usize].head = state.next;
        self.finish(head);
        true
    }

    /// An unfinished op that the head of a lane waits for by an `after` edge.
    fn blocker(&self, lane: u32) -> Option<u32> {
        let Lane { head, role, .. } = self.lanes[lane as usize];
        let first = self.links.ops.number(role, OpId(0));
        let after = self.sections[role.index()].after(OpId(head - first));
        after.iter().map(|op| first + op.0).find(|&op| !self.ops[op as usize].done)
    }

    fn start(&mut self, op: u32) {
        self.ops[op as usize].started = true;
        for &other in self.links.of(op) {
            let state = &mut self.ops[other as usize];
            state.missing -= 1;
            if state.missing == 0 && state.started {
                self.ready.push(self.lane(other));
            }
        }
    }

    fn finish(&mut self, op: u32) {
        let state = &mut self.ops[op as usize];
        state.done = true;
        let mut waiter = std::mem::replace(&mut state.waiter, NONE);
        while waiter != NONE {
            self.ready.push(waiter);
            waiter = self.lanes[waiter as usize].next_waiter;
        }
    }

    /// Lane of an op.
    fn lane(&self, op: u32) -> u32 {
        let (role, id) = self.links.ops.op(op);
        let lane = self.sections[role.index()].nodes[id.index()].lane;
        self.first_lane[role.index()] + u32::from(lane.0)
    }

    /// Reports a lane whose head has started but never finishes. Heads that wait for an `after`
    /// edge are not reported: they wait for an op behind a reported one.
    fn report_stuck_lane(&self, report: &mut Report<'_>, lane: u32) {
        let head = self.lanes[lane as usize].head;
        if head == NONE || !self.ops[head as usize].started {
            return;
        }
        let numbers = &self.links.ops;
        let (role, op) = numbers.op(head);
        for &other in self.links.of(head).iter().filter(|&&other| !self.ops[other as usize].started)
        {
            let (other_role, other_op) = numbers.op(other);
            let (_, behind) = numbers.op(self.culprit(other));
            let kind = ViolationKind::Deadlock {
                rank: report.plan.representative(other_role),
                other: report.site(other_role, self.section, other_op),
                behind: report.site(other_role, self.section, behind),
            };
            report.op(role, self.section, op, kind);
        }
    }

    /// The op of the same role that keeps `op` from starting and is itself stuck on other roles.
    /// Lanes and `after` edges only lead backwards, so the search ends.
    fn culprit(&self, op: u32) -> u32 {
        let mut lane = self.lane(op);
        while !self.ops[self.lanes[lane as usize].head as usize].started
            && let Some(blocker) = self.blocker(lane)
        {
            lane = self.lane(blocker);
        }
        self.lanes[lane as usize].head
    }
}
