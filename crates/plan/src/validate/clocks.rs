//! Happens-before among the ops of a program, as vector clocks with one entry per lane.
//!
//! The n-th op of a lane has the *epoch* (lane, n). An op's clock gives, for every lane, the number
//! of that lane's ops that are certainly done when the op is. An op is ordered before another
//! exactly if the other's clock covers its epoch. With few lanes, ordering two ops is a comparison
//! of two numbers (Fidge 1988; Mattern 1989).

use super::SectionKind;
use crate::ids::{LaneId, OpId};
use crate::program::{CarryoverOp, Section};

/// An op's position on its lane, counted from 1; position 0 is before everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Epoch {
    pub(super) lane: LaneId,
    pub(super) position: u32,
}

impl Epoch {
    /// Returns true if an op with this clock runs after the op of this epoch, or is that op.
    pub(super) fn is_covered(self, clock: &[u32]) -> bool {
        self.position <= clock[self.lane.index()]
    }
}

/// Clocks of a program's ops, in plan order, section by section.
#[derive(Default)]
pub(super) struct Clocks {
    lanes: usize,
    /// Clock of the last op of each lane: `lanes` rows of `lanes` entries.
    last: Vec<u32>,
    /// Clocks of the current section's ops, one row each.
    done: Vec<u32>,
    /// Clocks of the previous section's carryover ops, by the op that waits for them. Sorted in
    /// descending order, so the next such op is last.
    carryover: Vec<(OpId, Vec<u32>)>,
    /// Ops of each lane by position − 1, to map an epoch back to its op.
    ops: Vec<Vec<(SectionKind, OpId)>>,
}

impl Clocks {
    /// Resets to the start of a program with `lanes` lanes.
    pub(super) fn reset(&mut self, lanes: usize) {
        self.lanes = lanes;
        self.last.clear();
        self.last.resize(lanes * lanes, 0);
        self.done.clear();
        self.carryover.clear();
        self.ops.iter_mut().for_each(Vec::clear);
        self.ops.resize_with(lanes, Vec::new);
    }

    /// Computes the clock of the section's next op and returns its epoch. Ops must be given in plan
    /// order, so that the ops it waits for have clocks.
    pub(super) fn advance(
        &mut self,
        kind: SectionKind,
        section: &Section,
        op: OpId,
        lane: LaneId,
    ) -> Epoch {
        let (lanes, at) = (self.lanes, lane.index());
        let row = &mut self.last[at * lanes..][..lanes];
        for after in section.after(op) {
            join(row, &self.done[after.index() * lanes..][..lanes]);
        }
        while let Some((_, clock)) = self.carryover.pop_if(|(before, _)| *before <= op) {
            join(row, &clock);
        }
        row[at] += 1;
        self.done.extend_from_slice(row);
        self.ops[at].push((kind, op));
        Epoch { lane, position: row[at] }
    }

    /// Clock of an op of the current section.
    pub(super) fn of(&self, op: OpId) -> &[u32] {
        &self.done[op.index() * self.lanes..][..self.lanes]
    }

    /// Ends the section: later ops wait for all of its ops except the carryover ops.
    pub(super) fn finish_section(&mut self, in_flight: &[CarryoverOp]) {
        let mut floor = vec![0; self.lanes];
        let mut flying: Vec<OpId> = in_flight.iter().map(|f| f.op).collect();
        flying.sort_unstable();
        for (op, clock) in self.done.chunks_exact(self.lanes.max(1)).enumerate() {
            if flying.binary_search(&OpId(op as u32)).is_err() {
                join(&mut floor, clock);
            }
        }
        self.carryover.clear();
        for flight in in_flight {
            let clock = self.of(flight.op).to_vec();
            let waiting = flight.before.iter().map(|&before| (before, clock.clone()));
            self.carryover.extend(waiting);
        }
        self.carryover.sort_unstable_by_key(|&(before, _)| std::cmp::Reverse(before));
        for row in self.last.chunks_exact_mut(self.lanes.max(1)) {
            join(row, &floor);
        }
        self.done.clear();
    }

    /// Op with this epoch; `None` for position 0.
    pub(super) fn op(&self, epoch: Epoch) -> Option<(SectionKind, OpId)> {
        let position = epoch.position.checked_sub(1)?;
        self.ops[epoch.lane.index()].get(position as usize).copied()
    }
}

fn join(into: &mut [u32], other: &[u32]) {
    for (into, other) in into.iter_mut().zip(other) {
        *into = (*into).max(*other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Op, StepPhase};

    fn section(ops: &[(u8, &[u32])]) -> Section {
        let mut section = Section::default();
        for (lane, after) in ops {
            let after: Vec<OpId> = after.iter().copied().map(OpId).collect();
            section.push(LaneId(*lane), Op::Step { bucket: 0, phase: StepPhase::Apply }, &after);
        }
        section
    }

    fn run(
        clocks: &mut Clocks,
        section: &Section,
        in_flight: &[CarryoverOp],
    ) -> Vec<(Epoch, Vec<u32>)> {
        let mut all = Vec::new();
        for (op, node) in section.nodes.iter().enumerate() {
            let op = OpId(op as u32);
            let epoch = clocks.advance(SectionKind::Body, section, op, node.lane);
            all.push((epoch, clocks.of(op).to_vec()));
        }
        clocks.finish_section(in_flight);
        all
    }

    #[test]
    fn order_follows_lanes_and_edges_and_nothing_else() {
        let mut clocks = Clocks::default();
        clocks.reset(3);
        // 0 and 1 on lane 0; 2 on lane 1 after 0; 3 on lane 2 after 2; 4 on lane 0.
        let ops = section(&[(0, &[]), (0, &[]), (1, &[0]), (2, &[2]), (0, &[])]);
        let all = run(&mut clocks, &ops, &[]);
        let before = |a: usize, b: usize| all[a].0.is_covered(&all[b].1);
        assert!(before(0, 1) && before(0, 2) && before(0, 3) && before(2, 3) && before(1, 4));
        assert!(!before(1, 2) && !before(1, 3) && !before(2, 4) && !before(3, 4));
    }

    #[test]
    fn sections_wait_for_all_but_what_is_in_flight() {
        let mut clocks = Clocks::default();
        clocks.reset(2);
        let ops = section(&[(0, &[]), (1, &[0]), (1, &[]), (0, &[])]);
        let flight = CarryoverOp { op: OpId(2), before: vec![OpId(3)] };
        let first = run(&mut clocks, &ops, &[flight]);
        let second = run(&mut clocks, &ops, &[]);
        assert!(first[1].0.is_covered(&second[0].1));
        assert!(!first[2].0.is_covered(&second[0].1));
        assert!(first[2].0.is_covered(&second[1].1), "its own lane still orders it");
        assert!(first[2].0.is_covered(&second[3].1), "and what waits for it");
        assert_eq!(clocks.op(second[2].0), Some((SectionKind::Body, OpId(2))));
        assert_eq!(clocks.op(Epoch::default()), None);
    }
}
