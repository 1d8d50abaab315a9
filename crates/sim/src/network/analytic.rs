//! The analytic backend: latency plus bytes over bandwidth, with nothing else on the links.
//!
//! Different ops do not slow each other down here. Within one op, what certainly shares a link
//! does:
//!
//! - All ranks of a role do the same at once, so devices behind one NIC always share it.
//! - A rank's messages of one round of a collective share its links. Let it send b₁, b₂, … bytes
//!   over h₁, h₂, … hops of a dimension in which its links carry β each and all together B. The
//!   round takes the largest latency, plus the larger of max bᵢ/β and Σ hᵢbᵢ/B: no message is
//!   faster than its own link, and all of them no faster than all links. The second is exact where
//!   every rank does the same, because then every link carries the average. What a rank receives
//!   counts alike.
//! - Rounds follow each other: a collective takes the sum over rounds of the slowest rank's time.
//!
//! **Rings over several hosts.** In a ring through a group with g members on each host, one member
//! of each host sends to the next host while g−1 have idle NICs. Libraries do not leave it at that:
//! NCCL lays one ring through each NIC, rotated so that another member sends each of them, and
//! gives each a share of the vector. Rank order between dimensions is therefore timed with g times
//! one device's bandwidth. Halving-doubling and direct messages use all NICs by themselves.

use super::{Network, NoPath, Vector};
use crate::cluster::{Cluster, Dimension, DimensionKind, Path};
use paceline_plan::collective::{Action, Algorithm, Chunks, Cut, Pattern};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use std::collections::BTreeMap;

/// Times from the topology alone.
#[derive(Clone, Copy, Debug)]
pub struct Analytic<'c> {
    cluster: &'c Cluster,
}

impl<'c> Analytic<'c> {
    /// The network of a cluster.
    pub const fn new(cluster: &'c Cluster) -> Self {
        Self { cluster }
    }

    fn path(&self, from: Rank, to: Rank) -> Result<Path, NoPath> {
        self.cluster.link(from, to).ok_or(NoPath { from, to })
    }

    /// What one device gets of a link: all that stand behind it use it at once.
    fn rate(&self, path: &Path) -> f64 {
        path.bandwidth.0 / path.sharing
    }

    /// By dimension, by how much a ring's links between units of that dimension are widened.
    fn rails(&self, pattern: &Pattern, members: &[Rank]) -> Vec<f64> {
        let mut unit: u64 = 1;
        let widths = self.cluster.dimensions.iter().map(|dimension| {
            let width = match pattern.algorithm() {
                Algorithm::Ring => fewest_in_a_unit(members, unit),
                Algorithm::Auto
                | Algorithm::MultiRing { .. }
                | Algorithm::HalvingDoubling
                | Algorithm::Tree
                | Algorithm::Direct
                | Algorithm::ReadReduce
                | Algorithm::ParameterServer { .. }
                | Algorithm::Naive
                | Algorithm::Overlapped
                | Algorithm::Partitioned
                | Algorithm::Torus { .. }
                | Algorithm::Hierarchical { .. } => 1,
            };
            unit = unit.saturating_mul(u64::from(dimension.size));
            width as f64
        });
        widths.collect()
    }

    /// Members that between them see every kind of link that the group uses: one for each place
    /// that a member has within the outermost dimension, and those around the root and the ends.
    fn representatives(&self, pattern: &Pattern, members: &[Rank]) -> Vec<u32> {
        /// More places than a rack has devices; a torus of thousands looks alike everywhere.
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
        if !self.cluster.is_even() {
            // What differs from the rule is looked at too, once for each way in which it does.
            let members = (0..ranks).zip(members).rev();
            let kinds: BTreeMap<Vec<u16>, u32> =
                members.map(|(index, &member)| (self.cluster.exceptions(member), index)).collect();
            chosen.extend(kinds.into_values());
        }
        chosen.extend([0, ranks - 1]);
        let servers = match pattern.algorithm() {
            Algorithm::ParameterServer { servers } => servers,
            Algorithm::Tree | Algorithm::Torus { .. } | Algorithm::Hierarchical { .. } => {
                chosen.extend(pattern.busiest());
                0
            }
            Algorithm::Auto
            | Algorithm::Ring
            | Algorithm::MultiRing { .. }
            | Algorithm::HalvingDoubling
            | Algorithm::Direct
            | Algorithm::ReadReduce
            | Algorithm::Naive
            | Algorithm::Overlapped
            | Algorithm::Partitioned => 0,
        };
        if pattern.kind().has_root() || servers > 0 {
            let around = [0, 1, ranks - 1, servers, servers + ranks - 1];
            chosen.extend(around.map(|step| (pattern.root() + step) % ranks));
        }
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }
}

