//! Checks that every read finds the right content in any order the lanes may run.
//!
//! Ops are walked in plan order, one of the orders that lanes and edges allow. Each access is
//! checked against the state of its cells. The content must exist, belong to the reader and be
//! ordered before the read. A write must be ordered after every earlier access to the same memory.
//! Two accesses that are ordered in the walk but not by happens-before are a race, so a plan that
//! passes is correct in any order that can occur.
//!
//! Weights and optimizer state exist from the start. Gradients do not: each iteration must
//! initialise them. The body is walked twice if an iteration can see earlier work (a prologue's, or
//! carryover ops), else once, since all iterations are then alike.

use super::cells::{ANY, CellRange, Cells, Fault, Visit};
use super::clocks::{Clocks, Epoch};
use super::effects::{Effects, Operand};
use super::groups::{Roots, roots};
use super::padding::padding;
use super::{Report, SectionKind, Site, ViolationKind};
use crate::collective::CollectiveKind;
use crate::ids::{BufferId, Microbatch, OpId, RoleId, SegmentId};
use crate::program::{
    Access, AccumulateMode, Bucket, Call, ComputePass, MemoryKind, Op, Plan, Program, StepPhase,
    View,
};

/// Checks roles one after the other and reuses its allocations.
#[derive(Default)]
pub(super) struct Checker {
    clocks: Clocks,
    cells: Cells,
}

impl Checker {
    /// Checks one role; its structure must be valid.
    pub(super) fn check(&mut self, report: &mut Report<'_>, role: RoleId) {
        let program = report.program(role);
        self.clocks.reset(program.lanes.len());
        let mut effects = Effects::new(report, role);
        self.cells.reset(program, &mut effects, views(program), &padding(program));
        let calls = program.calls.iter().map(|call| sides(report.plan, role, call)).collect();
        let mut walk =
            Walk { checker: self, report, role, program, calls, effects, faults: Vec::new() };
        // Running microbatch numbers continue from body to body and into the epilogue.
        let microbatches = u64::from(walk.report.plan.strategy.microbatches());
        walk.section(SectionKind::Prologue, 0);
        walk.section(SectionKind::Body, 0);
        let mut bodies = 1;
        if !program.prologue.nodes.is_empty() || !program.in_flight.is_empty() {
            walk.section(SectionKind::Body, microbatches);
            bodies = 2;
        }
        walk.section(SectionKind::Epilogue, bodies * microbatches);
    }
}

/// All views that a program's ops can touch.
fn views(program: &Program) -> impl Iterator<Item = View> {
    let segments = program.segments.iter().flat_map(|segment| segment.operands.iter().copied());
    let calls = program.calls.iter().flat_map(|call| [call.input, call.output]);
    let buckets = program.buckets.iter().flat_map(|bucket| {
        let state = bucket.master.into_iter().chain(bucket.moments.iter().copied());
        let norms =
            bucket.tensor_norms.into_iter().flat_map(|g| [g.weights, g.directions, g.tensors]);
        [bucket.params, bucket.grads].into_iter().chain(state).chain(norms)
    });
    let services = program.services.iter().flat_map(|service| [service.receives, service.sends]);
    let ops = SectionKind::ALL.into_iter().flat_map(|section| &section.of(program).nodes);
    let own = ops.flat_map(|node| match node.op {
        Op::Send { view, .. } | Op::Recv { view, .. } => [Some(view), None],
        Op::Accumulate { from, into, .. }
        | Op::Stash { from, into, .. }
        | Op::Restore { from, into, .. } => [Some(from), Some(into)],
        Op::Load { .. }
        | Op::Compute { .. }
        | Op::Collective { .. }
        | Op::Step { .. }
        | Op::Free { .. }
        | Op::Serve { .. } => [None, None],
    });
    segments.chain(calls).chain(buckets).chain(services).chain(own.flatten())
}

/// Views that a call accesses on the ranks of this role: input, output or both.
#[derive(Clone, Copy)]
struct Sides {
    reads: bool,
    writes: bool,
}

fn sides(plan: &Plan, role: RoleId, call: &Call) -> Sides {
    let roots = || -> Roots { roots(plan, plan.group(call.group), role, call.root) };
    match call.kind {
        CollectiveKind::AllReduce
        | CollectiveKind::ReduceScatter
        | CollectiveKind::AllGather
        | CollectiveKind::AllToAll
        | CollectiveKind::SendRecv => Sides { reads: true, writes: true },
        CollectiveKind::Barrier => Sides { reads: false, writes: false },
        CollectiveKind::Broadcast | CollectiveKind::Scatter => {
            Sides { reads: roots().some, writes: true }
        }
        CollectiveKind::Reduce | CollectiveKind::Gather => {
            Sides { reads: true, writes: roots().some }
        }
    }
}

