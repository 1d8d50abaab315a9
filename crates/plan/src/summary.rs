//! Summary statistics of a plan.

use crate::collective::{Action, Chunking};
use crate::mesh::GroupKind;
use crate::program::{Call, IterationFilter, Memory, Op, Peer, Plan, Program};
use crate::schedule::{self, Slots};
use crate::units::Bytes;
use serde::Serialize;
use std::collections::BTreeMap;

/// Summary statistics of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of distinct programs.
    pub roles: usize,
    /// Number of ops in the body of the longest program.
    pub ops_per_iteration: usize,
    /// Idle fraction of the schedule if stages cost the same, a backward pass costs two forward
    /// passes and communication is free.
    pub bubble_fraction: f64,
    /// Memory of the role with the largest footprint.
    pub peak_bytes: Bytes,
    /// Index of that role.
    pub fullest: usize,
    /// Memory of that role by kind.
    #[serde(skip)]
    pub memory: Memory,
    /// Offload traffic of one rank per iteration, maximum over ranks.
    pub offloaded: Bytes,
    /// Traffic sent by one rank along each axis per iteration, maximum over ranks.
    pub traffic: BTreeMap<&'static str, Traffic>,
}

/// Traffic sent by one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Number of messages.
    pub messages: u64,
    /// Number of bytes.
    pub bytes: Bytes,
}

/// Summarizes a plan.
pub fn summarize(plan: &Plan) -> Summary {
    let fullest = (0..plan.programs.len())
        .max_by_key(|&r| (plan.programs[r].memory.with_shared(), std::cmp::Reverse(r)))
        .unwrap_or(0);
    let memory = plan.programs.get(fullest).map(|p| p.memory).unwrap_or_default();
    let mut traffic: BTreeMap<&'static str, Traffic> = BTreeMap::new();
    for program in &plan.programs {
        for (axis, sent) in program_traffic(plan, program) {
            let most = traffic.entry(axis).or_default();
            if sent.bytes >= most.bytes {
                *most = sent;
            }
        }
    }
    Summary {
        ranks: plan.mesh.world(),
        roles: plan.programs.len(),
        ops_per_iteration: plan.programs.iter().map(|p| p.body.nodes.len()).max().unwrap_or(0),
        bubble_fraction: ideal_bubble(plan),
        peak_bytes: memory.with_shared(),
        fullest,
        memory,
        offloaded: plan.programs.iter().map(offloaded).max().unwrap_or_default(),
        traffic,
    }
}

/// Offload traffic of one rank of a role, in both directions.
fn offloaded(program: &Program) -> Bytes {
    program.body.nodes.iter().filter_map(|node| program.offloaded(&node.op)).sum()
}

/// Idle fraction of the schedule with equal stages.
fn ideal_bubble(plan: &Plan) -> f64 {
    let s = &plan.strategy;
    let Ok(pp) = u16::try_from(s.pp) else { return 0.0 };
    if !s.schedule.flushes() {
        // A pipeline that never drains has no bubble once it is full.
        return 0.0;
    }
    schedule::order(s.schedule, pp, s.microbatches())
        .ok()
        .and_then(|order| schedule::bubble(&order, Slots::new(1, 2)).ok())
        .map_or(0.0, |bubble| bubble.fraction)
}

/// Traffic sent by one rank of a role along each axis, in an iteration after any warm-up.
pub fn program_traffic(plan: &Plan, program: &Program) -> BTreeMap<&'static str, Traffic> {
    let mut cost: Vec<Option<Traffic>> = vec![None; program.calls.len()];
    let mut traffic: BTreeMap<&'static str, Traffic> = BTreeMap::new();
    let mut add = |axis: &'static str, sent: Traffic| {
        let total = traffic.entry(axis).or_default();
        total.messages += sent.messages;
        total.bytes += sent.bytes;
    };
    for node in program.body.nodes.iter().filter(|node| node.filter != IterationFilter::Warmup) {
        match node.op {
            Op::Collective { call, .. } => {
                let decl = program.call(call);
                let group = plan.group(decl.group);
                let sent = *cost[call.index()].get_or_insert_with(|| call_traffic(plan, decl));
                add(group_axis(group), sent);
            }
            Op::Send { to, view, .. } => {
                let axis = match to {
                    Peer::Stage(_) => "pp",
                    Peer::Next(axis) | Peer::Previous(axis) => axis.name(),
                    Peer::Server(_) | Peer::Replica(_) => "ps",
                };
                let size = program.buffer(view.buffer).dtype.size();
                add(axis, Traffic { messages: 1, bytes: Bytes(view.len * size) });
            }
            Op::Serve { service } => {
                let service = &program.services[service as usize];
                let peers = plan.mesh.group_size(plan.group(service.group)).saturating_sub(1);
                let messages = u64::from(peers) * u64::from(service.requests);
                let size = program.buffer(service.sends.buffer).dtype.size();
                add("ps", Traffic { messages, bytes: Bytes(service.sends.len * size * messages) });
            }
            Op::Load { .. }
            | Op::Compute { .. }
            | Op::Recv { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
            | Op::Free { .. } => {}
        }
    }
    traffic
}

/// Traffic sent by the first rank of a group in one call.
fn call_traffic(plan: &Plan, call: &Call) -> Traffic {
    let ranks = plan.mesh.group_size(plan.group(call.group));
    let Ok(pattern) = call.pattern(ranks) else { return Traffic::default() };
    let cut = Chunking { elements: call.elements(), chunks: pattern.chunks(), block: call.block };
    let mut sent = Traffic::default();
    for step in pattern.steps(0) {
        if let Action::Send { chunks, .. } = step.action {
            sent.messages += 1;
            sent.bytes += Bytes(cut.elements_in(chunks) * call.dtype.size());
        }
    }
    sent
}

/// Axis under which a group's traffic is counted.
pub fn group_axis(group: GroupKind) -> &'static str {
    match group {
        GroupKind::Axis(axis) => axis.name(),
        GroupKind::Replicas => "dp",
        GroupKind::Ends => "tied",
        GroupKind::Served(_) | GroupKind::Servers => "ps",
    }
}
