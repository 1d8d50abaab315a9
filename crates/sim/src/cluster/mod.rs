//! Cluster model: devices connected by dimensions, from the inside out.
//!
//! A dimension is one layer of the network: NVLink inside a host, InfiniBand across hosts. The
//! number of devices is the product of the dimensions' sizes. Rank r runs on device r, whose
//! coordinates count through the dimensions innermost first:
//!
//! ```text
//! dgx-a100:2, dimensions [nvlink of 8, infiniband of 2]
//! rank        0     1   …   7     8     9   …   15
//! coordinates (0,0) (1,0) … (7,0) (0,1) (1,1) … (7,1)
//! ```
//!
//! Hosts are a second, coarser division of the same ranks: consecutive ranges of `devices / hosts`.
//! They usually end at a dimension boundary, but need not: an NVL72 rack is one NVLink dimension of
//! 72 devices over 18 hosts. Therefore the host count is stated explicitly, and everything else
//! about hosts follows from it.
//!
//! All devices, and all links of a dimension, are equal except for the overrides in
//! [`Heterogeneity`]: other kinds of devices, slower links, stragglers, changing bandwidths.

mod device;
mod dimension;
mod heterogeneity;
mod host;
pub mod measured;
mod parse;
pub mod preset;
mod print;
mod quantity;
mod resize;
mod selector;

pub use device::{Device, FlopsPerSec, Peak};
pub(crate) use dimension::walk;
pub use dimension::{Dimension, DimensionKind, GraphLink, Tree};
pub use heterogeneity::{
    BandwidthChange, BandwidthSchedule, DeviceOverride, Heterogeneity, LinkOverride, Straggler,
};
pub(crate) use heterogeneity::{SpeedProfile, through};
pub(crate) use host::Gate;
pub use host::{Control, HostPorts, Protocol};
pub use measured::Measured;
pub use selector::{IndexRange, Selector};

use paceline_plan::ids::Rank;
use paceline_plan::units::{BytesPerSec, Seconds};
use serde::Serialize;
use std::fmt;

/// Devices, their network, and their assignment to hosts.
///
/// [`Cluster::parse`] and [`preset::get`] guarantee: at least one dimension, no size of zero, at
/// most [`Cluster::MAX_DEVICES`] devices, and a host count that divides them. Rates are positive
/// and finite, efficiencies from 1e-6 to 1, and in graphs every device reaches every other.
/// Code that builds a cluster by hand must guarantee the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cluster {
    /// Name in reports, with the host count if a preset was scaled.
    pub name: String,
    /// Number of hosts; devices are divided evenly among them, in rank order.
    pub hosts: u32,
    /// Default kind of device.
    pub device: Device,
    /// Network dimensions, innermost first.
    pub dimensions: Vec<Dimension>,
    /// Measurements of such a host; they replace the model as far as they go.
    pub measured: Option<Measured>,
    /// Host model between devices and the inter-host fabric, if the fabric's rates follow from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_ports: Option<HostPorts>,
    /// Overrides of the defaults.
    #[serde(skip_serializing_if = "Heterogeneity::is_empty")]
    pub heterogeneity: Heterogeneity,
}

/// A host of a cluster, counted in rank order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct HostId(pub u32);

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Path of a message between two ranks on otherwise unused links.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Path {
    /// Index into [`Cluster::dimensions`] of the dimension that carries the message.
    pub dimension: usize,
    /// Number of latencies paid: links crossed, except that a switch counts as 1.
    pub hops: u32,
    /// Achievable bandwidth of the narrowest link of the path, in one direction.
    pub bandwidth: BytesPerSec,
    /// Time until the first byte arrives.
    pub latency: Seconds,
    /// Number of devices that share that link if all send at once.
    pub sharing: f64,
    /// Fraction of the dimension's bandwidth left by the end links and host ports; already included
    /// in `bandwidth`.
    pub scale: f64,
}

impl Cluster {
    /// Maximum number of devices: more than any machine has, and no product of them overflows.
    pub const MAX_DEVICES: u64 = 1 << 24;

    /// Number of devices: the product of the dimensions' sizes.
    pub fn devices(&self) -> u64 {
        self.dimensions.iter().fold(1, |product, d| product.saturating_mul(u64::from(d.size)))
    }

