//! Links of a cluster, one per direction, and the routes of messages over them.
//!
//! A message travels in the outermost dimension in which its ends differ, with the latency of
//! [`Cluster::link`]. It crosses these links:
//!
//! | kind | links |
//! |---|---|
//! | switch | the sender's port into it, the receiver's port out of it |
//! | switch across hosts with ports | additionally a gate for PCIe, host memory and cores at either end |
//! | switch with a tree | additionally the uplink of one leaf and the downlink of the other |
//! | ring, torus | one per step, axis after axis, the shorter way round |
//! | fully-connected | the one from the sender's position to the receiver's |
//! | graph | the edges of the route: fewest, then widest, then lowest latency |
//!
//! **Ties.** Exactly half-way around a ring, senders at even positions go up and those at odd
//! positions go down, so that both directions carry the same load under uniform traffic. Equally
//! good routes through a graph are distributed by destination, as D-mod-k routing does in fat trees
//! (Zahavi, "Fat-tree routing and node ordering providing contention free traffic for MPI global
//! collectives", 2012): senders to different receivers spread, and a pair's route does not depend
//! on other traffic.
//!
//! **Planes.** A dimension that connects hosts has a copy of its links for every device of a host,
//! or for every `devices_per_link` devices. A message to a device of another plane stays in the
//! sender's plane, because every device reaches the fabric directly.

use super::super::NoPath;
use super::graph::Ways;
use super::script::Via;
use crate::cluster::{Cluster, Dimension, DimensionKind, Gate, Tree, walk};
use paceline_plan::ids::Rank;
use paceline_plan::units::{BytesPerSec, Seconds};
use std::collections::BTreeMap;

/// One direction of one link, identified by its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::network) struct LinkId {
    /// Index of its dimension in the cluster.
    dimension: u32,
    /// First of the devices that it belongs to.
    owner: u32,
    /// Index among that device's links, as numbered by the dimension kind.
    index: u32,
}

impl LinkId {
    /// First of the devices that it belongs to, and its index among their links.
    pub(in crate::network) fn parts(self) -> (u64, u32) {
        (u64::from(self.owner), self.index)
    }
}

/// Link from a device into a switch.
const UP: u32 = 0;
/// Link from a switch to a device.
const DOWN: u32 = 1;
/// Link from a leaf to the core.
const LEAF_UP: u32 = 2;
/// Link from the core to a leaf.
const LEAF_DOWN: u32 = 3;
/// First gate between a device and its port, outbound; the others follow in steps of two. The
/// inbound gate is one higher.
const GATES: u32 = 4;

/// Links of a cluster.
#[derive(Debug)]
pub(in crate::network) struct Links<'c> {
    cluster: &'c Cluster,
    layers: Vec<Layer<'c>>,
}

#[derive(Debug)]
struct Layer<'c> {
    dimension: &'c Dimension,
    /// Number of devices inside one member.
    inner: u64,
    /// Number of neighbouring devices that share one link.
    sharing: u64,
    /// Gates between devices and ports.
    gates: Vec<Gate>,
    /// Routes through a graph, by starting member.
    ways: BTreeMap<u32, Ways>,
}

impl<'c> Links<'c> {
    /// Derives the links of a cluster.
    pub(in crate::network) fn new(cluster: &'c Cluster) -> Self {
        let mut inner = 1u64;
        let layer = |(index, dimension): (usize, &'c Dimension)| {
            let sharing = u64::from(dimension.devices_per_link.max(1));
            let gates = cluster.gates(index);
            let layer = Layer { dimension, inner, sharing, gates, ways: BTreeMap::new() };
            inner = inner.saturating_mul(u64::from(dimension.size.max(1)));
            layer
        };
        Self { cluster, layers: cluster.dimensions.iter().enumerate().map(layer).collect() }
    }

