//! Analytic backend: latency plus bytes over bandwidth, without other traffic on the links.
//!
//! Different ops do not slow each other down. Within one op, certain sharing of links is modelled:
//!
//! - All ranks of a role do the same concurrently, so devices behind one NIC always share it.
//! - All messages of one round of a collective are in flight concurrently. A round takes the
//!   largest latency plus the time of the busiest link: the bytes of all messages that cross it
//!   over its bandwidth. On a switch that link is a device's port, in or out; with a link for every
//!   pair each message has its own; on rings and tori a message loads one link per hop, on the
//!   shorter way round, split in half if both ways are equally long. [`link_loads`] follows every
//!   message of a group. In a group too large for that, one rank's own messages represent all,
//!   which is exact if every rank does the same.
//! - Rounds are sequential: a collective takes the sum over rounds of the slowest rank's time.
//! - Chunks that pass through the dimensions of a grid ([`streams`]) are in different dimensions
//!   concurrently; each dimension serves one chunk after the other.
//!
//! **Rings over several hosts.** In a ring through a group with g members per host, one member of
//! each host sends to the next host while g−1 NICs are idle. Libraries avoid that: NCCL builds one
//! ring per NIC, rotated so that a different member sends in each, and gives each a share of the
//! vector. Rank order between dimensions is therefore timed with g times one device's bandwidth. If
//! a ring steps over s − 1 ranks, s of the g members send to the next host, and the factor is g/s.
//! The rings of a multi-ring are in the plan: each message has the port that it leaves through, whole
//! if no other ring takes it.
//! The "ring" of an all_to_all is a rotation in which every NIC is busy, as with halving-doubling
//! and direct messages.

mod link_loads;
mod profile;
mod streams;

pub use profile::{CollectiveProfile, DimensionLoad, PhaseLatency};

use super::{CostModel, NoPath, Vector};
use crate::cluster::{Cluster, Dimension, DimensionKind, Path};
use paceline_plan::collective::{
    Action, Algorithm, Chunking, Chunks, CollectiveKind, Pattern, Peers, Step, Symmetric,
};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use std::collections::BTreeMap;

/// Network model that derives times from the topology alone.
#[derive(Clone, Copy, Debug)]
pub struct Analytic<'c> {
    cluster: &'c Cluster,
}

impl<'c> Analytic<'c> {
    /// Creates the network of a cluster.
    pub const fn new(cluster: &'c Cluster) -> Self {
        Self { cluster }
    }

    fn path(&self, from: Rank, to: Rank) -> Result<Path, NoPath> {
        self.cluster.link(from, to).ok_or(NoPath { from, to })
    }

    /// One device's share of a link: all devices behind it use it concurrently.
    fn rate(&self, path: &Path) -> f64 {
        path.bandwidth.0 / path.sharing
    }

    /// By dimension, the bandwidth factor of a ring's links between units of that dimension if only
    /// one member of a unit sends to the next.
    fn rails(&self, pattern: &Pattern, members: &[Rank]) -> Vec<f64> {
        if let Some((rings, host)) = rings_over_hosts(pattern) {
            // Each ring leaves a host through a member of its own, and has what its ring's share of
            // the host's ports is, up to a whole port.
            let share = (f64::from(host) / f64::from(rings)).max(1.0);
            let ports =
                self.cluster.dimensions.iter().map(|d| f64::from(d.devices_per_link.max(1)));
            return (0..)
                .zip(ports)
                .map(|(d, port)| if d == 0 { 1.0 } else { share.min(port) })
                .collect();
        }
        let mut unit: u64 = 1;
        let widths = self.cluster.dimensions.iter().map(|dimension| {
            let is_ring = pattern.algorithm().def().hints.is_ring;
            let width = match is_ring && pattern.kind() != CollectiveKind::AllToAll {
                true => fewest_in_a_unit(members, unit),
                false => 1,
            };
            unit = unit.saturating_mul(u64::from(dimension.size));
            width as f64
        });
        widths.collect()
    }

