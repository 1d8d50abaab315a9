//! Where one role's time goes.

use super::OpStat;
use crate::engine::Timeline;
use paceline_plan::graph::OpKind;
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::mesh::{Axis, GroupKind, Mesh};
use paceline_plan::program::{Op, Peer, Plan, Program, SegmentPass, Template};
use paceline_plan::trace::{Intervals, SpanKind};
use paceline_plan::units::Seconds;
use std::collections::BTreeMap;

/// How one rank spends an iteration: compute + exposed + idle is all of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    pub(super) compute: Seconds,
    pub(super) communication: Seconds,
    pub(super) exposed: Seconds,
    pub(super) idle: Seconds,
    /// When it computes.
    busy: Intervals,
}

impl Account {
    /// Of a rank of a class.
    pub(super) fn new(plan: &Plan, class: u32, timeline: &Timeline, iteration: Seconds) -> Self {
        let program = &plan.programs[timeline.classes().get(class).role.index()];
        let (mut busy, mut moving) = (Vec::new(), Vec::new());
        for (index, node) in program.body.nodes.iter().enumerate() {
            let kind = kind(plan, program, &node.op);
            let span = timeline.span_of(class, OpId::from(index));
            if kind.is_compute() {
                busy.push(span);
            } else if kind.is_communication() {
                moving.push(span);
            }
        }
        let (busy, moving) = (Intervals::new(busy), Intervals::new(moving));
        let (compute, exposed) = (busy.measure(), moving.subtract(&busy).measure());
        // Rounding may leave less than nothing of an iteration that is full.
        let idle = (iteration - compute - exposed).max(Seconds::ZERO);
        Self { compute, communication: moving.measure(), exposed, idle, busy }
    }

    /// The rank's ops by kind, the longest first.
    pub(super) fn ops(&self, plan: &Plan, role: RoleId, timeline: &Timeline) -> Vec<OpStat> {
        let Some(program) = plan.programs.get(role.index()) else { return Vec::new() };
        let mut sums: BTreeMap<Label, (u64, Seconds, Seconds)> = BTreeMap::new();
        for (index, node) in program.body.nodes.iter().enumerate() {
            let Some(label) = label(plan, program, &node.op) else { continue };
            let (start, end) = timeline.span(role, OpId::from(index));
            let time = end - start;
            let exposed = if kind(plan, program, &node.op).is_communication() {
                (time - self.busy.measure_within(start, end)).max(Seconds::ZERO)
            } else {
                Seconds::ZERO
            };
            let sum = sums.entry(label).or_default();
            sum.0 += 1;
            sum.1 += time;
            sum.2 += exposed;
        }
        let mut stats: Vec<OpStat> = sums
            .into_iter()
            .map(|(label, (count, time, exposed))| {
                let name = label.words(&plan.mesh);
                OpStat { name, count, time, exposed }
            })
            .collect();
        stats.sort_by(|a, b| b.time.0.total_cmp(&a.time.0));
        stats
    }
}

