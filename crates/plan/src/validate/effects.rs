//! Effects of running a segment on memory, as seen by other ops.
//!
//! A segment's operands include values that only its own operators use; these share memory as soon
//! as their lifetimes allow. Inside the segment, the operator order decides if that is correct;
//! this is checked here, once per segment. Outside, such *private* buffers matter only for what
//! they destroy. They are summarised as the memory ranges that the segment clobbers, so the walk
//! over all ops handles a few ranges instead of dozens of operands.

use super::cells::CellRange;
use super::{Report, SectionKind, ViolationKind};
use crate::graph::OpPass;
use crate::ids::{BufferId, RoleId};
use crate::program::{Access, Op, Plan, Program, Segment, Template, TensorNorms, View};
use std::ops::Range;

/// Effects of a program's segments, by segment.
#[derive(Default)]
pub(super) struct Effects {
    /// True for buffers that never carry data from one op to another.
    pub(super) private: Vec<bool>,
    /// Operands that carry data in or out, segment by segment.
    operands: Vec<Operand>,
    /// Bytes overwritten by data that does not outlive the segment.
    clobbers: Vec<Clobber>,
    /// End index of each segment's operands and clobbers.
    ends: Vec<(u32, u32)>,
}

/// An input or output of a segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    /// The view.
    pub(super) view: View,
    /// Access of the segment to the view.
    pub(super) access: Access,
    /// Cells of the view, if the same for every microbatch; set once the arena is split into cells.
    pub(super) place: Option<CellRange>,
}

/// A range of the arena that a segment overwrites with data no other op uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Clobber {
    /// The bytes; once the arena is split, the cells.
    pub(super) range: Range<u64>,
    /// One of the buffers in the range.
    pub(super) buffer: BufferId,
}

impl Effects {
    /// Summarises all segments of a program and reports segments whose operands overwrite each
    /// other.
    pub(super) fn new(report: &mut Report<'_>, role: RoleId) -> Self {
        let (plan, program) = (report.plan, report.program(role));
        let mut effects = Self { private: private(plan, program), ..Self::default() };
        let mut inside = Inside::default();
        for (at, segment) in program.segments.iter().enumerate() {
            let template = &plan.templates[segment.template as usize];
            if let Some(kind) = inside.run(program, at as u32, segment, template) {
                report.role(role, kind);
            }
            effects.add(program, segment, template, &inside.valid);
        }
        effects
    }

    fn add(&mut self, program: &Program, segment: &Segment, template: &Template, alive: &[bool]) {
        let first = self.clobbers.len();
        for ((operand, &view), &alive) in template.operands.iter().zip(&segment.operands).zip(alive)
        {
            let carried_out = alive && !self.private[view.buffer.index()];
            if operand.access == Access::Read || carried_out {
                self.operands.push(Operand { view, access: operand.access, place: None });
            } else {
                // An input that is not an output is read, then destroyed.
                if matches!(operand.access, Access::Accumulate | Access::Add) {
                    self.operands.push(Operand { view, access: operand.access, place: None });
                }
                self.clobbers.push(Clobber { range: bytes(program, view), buffer: view.buffer });
            }
        }
        merge(&mut self.clobbers, first);
        self.ends.push((self.operands.len() as u32, self.clobbers.len() as u32));
    }

    /// Operands and clobbers of a segment.
    pub(super) fn of(&self, segment: usize) -> (&[Operand], &[Clobber]) {
        let start = segment.checked_sub(1).map_or((0, 0), |before| self.ends[before]);
        let end = self.ends[segment];
        (
            &self.operands[start.0 as usize..end.0 as usize],
            &self.clobbers[start.1 as usize..end.1 as usize],
        )
    }

    /// All operands of all segments.
    pub(super) fn operands(&mut self) -> &mut [Operand] {
        &mut self.operands
    }

    /// All clobbers of all segments.
    pub(super) fn clobbers(&mut self) -> &mut [Clobber] {
        &mut self.clobbers
    }
}

/// Merges the ranges from index `first` that touch or overlap.
fn merge(clobbers: &mut Vec<Clobber>, first: usize) {
    clobbers[first..].sort_unstable_by_key(|clobber| clobber.range.start);
    let mut kept = first;
    for at in first..clobbers.len() {
        let Range { start, end } = clobbers[at].range;
        if kept > first && start <= clobbers[kept - 1].range.end {
            let before = &mut clobbers[kept - 1].range.end;
            *before = (*before).max(end);
        } else {
            clobbers.swap(kept, at);
            kept += 1;
        }
    }
    clobbers.truncate(kept);
}

/// Bytes of a view in the buffer's first copy.
fn bytes(program: &Program, view: View) -> Range<u64> {
    let buffer = program.buffer(view.buffer);
    let start = buffer.offset.0 + view.offset * buffer.dtype.size();
    start..start + view.len * buffer.dtype.size()
}