    /// This machine with one device for each of `ranks` ranks. If they outnumber its devices they
    /// share them, so that each has a proportional share of compute rate and memory bandwidth.
    ///
    /// Only the innermost dimension grows: the cores of one host are shared.
    pub fn with_oversubscribed_cores(&self, ranks: u32) -> Self {
        let mut oversubscribed = self.clone();
        let (ranks, devices) = (ranks.max(1), self.devices());
        let Some(cores) = oversubscribed.dimensions.first_mut() else { return oversubscribed };
        cores.size = ranks;
        let share = (devices as f64 / f64::from(ranks)).min(1.0);
        let device = &mut oversubscribed.device;
        let Peak { f32, tf32, bf16, f16, fp8, fp4 } = &mut device.peak;
        let narrow = [tf32, bf16, f16, fp8, fp4].map(Option::as_mut);
        for rate in [Some(f32)].into_iter().chain(narrow) {
            rate.into_iter().for_each(|rate| rate.0 *= share);
        }
        device.memory_bandwidth.0 *= share;
        device.launch_overhead = device.launch_overhead * (1.0 / share);
        oversubscribed
    }

    /// Number of devices per host.
    pub fn devices_per_host(&self) -> u64 {
        (self.devices() / u64::from(self.hosts.max(1))).max(1)
    }

    /// Host of a rank.
    pub fn host(&self, rank: Rank) -> HostId {
        let host = u64::from(rank.0) / self.devices_per_host();
        HostId(u32::try_from(host).unwrap_or(u32::MAX))
    }

    /// Coordinates of a rank in each dimension, innermost first.
    ///
    /// A rank outside the cluster wraps around to a position inside it.
    pub fn coordinates(&self, rank: Rank) -> Vec<u32> {
        let mut rest = rank.0;
        self.dimensions
            .iter()
            .map(|d| {
                let size = d.size.max(1);
                let here = rest % size;
                rest /= size;
                here
            })
            .collect()
    }

    /// Path from one rank to another. `None` if both are the same, or one is outside the cluster.
    ///
    /// The message travels only in the outermost dimension in which the two differ. Between GPUs
    /// with different local numbers on different hosts it therefore crosses the fabric once and no
    /// NVLink. Every device has its own access to the fabric, and an inner crossing would run
    /// concurrently at several times the fabric's rate. (ASTRA-sim's unaware backend takes the
    /// innermost dimension instead.)
    ///
    /// A switch's stated latency is from device to device, including both links and the switch, so
    /// it counts as one hop. On rings and tori the shorter direction is taken.
    pub fn link(&self, a: Rank, b: Rank) -> Option<Path> {
        let (index, from, to) = self.crossing(a, b)?;
        let route = self.dimensions[index].route(from, to)?;
        let (scale, delay) = self.link_override(a, b, index);
        let (narrowing, cost) = self.ports(index);
        let (scale, delay) = (scale * narrowing, delay + cost);
        Some(Path {
            dimension: index,
            hops: route.hops,
            bandwidth: BytesPerSec(route.bandwidth.0 * scale),
            latency: (route.latency + delay).max(Seconds::ZERO),
            sharing: self.dimensions[index].sharing(from, to),
            scale,
        })
    }

    /// Bandwidth fraction and added latency of a path due to overrides. The slower end counts, and
    /// on rings and tori all links in between.
    fn link_override(&self, a: Rank, b: Rank, index: usize) -> (f64, Seconds) {
        let Heterogeneity { links, schedules, .. } = &self.heterogeneity;
        if links.is_empty() && schedules.is_empty() {
            return (1.0, Seconds::ZERO);
        }
        let mut scale = self.link_scale(a, index).min(self.link_scale(b, index));
        let dimension = &self.dimensions[index];
        let shape = match &dimension.kind {
            DimensionKind::Ring => Some((vec![dimension.size], true)),
            DimensionKind::Torus { shape, wrap } => Some((shape.clone(), *wrap)),
            DimensionKind::Switch | DimensionKind::FullyConnected | DimensionKind::Graph { .. } => {
                None
            }
        };
        if let (Some((shape, wrap)), Some((_, from, to))) = (shape, self.crossing(a, b)) {
            let sizes = self.dimensions[..index].iter().map(|d| d.size);
            let inner = sizes.fold(1u32, u32::saturating_mul);
            walk(from, to, &shape, wrap, |place, _| {
                let there = a.0 - from * inner + place * inner;
                scale = scale.min(self.link_scale(Rank(there), index));
            });
        }
        (scale, self.link_delay(a, index).max(self.link_delay(b, index)))
    }

