//! Memory of a rank of each role over an iteration.
//!
//! A plan gives every buffer a fixed address; the fill level of the arena follows from the times at
//! which buffers hold data. A rank's memory has three parts:
//!
//! - *Frames*, the activations saved from forward to backward. A copy is live from the start of the
//!   first op that writes it for a microbatch to the end of the `free` that releases it.
//! - *Scratch*, the region at the end of the activations whose buffers share addresses. While a
//!   compute op runs, it holds everything below the highest byte that the op touches.
//! - Everything else (weights, gradients, optimizer state, communication buffers), which is held
//!   throughout.

use crate::engine::Timeline;
use paceline_plan::ids::{BufferId, Microbatch, OpId, RoleId};
use paceline_plan::program::{Access, Buffer, MemoryKind, Op, Plan, Program};
use paceline_plan::units::{Bytes, Seconds};
use serde::Serialize;

/// Memory of a rank of one role, as a step curve.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryCurve {
    /// The role's name.
    pub role: String,
    /// Bytes held throughout.
    pub persistent: Bytes,
    /// Size of the planned arena.
    pub planned: Bytes,
    /// Bytes held from each point until the next; at most [`MemoryCurve::POINTS`]. If there were
    /// more, each is the maximum until the next one.
    pub points: Vec<MemoryPoint>,
}

/// Step of a curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MemoryPoint {
    /// Start time.
    pub at: Seconds,
    /// Bytes held from then on.
    pub bytes: Bytes,
}

impl MemoryCurve {
    /// Maximum number of points: more cannot be distinguished in a plot.
    pub const POINTS: usize = 200;

    /// Maximum of the curve.
    pub fn peak(&self) -> Bytes {
        self.points.iter().map(|point| point.bytes).max().unwrap_or(self.persistent)
    }
}

pub(super) fn memory(plan: &Plan, timeline: &Timeline) -> Vec<MemoryCurve> {
    let roles = (0..plan.programs.len()).map(RoleId::from);
    roles.map(|role| curve(plan, role, timeline)).collect()
}

fn curve(plan: &Plan, role: RoleId, timeline: &Timeline) -> MemoryCurve {
    let program = &plan.programs[role.index()];
    let planned = program.memory.total();
    let scratch = Scratch::of(program);
    let mut frames = Frames::new(program);
    // Each list alone is nearly sorted by time; a combined one would not be.
    let (mut changes, mut by_frames) = (Vec::new(), Vec::new());
    for (index, node) in program.body.nodes.iter().enumerate() {
        let (start, end) = timeline.span(role, OpId::from(index));
        frames.run(plan, program, &node.op, (start, end), &mut by_frames);
        if let Op::Compute { segment, .. } = node.op {
            let operands = &program.segment(segment).operands;
            let reach = scratch.reach(program, operands.iter().map(|view| view.buffer));
            changes.push(Change { at: start.0, bytes: reach.0 as i64 });
            changes.push(Change { at: end.0, bytes: -(reach.0 as i64) });
        }
    }
    // Memory released at a time is free for anything that starts then.
    let order = |a: &Change, b: &Change| a.at.total_cmp(&b.at).then(a.bytes.cmp(&b.bytes));
    by_frames.sort_by(order);
    changes.append(&mut by_frames);
    changes.sort_by(order);
    let of_frames: Bytes = frames.extent(program);
    let held = of_frames.0.saturating_add(scratch.size.0);
    let persistent = Bytes(planned.0.saturating_sub(held));
    let points = thinned(steps(persistent, &changes), timeline.end());
    MemoryCurve { role: program.name.clone(), persistent, planned, points }
}

/// Change in bytes at a time.
#[derive(Clone, Copy, Debug)]
struct Change {
    at: f64,
    bytes: i64,
}

/// Running sum of all changes.
fn steps(persistent: Bytes, changes: &[Change]) -> Vec<MemoryPoint> {
    let mut points = vec![MemoryPoint { at: Seconds::ZERO, bytes: persistent }];
    let mut held = persistent.0;
    for at in changes.chunk_by(|a, b| a.at == b.at) {
        held = at.iter().fold(held, |held, change| held.saturating_add_signed(change.bytes));
        let point = MemoryPoint { at: Seconds(at[0].at), bytes: Bytes(held) };
        match points.last_mut() {
            Some(last) if last.at.0 >= point.at.0 => last.bytes = point.bytes,
            Some(last) if last.bytes == point.bytes => {}
            Some(_) | None => points.push(point),
        }
    }
    points
}