/// True for buffers that segments only write and that no op outside a segment uses.
fn private(plan: &Plan, program: &Program) -> Vec<bool> {
    let mut private: Vec<bool> = program.buffers.iter().map(|buffer| buffer.copies == 1).collect();
    let mut used = |buffer: BufferId| private[buffer.index()] = false;
    for segment in &program.segments {
        let template = &plan.templates[segment.template as usize];
        for (operand, view) in template.operands.iter().zip(&segment.operands) {
            if operand.access != Access::Write {
                used(view.buffer);
            }
        }
    }
    for call in &program.calls {
        used(call.input.buffer);
        used(call.output.buffer);
    }
    for bucket in &program.buckets {
        let state = bucket.master.iter().chain(&bucket.moments).chain(&bucket.offloaded);
        for view in [bucket.params, bucket.grads].iter().chain(state) {
            used(view.buffer);
        }
        if let Some(TensorNorms { weights, directions, tensors }) = bucket.tensor_norms {
            [weights, directions, tensors].into_iter().for_each(|view| used(view.buffer));
        }
    }
    for service in &program.services {
        used(service.receives.buffer);
        used(service.sends.buffer);
    }
    program.frames.iter().flatten().for_each(|&buffer| used(buffer));
    program.outputs.loss.into_iter().chain(program.outputs.norm).for_each(&mut used);
    for node in SectionKind::ALL.into_iter().flat_map(|section| &section.of(program).nodes) {
        match node.op {
            Op::Load { into, .. } => used(into),
            Op::Send { view, .. } | Op::Recv { view, .. } => used(view.buffer),
            Op::Accumulate { from, into, .. }
            | Op::Stash { from, into, .. }
            | Op::Restore { from, into, .. } => {
                used(from.buffer);
                used(into.buffer);
            }
            Op::Compute { .. }
            | Op::Collective { .. }
            | Op::Step { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => {}
        }
    }
    private
}

/// Interpreter of a segment's operators over its operands.
#[derive(Default)]
struct Inside {
    /// True for operands that hold their value.
    valid: Vec<bool>,
    /// The operand that last overwrote each operand, or itself.
    writer: Vec<u16>,
    ranges: Vec<Range<u64>>,
    /// Operands sorted by their first byte, to find overlaps.
    by_start: Vec<u16>,
    overlaps: Vec<(u16, u16)>,
}

impl Inside {
    fn run(
        &mut self,
        program: &Program,
        number: u32,
        segment: &Segment,
        template: &Template,
    ) -> Option<ViolationKind> {
        self.prepare(program, segment, template);
        let name = |operand: u16| {
            program.buffer(segment.operands[usize::from(operand)].buffer).name.clone()
        };
        let mut found = None;
        for op in &template.ops {
            let adds = op.pass == OpPass::BackwardWeight;
            let read = op.inputs.iter().chain(&op.params);
            let mut wrong = read.clone().copied().find(|&at| !self.valid[usize::from(at)]);
            let mut by = wrong.map(|at| self.writer[usize::from(at)]);
            let none: &[u16] = &[];
            for &written in op.outputs.iter().chain(if adds { &op.params[..] } else { none }) {
                for at in self.write(written) {
                    let used = read.clone().chain(&op.outputs).any(|&other| other == at);
                    if used && wrong.is_none() {
                        (wrong, by) = (Some(at), Some(written));
                    }
                }
            }
            if let (Some(wrong), Some(by), None) = (wrong, by, &found) {
                found = Some(ViolationKind::OperandOverwritten {
                    segment: number,
                    template: template.name.clone(),
                    operator: op.kind.name(),
                    operand: name(wrong),
                    by: (by != wrong).then(|| name(by)),
                });
            }
        }
        found
    }

    fn prepare(&mut self, program: &Program, segment: &Segment, template: &Template) {
        let count = template.operands.len() as u16;
        self.valid.clear();
        self.valid.extend(template.operands.iter().map(|operand| operand.access != Access::Write));
        self.writer.clear();
        self.writer.extend(0..count);
        self.ranges.clear();
        self.ranges.extend(segment.operands.iter().map(|&view| bytes(program, view)));
        self.by_start.clear();
        self.by_start.extend(0..count);
        self.by_start.sort_unstable_by_key(|&at| self.ranges[usize::from(at)].start);
        self.overlaps.clear();
        for (index, &a) in self.by_start.iter().enumerate() {
            let end = self.ranges[usize::from(a)].end;
            let rest = &self.by_start[index + 1..];
            let reach = |b: &&u16| self.ranges[usize::from(**b)].start < end;
            for &b in rest.iter().take_while(reach) {
                // Equal views are one value under two names.
                if segment.operands[usize::from(a)] != segment.operands[usize::from(b)] {
                    self.overlaps.extend([(a, b), (b, a)]);
                }
            }
        }
        self.overlaps.sort_unstable();
    }

    /// Marks an operand as valid; returns the overlapping operands, which become invalid.
    fn write(&mut self, operand: u16) -> impl Iterator<Item = u16> {
        self.valid[usize::from(operand)] = true;
        let first = self.overlaps.partition_point(|&(a, _)| a < operand);
        let lost = self.overlaps[first..].iter().take_while(move |&&(a, _)| a == operand);
        for &(_, other) in lost.clone() {
            self.valid[usize::from(other)] = false;
            self.writer[usize::from(other)] = operand;
        }
        lost.map(|&(_, other)| other)
    }
}
