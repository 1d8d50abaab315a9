//! Checks that references resolve, views fit their buffers and segments fit their templates.

use super::{Report, SectionKind, ViolationKind, groups};
use crate::collective::{Algorithm, CollectiveKind, Method};
use crate::dtype::DType;
use crate::graph::{BLOCK, OpPass};
use crate::ids::{BufferId, GroupId, OpId, RoleId};
use crate::mesh::{GroupKind, Mesh};
use crate::program::{
    ALIGNMENT, Access, Bucket, Buffer, Call, IterationFilter, MemoryKind, Op, Operand, Program,
    StepPhase, Template, TensorNorms, View,
};

/// Limit on copies of one buffer, above any schedule's need; bounds the other passes' allocations.
const MAX_COPIES: u32 = 1 << 16;

/// Limit on copies of all buffers of a role together.
const MAX_SLOTS: u64 = 1 << 24;

/// Checks the declarations that all roles share; `false` if no lookups are possible.
pub(super) fn check_plan(report: &mut Report<'_>) -> bool {
    let plan = report.plan;
    if let Some(why) = mesh_problem(&plan.mesh) {
        report.plan(ViolationKind::Mesh { why });
        return false;
    }
    let expected = u64::from(plan.mesh.pp) + u64::from(plan.mesh.servers);
    let found = plan.programs.len() as u64;
    if found != expected {
        report.plan(ViolationKind::Programs { expected, found });
        return false;
    }
    let before = report.violations.len();
    for group in &plan.groups {
        if let GroupKind::Served(server) = *group {
            let (index, count) = (u64::from(server), u64::from(plan.mesh.servers));
            if index >= count {
                report.plan(ViolationKind::Dangling { what: "server", index, count });
            }
        }
    }
    for template in &plan.templates {
        check_template(report, template);
    }
    report.violations.len() == before
}

fn mesh_problem(mesh: &Mesh) -> Option<&'static str> {
    let Mesh { pp, dp, cp, tp, ep, etp, servers, order: _ } = *mesh;
    if [pp, dp, cp, tp, ep, etp].contains(&0) {
        return Some("has an axis of size 0");
    }
    let product = |sizes: &[u32]| sizes.iter().try_fold(1u32, |all, &size| all.checked_mul(size));
    let ranks = product(&[pp, dp, cp, tp]).and_then(|size| size.checked_add(servers));
    let (Some(_), Some(stage), Some(experts)) =
        (ranks, product(&[dp, cp, tp]), product(&[ep, etp]))
    else {
        return Some("has more than 2^32 ranks");
    };
    (stage % experts != 0).then_some("has expert axes that do not divide dp·cp·tp")
}

fn check_template(report: &mut Report<'_>, template: &Template) {
    let mut problem = |problem: String| {
        let subject = format!("template '{}'", template.name);
        report.plan(ViolationKind::Declaration { subject, problem });
    };
    for (at, operand) in template.operands.iter().enumerate() {
        if elements(operand).is_none() {
            problem(format!("operand {at} has more than 2^64 elements"));
        }
    }
    for op in &template.ops {
        let adds: &[u16] = if op.pass == OpPass::BackwardWeight { &op.params } else { &[] };
        for &at in op.inputs.iter().chain(&op.params).chain(&op.outputs) {
            let count = template.operands.len();
            if usize::from(at) >= count {
                let name = op.kind.name();
                problem(format!("{name} names operand {at}, there are {count}"));
            }
        }
        for &at in op.outputs.iter().chain(adds) {
            let access = template.operands.get(usize::from(at)).map(|operand| operand.access);
            if access == Some(Access::Read) {
                problem(format!("{} writes operand {at}, which is declared read", op.kind.name()));
            }
        }
    }
}

/// Like [`Operand::elements`], without overflow.
fn elements(operand: &Operand) -> Option<u64> {
    operand.dims[0].checked_mul(operand.dims[1])
}

/// Checks one role; `false` if its references are not valid.
pub(super) fn check_role(report: &mut Report<'_>, role: RoleId) -> bool {
    let before = report.violations.len();
    let mut role = Role { program: report.program(role), role, report };
    role.lanes();
    role.buffers();
    if role.report.violations.len() > before {
        return false;
    }
    role.segments();
    role.calls();
    role.buckets();
    role.services();
    for section in SectionKind::ALL {
        role.ops(section);
    }
    let count = role.program.body.nodes.len() as u64;
    for flight in &role.program.in_flight {
        for op in flight.before.iter().chain([&flight.op]) {
            role.in_range("body op", u64::from(op.0), count);
        }
    }
    let count = role.program.buffers.len() as u64;
    let outputs = role.program.outputs;
    for buffer in outputs.loss.into_iter().chain(outputs.norm) {
        role.in_range("buffer", u64::from(buffer.0), count);
    }
    report.violations.len() == before
}

