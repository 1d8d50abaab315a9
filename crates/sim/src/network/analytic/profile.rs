//! Breakdown of one collective's time by phase and by dimension.

use super::{Analytic, all_links, streams};
use crate::cluster::DimensionKind;
use crate::network::{NoPath, Vector};
use paceline_plan::collective::{Action, Algorithm, Pattern, Step};
use paceline_plan::ids::Rank;
use paceline_plan::units::Seconds;
use serde::Serialize;
use std::collections::BTreeMap;

/// Time of a collective and its breakdown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CollectiveProfile {
    /// Time from the arrival of the last member to the end of the last one.
    pub time: Seconds,
    /// Phases in order: one per level or dimension and direction, or a single one.
    pub phases: Vec<PhaseLatency>,
    /// Dimensions of the cluster, innermost first.
    pub dimensions: Vec<DimensionLoad>,
}

/// One phase of a hierarchical collective.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseLatency {
    /// Operation and dimension, for example "reduce_scatter in nvlink".
    pub name: String,
    /// Mean number of messages that a rank sends in the phase.
    pub messages_per_rank: f64,
    /// Mean message time in seconds, from when it could be sent (chunk available and round begun,
    /// ignoring the queue of its dimension) to the end of its round.
    pub message_latency_s: f64,
}

/// Utilisation of a dimension.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DimensionLoad {
    /// Dimension name.
    pub dimension: String,
    /// Mean bytes that a rank sends through it.
    pub bytes_per_rank: f64,
    /// Fraction of the capacity of the ranks' links in this dimension over the collective's time.
    pub utilisation: f64,
}

/// Maximum number of steps examined; in a larger group the first ranks represent all.
const MAX_STEPS: usize = 1 << 20;