    /// Appends the links that a message crosses, in order, and returns its latency.
    pub(in crate::network) fn route(
        &mut self,
        from: Rank,
        to: Rank,
        links: &mut Vec<LinkId>,
    ) -> Result<Seconds, NoPath> {
        let no_path = NoPath { from, to };
        let (dimension, start, end) = self.cluster.crossing(from, to).ok_or(no_path)?;
        let layer = &mut self.layers[dimension];
        let mut push = |owner: u64, index: u32| {
            // Device numbers are rank numbers, so the cast is lossless.
            links.push(LinkId { dimension: dimension as u32, owner: owner as u32, index });
        };
        let latency = layer.dimension.latency;
        let delay =
            self.cluster.link_delay(from, dimension).max(self.cluster.link_delay(to, dimension));
        let crossed: Result<Seconds, NoPath> = match &layer.dimension.kind {
            DimensionKind::Switch => {
                let host = self.cluster.devices_per_host();
                for (number, gate) in (0..).zip(&layer.gates) {
                    push(behind(gate, from, host), GATES + 2 * number);
                    push(behind(gate, to, host), GATES + 2 * number + 1);
                }
                push(layer.port(from), UP);
                if let Some((up, down)) = layer.leaves(from, start, end) {
                    push(up, LEAF_UP);
                    push(down, LEAF_DOWN);
                }
                push(layer.port(to), DOWN);
                Ok(latency)
            }
            DimensionKind::FullyConnected => {
                push(layer.wire(from, start), end);
                Ok(latency)
            }
            DimensionKind::Ring => {
                let steps = walk(start, end, &[layer.dimension.size], true, |place, index| {
                    push(layer.wire(from, place), index);
                });
                Ok(latency * f64::from(steps))
            }
            DimensionKind::Torus { shape, wrap } => {
                let steps = walk(start, end, shape, *wrap, |place, index| {
                    push(layer.wire(from, place), index);
                });
                Ok(latency * f64::from(steps))
            }
            DimensionKind::Graph { switches, links: edges } => {
                let plane = layer.wire(from, 0);
                let ways = layer
                    .ways
                    .entry(start)
                    .or_insert_with(|| Ways::new(layer.dimension, *switches, edges, start));
                ways.walk(end, |index| push(plane, index)).ok_or(no_path)
            }
        };
        let cost = self.cluster.message_cost(dimension);
        crossed.map(|latency| (latency + delay + cost).max(Seconds::ZERO))
    }

    /// Returns true if a link is on this part of a route: for a switch, up to or down from it.
    pub(super) fn is_on(&self, link: LinkId, via: Via) -> bool {
        let switch = self.layers[link.dimension as usize].dimension.kind == DimensionKind::Switch;
        match via {
            Via::Through => true,
            // Outbound links have even numbers, inbound links the next odd ones.
            Via::Up => !switch || link.index.is_multiple_of(2),
            Via::Down => !switch || !link.index.is_multiple_of(2),
        }
    }

    /// Capacity of a link in the given epoch's cluster: the dimension's bandwidth, scaled by the
    /// slower of its ends.
    pub(in crate::network) fn capacity_at(&self, link: LinkId, cluster: &Cluster) -> BytesPerSec {
        let nominal = self.capacity(link);
        let index = link.dimension as usize;
        if cluster.is_homogeneous() || self.layers[index].gate(link).is_some() {
            return nominal;
        }
        let ends = self.layers[index].ends(link);
        let scales = ends.into_iter().flatten().map(|end| cluster.link_scale(Rank(end), index));
        let scale = scales.reduce(f64::min).unwrap_or_else(|| cluster.dimension_scale(index));
        BytesPerSec((nominal.0 * scale).max(f64::MIN_POSITIVE))
    }

