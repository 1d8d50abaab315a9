//! Ranks that are not alike: what each kind of them does, and which one the others wait for.

use super::statistics::Account;
use crate::cluster::{Cluster, HostId};
use crate::engine::Timeline;
use paceline_plan::ids::{OpId, Rank, RoleId};
use paceline_plan::program::{Op, Plan};
use paceline_plan::units::Seconds;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// The rank whose times an outcome tells.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slowest {
    /// The rank.
    pub rank: Rank,
    /// Where it stands.
    pub host: HostId,
    /// On which device.
    pub device: String,
    /// How many times longer its computations take than its kind's, at the worst moment.
    pub slowdown: f64,
}

/// Ranks of one role that the same exceptions of the cluster name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnequalRanks {
    /// The role's name.
    pub role: String,
    /// How many ranks there are.
    pub ranks: u32,
    /// Of these, the one that computes longest; the times are its own.
    #[serde(flatten)]
    pub slowest: Slowest,
    /// Time in which it computes.
    pub compute: Seconds,
    /// Time in which it moves bytes and does not compute.
    pub exposed: Seconds,
    /// What is left of the iteration: it waits for others.
    pub idle: Seconds,
}

/// What a rank is.
pub(super) fn slowest(cluster: &Cluster, rank: Rank) -> Slowest {
    Slowest {
        rank,
        host: cluster.host(rank),
        device: cluster.device_of(rank).name.clone(),
        slowdown: cluster.pace(rank).worst(),
    }
}

/// Every role's ranks, by what exceptions name them, and for each the class to tell of; in the order
/// of roles and of first ranks.
fn sorted(plan: &Plan, cluster: &Cluster, timeline: &Timeline) -> Vec<(u32, u32)> {
    let classes = timeline.classes();
    // Of each: the class, its time of computing, and how many ranks there are.
    let mut known: BTreeMap<(RoleId, Vec<u16>), (u32, f64, u32)> = BTreeMap::new();
    for number in 0..classes.len() as u32 {
        let class = classes.get(number);
        let compute = computes(plan, timeline, number);
        let key = (class.role, cluster.exceptions(class.rank));
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

/// How long a rank of a class computes.
fn computes(plan: &Plan, timeline: &Timeline, class: u32) -> f64 {
    let role = timeline.classes().get(class).role;
    let nodes = plan.programs[role.index()].body.nodes.iter().enumerate();
    let computing = nodes.filter(|(_, node)| matches!(node.op, Op::Compute { .. }));
    let times = computing.map(|(op, _)| timeline.span_of(class, OpId::from(op)));
    times.map(|(start, end)| end.0 - start.0).sum()
}

/// Ranks that are not alike; none on a cluster whose exceptions name none of the plan's ranks, or all.
pub(super) fn unequal(
    plan: &Plan,
    cluster: &Cluster,
    timeline: &Timeline,
    iteration: Seconds,
) -> Vec<UnequalRanks> {
    let sorted = if cluster.is_even() { Vec::new() } else { sorted(plan, cluster, timeline) };
    let exceptions = |&(class, _): &(u32, u32)| {
        let rank = timeline.classes().get(class).rank;
        cluster.exceptions(rank)
    };
    let different: BTreeSet<Vec<u16>> = sorted.iter().map(exceptions).collect();
    if different.len() < 2 {
        return Vec::new();
    }
    let told = |(number, ranks): (u32, u32)| {
        let class = timeline.classes().get(number);
        let account = Account::new(plan, number, timeline, iteration);
        UnequalRanks {
            role: plan.programs[class.role.index()].name.clone(),
            ranks,
            slowest: slowest(cluster, class.rank),
            compute: account.compute,
            exposed: account.exposed,
            idle: account.idle,
        }
    };
    sorted.into_iter().map(told).collect()
}

/// The classes that a trace shows: of each role the one that reports tell of, and one for each way
/// in which its other ranks differ.
pub(super) fn shown(plan: &Plan, cluster: &Cluster, timeline: &Timeline) -> Vec<u32> {
    let roles = (0..plan.programs.len()).map(RoleId::from);
    let mut shown: Vec<u32> = roles.map(|role| timeline.told(role)).collect();
    if !cluster.is_even() {
        shown.extend(sorted(plan, cluster, timeline).into_iter().map(|(class, _)| class));
        shown.sort_unstable_by_key(|&class| timeline.classes().get(class).rank);
        shown.dedup();
    }
    shown
}