    /// Members that together see every kind of link the group uses: one per position within the
    /// inner dimensions, and those around the root and the ends.
    fn representatives(&self, pattern: &Pattern, members: &[Rank]) -> Vec<u32> {
        /// Maximum number of positions: more than a rack has; a large torus is alike everywhere.
        const MOST: usize = 80;
        let ranks = pattern.ranks();
        let inner = self.cluster.dimensions.split_last().map_or(1, |(_, inner)| {
            inner.iter().fold(1u64, |n, d| n.saturating_mul(u64::from(d.size)))
        });
        let mut places: BTreeMap<u64, u32> = BTreeMap::new();
        for (index, member) in (0..ranks).zip(members) {
            places.entry(u64::from(member.0) % inner.max(1)).or_insert(index);
            if places.len() == MOST {
                break;
            }
        }
        let mut chosen: Vec<u32> = places.into_values().collect();
        if !self.cluster.is_homogeneous() {
            // One member for each distinct set of overrides.
            let members = (0..ranks).zip(members).rev();
            let kinds: BTreeMap<Vec<u16>, u32> =
                members.map(|(index, &member)| (self.cluster.overrides(member), index)).collect();
            chosen.extend(kinds.into_values());
        }
        chosen.extend([0, ranks - 1]);
        let even = ranks.is_power_of_two() && !pattern.kind().has_root();
        let symmetric = match pattern.algorithm().def().hints.symmetric {
            Symmetric::All => true,
            Symmetric::PowersOfTwo => even,
            Symmetric::None => false,
        };
        if !symmetric {
            // Ranks that a remainder, a root or a position makes different, if these are few steps.
            chosen.extend(pattern.busiest());
        }
        let servers = pattern.servers();
        if pattern.kind().has_root() || servers > 0 {
            let around = [0, 1, ranks - 1, servers, servers + ranks - 1];
            chosen.extend(around.map(|step| (pattern.root() + step) % ranks));
        }
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }
}

impl CostModel for Analytic<'_> {
    fn message(&self, from: Rank, to: Rank, bytes: Bytes) -> Result<Seconds, NoPath> {
        let path = self.path(from, to)?;
        Ok(path.latency + Seconds(bytes.as_f64() / self.rate(&path)))
    }

    fn collective(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath> {
        if !pattern.visits().is_empty() {
            return Ok(streams::run(self, pattern, members, vector)?.time);
        }
        let rounds = self.rounds(pattern, members, vector)?;
        Ok(Seconds(rounds.iter().sum()))
    }
}

impl Analytic<'_> {
    /// Time of every round of a pattern without streams.
    fn rounds(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Vec<f64>, NoPath> {
        let rails = self.rails(pattern, members);
        let group = Group { pattern, members, vector, rails: &rails };
        let steps = |me| pattern.steps(me);
        if let Some(wires) =
            link_loads::LinkLoads::of(self, &group, link_loads::MAX_MESSAGES, &steps)
        {
            return wires.rounds();
        }
        let chosen = self.representatives(pattern, members);
        self.rounds_of(&group, &chosen, steps)
    }

    /// Time of a collective from every rank and every message, and the number of messages;
    /// [`Network::collective`] uses a few representative ranks.
    pub fn every_message(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<(Seconds, u64), NoPath> {
        let rails = self.rails(pattern, members);
        let group = Group { pattern, members, vector, rails: &rails };
        let all: Vec<u32> = (0..pattern.ranks()).collect();
        let messages = std::cell::Cell::new(0);
        let steps = |me| {
            let steps = pattern.steps(me);
            let sent = |step: &&Step| {
                matches!(
                    step.action,
                    Action::Send { .. }
                        | Action::Lend { .. }
                        | Action::Write { .. }
                        | Action::Offer { .. }
                )
            };
            messages.set(messages.get() + steps.iter().filter(sent).count() as u64);
            steps
        };
        let rounds = self.rounds_of(&group, &all, steps)?;
        Ok((Seconds(rounds.iter().sum()), messages.get()))
    }

    /// Time of every round as seen by `ranks`, given their steps.
    fn rounds_of(
        &self,
        group: &Group<'_>,
        ranks: &[u32],
        steps: impl Fn(u32) -> Vec<Step>,
    ) -> Result<Vec<f64>, NoPath> {
        let mut rounds: Vec<f64> = Vec::new();
        for &me in ranks {
            let mut tally = Tally::new(self, group, me);
            let mut round = 0;
            for step in steps(me) {
                if step.round != round {
                    slowest(&mut rounds, round, tally.close());
                    round = step.round;
                }
                tally.step(&step.action)?;
            }
            slowest(&mut rounds, round, tally.close());
        }
        Ok(rounds)
    }
}

/// Collective and its group.
struct Group<'a> {
    pattern: &'a Pattern,
    members: &'a [Rank],
    vector: &'a Vector,
    rails: &'a [f64],
}