/// What ops are summed up by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Label {
    Compute(&'static str),
    Store(&'static str),
    Collective(&'static str, GroupKind),
    /// A message, and whether a server is at one end.
    Message(&'static str, Option<Axis>),
}

impl Label {
    /// The same label for both sides of a message.
    pub(super) fn of_both_sides(self) -> Self {
        match self {
            Self::Message("send" | "recv", axis) => Self::Message("send/recv", axis),
            Self::Message(_, _) | Self::Compute(_) | Self::Store(_) | Self::Collective(_, _) => {
                self
            }
        }
    }

    pub(super) fn words(self, mesh: &Mesh) -> String {
        match self {
            Self::Compute(word) | Self::Store(word) => word.to_owned(),
            Self::Collective(word, GroupKind::Axis(axis)) => format!("{word} {axis}"),
            Self::Collective(word, GroupKind::Replicas) => {
                let cut = if mesh.cp > 1 { "dp·cp" } else { "dp" };
                format!("{word} {cut}")
            }
            Self::Collective(word, GroupKind::Ends) => format!("{word} pp ends"),
            Self::Collective(word, GroupKind::Served(_)) => format!("{word} served"),
            Self::Collective(word, GroupKind::Servers) => format!("{word} servers"),
            Self::Message(word, Some(axis)) => format!("{word} {axis}"),
            Self::Message(word, None) => format!("{word} servers"),
        }
    }
}

/// What an op is summed up under; nothing for what takes no time by definition.
pub(super) fn label(plan: &Plan, program: &Program, op: &Op) -> Option<Label> {
    Some(match *op {
        Op::Load { .. } | Op::Free { .. } => return None,
        Op::Compute { segment, .. } => {
            let template = &plan.templates[program.segment(segment).template as usize];
            Label::Compute(match template.pass {
                SegmentPass::Forward => "forward",
                SegmentPass::Backward => "backward",
                SegmentPass::BackwardInput => "backward input",
                SegmentPass::BackwardWeight => "backward weight",
                SegmentPass::Recompute => "recompute",
                SegmentPass::Update if compresses(template) => "compression",
                SegmentPass::Update => "gradient norm",
            })
        }
        Op::Send { to, .. } => Label::Message("send", axis(to)),
        Op::Recv { from, .. } => Label::Message("recv", axis(from)),
        Op::Collective { call, .. } => {
            let call = program.call(call);
            Label::Collective(call.kind.name(), plan.group(call.group))
        }
        Op::Accumulate { .. } => Label::Compute("accumulate"),
        Op::Step { .. } => Label::Compute("optimizer step"),
        Op::Stash { .. } if program.offloaded(op).is_some() => Label::Store("offload out"),
        Op::Restore { .. } if program.offloaded(op).is_some() => Label::Store("offload in"),
        Op::Stash { .. } | Op::Restore { .. } => Label::Compute("weight versions"),
        Op::Serve { .. } => Label::Message("serve", None),
    })
}

/// Whether a template is a part of a compressed reduction.
fn compresses(template: &Template) -> bool {
    template.ops.iter().any(|op| matches!(op.kind, OpKind::Compress(_)))
}

/// The axis along which a message goes; none to or from a server.
fn axis(peer: Peer) -> Option<Axis> {
    match peer {
        Peer::Stage(_) => Some(Axis::Pp),
        Peer::Next(axis) | Peer::Previous(axis) => Some(axis),
        Peer::Server(_) | Peer::Replica(_) => None,
    }
}

/// What a trace calls an op.
pub(super) fn kind(plan: &Plan, program: &Program, op: &Op) -> SpanKind {
    match *op {
        Op::Load { .. } => SpanKind::Load,
        Op::Compute { segment, .. } => {
            match plan.templates[program.segment(segment).template as usize].pass {
                SegmentPass::Forward => SpanKind::Forward,
                SegmentPass::Backward => SpanKind::Backward,
                SegmentPass::BackwardInput => SpanKind::BackwardInput,
                SegmentPass::BackwardWeight => SpanKind::BackwardWeight,
                SegmentPass::Recompute => SpanKind::Recompute,
                SegmentPass::Update => SpanKind::Optimizer,
            }
        }
        Op::Send { .. } => SpanKind::Send,
        Op::Recv { .. } => SpanKind::Recv,
        Op::Collective { .. } => SpanKind::Collective,
        Op::Accumulate { .. } => SpanKind::Accumulate,
        Op::Step { .. } => SpanKind::Optimizer,
        Op::Stash { .. } | Op::Restore { .. } if program.offloaded(op).is_some() => {
            SpanKind::Offload
        }
        Op::Stash { .. } | Op::Restore { .. } => SpanKind::Weights,
        // It moves nothing and takes no time; it stands on the compute lane.
        Op::Free { .. } => SpanKind::Accumulate,
        Op::Serve { .. } => SpanKind::Serve,
    }
}