    /// Nominal capacity of a link.
    pub(super) fn capacity(&self, link: LinkId) -> BytesPerSec {
        let layer = &self.layers[link.dimension as usize];
        let one = layer.dimension.achievable().0;
        if let Some(gate) = layer.gate(link) {
            return BytesPerSec(gate.capacity.max(f64::MIN_POSITIVE));
        }
        let rate = match &layer.dimension.kind {
            DimensionKind::Switch if link.index >= LEAF_UP => layer.uplink(one),
            DimensionKind::Switch => one,
            DimensionKind::FullyConnected | DimensionKind::Ring | DimensionKind::Torus { .. } => {
                one / layer.devices_per_wire()
            }
            DimensionKind::Graph { links, .. } => {
                let edge = &links[link.index as usize / 2];
                let bandwidth = edge.bandwidth.unwrap_or(layer.dimension.bandwidth).0;
                bandwidth * layer.dimension.efficiency * f64::from(edge.width)
                    / layer.devices_per_wire()
            }
        };
        // An invalid description must not produce a NaN rate.
        BytesPerSec(rate.max(f64::MIN_POSITIVE))
    }
}

/// First device of the host that shares a gate with `rank`.
fn behind(gate: &Gate, rank: Rank, host: u64) -> u64 {
    let (rank, first) = (u64::from(rank.0), u64::from(rank.0) / host * host);
    first + (rank - first) / u64::from(gate.devices.max(1)) * u64::from(gate.devices.max(1))
}