/// Location of a role's violation: a declaration or an op.
#[derive(Clone, Copy)]
enum At<'s> {
    Declaration(&'s str, usize),
    Op(SectionKind, OpId),
}

struct Role<'r, 'a> {
    report: &'r mut Report<'a>,
    role: RoleId,
    program: &'a Program,
}

impl Role<'_, '_> {
    fn problem(&mut self, subject: String, problem: impl Into<String>) {
        let problem = problem.into();
        self.report.role(self.role, ViolationKind::Declaration { subject, problem });
    }

    fn violation(&mut self, at: At<'_>, kind: ViolationKind) {
        match at {
            At::Declaration(..) => self.report.role(self.role, kind),
            At::Op(section, op) => self.report.op(self.role, section, op, kind),
        }
    }

    fn in_range(&mut self, what: &'static str, index: u64, count: u64) -> bool {
        if index >= count {
            self.report.role(self.role, ViolationKind::Dangling { what, index, count });
        }
        index < count
    }

    fn lanes(&mut self) {
        let lanes = &self.program.lanes;
        if lanes.first().is_none_or(|lane| lane != "compute") {
            self.problem("lanes".into(), "the first must be named 'compute'");
        }
        if lanes.len() > 256 {
            self.problem(
                "lanes".into(),
                format!("there are {}, at most 256 can be named", lanes.len()),
            );
        }
        for (at, lane) in lanes.iter().enumerate() {
            if lanes[..at].contains(lane) {
                self.problem("lanes".into(), format!("two are named '{lane}'"));
            }
        }
    }

    fn buffers(&mut self) {
        let mut slots = 0;
        for (at, buffer) in self.program.buffers.iter().enumerate() {
            if let Some(problem) = buffer_problem(buffer) {
                self.problem(format!("buffer {at} ('{}')", buffer.name), problem);
            }
            slots += u64::from(buffer.copies);
        }
        if slots > MAX_SLOTS {
            self.problem("buffers".into(), format!("{slots} copies are more than {MAX_SLOTS}"));
        }
        let count = self.program.buffers.len() as u64;
        for frame in &self.program.frames {
            for &buffer in frame {
                self.in_range("buffer", u64::from(buffer.0), count);
            }
        }
    }

    /// Checks that a view refers to memory in the arena.
    fn view(&mut self, at: At<'_>, view: View) -> bool {
        self.view_outside(at, view, &[])
    }

    /// Checks that a view refers to memory in the arena, or outside it to one of `reached`.
    fn view_outside(&mut self, at: At<'_>, view: View, reached: &[MemoryKind]) -> bool {
        let inside = self.view_anywhere(at, view);
        let Some(buffer) = self.program.buffers.get(view.buffer.index()) else { return inside };
        let problem = match buffer.kind {
            kind if reached.contains(&kind) => return inside,
            MemoryKind::Offloaded => "rests in the store, which ops only stash to and restore from",
            MemoryKind::Shared => "is shared by all ranks, which only restore from there and step",
            MemoryKind::Parameters
            | MemoryKind::Gradients
            | MemoryKind::Optimizer
            | MemoryKind::Activations
            | MemoryKind::Communication => return inside,
        };
        let subject = format!("'{}'", buffer.name);
        self.violation(at, ViolationKind::Declaration { subject, problem: problem.into() });
        inside
    }

    /// Checks that a view fits its buffer, in or outside the arena.
    fn view_anywhere(&mut self, at: At<'_>, view: View) -> bool {
        let View { buffer: BufferId(index), offset, len } = view;
        let Some(buffer) = self.program.buffers.get(index as usize) else {
            let count = self.program.buffers.len() as u64;
            let index = u64::from(index);
            self.violation(at, ViolationKind::Dangling { what: "buffer", index, count });
            return false;
        };
        let inside = offset.checked_add(len).is_some_and(|end| end <= buffer.elements);
        if !inside {
            let subject = match at {
                At::Declaration(what, number) => format!("{what} {number}"),
                At::Op(..) => "view".into(),
            };
            let (elements, buffer) = (buffer.elements, buffer.name.clone());
            self.violation(
                at,
                ViolationKind::ViewOutside { subject, buffer, offset, len, elements },
            );
        }
        inside
    }