    /// The outermost dimension in which two ranks differ, and their positions in it.
    pub(crate) fn crossing(&self, a: Rank, b: Rank) -> Option<(usize, u32, u32)> {
        if u64::from(a.0.max(b.0)) >= self.devices() {
            return None;
        }
        let (mut rest_a, mut rest_b) = (a.0, b.0);
        let mut outermost = None;
        for (index, dimension) in self.dimensions.iter().enumerate() {
            let (from, to) = (rest_a % dimension.size, rest_b % dimension.size);
            (rest_a, rest_b) = (rest_a / dimension.size, rest_b / dimension.size);
            if from != to {
                outermost = Some((index, from, to));
            }
        }
        outermost
    }

    /// Number of distinct coordinates of a group in each dimension, innermost first.
    ///
    /// A tensor-parallel group of one DGX host spans `[8, 1]`. The data-parallel group with one
    /// rank on each of 16 hosts spans `[1, 16]`, so it can use one NIC per host. All 128 ranks span
    /// `[8, 16]` and can use eight.
    pub fn span(&self, ranks: &[Rank]) -> Vec<u32> {
        let mut rests: Vec<u32> = ranks.iter().map(|rank| rank.0).collect();
        self.dimensions
            .iter()
            .map(|d| {
                let size = d.size.max(1);
                let coordinates = rests.iter().map(|rest| rest % size).collect();
                rests.iter_mut().for_each(|rest| *rest /= size);
                distinct(coordinates)
            })
            .collect()
    }

    /// Number of distinct hosts of a group.
    pub fn hosts_of(&self, ranks: &[Rank]) -> u32 {
        distinct(ranks.iter().map(|&rank| self.host(rank).0).collect())
    }
}