/// Resamples the curve to equal time spans, each with its maximum.
fn thinned(points: Vec<MemoryPoint>, end: Seconds) -> Vec<MemoryPoint> {
    if points.len() <= MemoryCurve::POINTS {
        return points;
    }
    let width = end.0 / MemoryCurve::POINTS as f64;
    let mut at = 0;
    let mut thin = Vec::with_capacity(MemoryCurve::POINTS);
    for span in 0..MemoryCurve::POINTS {
        let (from, to) = (span as f64 * width, (span + 1) as f64 * width);
        // The value at the start of the span counts as well.
        let mut most = points[at].bytes;
        while let Some(next) = points.get(at + 1).filter(|next| next.at.0 < to) {
            most = most.max(next.bytes);
            at += 1;
        }
        thin.push(MemoryPoint { at: Seconds(from), bytes: most });
    }
    thin
}

/// Liveness of the copies of a program's frames.
struct Frames {
    /// By buffer, true for each live copy; empty for a buffer outside frames.
    alive: Vec<Vec<bool>>,
}

impl Frames {
    fn new(program: &Program) -> Self {
        let mut alive = vec![Vec::new(); program.buffers.len()];
        for &buffer in program.frames.iter().flatten() {
            alive[buffer.index()] = vec![false; program.buffer(buffer).copies as usize];
        }
        Self { alive }
    }

    /// Total bytes of all copies of all frames.
    fn extent(&self, program: &Program) -> Bytes {
        let framed = program.buffers.iter().zip(&self.alive).filter(|(_, alive)| !alive.is_empty());
        framed.map(|(buffer, _)| buffer.extent()).sum()
    }

    fn run(
        &mut self,
        plan: &Plan,
        program: &Program,
        op: &Op,
        (start, end): (Seconds, Seconds),
        changes: &mut Vec<Change>,
    ) {
        let mut set = |buffer: BufferId, microbatch: Microbatch, alive: bool| {
            let copies = &mut self.alive[buffer.index()];
            if copies.is_empty() {
                return;
            }
            let copy = microbatch.index() % copies.len();
            if std::mem::replace(&mut copies[copy], alive) != alive {
                let bytes = program.buffer(buffer).stride().0 as i64;
                let (at, bytes) = if alive { (start.0, bytes) } else { (end.0, -bytes) };
                match changes.last_mut() {
                    Some(last) if last.at == at && (last.bytes > 0) == alive => last.bytes += bytes,
                    Some(_) | None => changes.push(Change { at, bytes }),
                }
            }
        };
        match *op {
            Op::Load { into, microbatch, .. } => set(into, microbatch, true),
            Op::Compute { segment, microbatch, .. } => {
                let segment = program.segment(segment);
                let operands = &plan.templates[segment.template as usize].operands;
                let written = operands.iter().zip(&segment.operands);
                for (_, view) in written.filter(|(operand, _)| operand.access != Access::Read) {
                    set(view.buffer, microbatch, true);
                }
            }
            Op::Recv { view, microbatch, .. } => set(view.buffer, microbatch, true),
            Op::Collective { call, microbatch } => {
                set(program.call(call).output.buffer, microbatch, true);
            }
            Op::Stash { into, microbatch, .. } | Op::Restore { into, microbatch, .. } => {
                set(into.buffer, microbatch, true);
            }
            Op::Free { frame, microbatch } => {
                for &buffer in &program.frames[frame as usize] {
                    set(buffer, microbatch, false);
                }
            }
            Op::Send { .. } | Op::Accumulate { .. } | Op::Step { .. } | Op::Serve { .. } => {}
        }
    }
}

/// Region whose buffers share addresses: from the first such buffer to the end of the activations.
struct Scratch {
    start: u64,
    size: Bytes,
}

impl Scratch {
    fn of(program: &Program) -> Self {
        let kinds = MemoryKind::ALL.iter();
        let up_to = kinds.take_while(|&&kind| kind <= MemoryKind::Activations);
        let end = up_to.map(|&kind| program.memory.of(kind).0).fold(0, u64::saturating_add);
        let activations = program.buffers.iter().filter(|b| b.kind == MemoryKind::Activations);
        let mut buffers: Vec<&Buffer> = activations.filter(|b| b.elements > 0).collect();
        buffers.sort_by_key(|buffer| buffer.offset);
        // Buffers with dedicated addresses come first and never overlap.
        let mut farthest: Option<&Buffer> = None;
        let mut start = end;
        for buffer in buffers {
            let reach = |buffer: &Buffer| (buffer.offset + buffer.extent()).0;
            match farthest {
                Some(before) if buffer.offset.0 < reach(before) => {
                    start = before.offset.0;
                    break;
                }
                Some(_) | None => farthest = Some(buffer),
            }
        }
        Self { start, size: Bytes(end.saturating_sub(start)) }
    }

