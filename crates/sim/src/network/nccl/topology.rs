//! Topology of a group as NCCL detects it: rings inside each host, NICs between hosts.

use super::super::analytic::fewest_in_a_unit;
use super::rings;
use super::tuning::Generation;
use crate::cluster::{Cluster, Device, DimensionKind};
use crate::network::NoPath;
use paceline_plan::ids::Rank;

/// Links of a group as NCCL uses them. A host is a unit of the innermost dimension, so a rack whose
/// GPUs share one NVLink domain counts as one host, as it does for NCCL.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Topology {
    pub(super) generation: Generation,
    pub(super) ranks: u32,
    pub(super) hosts: u32,
    /// Number of members on the host with the fewest.
    pub(super) per_host: u32,
    /// Rings inside hosts; `None` if every host has one member.
    pub(super) inside: Option<Inside>,
    /// Total bandwidth of the rings over hosts, in bytes per second; `None` inside one host.
    pub(super) across: Option<f64>,
    /// Rate of copies within a device's memory, counting a byte read and written once.
    pub(super) copy: f64,
}

/// Rings inside a host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Inside {
    /// Total bandwidth of the rings, in bytes per second.
    pub(super) rate: f64,
    /// Number of rings.
    pub(super) rings: u32,
    /// True if a switch connects the GPUs, so that all rings use the same links.
    pub(super) switch: bool,
}

/// Bandwidth of one ring over a switch, in bytes per second: NCCL searches for as many rings as the
/// links carry at this rate (`speedArray` in `src/graph/search.cc`, `SM80_NVLINK_BW` in `topo.h`).
const RING_ON_A_SWITCH: f64 = 20e9;

/// Maximum number of rings: each gets two channels (`ncclTopoPostset` in `src/graph/connect.cc`),
/// of which there are at most 32 (`MAXCHANNELS` in `src/include/devcomm.h`).
const MOST_RINGS: u32 = 16;

impl Topology {
    /// Finds the links between a group's members; `None` if the description has no links that NCCL
    /// builds rings over.
    pub(super) fn of(cluster: &Cluster, members: &[Rank]) -> Result<Option<Self>, NoPath> {
        let Some(inner) = cluster.dimensions.first() else { return Ok(None) };
        let size = u64::from(inner.size.max(1));
        let host = |rank: &Rank| u64::from(rank.0) / size;
        let mut hosts: Vec<u64> = members.iter().map(host).collect();
        hosts.sort_unstable();
        hosts.dedup();
        let mut inside: Option<Inside> = None;
        let mut seen: Vec<Vec<u32>> = Vec::new();
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        for unit in sorted.chunk_by(|a, b| host(a) == host(b)).filter(|unit| unit.len() > 1) {
            let places: Vec<u32> =
                unit.iter().map(|rank| (u64::from(rank.0) % size) as u32).collect();
            if cluster.is_homogeneous() && seen.contains(&places) {
                continue;
            }
            let Some(found) = inside_host(cluster, unit, &places)? else { return Ok(None) };
            inside = Some(match inside {
                Some(slowest) if slowest.rate <= found.rate => slowest,
                Some(_) | None => found,
            });
            seen.push(places);
        }
        let device = slowest_device(cluster, members);
        let memory = device.sustained_memory_bandwidth().0;
        Ok(Some(Self {
            generation: Generation::of(device),
            ranks: u32::try_from(members.len()).unwrap_or(u32::MAX),
            hosts: u32::try_from(hosts.len()).unwrap_or(u32::MAX),
            per_host: u32::try_from(fewest_in_a_unit(members, size)).unwrap_or(u32::MAX),
            inside,
            across: across_hosts(cluster, members)?,
            copy: memory / 2.0,
        }))
    }

    /// Bandwidth of rings through all members: that of the narrowest part.
    pub(super) fn ring_rate(&self) -> f64 {
        self.inside_rate().min(self.across.unwrap_or(f64::INFINITY))
    }

