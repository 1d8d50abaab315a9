//! An op in a few words, for messages.

use crate::ids::BufferId;
use crate::program::{LoadKind, Op, Peer, Plan, Program};
use std::fmt;

/// What an op does, in the words of error messages: `compute F.block.0 mb 2`.
///
/// Names that lead nowhere are shown as numbers, so that a broken plan can be talked about.
pub fn describe(plan: &Plan, program: &Program, op: &Op) -> String {
    let buffer = |id: BufferId| match program.buffers.get(id.index()) {
        Some(buffer) => format!("'{}'", buffer.name),
        None => format!("buffer {id}"),
    };
    match *op {
        Op::Load { what: LoadKind::Tokens, microbatch, .. } => {
            format!("load tokens mb {microbatch}")
        }
        Op::Load { what: LoadKind::Features, microbatch, .. } => {
            format!("load features of microbatch {microbatch}")
        }
        Op::Load { what: LoadKind::Targets, microbatch, .. } => {
            format!("load targets mb {microbatch}")
        }
        Op::Load { what: LoadKind::Further(places), microbatch, .. } => {
            format!("load tokens {places} further on mb {microbatch}")
        }
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