impl Network for Analytic<'_> {
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
        let cut = vector.cut(pattern);
        let rails = self.rails(pattern, members);
        let mut rounds: Vec<f64> = Vec::new();
        let mut tally = Tally { network: self, rails: &rails, out: Vec::new(), back: Vec::new() };
        for me in self.representatives(pattern, members) {
            let mine = members[me as usize];
            let mut round = 0;
            for step in pattern.steps(me) {
                if step.round != round {
                    slowest(&mut rounds, round, tally.close());
                    round = step.round;
                }
                let size = |chunks: Chunks| vector.bytes_in(&cut, chunks);
                match step.action {
                    // What is read from another's memory crosses the same links as a message.
                    Action::Send { to, chunks } | Action::Lend { to, chunks } => {
                        tally.send(mine, members[to as usize], size(chunks))?;
                    }
                    Action::Recv { from, chunks, how: _ }
                    | Action::Read { from, chunks, how: _ } => {
                        tally.receive(members[from as usize], mine, size(chunks))?;
                    }
                    // Sums and copies inside a device run at many times the network's rate.
                    Action::Fold { .. } | Action::Emit { .. } => {}
                }
            }
            slowest(&mut rounds, round, tally.close());
        }
        Ok(Seconds(rounds.iter().sum()))
    }
}

impl Vector {
    fn bytes_in(&self, cut: &Cut, chunks: Chunks) -> f64 {
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

/// The fewest members that any unit of so many consecutive ranks has, of those that have any.
pub(super) fn fewest_in_a_unit(members: &[Rank], unit: u64) -> u64 {
    let mut units: Vec<u64> = members.iter().map(|rank| u64::from(rank.0) / unit.max(1)).collect();
    units.sort_unstable();
    units.chunk_by(|a, b| a == b).map(|members| members.len() as u64).min().unwrap_or(1)
}

/// What one rank does in one round.
struct Tally<'a> {
    network: &'a Analytic<'a>,
    rails: &'a [f64],
    /// By dimension.
    out: Vec<Load>,
    back: Vec<Load>,
}

/// One rank's messages of one round in one dimension and direction.
#[derive(Clone, Copy, Default)]
struct Load {
    latency: f64,
    /// The longest time of a message on its own links.
    alone: f64,
    /// The time of all messages on all links.
    together: f64,
}

impl Tally<'_> {
    fn send(&mut self, me: Rank, to: Rank, bytes: f64) -> Result<(), NoPath> {
        let (path, load) = self.load(me, to, me, bytes)?;
        merge(&mut self.out, path.dimension, load);
        Ok(())
    }

    fn receive(&mut self, from: Rank, me: Rank, bytes: f64) -> Result<(), NoPath> {
        let (path, load) = self.load(from, me, me, bytes)?;
        merge(&mut self.back, path.dimension, load);
        Ok(())
    }

    fn load(&self, from: Rank, to: Rank, me: Rank, bytes: f64) -> Result<(Path, Load), NoPath> {
        let path = self.network.path(from, to)?;
        let dimension = &self.network.cluster.dimensions[path.dimension];
        let rail = self.rails[path.dimension];
        let all = all_links(dimension, self.network.cluster, path.dimension, me);
        let links = all * path.scale / path.sharing;
        let load = Load {
            latency: path.latency.0,
            alone: bytes / (self.network.rate(&path) * rail),
            together: bytes * f64::from(path.hops) / (links * rail),
        };
        Ok((path, load))
    }

    /// The time of the round, after which the next one starts.
    fn close(&mut self) -> f64 {
        let all = self.out.drain(..).chain(self.back.drain(..));
        all.map(|load| load.latency + load.alone.max(load.together)).fold(0.0, f64::max)
    }
}

fn merge(loads: &mut Vec<Load>, dimension: usize, load: Load) {
    if loads.len() <= dimension {
        loads.resize(dimension + 1, Load::default());
    }
    let sum = &mut loads[dimension];
    sum.latency = sum.latency.max(load.latency);
    sum.alone = sum.alone.max(load.alone);
    sum.together += load.together;
}

/// What a device's links of one dimension carry together, in one direction.
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
mod tests {
    use super::*;
    use crate::cluster::preset;
    use paceline_plan::collective::{CollectiveKind, Order};
    use paceline_plan::units::BytesPerSec;
    use proptest::prelude::*;