impl Group<'_> {
    /// Bandwidth factor of a dimension's links for a message between two members.
    fn rail(&self, dimension: usize, from: u32, to: u32) -> f64 {
        let width = self.rails[dimension];
        if width <= 1.0 || rings_over_hosts(self.pattern).is_some() {
            return width.max(1.0);
        }
        let distance = from.abs_diff(to);
        let stride = distance.min(self.pattern.ranks() - distance).max(1);
        (width / f64::from(stride)).max(1.0)
    }
}

/// Number of rings that go from host to host, and of members that they can leave a host through.
fn rings_over_hosts(pattern: &Pattern) -> Option<(u32, u32)> {
    let Algorithm::MultiRing { rings } = pattern.algorithm() else { return None };
    let host = rings.host().filter(|&host| host < pattern.ranks())?;
    Some((rings.count().min(host), host))
}

/// Member at a switch that is farthest from `me`: the message to it crosses the common switch.
fn across(peers: Peers, me: u32) -> u32 {
    if me == peers.first { peers.last() } else { peers.first }
}

impl Vector {
    fn bytes_in(&self, cut: &Chunking, chunks: Chunks) -> f64 {
        cut.elements_in(chunks) as f64 * self.element.as_f64()
    }
}

fn slowest(rounds: &mut Vec<f64>, round: u32, time: f64) {
    let round = round as usize;
    if rounds.len() <= round {
        rounds.resize(round + 1, 0.0);
    }
    rounds[round] = rounds[round].max(time);
}

/// Smallest number of members in any non-empty unit of `unit` consecutive ranks.
pub(super) fn fewest_in_a_unit(members: &[Rank], unit: u64) -> u64 {
    let mut units: Vec<u64> = members.iter().map(|rank| u64::from(rank.0) / unit.max(1)).collect();
    units.sort_unstable();
    units.chunk_by(|a, b| a == b).map(|members| members.len() as u64).min().unwrap_or(1)
}

/// Traffic of one rank in one round.
struct Tally<'a> {
    network: &'a Analytic<'a>,
    group: &'a Group<'a>,
    cut: Chunking,
    me: u32,
    /// Last routes out and back, cached because most algorithms keep to their neighbours.
    known: [Option<MemberRoute>; 2],
    /// Indexed by dimension.
    out: Vec<Load>,
    back: Vec<Load>,
}

/// Link classes of one device with separate loads: on a torus, two per axis.
const CLASSES: usize = 2 * link_loads::MAX_AXES;

/// Route between two members.
#[derive(Clone, Copy)]
struct MemberRoute {
    from: u32,
    to: u32,
    dimension: usize,
    latency: f64,
    rate: f64,
    /// Number of shared links of each class that a message crosses; the first `classes` count.
    crosses: [f64; CLASSES],
    classes: usize,
}

/// Messages of one rank in one round, dimension and direction.
#[derive(Clone, Copy, Default)]
struct Load {
    latency: f64,
    /// Longest time of a single message on its links.
    solo: f64,
    /// Time of all messages on the links they share, by class.
    shared: [f64; CLASSES],
}

impl Load {
    fn add(&mut self, way: &MemberRoute, bytes: f64) {
        let alone = bytes / way.rate;
        self.latency = self.latency.max(way.latency);
        self.solo = self.solo.max(alone);
        for (sum, crosses) in self.shared.iter_mut().zip(&way.crosses[..way.classes]) {
            *sum += crosses * alone;
        }
    }

    fn time(&self) -> f64 {
        self.latency + self.shared.iter().fold(self.solo, |a, &b| a.max(b))
    }
}

impl<'a> Tally<'a> {
    fn new(network: &'a Analytic<'a>, group: &'a Group<'a>, me: u32) -> Self {
        let cut = group.vector.cut(group.pattern);
        Self { network, group, cut, me, known: [None; 2], out: Vec::new(), back: Vec::new() }
    }

    fn step(&mut self, action: &Action) -> Result<(), NoPath> {
        let me = self.me;
        match *action {
            // Reads and writes of another rank's memory cross the same links as a message.
            Action::Send { to, chunks }
            | Action::Lend { to, chunks }
            | Action::Write { to, chunks } => self.out(to, chunks),
            Action::Recv { from, chunks, how: _ } | Action::Read { from, chunks, how: _ } => {
                self.back(from, chunks)
            }
            Action::Offer { to, chunks } => self.out(across(to, me), chunks),
            Action::Take { from, chunks } => self.back(across(from, me), chunks),
            // Sums and copies inside a device run at many times the network bandwidth.
            Action::Fold { .. } | Action::Emit { .. } => Ok(()),
        }
    }