impl Analytic<'_> {
    /// Times a collective and breaks the time down.
    pub fn profile(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<CollectiveProfile, NoPath> {
        let timed = if pattern.visits().is_empty() {
            self.by_rounds(pattern, members, vector)?
        } else {
            self.by_visits(pattern, members, vector)?
        };
        let (time, phases) = timed;
        let sent = self.sent(pattern, members, vector);
        let named = self.cluster.dimensions.iter().enumerate();
        let dimensions = named.map(|(index, dimension)| {
            let Sent { bytes, link_bytes } = sent[index];
            let shared = f64::from(dimension.devices_per_link.max(1));
            let links = all_links(dimension, self.cluster, index, members[0]) / shared;
            let share = link_bytes / (links * time.0);
            DimensionLoad {
                dimension: dimension.name.clone(),
                bytes_per_rank: bytes,
                utilisation: if share.is_finite() { share } else { 0.0 },
            }
        });
        Ok(CollectiveProfile { time, phases, dimensions: dimensions.collect() })
    }

    fn by_rounds(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<(Seconds, Vec<PhaseLatency>), NoPath> {
        let rounds = self.rounds(pattern, members, vector)?;
        let mut sums: Vec<Phase> = Vec::new();
        let mut ranks = 0.0;
        self.each_rank(pattern, |me, steps| {
            ranks += 1.0;
            for step in steps {
                let Some(to) = receiver(&step.action, me) else { continue };
                let ends = (members[me as usize], members[to as usize]);
                let Some((dimension, ..)) = self.cluster.crossing(ends.0, ends.1) else { continue };
                let name = self.phase_name(pattern, step.round, dimension);
                let latency = rounds.get(step.round as usize).copied().unwrap_or(0.0);
                add(&mut sums, name, step.round, latency);
            }
        });
        Ok((Seconds(rounds.iter().sum()), averages(sums, ranks)))
    }

    fn by_visits(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<(Seconds, Vec<PhaseLatency>), NoPath> {
        let schedule = streams::run(self, pattern, members, vector)?;
        let mut sums: Vec<Phase> = Vec::new();
        for (index, timed) in schedule.visits.iter().enumerate() {
            let steps = pattern.visit_steps(&timed.visit, 0);
            let queued = timed.end - timed.ready - timed.rounds.iter().sum::<f64>();
            let mut name = None;
            for step in &steps {
                let Some(to) = receiver(&step.action, 0) else { continue };
                let kind = if timed.visit.gathers { "all_gather" } else { "reduce_scatter" };
                let name = name.get_or_insert_with(|| {
                    let crossed = self.cluster.crossing(members[0], members[to as usize]);
                    let dimension = crossed.map_or("", |(d, ..)| &self.cluster.dimensions[d].name);
                    match crossed.and_then(|(d, from, to)| self.axis(d, from, to)) {
                        Some(axis) => format!("{kind} in {dimension}, axis {axis}"),
                        None => format!("{kind} in {dimension}"),
                    }
                });
                let wait = if step.round == 0 { queued } else { 0.0 };
                let round = timed.rounds.get(step.round as usize).copied().unwrap_or(0.0);
                add(&mut sums, name.clone(), index as u32, wait + round);
            }
        }
        Ok((schedule.time, averages(sums, 1.0)))
    }

    /// Axis of a torus along which two neighbouring positions differ.
    fn axis(&self, dimension: usize, from: u32, to: u32) -> Option<usize> {
        let DimensionKind::Torus { shape, .. } = &self.cluster.dimensions[dimension].kind else {
            return None;
        };
        let (mut from, mut to) = (from, to);
        shape.iter().position(|&size| {
            let differ = from % size.max(1) != to % size.max(1);
            (from, to) = (from / size.max(1), to / size.max(1));
            differ
        })
    }

    /// Hierarchies reduce inside, cross, and distribute inside; others are one phase per dimension.
    fn phase_name(&self, pattern: &Pattern, round: u32, dimension: usize) -> String {
        let dimension = &self.cluster.dimensions[dimension].name;
        let halves = matches!(pattern.algorithm(), Algorithm::Hierarchical { .. })
            || matches!(pattern.algorithm(), Algorithm::Torus { .. });
        match halves {
            true if 2 * round < pattern.rounds() => format!("first half in {dimension}"),
            true => format!("second half in {dimension}"),
            false => format!("{} in {dimension}", pattern.kind()),
        }
    }

    /// Mean bytes that a rank sends through each dimension.
    fn sent(&self, pattern: &Pattern, members: &[Rank], vector: &Vector) -> Vec<Sent> {
        let cut = vector.cut(pattern);
        let mut sums = vec![Sent::default(); self.cluster.dimensions.len()];
        let mut ranks = 0.0;
        self.each_rank(pattern, |me, steps| {
            ranks += 1.0;
            let mut peers: BTreeMap<u32, f64> = BTreeMap::new();
            for step in steps {
                let Some(to) = receiver(&step.action, me) else { continue };
                let (Action::Send { chunks, .. }
                | Action::Lend { chunks, .. }
                | Action::Write { chunks, .. }
                | Action::Offer { chunks, .. }) = step.action
                else {
                    continue;
                };
                *peers.entry(to).or_default() += vector.bytes_in(&cut, chunks);
            }
            for (to, bytes) in peers {
                let link = self.cluster.link(members[me as usize], members[to as usize]);
                if let Some(path) = link {
                    let sum = &mut sums[path.dimension];
                    sum.bytes += bytes;
                    sum.link_bytes += bytes * f64::from(path.hops);
                }
            }
        });
        for Sent { bytes, link_bytes } in &mut sums {
            (*bytes, *link_bytes) = (*bytes / ranks, *link_bytes / ranks);
        }
        sums
    }

    fn each_rank(&self, pattern: &Pattern, mut each: impl FnMut(u32, &[Step])) {
        let mut seen = 0;
        for me in 0..pattern.ranks() {
            let steps = pattern.steps(me);
            seen += steps.len();
            each(me, &steps);
            if seen > MAX_STEPS {
                break;
            }
        }
    }
}

/// Receiver of a step's message, if it sends one.
fn receiver(action: &Action, me: u32) -> Option<u32> {
    match *action {
        Action::Send { to, .. } | Action::Lend { to, .. } | Action::Write { to, .. } => Some(to),
        Action::Offer { to, .. } => Some(super::across(to, me)),
        Action::Recv { .. }
        | Action::Read { .. }
        | Action::Take { .. }
        | Action::Fold { .. }
        | Action::Emit { .. } => None,
    }
}

/// Bytes that a rank sends through a dimension.
#[derive(Clone, Copy, Default)]
struct Sent {
    bytes: f64,
    /// Bytes, counted once per link crossed.
    link_bytes: f64,
}

/// Accumulated messages of a phase.
struct Phase {
    name: String,
    /// Round or visit in which it first appeared.
    first: u32,
    messages: f64,
    latency: f64,
}

fn add(sums: &mut Vec<Phase>, name: String, first: u32, latency: f64) {
    match sums.iter_mut().find(|phase| phase.name == name) {
        Some(phase) => {
            phase.first = phase.first.min(first);
            phase.messages += 1.0;
            phase.latency += latency;
        }
        None => sums.push(Phase { name, first, messages: 1.0, latency }),
    }
}

fn averages(mut sums: Vec<Phase>, ranks: f64) -> Vec<PhaseLatency> {
    sums.sort_by_key(|phase| phase.first);
    let average = |phase: Phase| PhaseLatency {
        name: phase.name,
        messages_per_rank: phase.messages / ranks,
        message_latency_s: phase.latency / phase.messages,
    };
    sums.into_iter().map(average).collect()
}