fn distinct(mut values: Vec<u32>) -> u32 {
    values.sort_unstable();
    values.dedup();
    u32::try_from(values.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(values: impl IntoIterator<Item = u32>) -> Vec<Rank> {
        values.into_iter().map(Rank).collect()
    }

    #[test]
    fn ranks_fill_the_innermost_dimension_first() {
        let cluster = preset::get("dgx-a100:4").unwrap();
        assert_eq!(cluster.devices(), 32);
        assert_eq!(cluster.devices_per_host(), 8);
        assert_eq!(cluster.coordinates(Rank(0)), [0, 0]);
        assert_eq!(cluster.coordinates(Rank(7)), [7, 0]);
        assert_eq!(cluster.coordinates(Rank(8)), [0, 1]);
        assert_eq!(cluster.coordinates(Rank(31)), [7, 3]);
        assert_eq!(cluster.host(Rank(7)), HostId(0));
        assert_eq!(cluster.host(Rank(8)), HostId(1));
    }

    #[test]
    fn a_host_need_not_be_a_dimension() {
        let rack = preset::get("gb200-nvl72").unwrap();
        assert_eq!((rack.devices(), rack.hosts, rack.devices_per_host()), (72, 18, 4));
        assert_eq!(rack.host(Rank(71)), HostId(17));
        let across_hosts = rack.link(Rank(0), Rank(71)).unwrap();
        assert_eq!(across_hosts.dimension, 0, "still NVLink, though the hosts differ");
    }

    #[test]
    fn a_message_travels_in_the_outermost_dimension_that_differs() {
        let cluster = preset::get("dgx-a100:2").unwrap();
        let [nvlink, fabric] = &cluster.dimensions[..] else { panic!("two dimensions") };
        let inside = cluster.link(Rank(0), Rank(5)).unwrap();
        assert_eq!((inside.dimension, inside.hops), (0, 1));
        assert_eq!(inside.bandwidth, nvlink.achievable());
        assert_eq!(inside.latency, nvlink.latency);
        for other in [8, 9, 15] {
            let across = cluster.link(Rank(0), Rank(other)).unwrap();
            assert_eq!((across.dimension, across.hops), (1, 1));
            assert_eq!(across.bandwidth, fabric.achievable());
            assert_eq!(across.latency, fabric.latency);
        }
    }

    #[test]
    fn there_is_no_way_to_itself_or_out_of_the_cluster() {
        let cluster = preset::get("dgx-a100:2").unwrap();
        assert_eq!(cluster.link(Rank(3), Rank(3)), None);
        assert_eq!(cluster.link(Rank(0), Rank(16)), None);
        assert_eq!(cluster.link(Rank(u32::MAX), Rank(0)), None);
        assert_eq!(cluster.coordinates(Rank(u32::MAX)), [7, 1]);
    }

    #[test]
    fn the_torus_takes_the_short_way_round_on_each_axis() {
        let pod = preset::get("tpu-v4").unwrap();
        let hops = |a: u32, b: u32| pod.link(Rank(a), Rank(b)).unwrap().hops;
        assert_eq!(hops(0, 1), 1);
        assert_eq!(hops(0, 15), 1, "around the first axis of 16");
        assert_eq!(hops(0, 8), 8);
        assert_eq!(hops(0, 16), 1, "one step along the second axis");
        assert_eq!(hops(0, 8 + 8 * 16 + 8 * 256), 24, "the diameter of 16×16×16");
        let far = pod.link(Rank(0), Rank(8)).unwrap();
        assert_eq!(far.latency, pod.dimensions[0].latency * 8.0);
    }

    #[test]
    fn the_cube_mesh_of_a_dgx_1_is_not_uniform() {
        let host = preset::get("dgx1-v100").unwrap();
        let path = |a: u32, b: u32| host.link(Rank(a), Rank(b)).unwrap();
        let (one, two) = (path(0, 1), path(0, 3));
        assert_eq!((one.hops, two.hops), (1, 1));
        assert_eq!(two.bandwidth.0, one.bandwidth.0 * 2.0, "two bonded NVLinks");
        let through = path(0, 5);
        assert_eq!(through.hops, 2, "no direct NVLink between 0 and 5");
        assert_eq!(through.bandwidth, one.bandwidth, "either way has a single link in it");
    }

    #[test]
    fn a_group_spans_what_its_coordinates_span() {
        let cluster = preset::get("dgx-a100:16").unwrap();
        let tensor = ranks(8..16);
        let data = ranks((0..16).map(|host| host * 8 + 3));
        let everyone = ranks(0..128);
        assert_eq!(cluster.span(&tensor), [8, 1]);
        assert_eq!(cluster.span(&data), [1, 16]);
        assert_eq!(cluster.span(&everyone), [8, 16]);
        assert_eq!(cluster.span(&[]), [0, 0]);
        assert_eq!(cluster.hosts_of(&tensor), 1);
        assert_eq!(cluster.hosts_of(&data), 16);
        assert_eq!(cluster.hosts_of(&ranks([0, 9, 17])), 3);
    }

    #[test]
    fn ranks_that_outnumber_cores_take_turns() {
        let laptop = preset::get("laptop").unwrap();
        let cores = laptop.devices() as u32;
        let few = laptop.with_oversubscribed_cores(1);
        assert_eq!((few.devices(), &few.device), (1, &laptop.device));
        let many = laptop.with_oversubscribed_cores(4 * cores);
        assert_eq!(many.devices(), u64::from(4 * cores));
        assert_eq!(many.device.peak.f32.0, laptop.device.peak.f32.0 / 4.0);
        assert_eq!(many.device.memory_bandwidth.0, laptop.device.memory_bandwidth.0 / 4.0);
        assert_eq!(laptop.with_oversubscribed_cores(0).devices(), 1);
    }

    #[test]
    fn sizes_beyond_counting_saturate() {
        let mut cluster = preset::get("dgx-a100").unwrap();
        for _ in 0..3 {
            cluster.dimensions.push(Dimension { size: u32::MAX, ..cluster.dimensions[1].clone() });
        }
        assert_eq!(cluster.devices(), u64::MAX);
        assert_eq!(cluster.host(Rank(u32::MAX)), HostId(0));
    }
}