struct Walk<'w, 'r, 'a> {
    checker: &'w mut Checker,
    report: &'r mut Report<'a>,
    role: RoleId,
    program: &'a Program,
    calls: Vec<Sides>,
    effects: Effects,
    faults: Vec<(BufferId, Verb, Fault)>,
}

/// Access of an op to a view.
#[derive(Clone, Copy)]
enum Verb {
    Read,
    Write,
    Free,
}

/// Context for applying one op to the memory it touches.
struct Touch<'t> {
    cells: &'t mut Cells,
    program: &'t Program,
    faults: &'t mut Vec<(BufferId, Verb, Fault)>,
    visit: Visit<'t>,
    running: u64,
}

impl Walk<'_, '_, '_> {
    fn section(&mut self, kind: SectionKind, first_microbatch: u64) {
        let (program, plan) = (self.program, self.report.plan);
        let section = kind.of(program);
        if kind == SectionKind::Body {
            self.checker.cells.forget(program, MemoryKind::Gradients);
        }
        for (index, node) in section.nodes.iter().enumerate() {
            let op = OpId(index as u32);
            let Checker { clocks, cells } = &mut *self.checker;
            let epoch = clocks.advance(kind, section, op, node.lane);
            let running = node.op.microbatch().map(|Microbatch(k)| first_microbatch + u64::from(k));
            let microbatch = running.map_or(ANY, |running| running as u32);
            let visit = Visit { epoch, clock: clocks.of(op), microbatch };
            let running = running.unwrap_or(0);
            let mut touch = Touch { cells, program, faults: &mut self.faults, visit, running };
            touch.op(plan, &node.op, &self.effects, &self.calls);
            if !self.faults.is_empty() {
                self.report_faults(kind, op, microbatch);
            }
        }
        // All ops complete before the epilogue, so the last body has no carryover ops.
        let flying = kind == SectionKind::Body && first_microbatch == 0;
        let in_flight = if flying { &program.in_flight[..] } else { &[] };
        self.checker.clocks.finish_section(in_flight);
    }

    /// Reports the faults of one op.
    fn report_faults(&mut self, section: SectionKind, op: OpId, microbatch: u32) {
        for (buffer, verb, fault) in std::mem::take(&mut self.faults) {
            if let Some(kind) = self.violation(buffer, verb, fault, microbatch) {
                self.report.op(self.role, section, op, kind);
            }
        }
    }

    fn violation(
        &self,
        buffer: BufferId,
        verb: Verb,
        fault: Fault,
        expected: u32,
    ) -> Option<ViolationKind> {
        let name = |id: BufferId| self.program.buffer(id).name.clone();
        let site = |epoch: Epoch| -> Option<Site> {
            let (section, op) = self.checker.clocks.op(epoch)?;
            Some(self.report.site(self.role, section, op))
        };
        let other_name = name;
        let buffer = name(buffer);
        let race = |buffer, by, other_verb| {
            let verb = match verb {
                Verb::Read => "reads",
                Verb::Write => "writes",
                Verb::Free => "frees",
            };
            Some(ViolationKind::Race { verb, buffer, other: site(by)?, other_verb })
        };
        Some(match fault {
            Fault::FreedTwice => ViolationKind::DoubleFree { buffer },
            Fault::Undefined => ViolationKind::Undefined { buffer },
            Fault::Overwritten { other, by } => match site(by) {
                Some(by) => ViolationKind::Overwritten { buffer, other: other_name(other), by },
                None => ViolationKind::Undefined { buffer },
            },
            Fault::WrongMicrobatch { found, by } => {
                ViolationKind::WrongMicrobatch { buffer, expected, found, by: site(by)? }
            }
            Fault::Freed { by } => ViolationKind::UseAfterFree { buffer, by: site(by)? },
            Fault::RacesWrite { by } => return race(buffer, by, "writes"),
            Fault::RacesRead { by } => return race(buffer, by, "reads"),
        })
    }
}