    fn segments(&mut self) {
        let templates = &self.report.plan.templates;
        let layers = self.report.plan.layers.len() as u64;
        for (at, segment) in self.program.segments.iter().enumerate() {
            let number = at as u32;
            if let Some(layer) = segment.layer {
                self.in_range("layer", u64::from(layer.0), layers);
            }
            let index = u64::from(segment.template);
            if !self.in_range("template", index, templates.len() as u64) {
                continue;
            }
            let template = &templates[segment.template as usize];
            let (expected, found) = (template.operands.len(), segment.operands.len());
            if expected != found {
                let kind = ViolationKind::OperandCount {
                    segment: number,
                    template: template.name.clone(),
                    expected: expected as u64,
                    found: found as u64,
                };
                self.report.role(self.role, kind);
                continue;
            }
            for (position, (operand, &view)) in
                template.operands.iter().zip(&segment.operands).enumerate()
            {
                if self.view(At::Declaration("segment", at), view) {
                    self.operand(number, template, position, operand, view);
                }
            }
        }
    }

    fn operand(
        &mut self,
        segment: u32,
        template: &Template,
        position: usize,
        operand: &Operand,
        view: View,
    ) {
        let dtype = self.program.buffer(view.buffer).dtype;
        let (operand_position, name) = (position as u64, &template.name);
        if elements(operand) != Some(view.len) {
            let kind = ViolationKind::OperandElements {
                segment,
                template: name.clone(),
                operand: operand_position,
                expected: elements(operand).unwrap_or(u64::MAX),
                found: view.len,
            };
            self.report.role(self.role, kind);
        }
        if operand.dtype != dtype {
            let kind = ViolationKind::OperandType {
                segment,
                template: name.clone(),
                operand: operand_position,
                expected: operand.dtype,
                found: dtype,
            };
            self.report.role(self.role, kind);
        }
    }

    fn calls(&mut self) {
        for (at, call) in self.program.calls.iter().enumerate() {
            let views = self.view(At::Declaration("call", at), call.input)
                & self.view(At::Declaration("call", at), call.output);
            if let (Some(group), true) = (self.group(call.group), views)
                && let Some(problem) = self.call_problem(call, group)
            {
                self.problem(format!("call {at} ('{}')", call.name), problem);
            }
        }
    }

    fn group(&mut self, group: GroupId) -> Option<GroupKind> {
        let groups = &self.report.plan.groups;
        self.in_range("group", u64::from(group.0), groups.len() as u64)
            .then(|| groups[group.index()])
    }

    fn call_problem(&self, call: &Call, group: GroupKind) -> Option<String> {
        let plan = self.report.plan;
        if groups::roles(&plan.mesh, group, self.role).is_empty() {
            return Some("this rank is not a member of its group".into());
        }
        let size = match group {
            GroupKind::Served(_) => u64::from(plan.mesh.size()) + 1,
            other => u64::from(plan.mesh.group_size(other)),
        };
        if call.method == Method::Steps(Algorithm::Auto) {
            return Some("its method is not decided".into());
        }
        if call.kind.has_root() && u64::from(call.root) >= size {
            return Some(format!("its root is {}, the group has {size} ranks", call.root));
        }
        let (input, output) = (call.input.len, call.output.len);
        let in_place = call.input == call.output;
        let (fits, rule) = match call.kind {
            CollectiveKind::AllGather | CollectiveKind::Gather => {
                (in_place || input.checked_mul(size) == Some(output), "output is input × ranks")
            }
            CollectiveKind::ReduceScatter | CollectiveKind::Scatter => {
                (in_place || output.checked_mul(size) == Some(input), "input is output × ranks")
            }
            CollectiveKind::AllReduce
            | CollectiveKind::Broadcast
            | CollectiveKind::Reduce
            | CollectiveKind::AllToAll
            | CollectiveKind::SendRecv
            | CollectiveKind::Barrier => (input == output, "input and output are equally long"),
        };
        (!fits)
            .then(|| format!("{input} elements in and {output} out among {size} ranks, but {rule}"))
    }