impl Layer<'_> {
    /// Returns the gate behind a link, if it is one.
    fn gate(&self, link: LinkId) -> Option<&Gate> {
        let number = link.index.checked_sub(GATES)? / 2;
        let switch = self.dimension.kind == DimensionKind::Switch;
        self.gates.get(number as usize).filter(|_| switch)
    }

    /// Devices at the ends of a link; a switch counts as none, and a leaf's uplink has none.
    fn ends(&self, link: LinkId) -> [Option<u32>; 2] {
        let owner = u64::from(link.owner);
        let size = u64::from(self.dimension.size.max(1));
        let place = owner / self.inner % size;
        let at = |there: u64| u32::try_from(owner + there * self.inner - place * self.inner).ok();
        let along = |shape: &[u32]| {
            let (axis, down) = (link.index as usize / 2, !link.index.is_multiple_of(2));
            let stride = shape[..axis].iter().map(|&size| u64::from(size.max(1))).product::<u64>();
            let size = u64::from(shape[axis].max(1));
            let here = place / stride % size;
            let there = if down { (here + size - 1) % size } else { (here + 1) % size };
            [at(place), at(place + there * stride - here * stride)]
        };
        match &self.dimension.kind {
            DimensionKind::Switch if link.index >= LEAF_UP => [None, None],
            DimensionKind::Switch => [Some(link.owner), None],
            DimensionKind::FullyConnected => [Some(link.owner), at(link.index.into())],
            DimensionKind::Ring => along(&[self.dimension.size]),
            DimensionKind::Torus { shape, .. } => along(shape),
            DimensionKind::Graph { links, .. } => {
                let points = links[link.index as usize / 2].between.map(u64::from);
                points.map(|point| (point < size).then(|| at(point)).flatten())
            }
        }
    }

    /// First device of the dimension instance that a device is in.
    fn start(&self, rank: Rank) -> u64 {
        let size = self.inner.saturating_mul(u64::from(self.dimension.size.max(1)));
        u64::from(rank.0) - u64::from(rank.0) % size
    }

    /// First of the devices that share a device's port: neighbours within a member, or neighbouring
    /// members if members are single devices.
    fn port(&self, rank: Rank) -> u64 {
        let unit = match self.inner {
            1 => self.start(rank),
            inner => u64::from(rank.0) - u64::from(rank.0) % inner,
        };
        unit + (u64::from(rank.0) - unit) / self.sharing * self.sharing
    }

    /// Device that owns a link at a position, in the plane of `rank`.
    fn wire(&self, rank: Rank, place: u32) -> u64 {
        let plane = u64::from(rank.0) % self.inner / self.sharing * self.sharing;
        self.start(rank) + u64::from(place) * self.inner + plane
    }

    /// Number of devices that use one link concurrently if there are no planes.
    fn devices_per_wire(&self) -> f64 {
        if self.inner == 1 { self.sharing as f64 } else { 1.0 }
    }

    /// First devices under the leaves of two positions, if the leaves differ.
    fn leaves(&self, rank: Rank, from: u32, to: u32) -> Option<(u64, u64)> {
        let leaf = self.dimension.tree?.leaf.max(1);
        let first = |place: u32| {
            self.start(rank) + u64::from(place / leaf * leaf).saturating_mul(self.inner)
        };
        (from / leaf != to / leaf).then(|| (first(from), first(to)))
    }

    /// Capacity of a leaf's link to the core.
    fn uplink(&self, one: f64) -> f64 {
        let Some(Tree { leaf, oversubscription }) = self.dimension.tree else { return one };
        let members = leaf.clamp(1, self.dimension.size.max(1));
        let ports = match self.inner {
            1 => u64::from(members).div_ceil(self.sharing),
            inner => inner.div_ceil(self.sharing).saturating_mul(u64::from(members)),
        };
        one * ports as f64 / oversubscription
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Job, Work, simulate_flows};
    use super::*;
    use crate::cluster::{GraphLink, HostPorts, Protocol, preset};
    use paceline_plan::units::Bytes;
    use proptest::prelude::*;

    fn dimension(kind: DimensionKind, size: u32) -> Dimension {
        Dimension {
            name: "wire".into(),
            kind,
            size,
            bandwidth: BytesPerSec(100e9),
            latency: Seconds(1e-6),
            efficiency: 0.5,
            devices_per_link: 1,
            tree: None,
            in_network_reduction: false,
        }
    }

    fn cluster(dimensions: Vec<Dimension>) -> Cluster {
        Cluster { dimensions, ..preset::get("laptop").unwrap() }
    }

    fn route(cluster: &Cluster, from: u32, to: u32) -> Vec<LinkId> {
        let mut links = Vec::new();
        Links::new(cluster).route(Rank(from), Rank(to), &mut links).unwrap();
        links
    }

    fn carries(cluster: &Cluster, from: u32, to: u32) -> f64 {
        let links = Links::new(cluster);
        let rates = route(cluster, from, to).into_iter().map(|link| links.capacity(link).0);
        rates.fold(f64::INFINITY, f64::min)
    }

    /// A device with idle neighbours has its NIC, its PCIe switch and the cores to itself.
    #[test]
    fn gates_are_shared_by_those_behind_them() {
        let mut hosts = preset::get("dgx-a100:2").unwrap();
        hosts.dimensions[1].bandwidth = BytesPerSec(12.5e9);
        hosts.dimensions[1].devices_per_link = 4;
        hosts.host_ports = Some(HostPorts {
            dimension: 1,
            nics: 2,
            nic_bandwidth: BytesPerSec(12.5e9),
            efficiency: None,
            protocol: Protocol::Tcp,
            mtu: 9000,
            message_overhead: Seconds(1e-5),
            control: None,
            gpudirect: false,
            pcie_bandwidth: Some(BytesPerSec(8e9)),
            devices_per_switch: 2,
            nics_on_switches: false,
            memory_bandwidth: Some(BytesPerSec(400e9)),
            cores: Some(40),
            core_bandwidth: BytesPerSec(5e9),
        });
        hosts.dimensions[1].efficiency = hosts.host_ports.as_ref().unwrap().payload();
        assert_eq!(carries(&hosts, 0, 8), 8e9, "its PCIe link");
        let all = simulate_together(&hosts, &[(0, 8), (1, 9)]);
        let alone = simulate_together(&hosts, &[(0, 8)]);
        assert!((all[0] / alone[0] - 2.0).abs() < 1e-3, "both cross one uplink: {all:?} {alone:?}");
        let apart = simulate_together(&hosts, &[(0, 8), (2, 10)]);
        let expected = 8e9 / (12.5e9 * hosts.dimensions[1].efficiency / 2.0);
        assert!((apart[0] / alone[0] / expected - 1.0).abs() < 1e-3, "one NIC: {apart:?}");
        // Inside a host a message crosses only the switch.
        assert_eq!(route(&hosts, 0, 1).len(), 2);
        let everyone: Vec<(u32, u32)> = (0..8).map(|rank| (rank, rank + 8)).collect();
        let path = hosts.link(Rank(0), Rank(8)).unwrap();
        let analytic = path.latency.0 + 1e9 / (path.bandwidth.0 / path.sharing);
        let flow = simulate_together(&hosts, &everyone);
        assert!((flow[0] / analytic - 1.0).abs() < 1e-9, "{} {analytic}", flow[0]);
    }

    /// End times of 1 GB messages that start together.
    fn simulate_together(cluster: &Cluster, messages: &[(u32, u32)]) -> Vec<f64> {
        let job = |&(from, to): &(u32, u32)| {
            Job::new(Work::Message { from: Rank(from), to: Rank(to), bytes: Bytes(1_000_000_000) })
        };
        let jobs: Vec<Job> = messages.iter().map(job).collect();
        simulate_flows(cluster, &jobs).unwrap().into_iter().map(|end| end.0).collect()
    }

    #[test]
    fn a_switch_has_a_port_in_and_a_port_out_for_every_device() {
        let host = cluster(vec![dimension(DimensionKind::Switch, 8)]);
        let (a, b) = (route(&host, 0, 3), route(&host, 5, 3));
        assert_eq!(a.len(), 2);
        assert_ne!(a[0], b[0]);
        assert_eq!(a[1], b[1], "both arrive through the same port");
        assert_ne!(route(&host, 3, 0)[0], a[1], "directions do not share");
    }

    #[test]
    fn devices_behind_one_nic_share_it() {
        let mut host = preset::get("dgx-a100:4").unwrap();
        assert_ne!(route(&host, 0, 8)[0], route(&host, 1, 9)[0]);
        host.dimensions[1].devices_per_link = 2;
        assert_eq!(route(&host, 0, 8), route(&host, 1, 9));
        assert_ne!(route(&host, 1, 9), route(&host, 2, 10));
        assert_ne!(route(&host, 0, 8), route(&host, 0, 16));
        assert_eq!(route(&host, 0, 8)[0], route(&host, 0, 16)[0]);
    }

    #[test]
    fn an_uplink_is_thinner_than_what_goes_into_its_leaf() {
        let mut fabric = preset::get("dgx-a100:4").unwrap();
        let nic = fabric.dimensions[1].achievable().0;
        fabric.dimensions[1].tree = Some(Tree { leaf: 2, oversubscription: 32.0 });
        assert_eq!(route(&fabric, 0, 8).len(), 2, "under one leaf");
        assert_eq!(route(&fabric, 0, 16).len(), 4);
        assert_eq!(route(&fabric, 0, 16)[1], route(&fabric, 9, 31)[1], "all 16 NICs of a leaf");
        assert_eq!(carries(&fabric, 0, 8), nic);
        assert_eq!(carries(&fabric, 0, 16), nic * 16.0 / 32.0);
    }

    #[test]
    fn half_way_around_both_directions_are_used() {
        let ring = cluster(vec![dimension(DimensionKind::Ring, 8)]);
        let mut load = BTreeMap::new();
        for from in 0..8 {
            for to in (0..8).filter(|&to| to != from) {
                for link in route(&ring, from, to) {
                    *load.entry(link).or_insert(0) += 1;
                }
            }
        }
        assert_eq!(load.len(), 16);
        assert!(load.values().all(|&messages| messages == 8), "{load:?}");
    }

    #[test]
    fn two_members_of_a_ring_share_a_single_link() {
        let ring = cluster(vec![dimension(DimensionKind::Ring, 2)]);
        let torus = DimensionKind::Torus { shape: vec![2, 2], wrap: true };
        let torus = cluster(vec![dimension(torus, 4)]);
        for (a, b) in [(0, 1), (1, 0)] {
            assert_eq!(route(&ring, a, b).len(), 1);
            assert_eq!(route(&ring, a, b)[0].index, 0);
        }
        let mut from_zero = route(&torus, 0, 3);
        from_zero.extend(route(&torus, 0, 1));
        from_zero.extend(route(&torus, 0, 2));
        from_zero.sort_unstable();
        from_zero.dedup();
        assert_eq!(from_zero.iter().filter(|link| link.owner == 0).count(), 2);
    }

    #[test]
    fn an_axis_without_ends_joined_is_walked_straight() {
        let mesh = DimensionKind::Torus { shape: vec![4, 4], wrap: false };
        let mesh = cluster(vec![dimension(mesh, 16)]);
        let owners: Vec<u32> = route(&mesh, 0, 15).iter().map(|link| link.owner).collect();
        assert_eq!(owners, [0, 1, 2, 3, 7, 11], "the first axis first");
        let back: Vec<u32> = route(&mesh, 15, 0).iter().map(|link| link.owner).collect();
        assert_eq!(back, [15, 14, 13, 12, 8, 4]);
    }

    /// Two leaves with four spines: messages to different receivers take different spines.
    #[test]
    fn equally_good_ways_are_dealt_out_by_destination() {
        let edge = |a, b| GraphLink { between: [a, b], width: 1, bandwidth: None, latency: None };
        let mut links: Vec<GraphLink> = (0..8).map(|device| edge(device, 8 + device / 4)).collect();
        for spine in 10..14 {
            links.extend([edge(8, spine), edge(9, spine)]);
        }
        let kind = DimensionKind::Graph { switches: 6, links };
        let fabric = cluster(vec![dimension(kind, 8)]);
        let mut second: Vec<LinkId> = (0..4).map(|i| route(&fabric, i, 4 + i)[1]).collect();
        second.sort_unstable();
        second.dedup();
        assert_eq!(second.len(), 4);
        assert_eq!(route(&fabric, 0, 5)[1..], route(&fabric, 1, 5)[1..]);
    }

    #[test]
    fn absurd_clusters_do_not_break() {
        let mut absurd = cluster(vec![dimension(DimensionKind::FullyConnected, u32::MAX)]);
        assert_eq!(route(&absurd, 0, u32::MAX - 1).len(), 1);
        absurd.dimensions[0].bandwidth = BytesPerSec(f64::NAN);
        absurd.dimensions[0].devices_per_link = u32::MAX;
        assert!(carries(&absurd, 0, 1) > 0.0);
        absurd.dimensions.push(dimension(DimensionKind::Switch, u32::MAX));
        absurd.dimensions[1].tree = Some(Tree { leaf: 0, oversubscription: 0.0 });
        assert!(carries(&absurd, 0, 1) > 0.0);
        let mut links = Vec::new();
        assert!(Links::new(&absurd).route(Rank(3), Rank(3), &mut links).is_err());
    }

    proptest! {
        /// A message alone has latency and bandwidth of [`Cluster::link`], on any network.
        #[test]
        fn ways_agree_with_the_clusters_own(
            name in prop_oneof![
                Just("dgx-a100:4"), Just("dgx1-v100:2"), Just("tpu-v4:32"), Just("laptop:3")
            ],
            a in 0u32..32,
            b in 0u32..32,
            wired: u8,
        ) {
            let mut cluster = preset::get(name).unwrap();
            let outer = cluster.dimensions.len() - 1;
            match wired % 3 {
                0 => cluster.dimensions[outer].kind = DimensionKind::Ring,
                1 => cluster.dimensions[outer].kind = DimensionKind::FullyConnected,
                _ => {}
            }
            let devices = cluster.devices() as u32;
            let (a, b) = (Rank(a % devices), Rank(b % devices));
            let mut links = Vec::new();
            let found = Links::new(&cluster).route(a, b, &mut links).ok();
            prop_assert_eq!(found.is_some(), a != b);
            if let (Some(latency), Some(path)) = (found, cluster.link(a, b)) {
                prop_assert_eq!(latency, path.latency);
                prop_assert_eq!(carries(&cluster, a.0, b.0), path.bandwidth.0);
                let switch = cluster.dimensions[path.dimension].kind == DimensionKind::Switch;
                let hops = if switch { 2 } else { path.hops };
                prop_assert_eq!(links.len() as u32, hops);
            }
        }
    }
}