    /// Highest byte of `buffers` relative to the start of the region.
    fn reach(&self, program: &Program, buffers: impl Iterator<Item = BufferId>) -> Bytes {
        let ends = buffers.map(|id| program.buffer(id)).filter(|buffer| {
            buffer.kind == MemoryKind::Activations && buffer.offset.0 >= self.start
        });
        let highest = ends.map(|buffer| (buffer.offset + buffer.extent()).0).max();
        Bytes(highest.map_or(0, |end| (end - self.start).min(self.size.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases::{blocks_only, ideal, mini, run, strategy};
    use super::*;
    use crate::cluster::preset;
    use paceline_plan::lower::lower;
    use paceline_plan::strategy::{Recompute, Strategy, Zero};
    use proptest::prelude::*;

    /// Bytes that one microbatch occupies in a role's frames.
    fn frame(program: &Program) -> u64 {
        program.frames.iter().flatten().map(|&id| program.buffer(id).stride().0).sum()
    }

    /// Maximum number of microbatches whose frames fit under the curve's peak.
    fn microbatches(curve: &MemoryCurve, program: &Program) -> u64 {
        (curve.peak().0 - curve.persistent.0) / frame(program)
    }

    /// 1F1B holds as many microbatches as there are stages from here to the end (Narayanan et al.,
    /// arXiv 2104.04473, section 2.2).
    #[test]
    fn earlier_stages_hold_more_microbatches() {
        let layout = Strategy { overlap: false, recompute: Recompute::None, ..strategy(2, 8) };
        let plan = blocks_only(&layout);
        let (_, details) = run(&plan, &ideal(2));
        for (stage, expected) in [(0, 2), (1, 1)] {
            let (curve, program) = (&details.memory[stage], &plan.programs[stage]);
            assert_eq!(microbatches(curve, program), expected, "stage {stage}");
            let extent = program.frames.iter().flatten().map(|&id| program.buffer(id).extent().0);
            assert!(curve.peak().0 >= curve.persistent.0 + extent.sum::<u64>());
            assert!(curve.peak() <= curve.planned);
        }
    }

    /// With one microbatch on one rank, everything allocated is released.
    #[test]
    fn memory_is_given_back_at_the_end() {
        let plan = lower(&mini(), &strategy(1, 1)).unwrap();
        let (outcome, details) = run(&plan, &ideal(1));
        let [curve] = &details.memory[..] else { panic!("one role") };
        let program = &plan.programs[0];
        let state = [MemoryKind::Parameters, MemoryKind::Gradients, MemoryKind::Optimizer];
        let state: u64 = state.iter().map(|&kind| program.memory.of(kind).0).sum();
        assert!(curve.persistent.0 >= state);
        assert_eq!(curve.points.last().unwrap().bytes, curve.persistent);
        assert!(curve.points.is_sorted_by(|a, b| a.at.0 < b.at.0));
        assert!(curve.points.last().unwrap().at.0 <= outcome.iteration.0);
        // The peak is after the forward pass, before the backward pass begins to free.
        let peak = curve.points.iter().find(|point| point.bytes == curve.peak()).unwrap();
        assert!(peak.at.0 > 0.2 * outcome.iteration.0 && peak.at.0 < outcome.iteration.0);
    }

    #[test]
    fn many_steps_are_thinned_to_their_peaks() {
        let points: Vec<MemoryPoint> = (0..10_000u64)
            .map(|i| MemoryPoint { at: Seconds(i as f64 * 1e-3), bytes: Bytes(i * 7919 % 10_007) })
            .collect();
        let thin = thinned(points.clone(), Seconds(10.0));
        assert_eq!(thin.len(), MemoryCurve::POINTS);
        let peak = |points: &[MemoryPoint]| points.iter().map(|point| point.bytes).max();
        assert_eq!(peak(&thin), peak(&points));
        for (index, point) in points.iter().enumerate() {
            let until = points.get(index + 1).map_or(10.0, |next| next.at.0);
            let covering = thin.iter().rfind(|thin| thin.at.0 < until).unwrap();
            assert!(covering.bytes >= point.bytes, "{point:?} under {covering:?}");
        }
        let few = &points[..MemoryCurve::POINTS];
        assert_eq!(thinned(few.to_vec(), Seconds(1.0)), few);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn no_curve_leaves_what_is_planned(
            tp in prop_oneof![Just(1u32), Just(2)],
            pp in prop_oneof![Just(1u32), Just(2), Just(4)],
            dp in prop_oneof![Just(1u32), Just(2)],
            stage in 0u8..4,
            microbatches in 1u64..9,
            overlap: bool,
        ) {
            let zero = Zero::from_stage(stage).unwrap();
            let layout = strategy(pp, microbatches * u64::from(dp));
            let plan = lower(&mini(), &Strategy { tp, dp, zero, overlap, ..layout }).unwrap();
            let cluster = preset::holding("dgx-a100", plan.mesh.world().into()).unwrap();
            let (_, details) = run(&plan, &cluster);
            for curve in &details.memory {
                prop_assert!(curve.points.len() <= MemoryCurve::POINTS);
                prop_assert!(curve.points.iter().all(|point| point.bytes >= curve.persistent));
                prop_assert!(curve.peak() <= curve.planned, "{} {}", curve.peak(), curve.planned);
            }
        }
    }
}
