//! Message delays over the links of a phase.

use super::case::{Dimension, Kind};

/// Links between the ranks of a group, and packet delays on them by size.
#[derive(Clone, Debug)]
pub(super) struct PhaseDelays {
    /// Dimensions that the group spans: one, or all for an algorithm over all ranks.
    legs: Vec<Leg>,
}

#[derive(Clone, Debug)]
struct Leg {
    kind: Kind,
    size: u32,
    latency_ns: f64,
    /// Transfer time of the bytes, by packet size, before any rounding.
    serial_ns: Vec<f64>,
}

impl PhaseDelays {
    pub(super) fn new(dims: &[Dimension], sizes: &[u64]) -> PhaseDelays {
        let leg = |dim: &Dimension| {
            let bytes_per_ns = dim.bandwidth_gibps * f64::from(1 << 30) / 1e9;
            Leg {
                kind: dim.kind,
                size: dim.size,
                latency_ns: dim.latency_ns,
                serial_ns: sizes.iter().map(|&bytes| bytes as f64 / bytes_per_ns).collect(),
            }
        };
        PhaseDelays { legs: dims.iter().map(leg).collect() }
    }

    /// Total delay of a packet of size index `size` to the rank at distance `offset` in the group,
    /// without congestion.
    ///
    /// A message uses only the first dimension in which the two ranks differ. With consecutive rank
    /// numbers in the group, that depends only on their difference.
    pub(super) fn delay_ns(&self, offset: u32, size: usize) -> u64 {
        let mut offset = offset;
        for leg in &self.legs {
            let distance = offset % leg.size;
            if distance != 0 {
                let hops = leg.kind.hops(leg.size, distance);
                return (f64::from(hops) * leg.latency_ns + leg.serial_ns[size]) as u64;
            }
            offset /= leg.size;
        }
        0
    }

    /// Time for which a packet occupies a link of the first dimension.
    pub(super) fn busy_ns(&self, size: usize) -> u64 {
        self.legs[0].serial_ns[size] as u64
    }

    /// Time from entering to leaving a link of the first dimension.
    pub(super) fn hop_ns(&self, size: usize) -> u64 {
        let leg = &self.legs[0];
        (leg.latency_ns + leg.serial_ns[size]) as u64
    }

    /// Upper bound on the delay of any packet without congestion; infinite on overflow.
    pub(super) fn longest_ns(&self) -> f64 {
        let longest = |leg: &Leg| {
            let hops = leg.kind.hops(leg.size, leg.size / 2);
            let serial = leg.serial_ns.iter().copied().fold(0.0, f64::max);
            // Stored and forwarded as a whole at every hop.
            f64::from(hops) * (leg.latency_ns + serial)
        };
        self.legs.iter().map(longest).fold(0.0, f64::max)
    }
}

impl Kind {
    /// Number of links between two ranks at `distance`, in the shorter direction.
    pub(super) fn hops(self, size: u32, distance: u32) -> u32 {
        match self {
            Kind::Ring => distance.min(size - distance),
            Kind::Switch => 2,
            Kind::FullyConnected => 1,
        }
    }
}
