//! One network dimension: topology and link properties.

use paceline_plan::units::{BytesPerSec, Seconds};
use serde::Serialize;

/// One layer of the network, which connects units of the layer below.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Dimension {
    /// Name in reports: "nvlink", "infiniband".
    pub name: String,
    /// Topology of the members.
    #[serde(flatten)]
    pub kind: DimensionKind,
    /// Number of members.
    pub size: u32,
    /// Datasheet bandwidth of one link in one direction; the other direction has the same in
    /// addition. The kind determines the links of a device.
    pub bandwidth: BytesPerSec,
    /// Time for the first byte to cross one link (through a switch: from device to device),
    /// including the sending software.
    pub latency: Seconds,
    /// Fraction of the bandwidth left for payload after framing, acknowledgements and protocol.
    pub efficiency: f64,
    /// Number of neighbouring devices that share one link into this dimension: 1 if each has its
    /// own, 2 if two GPUs share a NIC.
    pub devices_per_link: u32,
    /// Structure of the switch, if it is not a single non-blocking one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tree: Option<Tree>,
    /// True if the switch reduces messages and distributes the sum (SHARP, NVLink SHARP).
    pub in_network_reduction: bool,
}

/// A switch made of leaf switches under a core: a fat tree, possibly oversubscribed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tree {
    /// Number of members per leaf; 1 if each has its own leaf.
    pub leaf: u32,
    /// Ratio of the bandwidth into a leaf to that from the leaf to the core: 1 for non-blocking, 4
    /// for "4:1".
    pub oversubscription: f64,
}

/// Topology of the members of a dimension.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum DimensionKind {
    /// A link to the previous and to the next member, around; two members share a single link.
    Ring,
    /// One link into a non-blocking switch. Parallel links of a device count as one.
    Switch,
    /// A link to every other member.
    FullyConnected,
    /// A ring along each axis of a grid.
    Torus {
        /// Members along each axis, the first axis varying fastest; their product is the size.
        shape: Vec<u32>,
        /// True if the ends of each axis are connected; false for a mesh.
        wrap: bool,
    },
    /// An explicit list of links.
    Graph {
        /// Number of forwarding points without a device, numbered after the members.
        switches: u32,
        /// The links between points.
        links: Vec<GraphLink>,
    },
}

/// A link of a graph, usable in both directions at once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GraphLink {
    /// The two points it connects.
    pub between: [u32; 2],
    /// Number of equal parallel links.
    pub width: u32,
    /// Bandwidth of one of them, if it differs from the dimension's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<BytesPerSec>,
    /// Its latency, if it differs from the dimension's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<Seconds>,
}

impl DimensionKind {
    /// Names in cluster files, in the order of their documentation.
    pub(super) const NAMES: [&'static str; 5] =
        ["ring", "switch", "fully-connected", "torus", "graph"];

    /// Name in cluster files.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Switch => "switch",
            Self::FullyConnected => "fully-connected",
            Self::Torus { .. } => "torus",
            Self::Graph { .. } => "graph",
        }
    }
}

impl Dimension {
    /// Payload bandwidth of one link in one direction.
    pub fn achievable(&self) -> BytesPerSec {
        BytesPerSec(self.bandwidth.0 * self.efficiency)
    }

    /// Number of devices that share the narrowest link between two members if all send at once.
    pub(super) fn sharing(&self, from: u32, to: u32) -> f64 {
        let port = f64::from(self.devices_per_link.max(1));
        match self.tree {
            Some(Tree { leaf, oversubscription }) if from / leaf.max(1) != to / leaf.max(1) => {
                port * oversubscription.max(1.0)
            }
            Some(_) | None => port,
        }
    }

    /// Bandwidth of each of `senders` neighbouring devices if all of them send at once.
    pub fn share(&self, senders: u32) -> BytesPerSec {
        let sharing = senders.clamp(1, self.devices_per_link.max(1));
        BytesPerSec(self.achievable().0 / f64::from(sharing))
    }

    /// Route between two members, or `None` if no link leads there.
    pub(super) fn route(&self, from: u32, to: u32) -> Option<Route> {
        if from == to || from >= self.size || to >= self.size {
            return None;
        }
        let hops = match &self.kind {
            DimensionKind::Switch | DimensionKind::FullyConnected => 1,
            DimensionKind::Ring => around(from, to, self.size, true),
            DimensionKind::Torus { shape, wrap } => {
                let (mut from, mut to, mut hops) = (from, to, 0);
                for &size in shape {
                    let size = size.max(1);
                    hops += around(from % size, to % size, size, *wrap);
                    (from, to) = (from / size, to / size);
                }
                hops
            }
            DimensionKind::Graph { switches, links } => {
                return self.route_in_graph(*switches, links, from, to);
            }
        };
        let latency = self.latency * f64::from(hops);
        Some(Route { hops, bandwidth: self.achievable(), latency })
    }

