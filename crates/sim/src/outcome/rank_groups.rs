//! Groups of ranks that differ: time breakdown of each, and its slowest rank.

use super::statistics::Account;
use crate::cluster::{Cluster, HostId};
use crate::engine::{Class, Timeline};
use paceline_plan::ids::{OpId, Rank, RoleId};
use paceline_plan::program::{Op, Plan};
use paceline_plan::units::Seconds;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Rank whose times an outcome reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slowest {
    /// The rank.
    pub rank: Rank,
    /// Host of the rank.
    pub host: HostId,
    /// Device name.
    pub device: String,
    /// Maximum slowdown factor of its compute over time, relative to its device kind.
    pub slowdown: f64,
}

/// Ranks of one role with the same cluster overrides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankGroup {
    /// The role's name.
    pub role: String,
    /// Number of ranks.
    pub ranks: u32,
    /// Rank with the longest compute; the times below are its own.
    #[serde(flatten)]
    pub slowest: Slowest,
    /// Time in which it computes.
    pub compute: Seconds,
    /// Time in which it moves bytes and does not compute.
    pub exposed: Seconds,
    /// Rest of the iteration, in which it waits for others.
    pub idle: Seconds,
}

/// Describes the rank of a class.
pub(super) fn slowest(cluster: &Cluster, class: Class) -> Slowest {
    Slowest {
        rank: class.rank,
        host: cluster.host(class.device),
        device: cluster.device_of(class.device).name.clone(),
        slowdown: cluster.speed_profile(class.device).worst(),
    }
}

/// Class to report and number of ranks for each role and set of overrides, sorted by role and rank.
fn sorted(plan: &Plan, cluster: &Cluster, timeline: &Timeline) -> Vec<(u32, u32)> {
    let classes = timeline.classes();
    // Value: class, its compute time, and number of ranks.
    let mut known: BTreeMap<(RoleId, Vec<u16>), (u32, f64, u32)> = BTreeMap::new();
    for number in 0..classes.len() as u32 {
        let class = classes.get(number);
        let compute = computes(plan, timeline, number);
        let key = (class.role, cluster.overrides(class.device));
        let entry = known.entry(key).or_insert((number, compute, 0));
        entry.2 += class.ranks;
        if compute > entry.1 {
            (entry.0, entry.1) = (number, compute);
        }
    }
    let mut sorted: Vec<(u32, u32)> =
        known.into_values().map(|(class, _, ranks)| (class, ranks)).collect();
    sorted.sort_unstable_by_key(|&(class, _)| {
        let class = classes.get(class);
        (class.role, class.rank)
    });
    sorted
}

/// Compute time of a rank of a class.
fn computes(plan: &Plan, timeline: &Timeline, class: u32) -> f64 {
    let role = timeline.classes().get(class).role;
    let nodes = plan.programs[role.index()].body.nodes.iter().enumerate();
    let computing = nodes.filter(|(_, node)| matches!(node.op, Op::Compute { .. }));
    let times = computing.map(|(op, _)| timeline.span_of(class, OpId::from(op)));
    times.map(|(start, end)| end.0 - start.0).sum()
}

/// Groups of ranks that differ; empty if no ranks of the plan have overrides or all have the same.
pub(super) fn rank_groups(
    plan: &Plan,
    cluster: &Cluster,
    timeline: &Timeline,
    iteration: Seconds,
) -> Vec<RankGroup> {
    let sorted =
        if cluster.is_homogeneous() { Vec::new() } else { sorted(plan, cluster, timeline) };
    let exceptions = |&(class, _): &(u32, u32)| {
        let rank = timeline.classes().get(class).rank;
        cluster.overrides(rank)
    };
    let different: BTreeSet<Vec<u16>> = sorted.iter().map(exceptions).collect();
    if different.len() < 2 {
        return Vec::new();
    }
    let told = |(number, ranks): (u32, u32)| {
        let class = timeline.classes().get(number);
        let account = Account::new(plan, number, timeline, iteration);
        RankGroup {
            role: plan.programs[class.role.index()].name.clone(),
            ranks,
            slowest: slowest(cluster, class),
            compute: account.compute,
            exposed: account.exposed,
            idle: account.idle,
        }
    };
    sorted.into_iter().map(told).collect()
}

/// Classes that a trace shows: the representative of each role, and one for each distinct set of
/// overrides.
pub(super) fn shown(plan: &Plan, cluster: &Cluster, timeline: &Timeline) -> Vec<u32> {
    let roles = (0..plan.programs.len()).map(RoleId::from);
    let mut shown: Vec<u32> = roles.map(|role| timeline.representative(role)).collect();
    if !cluster.is_homogeneous() {
        shown.extend(sorted(plan, cluster, timeline).into_iter().map(|(class, _)| class));
        shown.sort_unstable_by_key(|&class| timeline.classes().get(class).rank);
        shown.dedup();
    }
    shown
}