impl Touch<'_> {
    fn locate(&self, view: View) -> CellRange {
        self.cells.locate(self.program.buffer(view.buffer), view, self.running)
    }

    fn read(&mut self, view: View) {
        self.read_at(view, self.locate(view));
    }

    fn read_at(&mut self, view: View, place: CellRange) {
        let buffer = self.program.buffer(view.buffer);
        if let Some(fault) = self.cells.read(buffer, view, place, self.visit) {
            self.faults.push((view.buffer, Verb::Read, fault));
        }
    }

    fn write(&mut self, view: View) {
        self.write_at(view.buffer, self.locate(view));
    }

    fn write_at(&mut self, buffer: BufferId, place: CellRange) {
        if let Some(fault) = self.cells.write(buffer, place, self.visit) {
            self.faults.push((buffer, Verb::Write, fault));
        }
    }

    /// Writes content that belongs to no particular microbatch.
    fn write_shared(&mut self, buffer: BufferId, place: CellRange) {
        let microbatch = std::mem::replace(&mut self.visit.microbatch, ANY);
        self.write_at(buffer, place);
        self.visit.microbatch = microbatch;
    }

    fn op(&mut self, plan: &Plan, op: &Op, effects: &Effects, calls: &[Sides]) {
        let program = self.program;
        match *op {
            Op::Load { into, .. } => self.write(whole(program, into)),
            Op::Compute { segment, fresh, .. } => {
                let template = program.segment(segment).template as usize;
                if plan.templates[template].pass == ComputePass::Update {
                    self.visit.microbatch = ANY;
                }
                self.compute(effects, segment, fresh);
            }
            Op::Send { view, .. } => self.read(view),
            Op::Recv { view, .. } => self.write(view),
            Op::Collective { call, .. } => {
                let sides = calls[call.index()];
                let call = program.call(call);
                if sides.reads {
                    self.read(call.input);
                }
                if sides.writes {
                    self.write(call.output);
                }
            }
            Op::Accumulate { from, into, mode } => {
                self.read(from);
                if mode == AccumulateMode::Add {
                    self.read(into);
                }
                self.write(into);
            }
            Op::Step { bucket, phase } => self.step(&program.buckets[bucket as usize], phase),
            Op::Stash { from, into, .. } | Op::Restore { from, into, .. } => {
                self.read(from);
                self.write(into);
            }
            Op::Free { frame, .. } => {
                for &buffer in &program.frames[frame as usize] {
                    self.free(buffer);
                }
            }
            Op::Serve { service } => {
                let service = &program.services[service as usize];
                self.read(service.sends);
                self.write(service.receives);
            }
        }
    }

    fn compute(&mut self, effects: &Effects, segment: SegmentId, fresh: bool) {
        let (operands, clobbers) = effects.of(segment.index());
        for &Operand { view, access, place } in operands {
            let reads = match access {
                Access::Read | Access::Add => true,
                Access::Accumulate => !fresh,
                Access::Write => false,
            };
            if reads {
                self.read_at(view, place.unwrap_or_else(|| self.locate(view)));
            }
        }
        for clobber in clobbers {
            if let Some(fault) = self.cells.clobber(clobber, self.visit) {
                self.faults.push((clobber.buffer, Verb::Write, fault));
            }
        }
        for &Operand { view, access, place } in operands {
            let place = || place.unwrap_or_else(|| self.locate(view));
            match access {
                Access::Read => {}
                Access::Write => self.write_at(view.buffer, place()),
                Access::Accumulate | Access::Add => self.write_shared(view.buffer, place()),
            }
        }
    }

    fn step(&mut self, bucket: &Bucket, phase: StepPhase) {
        let weights = [bucket.params].into_iter().chain(bucket.master);
        let moments = bucket.moments.iter().copied();
        match (phase, bucket.tensor_norms) {
            (StepPhase::Apply | StepPhase::ApplyMomentum, None) => {
                self.read(bucket.grads);
                weights.chain(moments).for_each(|view| self.change(view));
            }
            (StepPhase::TensorNorms, norms) => {
                self.read(bucket.grads);
                weights.for_each(|view| self.read(view));
                moments.for_each(|view| self.change(view));
                let squares = norms.into_iter().flat_map(|g| [g.weights, g.directions]);
                squares.for_each(|view| self.write(view));
            }
            (StepPhase::LocalMomentum, _) => {
                moments.take(1).for_each(|view| self.read(view));
                self.change(bucket.grads);
            }
            (StepPhase::Apply | StepPhase::ApplyMomentum, Some(norms)) => {
                self.read(norms.tensors);
                self.read(bucket.grads);
                weights.chain(moments).for_each(|view| self.change(view));
            }
        }
    }

    fn change(&mut self, view: View) {
        self.read(view);
        self.write(view);
    }

    fn free(&mut self, buffer: BufferId) {
        if let Some(fault) = self.cells.free(self.program, buffer, self.running, self.visit) {
            self.faults.push((buffer, Verb::Free, fault));
        }
    }
}

fn whole(program: &Program, buffer: BufferId) -> View {
    View { buffer, offset: 0, len: program.buffer(buffer).elements }
}