    fn buckets(&mut self) {
        for (at, bucket) in self.program.buckets.iter().enumerate() {
            for view in [bucket.params].into_iter().chain(bucket.moments.iter().copied()) {
                self.view_outside(At::Declaration("bucket", at), view, &[MemoryKind::Shared]);
            }
            for view in [bucket.grads].into_iter().chain(bucket.master) {
                self.view(At::Declaration("bucket", at), view);
            }
            self.sharing(at, bucket);
            for &view in &bucket.offloaded {
                self.view_anywhere(At::Declaration("bucket", at), view);
            }
            let worked = bucket.master.iter().chain(&bucket.moments).map(|view| view.len);
            if !bucket.offloaded.is_empty()
                && worked.ne(bucket.offloaded.iter().map(|view| view.len))
            {
                let problem = "its offloaded views differ in length from the state they hold";
                self.problem(format!("bucket {at} ('{}')", bucket.name), problem);
            }
            if let Some(group) = bucket.shard {
                self.group(group);
            }
            self.tensor_norms(at, bucket);
            for entry in &bucket.entries {
                let len = entry.local[0].checked_mul(entry.local[1]);
                let end = len.and_then(|len| len.checked_add(entry.offset));
                if end.is_none_or(|end| end > bucket.elements) {
                    let problem = format!("entry '{}' reaches beyond its end", entry.name);
                    self.problem(format!("bucket {at} ('{}')", bucket.name), problem);
                }
            }
        }
    }

    /// Checks weights that all ranks share: they must be f32 without master weights, share their
    /// moments too, and have the same addresses on all ranks.
    fn sharing(&mut self, at: usize, bucket: &Bucket) {
        let buffer = |view: &View| self.program.buffers.get(view.buffer.index());
        let shared = |view: &View| buffer(view).is_some_and(|b| b.kind == MemoryKind::Shared);
        let weights = shared(&bucket.params);
        let single = buffer(&bucket.params).is_some_and(|b| b.dtype == DType::F32);
        let problem = if bucket.moments.iter().any(|moment| shared(moment) != weights) {
            "all ranks share its weights or its moments, and not both"
        } else if weights && !(single && bucket.master.is_none()) {
            "its weights are shared, and not in f32"
        } else if weights && self.report.plan.programs.len() > 1 {
            "its weights are shared, and ranks have different programs"
        } else {
            return;
        };
        self.problem(format!("bucket {at} ('{}')", bucket.name), problem);
    }

    /// Checks that an optimizer that needs tensor norms has them, with one element per block and
    /// per tensor.
    fn tensor_norms(&mut self, at: usize, bucket: &Bucket) {
        let plan = self.report.plan;
        let optimizer = plan.strategy.optimizer;
        let subject = || format!("bucket {at} ('{}')", bucket.name);
        let Some(TensorNorms { weights, directions, tensors }) = bucket.tensor_norms else {
            if bucket.updated && optimizer.needs_tensor_norms() {
                let problem = format!("{optimizer} needs tensor norms, and it has none");
                self.problem(subject(), problem);
            }
            return;
        };
        for view in [weights, directions, tensors] {
            self.view(At::Declaration("bucket", at), view);
        }
        let blocks = bucket.elements / BLOCK;
        let expected = [blocks, blocks, 2 * u64::from(plan.norm_entries)];
        let lengths = [weights, directions, tensors].map(|view| view.len);
        if lengths != expected {
            let problem = format!("its tensor norms have {lengths:?} elements, not {expected:?}");
            self.problem(subject(), problem);
        }
        for entry in bucket.entries.iter().filter(|e| e.norm_entry >= plan.norm_entries) {
            let problem = format!("entry '{}' has no place among the model's tensors", entry.name);
            self.problem(subject(), problem);
        }
    }

    fn services(&mut self) {
        for (at, service) in self.program.services.iter().enumerate() {
            self.group(service.group);
            self.view(At::Declaration("service", at), service.receives);
            self.view(At::Declaration("service", at), service.sends);
        }
    }

    fn ops(&mut self, section: SectionKind) {
        let program = self.program;
        let nodes = section.of(program);
        for (index, node) in nodes.nodes.iter().enumerate() {
            let op = OpId(index as u32);
            let at = At::Op(section, op);
            if node.lane.index() >= program.lanes.len() {
                self.dangling(at, "lane", node.lane.0.into(), program.lanes.len());
            }
            for &after in nodes.after(op) {
                if after >= op {
                    self.violation(at, ViolationKind::AfterLater { after });
                }
            }
            if matches!(node.op, Op::Compute { .. }) && node.lane.0 != 0 {
                let lane = program.lanes.get(node.lane.index()).cloned().unwrap_or_default();
                self.violation(at, ViolationKind::ComputeLane { lane });
            }
            if section != SectionKind::Body && node.filter != IterationFilter::All {
                let subject = format!("op {op} of the {}", section.name());
                let problem = "only ops of the body take turns".into();
                self.violation(at, ViolationKind::Declaration { subject, problem });
            }
            self.op(at, &node.op);
        }
    }

