//! A plan in numbers: what a person wants to know before reading it.

use crate::collective::{Action, Cut, Pattern};
use crate::mesh::GroupKind;
use crate::program::{Call, Memory, Op, Peer, Plan, Program, Turn};
use crate::schedule::{self, Slots};
use crate::units::Bytes;
use serde::Serialize;
use std::collections::BTreeMap;

/// A plan in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// All ranks.
    pub ranks: u32,
    /// Distinct programs.
    pub roles: usize,
    /// Ops of the longest program's body.
    pub ops_per_iteration: usize,
    /// Idle share of the schedule when stages cost the same, a backward pass costs two forward passes
    /// and communication is free.
    pub bubble_fraction: f64,
    /// The fullest role's arena.
    pub peak_bytes: Bytes,
    /// Which role that is.
    pub fullest: usize,
    /// What is in it.
    #[serde(skip)]
    pub memory: Memory,
    /// What one rank moves to and from its store in one iteration, for the rank that moves most.
    pub offloaded: Bytes,
    /// What one rank sends along each axis in one iteration, for the rank that sends most.
    pub traffic: BTreeMap<&'static str, Traffic>,
}

/// What one rank sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Messages.
    pub messages: u64,
    /// Bytes.
    pub bytes: Bytes,
}

/// Adds a plan up.
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

/// What one rank of a role moves to and from its store.
fn offloaded(program: &Program) -> Bytes {
    program.body.nodes.iter().filter_map(|node| program.offloaded(&node.op)).sum()
}

/// The idle share of the schedule with equal stages.
fn ideal_bubble(plan: &Plan) -> f64 {
    let s = &plan.strategy;
    let Ok(pp) = u16::try_from(s.pp) else { return 0.0 };
    if !s.schedule.flushes() {
        // Once it is full, a pipeline that never drains has nothing to wait for.
        return 0.0;
    }
    schedule::order(s.schedule, pp, s.microbatches())
        .ok()
        .and_then(|order| schedule::bubble(&order, Slots::new(1, 2)).ok())
        .map_or(0.0, |bubble| bubble.fraction)
}

/// What one rank of a role sends along each axis in an iteration after any warm-up.
pub fn program_traffic(plan: &Plan, program: &Program) -> BTreeMap<&'static str, Traffic> {
    let mut cost: Vec<Option<Traffic>> = vec![None; program.calls.len()];
    let mut traffic: BTreeMap<&'static str, Traffic> = BTreeMap::new();
    let mut add = |axis: &'static str, sent: Traffic| {
        let total = traffic.entry(axis).or_default();
        total.messages += sent.messages;
        total.bytes += sent.bytes;
    };
    for node in program.body.nodes.iter().filter(|node| node.turn != Turn::WarmUp) {
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

/// What the first rank of a group sends in one call.
fn call_traffic(plan: &Plan, call: &Call) -> Traffic {
    let ranks = plan.mesh.group_size(plan.group(call.group));
    let Ok(pattern) = Pattern::new(call.kind, call.algorithm, call.order, ranks, call.root) else {
        return Traffic::default();
    };
    let cut = Cut { elements: call.elements(), chunks: pattern.chunks(), block: call.block };
    let mut sent = Traffic::default();
    for step in pattern.steps(0) {
        if let Action::Send { chunks, .. } = step.action {
            sent.messages += 1;
            sent.bytes += Bytes(cut.elements_in(chunks) * call.dtype.size());
        }
    }
    sent
}

/// The axis that a group's traffic counts to.
pub fn group_axis(group: GroupKind) -> &'static str {
    match group {
        GroupKind::Axis(axis) => axis.name(),
        GroupKind::Replicas => "dp",
        GroupKind::Ends => "tied",
        GroupKind::Served(_) | GroupKind::Servers => "ps",
    }
}
