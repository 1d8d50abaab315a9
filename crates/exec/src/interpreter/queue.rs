//! Ready queue: ops that may start under lane order and `after` edges.

use paceline_plan::ids::{LaneId, OpId};
use paceline_plan::program::{CarryoverOp, Section};

/// Section that is run repeatedly, and the position of each of its lanes.
///
/// An op may start once its pass is open, it is at the head of its lane, and its `after` ops are
/// done in the same pass. A pass is complete when all of its ops are done, except carryover ops.
/// These may stay in flight into the next pass; ops there that depend on them wait for them.
#[derive(Debug)]
pub(crate) struct ReadyQueue<'p> {
    section: &'p Section,
    lanes: Vec<LaneCursor>,
    /// Number of passes in which each op is done.
    done: Vec<u64>,
    /// True for each op that may stay in flight into the next pass.
    may_last: Vec<bool>,
    /// Ops of the previous pass that each op waits for.
    carryover: Vec<Vec<OpId>>,
    /// Number of ops that must be done for a pass to be complete.
    required: u64,
    /// Number of such ops done, over all passes.
    required_done: u64,
    opened: u64,
}

#[derive(Debug, Default)]
struct LaneCursor {
    ops: Vec<OpId>,
    /// Position of the next op.
    next: usize,
    pass: u64,
    /// True if that op has been started.
    under_way: bool,
}

impl<'p> ReadyQueue<'p> {
    /// Creates the queue of a section on `lanes` lanes, with no pass open.
    pub(crate) fn new(section: &'p Section, lanes: usize, in_flight: &[CarryoverOp]) -> Self {
        let mut by_lane: Vec<LaneCursor> = Vec::new();
        by_lane.resize_with(lanes, LaneCursor::default);
        for (at, node) in section.nodes.iter().enumerate() {
            by_lane[node.lane.index()].ops.push(OpId::from(at));
        }
        let mut may_last = vec![false; section.nodes.len()];
        let mut carried = vec![Vec::new(); section.nodes.len()];
        for CarryoverOp { op, before } in in_flight {
            may_last[op.index()] = true;
            before.iter().for_each(|later| carried[later.index()].push(*op));
        }
        let required = may_last.iter().filter(|&&lasts| !lasts).count() as u64;
        Self {
            section,
            lanes: by_lane,
            done: vec![0; section.nodes.len()],
            may_last,
            carryover: carried,
            required,
            required_done: 0,
            opened: 0,
        }
    }

    /// Opens the next pass. The previous one must be complete.
    pub(crate) fn open(&mut self) {
        debug_assert!(self.is_complete());
        self.opened += 1;
    }

    /// Number of lanes.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// First unfinished op of a lane and its pass, even if it may not start yet.
    pub(crate) fn head(&self, lane: LaneId) -> Option<(OpId, u64)> {
        let lane = &self.lanes[lane.index()];
        let op = *lane.ops.get(lane.next)?;
        (lane.pass < self.opened).then_some((op, lane.pass))
    }

    /// Head of a lane, if it may start and has not been started.
    pub(crate) fn ready(&self, lane: LaneId) -> Option<(OpId, u64)> {
        let (op, pass) = self.head(lane).filter(|_| !self.lanes[lane.index()].under_way)?;
        let times = |earlier: &OpId| self.done[earlier.index()];
        let free = self.section.after(op).iter().all(|earlier| times(earlier) > pass)
            && self.carryover[op.index()].iter().all(|earlier| times(earlier) >= pass);
        free.then_some((op, pass))
    }

    /// Marks the head of a lane as started, for ops that do not finish at once.
    pub(crate) fn start(&mut self, lane: LaneId) {
        self.lanes[lane.index()].under_way = true;
    }

    /// Marks the head of a lane as done.
    pub(crate) fn finish(&mut self, lane: LaneId) {
        let lane = &mut self.lanes[lane.index()];
        lane.under_way = false;
        let op = lane.ops[lane.next];
        self.done[op.index()] += 1;
        self.required_done += u64::from(!self.may_last[op.index()]);
        lane.next += 1;
        if lane.next == lane.ops.len() {
            lane.next = 0;
            lane.pass += 1;
        }
    }

