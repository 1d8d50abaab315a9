//! Rank symmetry on a cluster with overrides: ranks that cannot be distinguished.
//!
//! Two ranks are alike if they have the same role and the same overrides, and if all their peers
//! are alike: in every group, the same number of each class; at the other end of every message, a
//! rank of the same class. The coarsest such partition is found by refinement. It starts from role
//! and overrides and splits classes whose peers differ until none do (an equitable partition;
//! Berkholz, Bonsma and Grohe, "Tight lower and upper bounds for the complexity of canonical colour
//! refinement", 2017). One slow GPU among thousands leaves a few dozen classes: itself, its
//! tensor-parallel group, its pipeline, all others.

use crate::cluster::Cluster;
use paceline_plan::ids::{Rank, RoleId};
use paceline_plan::mesh::GroupKind;
use paceline_plan::program::{Op, Peer, Plan};
use std::collections::{BTreeMap, BTreeSet};

/// Returns the class of every rank, numbered in order of first appearance; `None` if every role is
/// one class.
pub(super) fn refine(plan: &Plan, cluster: &Cluster) -> Option<Vec<u32>> {
    let ranks = 0..plan.mesh.world();
    let own = |rank: u32| (plan.role(Rank(rank)), cluster.overrides(Rank(rank)));
    let mut colours = numbered(ranks.map(own));
    let mut count = classes(&colours);
    if count == plan.programs.len() {
        return None;
    }
    let company = Neighbours::new(plan);
    loop {
        colours = company.split(plan, &colours);
        match classes(&colours) {
            same if same == count => return Some(colours),
            more => count = more,
        }
    }
}

fn classes(colours: &[u32]) -> usize {
    colours.iter().max().map_or(0, |&last| last as usize + 1)
}

/// Numbers values in order of first appearance; equal values get equal numbers.
pub(super) fn numbered<T: Ord>(values: impl Iterator<Item = T>) -> Vec<u32> {
    let mut known: BTreeMap<T, u32> = BTreeMap::new();
    values
        .map(|value| {
            let next = known.len() as u32;
            *known.entry(value).or_insert(next)
        })
        .collect()
}

/// Communication partners of ranks.
struct Neighbours {
    groups: Vec<GroupKind>,
    /// By role, the peers of its messages.
    peers: Vec<Vec<Peer>>,
}

impl Neighbours {
    fn new(plan: &Plan) -> Self {
        let (mut groups, mut peers) = (BTreeSet::new(), Vec::new());
        for program in &plan.programs {
            let mut mine = BTreeSet::new();
            for node in &program.body.nodes {
                match node.op {
                    Op::Collective { call, .. } => {
                        groups.insert(plan.group(program.call(call).group));
                    }
                    Op::Send { to: peer, .. } | Op::Recv { from: peer, .. } => {
                        mine.insert(peer);
                    }
                    Op::Load { .. }
                    | Op::Compute { .. }
                    | Op::Accumulate { .. }
                    | Op::Step { .. }
                    | Op::Stash { .. }
                    | Op::Restore { .. }
                    | Op::Free { .. }
                    | Op::Serve { .. } => {}
                }
            }
            peers.push(mine.into_iter().collect());
        }
        Self { groups: groups.into_iter().collect(), peers }
    }

    /// Splits classes whose members have different peers.
    fn split(&self, plan: &Plan, colours: &[u32]) -> Vec<u32> {
        let mut seen: Vec<Vec<u32>> = colours.iter().map(|&colour| vec![colour]).collect();
        for &kind in &self.groups {
            let mut known: BTreeMap<Vec<u32>, u32> = BTreeMap::new();
            let mut done = vec![false; colours.len()];
            for rank in 0..colours.len() {
                if done[rank] {
                    continue;
                }
                let members = plan.mesh.members(kind, Rank::from(rank));
                let mut present: Vec<u32> =
                    members.iter().map(|member| colours[member.index()]).collect();
                present.sort_unstable();
                let next = known.len() as u32;
                let group = *known.entry(present).or_insert(next);
                for member in members {
                    if !std::mem::replace(&mut done[member.index()], true) {
                        seen[member.index()].push(group);
                    }
                }
            }
        }
        for (rank, seen) in seen.iter_mut().enumerate() {
            let rank = Rank::from(rank);
            let RoleId(role) = plan.role(rank);
            for &peer in &self.peers[role as usize] {
                let other = plan.peer(rank, peer);
                seen.push(other.map_or(u32::MAX, |other| colours[other.index()]));
            }
        }
        numbered(seen.into_iter())
    }
}