    /// Finds the route with the fewest links, then the largest bandwidth, then the lowest latency.
    ///
    /// The search is breadth-first by level, so the best route to a point is final before any route
    /// continues from it.
    fn route_in_graph(
        &self,
        switches: u32,
        links: &[GraphLink],
        from: u32,
        to: u32,
    ) -> Option<Route> {
        let points = self.size as usize + switches as usize;
        let mut best: Vec<Option<Route>> = vec![None; points];
        let start =
            Route { hops: 0, bandwidth: BytesPerSec(f64::INFINITY), latency: Seconds::ZERO };
        *best.get_mut(from as usize)? = Some(start);
        for hops in 1..=links.len() {
            let hops = u32::try_from(hops).ok()?;
            let mut reached = false;
            for link in links {
                let [a, b] = link.between.map(|point| point as usize);
                for (here, there) in [(a, b), (b, a)] {
                    let Some(so_far) = best.get(here).copied().flatten() else { continue };
                    let Some(known) = best.get_mut(there) else { continue };
                    let next = so_far.along(link, self);
                    if so_far.hops + 1 == hops && known.is_none_or(|known| next.beats(&known)) {
                        *known = Some(next);
                        reached = true;
                    }
                }
            }
            if !reached || best[to as usize].is_some() {
                break;
            }
        }
        best[to as usize]
    }
}

/// A route between two members of one dimension.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Route {
    pub(super) hops: u32,
    pub(super) bandwidth: BytesPerSec,
    pub(super) latency: Seconds,
}

impl Route {
    fn along(self, link: &GraphLink, dimension: &Dimension) -> Self {
        let one = link.bandwidth.unwrap_or(dimension.bandwidth).0 * dimension.efficiency;
        let bandwidth = self.bandwidth.0.min(one * f64::from(link.width));
        let latency = self.latency + link.latency.unwrap_or(dimension.latency);
        Self { hops: self.hops + 1, bandwidth: BytesPerSec(bandwidth), latency }
    }

    fn beats(&self, other: &Self) -> bool {
        self.hops == other.hops
            && (self.bandwidth > other.bandwidth
                || self.bandwidth == other.bandwidth && self.latency < other.latency)
    }
}

/// Number of links between two positions on an axis; with `wrap`, in the shorter direction.
fn around(from: u32, to: u32, size: u32, wrap: bool) -> u32 {
    let straight = from.abs_diff(to);
    if wrap { straight.min(size - straight) } else { straight }
}