    /// Returns true if all required ops of the passes opened so far are done.
    pub(crate) fn is_complete(&self) -> bool {
        self.required_done == self.required * self.opened
    }

    /// Returns true if all ops of the passes opened so far are done.
    pub(crate) fn is_drained(&self) -> bool {
        self.lanes.iter().all(|lane| lane.ops.is_empty() || lane.pass == self.opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::program::{Op, StepPhase};

    /// Section of ops, each given as its lane and its dependencies.
    fn section(ops: &[(u8, &[u32])]) -> Section {
        let mut section = Section::default();
        for (lane, after) in ops {
            let after: Vec<OpId> = after.iter().map(|&op| OpId(op)).collect();
            section.push(LaneId(*lane), Op::Step { bucket: 0, phase: StepPhase::Apply }, &after);
        }
        section
    }

    const A: LaneId = LaneId(0);
    const B: LaneId = LaneId(1);

    fn op(ready: Option<(OpId, u64)>) -> Option<u32> {
        ready.map(|(op, _)| op.0)
    }

    #[test]
    fn lanes_run_in_order_and_edges_hold_across_them() {
        let section = section(&[(0, &[]), (1, &[0]), (0, &[]), (0, &[1])]);
        let mut queue = ReadyQueue::new(&section, 2, &[]);
        assert_eq!(op(queue.ready(A)), None, "no pass is open");
        queue.open();
        assert_eq!((op(queue.ready(A)), op(queue.ready(B))), (Some(0), None));
        queue.finish(A);
        assert_eq!((op(queue.ready(A)), op(queue.ready(B))), (Some(2), Some(1)));
        queue.start(B);
        assert_eq!((op(queue.ready(B)), op(queue.head(B))), (None, Some(1)), "it is under way");
        queue.finish(A);
        assert_eq!(op(queue.ready(A)), None, "op 3 waits for op 1");
        assert_eq!(op(queue.head(A)), Some(3));
        queue.finish(B);
        queue.finish(A);
        assert!(queue.is_complete() && queue.is_drained());
    }

    #[test]
    fn edges_count_within_a_pass() {
        let section = section(&[(0, &[]), (1, &[0])]);
        let mut queue = ReadyQueue::new(&section, 2, &[]);
        queue.open();
        queue.finish(A);
        queue.finish(B);
        queue.open();
        assert_eq!(op(queue.ready(B)), None, "op 0 of the second pass is not done");
        queue.finish(A);
        assert_eq!(queue.ready(B), Some((OpId(1), 1)));
    }

    #[test]
    fn what_may_stay_in_flight_does_not_hold_up_the_next_pass() {
        let section = section(&[(0, &[]), (1, &[]), (0, &[])]);
        let in_flight = [CarryoverOp { op: OpId(1), before: vec![OpId(2)] }];
        let mut queue = ReadyQueue::new(&section, 2, &in_flight);
        queue.open();
        queue.finish(A);
        assert_eq!(queue.ready(A), Some((OpId(2), 0)), "nothing to wait for in the first pass");
        queue.finish(A);
        assert!(queue.is_complete() && !queue.is_drained());
        queue.open();
        assert_eq!(queue.ready(A), Some((OpId(0), 1)));
        queue.finish(A);
        assert_eq!(queue.ready(A), None, "op 2 waits for op 1 of the pass before");
        assert_eq!(queue.ready(B), Some((OpId(1), 0)), "still of the first pass");
        queue.finish(B);
        assert_eq!(queue.ready(A), Some((OpId(2), 1)));
        assert_eq!(queue.ready(B), Some((OpId(1), 1)));
    }

    #[test]
    fn nothing_is_complete_at_once() {
        let section = section(&[]);
        let mut queue = ReadyQueue::new(&section, 1, &[]);
        queue.open();
        assert!(queue.is_complete() && queue.is_drained() && queue.head(A).is_none());
    }
}