    /// Bandwidth of rings inside a host; infinite if there are none.
    pub(super) fn inside_rate(&self) -> f64 {
        self.inside.map_or(f64::INFINITY, |inside| inside.rate)
    }

    /// Number of rings: as many as inside a host, or as many as NICs leaving it.
    pub(super) fn rings(&self) -> f64 {
        let rings = match (self.across, self.inside) {
            (None, Some(inside)) => inside.rings,
            (Some(_), _) | (None, None) => self.per_host.clamp(1, MOST_RINGS),
        };
        f64::from(rings)
    }
}

/// Slowest device of a group: the one with the lowest memory bandwidth.
fn slowest_device<'c>(cluster: &'c Cluster, members: &[Rank]) -> &'c Device {
    if cluster.heterogeneity.kinds.is_empty() {
        return &cluster.device;
    }
    let devices = members.iter().map(|&rank| cluster.device_of(rank));
    let rate = |device: &&Device| device.sustained_memory_bandwidth().0;
    devices.min_by(|a, b| rate(a).total_cmp(&rate(b))).unwrap_or(&cluster.device)
}

/// Rings among the members on one host.
fn inside_host(cluster: &Cluster, unit: &[Rank], places: &[u32]) -> Result<Option<Inside>, NoPath> {
    let dimension = &cluster.dimensions[0];
    match &dimension.kind {
        DimensionKind::Switch => Ok(narrowest(cluster, around(unit), &[1.0])?.map(|rate| {
            // Finite, positive and clamped to a small number: the cast is lossless.
            let wanted = (rate / RING_ON_A_SWITCH).round().clamp(1.0, f64::from(MOST_RINGS));
            Inside { rate, rings: wanted as u32, switch: true }
        })),
        DimensionKind::Graph { switches: 0, links } => {
            let found = rings::pack(places, links, dimension);
            let scales = unit.iter().map(|&rank| cluster.link_scale(rank, 0));
            let scale = scales.fold(1.0, f64::min);
            Ok(found.map(|(rings, rate)| Inside { rate: rate * scale, rings, switch: false }))
        }
        DimensionKind::Graph { .. }
        | DimensionKind::Ring
        | DimensionKind::FullyConnected
        | DimensionKind::Torus { .. } => Ok(None),
    }
}

/// Total bandwidth to the next host of one ring through each NIC of a host.
///
/// As in [`super::Analytic`]: between units of a dimension, a ring is as wide as the smallest
/// number of members in a unit, because NCCL rotates one ring for each of their NICs.
fn across_hosts(cluster: &Cluster, members: &[Rank]) -> Result<Option<f64>, NoPath> {
    let mut unit: u64 = 1;
    let mut widths = Vec::new();
    for dimension in &cluster.dimensions {
        widths.push(fewest_in_a_unit(members, unit) as f64);
        unit = unit.saturating_mul(u64::from(dimension.size));
    }
    let inner = u64::from(cluster.dimensions[0].size.max(1));
    let leaves = |(from, to): &(Rank, Rank)| u64::from(from.0) / inner != u64::from(to.0) / inner;
    narrowest(cluster, around(members).filter(leaves), &widths)
}

/// Pairs every member with its successor, and the last with the first.
fn around(members: &[Rank]) -> impl Iterator<Item = (Rank, Rank)> {
    members.iter().copied().zip(members.iter().copied().cycle().skip(1))
}

/// Bandwidth of the slowest of these paths, each scaled by the ring width of its dimension.
fn narrowest(
    cluster: &Cluster,
    ways: impl Iterator<Item = (Rank, Rank)>,
    widths: &[f64],
) -> Result<Option<f64>, NoPath> {
    let mut slowest: Option<f64> = None;
    for (from, to) in ways {
        let path = cluster.link(from, to).ok_or(NoPath { from, to })?;
        let width = widths.get(path.dimension).copied().unwrap_or(1.0);
        let rate = path.bandwidth.0 / path.sharing * width;
        slowest = Some(slowest.map_or(rate, |known| known.min(rate)));
    }
    Ok(slowest)
}