    fn out(&mut self, to: u32, chunks: Chunks) -> Result<(), NoPath> {
        let bytes = self.group.vector.bytes_in(&self.cut, chunks);
        let way = self.way(0, self.me, to)?;
        of_dimension(&mut self.out, way.dimension).add(&way, bytes);
        Ok(())
    }

    fn back(&mut self, from: u32, chunks: Chunks) -> Result<(), NoPath> {
        let bytes = self.group.vector.bytes_in(&self.cut, chunks);
        let way = self.way(1, from, self.me)?;
        of_dimension(&mut self.back, way.dimension).add(&way, bytes);
        Ok(())
    }

    fn way(&mut self, side: usize, from: u32, to: u32) -> Result<MemberRoute, NoPath> {
        match self.known[side] {
            Some(way) if (way.from, way.to) == (from, to) => Ok(way),
            _ => {
                let way = self.find(from, to)?;
                self.known[side] = Some(way);
                Ok(way)
            }
        }
    }

    fn find(&self, from: u32, to: u32) -> Result<MemberRoute, NoPath> {
        let (members, cluster) = (self.group.members, self.network.cluster);
        let ends = (members[from as usize], members[to as usize]);
        let path = self.network.path(ends.0, ends.1)?;
        let dimension = &cluster.dimensions[path.dimension];
        let rail = self.group.rail(path.dimension, from, to);
        let rate = self.network.rate(&path) * rail;
        let mut crosses = [0.0; CLASSES];
        let classes = match &dimension.kind {
            DimensionKind::Switch => {
                crosses[0] = 1.0;
                1
            }
            DimensionKind::FullyConnected => 0,
            DimensionKind::Ring | DimensionKind::Torus { .. } => {
                if let Some((_, from, to)) = cluster.crossing(ends.0, ends.1) {
                    link_loads::hops(&dimension.kind, dimension.size, from, to, |class, hops| {
                        crosses[class] += hops;
                    });
                }
                CLASSES
            }
            DimensionKind::Graph { .. } => {
                let me = members[self.me as usize];
                let links = all_links(dimension, cluster, path.dimension, me);
                let shared = links * path.scale / path.sharing * rail;
                crosses[0] = f64::from(path.hops) * rate / shared;
                1
            }
        };
        let (dimension, latency) = (path.dimension, path.latency.0);
        Ok(MemberRoute { from, to, dimension, latency, rate, crosses, classes })
    }

    /// Returns the time of the round and resets the loads for the next one.
    fn close(&mut self) -> f64 {
        let all = self.out.drain(..).chain(self.back.drain(..));
        all.map(|load| load.time()).fold(0.0, f64::max)
    }
}

fn of_dimension(loads: &mut Vec<Load>, dimension: usize) -> &mut Load {
    if loads.len() <= dimension {
        loads.resize(dimension + 1, Load::default());
    }
    &mut loads[dimension]
}

/// Total bandwidth of a device's links in one dimension and one direction.
pub(crate) fn all_links(dimension: &Dimension, cluster: &Cluster, index: usize, rank: Rank) -> f64 {
    let neighbours = |size: u32| f64::from(size.saturating_sub(1).min(2));
    let one = dimension.achievable().0;
    match &dimension.kind {
        DimensionKind::Switch => one,
        DimensionKind::Ring => one * neighbours(dimension.size).max(1.0),
        DimensionKind::FullyConnected => one * f64::from(dimension.size.saturating_sub(1).max(1)),
        DimensionKind::Torus { shape, wrap: _ } => {
            one * shape.iter().map(|&size| neighbours(size)).sum::<f64>().max(1.0)
        }
        DimensionKind::Graph { switches: _, links } => {
            let inner = cluster.dimensions[..index]
                .iter()
                .fold(1u64, |n, d| n.saturating_mul(u64::from(d.size)));
            let place = u64::from(rank.0) / inner.max(1) % u64::from(dimension.size.max(1));
            let mine = links.iter().filter(|l| l.between.iter().any(|&p| u64::from(p) == place));
            let rates = mine.map(|link| {
                let bandwidth = link.bandwidth.unwrap_or(dimension.bandwidth).0;
                bandwidth * dimension.efficiency * f64::from(link.width)
            });
            rates.sum::<f64>().max(f64::MIN_POSITIVE)
        }
    }
}

#[cfg(test)]
mod tests;