    fn op(&mut self, at: At<'_>, op: &Op) {
        let program = self.program;
        match *op {
            Op::Load { into, .. } => self.dangling(at, "buffer", into.0, program.buffers.len()),
            Op::Compute { segment, .. } => {
                self.dangling(at, "segment", segment.0, program.segments.len());
            }
            Op::Send { view, .. } | Op::Recv { view, .. } => {
                self.view(at, view);
            }
            Op::Collective { call, .. } => self.dangling(at, "call", call.0, program.calls.len()),
            Op::Accumulate { from, into, .. } => {
                for view in [from, into] {
                    if self.view(at, view) {
                        self.one_copy(at, view);
                    }
                }
                self.same_shape(at, from, into);
            }
            Op::Step { bucket, phase } => {
                self.dangling(at, "bucket", bucket, program.buckets.len());
                if let Some(bucket) = program.buckets.get(bucket as usize) {
                    self.one_copy(at, bucket.params);
                    self.one_copy(at, bucket.grads);
                    let exchanges_momentum =
                        matches!(phase, StepPhase::LocalMomentum | StepPhase::ApplyMomentum);
                    if exchanges_momentum && bucket.moments.len() != 2 {
                        let subject = format!("{} of bucket '{}'", phase.word(), bucket.name);
                        let problem = "the bucket declares no two moments".into();
                        self.violation(at, ViolationKind::Declaration { subject, problem });
                    }
                    if phase == StepPhase::TensorNorms && bucket.tensor_norms.is_none() {
                        let subject = format!("tensor norms of bucket '{}'", bucket.name);
                        let problem = "the bucket declares no place for squares".into();
                        self.violation(at, ViolationKind::Declaration { subject, problem });
                    }
                }
            }
            Op::Stash { from, into, .. } => {
                self.view(at, from);
                self.view_outside(at, into, &[MemoryKind::Offloaded]);
                self.same_shape(at, from, into);
            }
            Op::Restore { from, into, .. } => {
                self.view_outside(at, from, &[MemoryKind::Offloaded, MemoryKind::Shared]);
                self.view(at, into);
                self.same_shape(at, from, into);
            }
            Op::Free { frame, .. } => self.dangling(at, "frame", frame, program.frames.len()),
            Op::Serve { service } => self.dangling(at, "service", service, program.services.len()),
        }
    }

    fn dangling(&mut self, at: At<'_>, what: &'static str, index: u32, count: usize) {
        let (index, count) = (u64::from(index), count as u64);
        if index >= count {
            self.violation(at, ViolationKind::Dangling { what, index, count });
        }
    }

    fn one_copy(&mut self, at: At<'_>, view: View) {
        if let Some(Buffer { name, copies: copies @ 2.., .. }) =
            self.program.buffers.get(view.buffer.index())
        {
            self.violation(at, ViolationKind::AnyCopy { buffer: name.clone(), copies: *copies });
        }
    }

    fn same_shape(&mut self, at: At<'_>, from: View, into: View) {
        if from.len != into.len {
            let subject = "operands".into();
            let problem = format!("{} elements do not fit into {}", from.len, into.len);
            self.violation(at, ViolationKind::Declaration { subject, problem });
        }
    }
}

fn buffer_problem(buffer: &Buffer) -> Option<&'static str> {
    let Buffer { elements, copies, dtype, offset, .. } = buffer;
    if *copies == 0 || *copies > MAX_COPIES {
        return Some("must have between 1 and 65536 copies");
    }
    if !offset.0.is_multiple_of(ALIGNMENT) {
        return Some("starts at no multiple of 64 bytes");
    }
    let stride =
        elements.checked_mul(dtype.size()).and_then(|b| b.checked_next_multiple_of(ALIGNMENT));
    let extent = stride.and_then(|stride| stride.checked_mul(u64::from(*copies)));
    let end = extent.and_then(|extent| extent.checked_add(offset.0));
    end.is_none().then_some("ends beyond 2^64 bytes")
}
