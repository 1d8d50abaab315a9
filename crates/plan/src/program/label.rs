//! Names of ops: in traces, in tables of times and in messages. No other place names an op.

use super::{ComputePass, LoadKind, Op, Peer, Plan, Program, Template};
use crate::graph::OpKind;
use crate::ids::BufferId;
use crate::mesh::{Axis, GroupKind, Mesh};
use crate::trace::SpanKind;
use std::borrow::Cow;
use std::fmt;

/// Kind of an op's span in a trace; `None` for ops that take no time in either engine.
pub fn span_kind(plan: &Plan, program: &Program, op: &Op) -> Option<SpanKind> {
    Some(match *op {
        Op::Load { .. } => SpanKind::Load,
        Op::Compute { segment, .. } => {
            plan.templates[program.segment(segment).template as usize].pass.into()
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
        Op::Serve { .. } => SpanKind::Serve,
        Op::Free { .. } => return None,
    })
}

/// Name of an op's span in a trace: that of its template or call, or the action and its object.
pub fn span_name<'p>(plan: &'p Plan, program: &'p Program, op: &Op) -> Cow<'p, str> {
    let of = |verb: &str, buffer: BufferId| -> Cow<'p, str> {
        format!("{verb} {}", program.buffer(buffer).name).into()
    };
    match *op {
        Op::Load { what, .. } => load(what).into(),
        Op::Compute { segment, .. } => {
            plan.templates[program.segment(segment).template as usize].name.as_str().into()
        }
        Op::Send { view, .. } => of("send", view.buffer),
        Op::Recv { view, .. } => of("recv", view.buffer),
        Op::Collective { call, .. } => program.call(call).name.as_str().into(),
        Op::Accumulate { into, .. } => of("accumulate", into.buffer),
        Op::Step { bucket, phase } => {
            format!("{} {}", phase.word(), program.buckets[bucket as usize].name).into()
        }
        // Offloaded state is named by its buffer in the arena, a weight version by its stash.
        Op::Stash { from, .. } if program.offloaded(op).is_some() => of("stash", from.buffer),
        Op::Stash { into, .. } => of("stash", into.buffer),
        Op::Restore { into, .. } => of("restore", into.buffer),
        Op::Serve { service } => format!("serve {service}").into(),
        Op::Free { .. } => "free".into(),
    }
}

fn load(what: LoadKind) -> &'static str {
    match what {
        LoadKind::Tokens => "load tokens",
        LoadKind::Features => "load features",
        LoadKind::Targets => "load targets",
        LoadKind::Lookahead(_) => "load lookahead tokens",
    }
}

