//! What a message takes over the wires of a phase.

use super::case::{Dimension, Kind};

/// The wires between the ranks of a group, and what packets of given sizes take on them.
#[derive(Clone, Debug)]
pub(super) struct Wires {
    /// The dimensions that the group spans: one, or all for an algorithm over all ranks.
    legs: Vec<Leg>,
}

#[derive(Clone, Debug)]
struct Leg {
    kind: Kind,
    size: u32,
    latency_ns: f64,
    /// What the bytes of a packet of each size take, before any rounding.
    serial_ns: Vec<f64>,
}

impl Wires {
    pub(super) fn new(dims: &[Dimension], sizes: &[u64]) -> Wires {
        let leg = |dim: &Dimension| {
            let bytes_per_ns = dim.bandwidth_gibps * f64::from(1 << 30) / 1e9;
            Leg {
                kind: dim.kind,
                size: dim.size,
                latency_ns: dim.latency_ns,
                serial_ns: sizes.iter().map(|&bytes| bytes as f64 / bytes_per_ns).collect(),
            }
        };
        Wires { legs: dims.iter().map(leg).collect() }
    }

    /// The whole delay of a packet of size number `size` to the rank `offset` further in the
    /// group, if no other packet is in its way.
    ///
    /// A message uses only the first dimension in which the two ranks differ. As all ranks of the
    /// group are numbered through, that depends on their difference alone.
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

    /// How long a packet keeps one link of the first dimension from the next packet.
    pub(super) fn busy_ns(&self, size: usize) -> u64 {
        self.legs[0].serial_ns[size] as u64
    }

    /// When a packet that enters a link of the first dimension has left it.
    pub(super) fn hop_ns(&self, size: usize) -> u64 {
        let leg = &self.legs[0];
        (leg.latency_ns + leg.serial_ns[size]) as u64
    }

    /// The longest delay that any packet can have by itself; infinite rather than wrong.
    pub(super) fn longest_ns(&self) -> f64 {
        let longest = |leg: &Leg| {
            let hops = leg.kind.hops(leg.size, leg.size / 2);
            let serial = leg.serial_ns.iter().copied().fold(0.0, f64::max);
            // Stored and forwarded whole at every hop.
            f64::from(hops) * (leg.latency_ns + serial)
        };
        self.legs.iter().map(longest).fold(0.0, f64::max)
    }
}

impl Kind {
    /// Links on the way between two ranks that are `distance` apart, both ways round.
    pub(super) fn hops(self, size: u32, distance: u32) -> u32 {
        match self {
            Kind::Ring => distance.min(size - distance),
            Kind::Switch => 2,
            Kind::FullyConnected => 1,
        }
    }
}