    /// `size` devices on one switch.
    fn switch(size: u32) -> Cluster {
        let mut cluster = preset::get("dgx-a100").unwrap();
        cluster.dimensions.truncate(1);
        cluster.dimensions[0].size = size;
        cluster
    }

    fn ranks(range: std::ops::Range<u32>) -> Vec<Rank> {
        range.map(Rank).collect()
    }

    fn time(
        cluster: &Cluster,
        kind: CollectiveKind,
        algorithm: Algorithm,
        members: &[Rank],
        bytes: u64,
    ) -> f64 {
        let size = members.len() as u32;
        let pattern = Pattern::new(kind, algorithm, Order::Free, size, 0).unwrap();
        let vector = Vector::of_bytes(Bytes(bytes));
        Analytic::new(cluster).collective(&pattern, members, &vector).unwrap().0
    }

    /// Latency and seconds per byte of the only dimension.
    fn link(cluster: &Cluster) -> (f64, f64) {
        let dimension = &cluster.dimensions[0];
        (dimension.latency.0, 1.0 / dimension.achievable().0)
    }

    fn close(a: f64, b: f64) {
        assert!((a / b - 1.0).abs() < 1e-9, "{a} is not {b}");
    }

    /// Patarasuk and Yuan (2009), section 3; Thakur et al. (2005), section 4.5.
    #[test]
    fn uniform_topologies_follow_the_closed_forms() {
        use CollectiveKind::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};
        for p in [2u32, 4, 8, 32, 1024] {
            let cluster = switch(p);
            let (a, b) = link(&cluster);
            let bytes = u64::from(p) << 16;
            let (n, p, members) = (bytes as f64, f64::from(p), ranks(0..p));
            let time = |kind, algorithm| time(&cluster, kind, algorithm, &members, bytes);
            let all = n * b * (p - 1.0) / p;
            close(time(AllReduce, Algorithm::Ring), 2.0 * ((p - 1.0) * a + all));
            close(time(ReduceScatter, Algorithm::Ring), (p - 1.0) * a + all);
            close(time(AllGather, Algorithm::Ring), (p - 1.0) * a + all);
            close(time(AllReduce, Algorithm::HalvingDoubling), 2.0 * (p.log2() * a + all));
            close(time(AllReduce, Algorithm::Direct), 2.0 * (a + all));
            close(time(AllToAll, Algorithm::Direct), a + all);
            close(time(Broadcast, Algorithm::Direct), a + n * b * (p - 1.0));
        }
    }

    #[test]
    fn three_ranks_on_a_ring_are_exact_too() {
        let cluster = switch(3);
        let (a, b) = link(&cluster);
        let members = ranks(0..3);
        let n = 3e6;
        let ring = time(&cluster, CollectiveKind::AllReduce, Algorithm::Ring, &members, n as u64);
        close(ring, 4.0 * (a + n / 3.0 * b));
    }

    #[test]
    fn a_group_of_one_takes_no_time() {
        let cluster = switch(8);
        for kind in CollectiveKind::ALL {
            let time = time(&cluster, kind, Algorithm::Auto, &ranks(3..4), 1 << 20);
            assert_eq!(time, 0.0, "{kind}");
        }
    }

    #[test]
    fn links_of_their_own_do_not_share() {
        let mut cluster = switch(8);
        cluster.dimensions[0].kind = DimensionKind::FullyConnected;
        let (a, b) = link(&cluster);
        let direct =
            time(&cluster, CollectiveKind::AllReduce, Algorithm::Direct, &ranks(0..8), 8_000);
        close(direct, 2.0 * (a + 1000.0 * b));
    }

    /// Every message goes its shortest way; the average link of a ring of 8 carries
    /// Σ hops·n / 2 = (1+2+3+4+3+2+1)/2 = 8 parts.
    #[test]
    fn a_ring_of_wires_carries_its_average_load() {
        let mut cluster = switch(8);
        cluster.dimensions[0].kind = DimensionKind::Ring;
        let (a, b) = link(&cluster);
        let spread =
            time(&cluster, CollectiveKind::AllToAll, Algorithm::Direct, &ranks(0..8), 8_000);
        close(spread, 4.0 * a + 8.0 * 1000.0 * b);
        let ring = time(&cluster, CollectiveKind::AllGather, Algorithm::Ring, &ranks(0..8), 8_000);
        close(ring, 7.0 * (a + 1000.0 * b));
    }

    #[test]
    fn a_ring_over_hosts_uses_every_nic_that_the_group_has() {
        let cluster = preset::get("dgx-a100:4").unwrap();
        let [nvlink, fabric] = &cluster.dimensions[..] else { panic!("two dimensions") };
        let (n, kind) = (32u64 << 20, CollectiveKind::AllReduce);
        let round = |bytes: f64, nics: f64| {
            let across = fabric.latency.0 + bytes / (fabric.achievable().0 * nics);
            across.max(nvlink.latency.0 + bytes / nvlink.achievable().0)
        };
        let everyone = time(&cluster, kind, Algorithm::Ring, &ranks(0..32), n);
        close(everyone, 62.0 * round(n as f64 / 32.0, 8.0));
        let one_each: Vec<Rank> = (0..4).map(|host| Rank(host * 8)).collect();
        let single = time(&cluster, kind, Algorithm::Ring, &one_each, n);
        close(single, 6.0 * round(n as f64 / 4.0, 1.0));
        let inside = time(&cluster, kind, Algorithm::Ring, &ranks(8..16), n);
        close(inside, 14.0 * (nvlink.latency.0 + n as f64 / 8.0 / nvlink.achievable().0));
    }

    #[test]
    fn halving_meets_neighbours_first() {
        // Of 32 ranks, rounds at distance 1, 2 and 4 stay inside a host, those at 8 and 16 do not.
        let cluster = preset::get("dgx-a100:4").unwrap();
        let [nvlink, fabric] = &cluster.dimensions[..] else { panic!("two dimensions") };
        let n = 32u64 << 20;
        let algorithm = Algorithm::HalvingDoubling;
        let time = time(&cluster, CollectiveKind::AllReduce, algorithm, &ranks(0..32), n);
        let share = |dimension: &Dimension, parts: f64, rounds: f64| {
            rounds * dimension.latency.0 + parts * n as f64 / dimension.achievable().0
        };
        close(time, 2.0 * (share(nvlink, 7.0 / 8.0, 3.0) + share(fabric, 3.0 / 32.0, 2.0)));
    }

    #[test]
    fn devices_behind_one_nic_share_it() {
        let mut cluster = preset::get("dgx-a100:2").unwrap();
        let alone = Analytic::new(&cluster).message(Rank(0), Rank(8), Bytes(1 << 30)).unwrap();
        cluster.dimensions[1].devices_per_link = 2;
        let shared = Analytic::new(&cluster).message(Rank(0), Rank(8), Bytes(1 << 30)).unwrap();
        let latency = cluster.dimensions[1].latency;
        close((shared - latency).0, 2.0 * (alone - latency).0);
    }

    #[test]
    fn the_slow_links_of_a_cube_mesh_set_the_pace() {
        let host = preset::get("dgx1-v100").unwrap();
        let n = 8_000_000;
        let ring = time(&host, CollectiveKind::AllReduce, Algorithm::Ring, &ranks(0..8), n);
        // GPUs 0 and 1 are joined by one NVLink, 1 and 2 by two.
        let dimension = &host.dimensions[0];
        let slow = dimension.latency.0 + n as f64 / 8.0 / dimension.achievable().0;
        close(ring, 14.0 * slow);
    }

    #[test]
    fn ranks_outside_the_cluster_are_named() {
        let cluster = switch(4);
        let network = Analytic::new(&cluster);
        let error = network.message(Rank(1), Rank(9), Bytes(1)).unwrap_err();
        assert_eq!(error.to_string(), "rank 1 has no way to rank 9 on this cluster");
    }

    proptest! {
        /// More bytes never take less time, and no algorithm beats the bound of its busiest rank.
        #[test]
        fn time_grows_with_bytes_and_keeps_the_bound(
            size in 2u32..40,
            algorithm in prop_oneof![
                Just(Algorithm::Ring), Just(Algorithm::HalvingDoubling), Just(Algorithm::Direct)
            ],
            bytes in 0u64..1 << 30,
            all: bool,
        ) {
            let kind = if all { CollectiveKind::AllReduce } else { CollectiveKind::ReduceScatter };
            let mut cluster = switch(size);
            cluster.dimensions[0].bandwidth = BytesPerSec(1e9);
            cluster.dimensions[0].efficiency = 1.0;
            let members = ranks(0..size);
            let less = time(&cluster, kind, algorithm, &members, bytes);
            let more = time(&cluster, kind, algorithm, &members, bytes + 4096);
            prop_assert!(less <= more);
            let pattern = Pattern::new(kind, algorithm, Order::Free, size, 0).unwrap();
            let counts = pattern.counts(Bytes(bytes));
            let bound = counts.rounds as f64 * cluster.dimensions[0].latency.0
                + counts.bytes_sent_per_rank_max.0 as f64 / 1e9;
            prop_assert!(less >= bound * (1.0 - 1e-9), "{less} under {bound}");
        }
    }
}