/// Key by which a table of times sums ops.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Label {
    /// A compute op.
    Compute(&'static str),
    /// A transfer to or from the offload store.
    Store(&'static str),
    /// A collective and its group.
    Collective(&'static str, GroupKind),
    /// A message and its axis; `None` if a server is at one end.
    Message(&'static str, Option<Axis>),
}

impl Label {
    /// Label of an op; `None` for ops that take no time by definition.
    pub fn of(plan: &Plan, program: &Program, op: &Op) -> Option<Self> {
        Some(match *op {
            Op::Load { .. } | Op::Free { .. } => return None,
            Op::Compute { segment, .. } => {
                let template = &plan.templates[program.segment(segment).template as usize];
                Self::Compute(match template.pass {
                    ComputePass::Forward => "forward",
                    ComputePass::Backward => "backward",
                    ComputePass::BackwardInput => "backward input",
                    ComputePass::BackwardWeight => "backward weight",
                    ComputePass::Recompute => "recompute",
                    ComputePass::Update if compresses(template) => "compression",
                    ComputePass::Update => "gradient norm",
                })
            }
            Op::Send { to, .. } => Self::Message("send", axis(to)),
            Op::Recv { from, .. } => Self::Message("recv", axis(from)),
            Op::Collective { call, .. } => {
                let call = program.call(call);
                Self::Collective(call.kind.name(), plan.group(call.group))
            }
            Op::Accumulate { .. } => Self::Compute("accumulate"),
            Op::Step { .. } => Self::Compute("optimizer step"),
            Op::Stash { .. } if program.offloaded(op).is_some() => Self::Store("offload out"),
            Op::Restore { .. } if program.offloaded(op).is_some() => Self::Store("offload in"),
            Op::Stash { .. } | Op::Restore { .. } => Self::Compute("weight versions"),
            Op::Serve { .. } => Self::Message("serve", None),
        })
    }

    /// Returns a common label for both sides of a message.
    pub fn of_both_sides(self) -> Self {
        match self {
            Self::Message("send" | "recv", axis) => Self::Message("send/recv", axis),
            Self::Message(_, _) | Self::Compute(_) | Self::Store(_) | Self::Collective(_, _) => {
                self
            }
        }
    }

    /// The label as shown to people.
    pub fn words(self, mesh: &Mesh) -> String {
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

/// Returns true if a template is part of a compressed reduction.
fn compresses(template: &Template) -> bool {
    template.ops.iter().any(|op| matches!(op.kind, OpKind::Compress(_)))
}

/// Axis along which a message travels; `None` to or from a server.
fn axis(peer: Peer) -> Option<Axis> {
    match peer {
        Peer::Stage(_) => Some(Axis::Pp),
        Peer::Next(axis) | Peer::Previous(axis) => Some(axis),
        Peer::Server(_) | Peer::Replica(_) => None,
    }
}

/// Describes an op for error messages: `compute F.block.0 mb 2`.
///
/// Dangling references are shown as numbers, so that broken plans can be described.
pub fn describe(plan: &Plan, program: &Program, op: &Op) -> String {
    let buffer = |id: BufferId| match program.buffers.get(id.index()) {
        Some(buffer) => format!("'{}'", buffer.name),
        None => format!("buffer {id}"),
    };
    match *op {
        Op::Load { what: LoadKind::Lookahead(places), microbatch, .. } => {
            format!("load lookahead tokens {places} mb {microbatch}")
        }
        Op::Load { what, microbatch, .. } => format!("{} mb {microbatch}", load(what)),
        Op::Compute { segment, microbatch, .. } => {
            let template = program.segments.get(segment.index()).map(|s| s.template as usize);
            match template.and_then(|t| plan.templates.get(t)) {
                Some(template) => format!("compute {} mb {microbatch}", template.name),
                None => format!("compute segment {segment} mb {microbatch}"),
            }
        }
        Op::Send { to, channel, view, microbatch } => {
            let what = buffer(view.buffer);
            format!("send {what} to {} ch {channel} mb {microbatch}", PeerName(to))
        }
        Op::Recv { from, channel, view, microbatch } => {
            let what = buffer(view.buffer);
            format!("recv {what} from {} ch {channel} mb {microbatch}", PeerName(from))
        }
        Op::Collective { call, microbatch } => match program.calls.get(call.index()) {
            Some(call) => format!("{} mb {microbatch}", call.name),
            None => format!("call {call} mb {microbatch}"),
        },
        Op::Accumulate { from, into, .. } => {
            format!("accumulate {} into {}", buffer(from.buffer), buffer(into.buffer))
        }
        Op::Step { bucket, phase } => match program.buckets.get(bucket as usize) {
            Some(bucket) => format!("{} {}", phase.word(), bucket.name),
            None => format!("{} bucket {bucket}", phase.word()),
        },
        Op::Stash { from, microbatch, .. } => {
            format!("stash {} mb {microbatch}", buffer(from.buffer))
        }
        Op::Restore { into, microbatch, .. } => {
            format!("restore {} mb {microbatch}", buffer(into.buffer))
        }
        Op::Free { frame, microbatch } => format!("free frame {frame} mb {microbatch}"),
        Op::Serve { service } => format!("serve {service}"),
    }
}

struct PeerName(Peer);

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Peer::Stage(stage) => write!(f, "stage {stage}"),
            Peer::Next(axis) => write!(f, "next {axis}"),
            Peer::Previous(axis) => write!(f, "previous {axis}"),
            Peer::Server(server) => write!(f, "server {server}"),
            Peer::Replica(rank) => write!(f, "rank {rank}"),
        }
    }
}
