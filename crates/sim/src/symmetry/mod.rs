//! Rank symmetry: ranks that cannot be distinguished, found by colour refinement.
//!
//! Two ranks are alike if they have the same role and the same overrides, and if all their peers
//! are alike: in every group, the same number of each class; at the other end of every message, a
//! rank of the same class. One slow GPU among thousands leaves a few dozen classes: itself, its
//! tensor-parallel group, its pipeline, all others.
//!
//! ```text
//! rank ── group of ranks        sender ── message ── receiver
//! ```

mod refine;

pub(crate) use refine::{EdgeKind, Graph};

use paceline_plan::ids::Rank;
use paceline_plan::mesh::GroupKind;
use paceline_plan::program::{Op, Peer, Plan};
use std::collections::{BTreeMap, BTreeSet};

/// Returns the class of every rank, numbered in order of first appearance; `None` if every role is
/// one class. `own` are the overrides of a rank.
pub(crate) fn of_ranks(plan: &Plan, own: impl Fn(Rank) -> Vec<u16>) -> Option<Vec<u32>> {
    let ranks = (0..plan.mesh.world()).map(Rank);
    let colours = numbered(ranks.map(|rank| (plan.role(rank), own(rank))));
    if count(&colours) == plan.programs.len() {
        return None;
    }
    let (colours, edges) = partners(plan, colours);
    let mut classes = Graph::new(colours.len(), &edges).classes(&colours);
    classes.truncate(plan.mesh.world() as usize);
    Some(numbered(classes.into_iter()))
}

/// Number of colours that are numbered from 0.
fn count(colours: &[u32]) -> usize {
    colours.iter().max().map_or(0, |&last| last as usize + 1)
}

/// Numbers values in order of first appearance; equal values get equal numbers.
pub(crate) fn numbered<T: Ord>(values: impl Iterator<Item = T>) -> Vec<u32> {
    let mut known: BTreeMap<T, u32> = BTreeMap::new();
    values
        .map(|value| {
            let next = known.len() as u32;
            *known.entry(value).or_insert(next)
        })
        .collect()
}

/// Graph of ranks, the groups of their collectives and the ways of their messages: the colours of
/// its points, beginning with those of the ranks, and its edges.
fn partners(plan: &Plan, mut colours: Vec<u32>) -> (Vec<u32>, Vec<(u32, u32, EdgeKind)>) {
    let (mut groups, mut peers) = (BTreeSet::new(), Vec::new());
    for program in &plan.programs {
        let mut mine: BTreeSet<Peer> = BTreeSet::new();
        for node in &program.body.nodes {
            if let Op::Collective { call, .. } = node.op {
                groups.insert(plan.group(program.call(call).group));
            } else if let Op::Send { to: peer, .. } | Op::Recv { from: peer, .. } = node.op {
                mine.insert(peer);
            }
        }
        peers.push(mine.into_iter().collect::<Vec<Peer>>());
    }
    let mut edges = Vec::new();
    let mut next = count(&colours) as u32;
    for kind in groups {
        add_groups(plan, kind, next, &mut colours, &mut edges);
        next += 1;
    }
    let most = peers.iter().map(Vec::len).max().unwrap_or(0) as u32;
    for rank in (0..plan.mesh.world()).map(Rank) {
        for (index, &peer) in (0..).zip(&peers[plan.role(rank).index()]) {
            let point = colours.len() as u32;
            edges.push((point, rank.0, EdgeKind::Sender));
            let other = plan.peer(rank, peer);
            edges.extend(other.map(|other| (point, other.0, EdgeKind::Plain)));
            // The same peer of two roles is told apart by the roles.
            colours.push(next + index + if other.is_some() { 0 } else { most });
        }
    }
    (colours, edges)
}

/// Adds one point for every group of a kind.
fn add_groups(
    plan: &Plan,
    kind: GroupKind,
    colour: u32,
    colours: &mut Vec<u32>,
    edges: &mut Vec<(u32, u32, EdgeKind)>,
) {
    let mut done = vec![false; plan.mesh.world() as usize];
    for rank in 0..done.len() {
        if done[rank] {
            continue;
        }
        let point = colours.len() as u32;
        colours.push(colour);
        for member in plan.mesh.members(kind, Rank::from(rank)) {
            if !std::mem::replace(&mut done[member.index()], true) {
                edges.push((point, member.0, EdgeKind::Plain));
            }
        }
    }
}