/// Walks a grid, first axis first, and returns the number of steps. Each step gets its start
/// position and the index of its link there: twice the axis, plus one for the downward direction.
///
/// Exactly half-way around a ring, even positions go up and odd ones down, so that uniform traffic
/// loads both directions equally.
pub(crate) fn walk(
    from: u32,
    to: u32,
    shape: &[u32],
    wrap: bool,
    mut step: impl FnMut(u32, u32),
) -> u32 {
    let (mut stride, mut place, mut steps) = (1u32, from, 0);
    for (axis, &size) in shape.iter().enumerate() {
        let size = size.max(1);
        let (here, there) = (from / stride % size, to / stride % size);
        let ahead = (there + size - here) % size;
        let up = match wrap {
            // Two members share a single link: there is no other direction.
            true if size == 2 => true,
            true => 2 * ahead < size || 2 * ahead == size && here.is_multiple_of(2),
            false => there > here,
        };
        let count = if up { ahead } else { (size - ahead) % size };
        let mut at = here;
        for _ in 0..count {
            step(place, 2 * axis as u32 + u32::from(!up && size > 2));
            let next = if up { (at + 1) % size } else { (at + size - 1) % size };
            place = place + next * stride - at * stride;
            at = next;
        }
        steps += count;
        stride = stride.saturating_mul(size);
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
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

    fn link(a: u32, b: u32) -> GraphLink {
        GraphLink { between: [a, b], width: 1, bandwidth: None, latency: None }
    }

    fn hops(dimension: &Dimension, from: u32, to: u32) -> Option<u32> {
        dimension.route(from, to).map(|route| route.hops)
    }

    #[test]
    fn rings_go_the_shorter_way() {
        let ring = dimension(DimensionKind::Ring, 6);
        assert_eq!(hops(&ring, 0, 1), Some(1));
        assert_eq!(hops(&ring, 0, 5), Some(1));
        assert_eq!(hops(&ring, 0, 3), Some(3));
        assert_eq!(hops(&ring, 5, 1), Some(2));
        assert_eq!(ring.route(0, 3).unwrap().latency, Seconds(3e-6));
        assert_eq!(ring.route(0, 3).unwrap().bandwidth, BytesPerSec(50e9));
        assert_eq!(hops(&ring, 2, 2), None);
        assert_eq!(hops(&ring, 0, 6), None);
    }

    #[test]
    fn a_mesh_has_no_way_round() {
        let kind = |wrap| DimensionKind::Torus { shape: vec![4, 4], wrap };
        assert_eq!(hops(&dimension(kind(true), 16), 0, 15), Some(2));
        assert_eq!(hops(&dimension(kind(false), 16), 0, 15), Some(6));
    }

    #[test]
    fn a_graph_takes_the_shortest_then_the_widest_then_the_quickest_way() {
        // 0–1–3 narrow, 0–2–3 wide, and a longer route 0–4–5–3 that is wider still.
        let mut wide = [link(0, 2), link(2, 3)];
        wide.iter_mut().for_each(|link| link.width = 2);
        let mut long = [link(0, 4), link(4, 5), link(5, 3)];
        long.iter_mut().for_each(|link| link.width = 8);
        let mut links = vec![link(0, 1), link(1, 3)];
        links.extend(wide);
        links.extend(long);
        let route = dimension(DimensionKind::Graph { switches: 0, links: links.clone() }, 6)
            .route(0, 3)
            .unwrap();
        assert_eq!((route.hops, route.bandwidth), (2, BytesPerSec(100e9)));

        // Equally wide now: the one with the lower latency.
        links.iter_mut().for_each(|link| link.width = 1);
        links[0].latency = Some(Seconds(0.25e-6));
        let route = dimension(DimensionKind::Graph { switches: 0, links }, 6).route(0, 3).unwrap();
        assert_eq!(route.latency, Seconds(0.25e-6) + Seconds(1e-6));
    }

    #[test]
    fn a_point_without_a_device_passes_messages_on() {
        // Two pairs of devices, each pair behind a PCIe switch (points 4 and 5).
        let mut bridge = link(4, 5);
        bridge.bandwidth = Some(BytesPerSec(10e9));
        let links = vec![link(0, 4), link(1, 4), link(2, 5), link(3, 5), bridge];
        let host = dimension(DimensionKind::Graph { switches: 2, links }, 4);
        assert_eq!(hops(&host, 0, 1), Some(2));
        let far = host.route(0, 3).unwrap();
        assert_eq!((far.hops, far.bandwidth), (3, BytesPerSec(5e9)));
        assert_eq!(hops(&host, 0, 4), None, "a switch is not a member");
    }

    #[test]
    fn where_no_link_leads_there_is_no_way() {
        let links = vec![link(0, 1), link(2, 3), link(7, 9)];
        let split = dimension(DimensionKind::Graph { switches: 0, links }, 4);
        assert_eq!(hops(&split, 0, 3), None);
    }

    #[test]
    fn devices_behind_one_nic_share_it() {
        let nic = Dimension { devices_per_link: 2, ..dimension(DimensionKind::Switch, 4) };
        assert_eq!(nic.share(0), BytesPerSec(50e9));
        assert_eq!(nic.share(1), BytesPerSec(50e9));
        assert_eq!(nic.share(2), BytesPerSec(25e9));
        assert_eq!(nic.share(8), BytesPerSec(25e9), "the other six have NICs of their own");
    }

    #[test]
    fn members_under_one_leaf_do_not_share_its_uplink() {
        let tree = Some(Tree { leaf: 4, oversubscription: 3.0 });
        let fabric = Dimension { tree, devices_per_link: 2, ..dimension(DimensionKind::Switch, 8) };
        assert_eq!(fabric.sharing(0, 3), 2.0);
        assert_eq!(fabric.sharing(3, 4), 6.0);
        assert_eq!(dimension(DimensionKind::Switch, 8).sharing(3, 4), 1.0);
    }

    proptest! {
        /// A ring, a one-axis torus and the same ring written as a graph give equal routes.
        #[test]
        fn a_ring_written_three_ways_routes_the_same(size in 3u32..24, a in 0u32..24, b in 0u32..24) {
            let (a, b) = (a % size, b % size);
            let ring = dimension(DimensionKind::Ring, size);
            let torus = dimension(DimensionKind::Torus { shape: vec![size], wrap: true }, size);
            let links = (0..size).map(|i| link(i, (i + 1) % size)).collect();
            let graph = dimension(DimensionKind::Graph { switches: 0, links }, size);
            prop_assert_eq!(ring.route(a, b), torus.route(a, b));
            prop_assert_eq!(hops(&ring, a, b), hops(&graph, a, b));
            prop_assert_eq!(ring.route(a, b), ring.route(b, a));
        }

        /// Going through a third member is never shorter.
        #[test]
        fn hops_obey_the_triangle_inequality(a in 0u32..48, b in 0u32..48, c in 0u32..48, wrap: bool) {
            let torus = dimension(DimensionKind::Torus { shape: vec![4, 3, 4], wrap }, 48);
            let hops = |a, b| hops(&torus, a, b).unwrap_or(0);
            prop_assert!(hops(a, c) <= hops(a, b) + hops(b, c));
        }
    }
}
