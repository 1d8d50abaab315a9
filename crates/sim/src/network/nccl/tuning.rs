//! NCCL's constants: latencies by algorithm and protocol, and channel bandwidth by GPU generation.
//!
//! All are from `src/graph/tuning.cc` of NVIDIA/nccl, which stores latencies in microseconds and
//! rates in GB/s. Latencies inside a host are those of v2.12.12 (May 2022), tuned for Volta and
//! Ampere. Latencies across hosts, those of the Simple protocol in trees, and all constants of
//! later devices are from v2.30.7, which contains newer measurements.

use crate::cluster::Device;

/// Time from the last rank's arrival to the first byte, in seconds: kernel launch on every rank and
/// the first check of each other's flags.
///
/// NCCL's table has no such constant, because all candidates share it. It is the time of small
/// messages beyond the table: an all_reduce of 64 bytes on two hosts of eight A100s takes 38 µs in
/// nccl-tests with one process per GPU (Oracle Cloud's tutorial on clusters for Horovod), of which
/// the table of that time explains 28.
pub(super) const START: f64 = 10e-6;

/// Protocol by which a channel signals to its receiver that data has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// Every eight bytes carry a four-byte flag: lowest latency, at most half of the bandwidth.
    Ll,
    /// Every 128 bytes carry an eight-byte flag; requires atomic 128-byte stores.
    Ll128,
    /// One flag after each slice of data, behind a memory fence: full bandwidth, highest latency.
    Simple,
}

impl Protocol {
    pub(super) const ALL: [Self; 3] = [Self::Ll, Self::Ll128, Self::Simple];

    /// Fraction of 128 bytes that is data.
    pub(super) const LL128_PAYLOAD: f64 = 120.0 / 128.0;
}

/// Latencies of one algorithm by protocol, in microseconds.
pub(super) struct Latencies {
    base: [f64; 3],
    hop: [f64; 3],
    network: [f64; 3],
}

/// `baseLat`, and `hwLat` of NVLink and of the network, for rings.
pub(super) const RING: Latencies =
    Latencies { base: [3.6, 10.0, 8.4], hop: [0.47, 1.9, 3.4], network: [2.7, 4.0, 14.0] };

/// `baseLat`, and `hwLat` of NVLink and of the network, for trees.
pub(super) const TREE: Latencies =
    Latencies { base: [4.4, 4.4, 8.4], hop: [0.52, 1.25, 4.0], network: [5.0, 8.5, 14.0] };

/// Latency in seconds of a reduction in the switch (`NVLS`), and of one level of the tree over
/// hosts whose leaves are such reductions (`NVLSTree`).
pub(super) const IN_SWITCH: (f64, f64) = (25e-6, 20.9e-6);

/// Minimum time to post a ring step to a NIC (`getNetOverhead`); three times that in the Simple
/// protocol, which also posts a flush and a credit.
const POSTING: f64 = 1e-6;

impl Latencies {
    /// One-time latency of the algorithm.
    pub(super) const fn base(&self, protocol: Protocol) -> f64 {
        self.base[protocol as usize] * 1e-6
    }

    /// Latency of a step between two GPUs of a host.
    pub(super) const fn hop(&self, protocol: Protocol) -> f64 {
        self.hop[protocol as usize] * 1e-6
    }

    /// Latency of a step between two GPUs of a host while other steps go through NICs.
    pub(super) fn hop_with_network(&self, protocol: Protocol) -> f64 {
        let posts = if protocol == Protocol::Simple { 3.0 } else { 1.0 };
        self.hop(protocol).max(POSTING * posts)
    }

    /// Latency of a step between two hosts.
    pub(super) const fn network(&self, protocol: Protocol) -> f64 {
        self.network[protocol as usize] * 1e-6
    }
}

/// GPU generations with different NCCL constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Generation {
    Volta,
    Ampere,
    Hopper,
    Blackwell,
}

impl Generation {
    /// Derives the generation from the matrix units that each one added: bf16 with Ampere, fp8 with
    /// Hopper. Blackwell added smaller dtypes, which no description names, and more than doubled
    /// the rate of fp8.
    pub(super) fn of(device: &Device) -> Self {
        match (device.peak.bf16, device.peak.fp8) {
            (None, _) => Self::Volta,
            (Some(_), None) => Self::Ampere,
            (Some(_), Some(fp8)) if fp8.0 < 3e15 => Self::Hopper,
            (Some(_), Some(_)) => Self::Blackwell,
        }
    }

    /// Maximum bandwidth of LL over all channels (`llMaxBws`: one host, two, more).
    pub(super) fn ll_most(self, hosts: u32) -> f64 {
        let rates: [f64; 3] = match self {
            Self::Volta => [39.0, 39.0, 20.4],
            Self::Ampere => [87.7, 22.5, 19.0],
            Self::Hopper => [141.0, 45.0, 35.0],
            Self::Blackwell => [282.0, 90.0, 70.0],
        };
        rates[by_hosts(hosts)] * 1e9
    }

    /// Bandwidth of one channel in LL: that of a host divided by the channels of its rings.
    pub(super) fn ll_channel(self) -> f64 {
        let channels = match self {
            Self::Volta => 12.0,
            Self::Ampere => 24.0,
            Self::Hopper | Self::Blackwell => 32.0,
        };
        self.ll_most(1) / channels
    }

    /// Bandwidth of one channel in LL128 (`perChMaxRingLL128Bws`).
    pub(super) const fn ll128_channel(self) -> f64 {
        match self {
            Self::Volta | Self::Ampere => 20e9,
            Self::Hopper => 36.7e9,
            Self::Blackwell => 40e9,
        }
    }

    /// Bandwidth of one channel in a tree (`perChMaxTreeBws`: one host, two, more).
    pub(super) fn tree_channel(self, hosts: u32) -> f64 {
        let rates: [f64; 3] = match self {
            Self::Volta => [26.5, 18.5, 10.0],
            Self::Ampere => [24.0, 23.6, 17.8],
            Self::Hopper => [38.7, 41.4, 36.0],
            Self::Blackwell => [70.0, 42.8, 24.0],
        };
        rates[by_hosts(hosts)] * 1e9
    }

    /// Fraction of link bandwidth that reductions inside NVSwitches reach (`nvlsEfficiency`);
    /// `None` before the third NVSwitch generation, which came with Hopper.
    pub(super) const fn in_switch(self) -> Option<f64> {
        match self {
            Self::Volta | Self::Ampere => None,
            Self::Hopper => Some(0.85),
            Self::Blackwell => Some(0.74),
        }
    }

    /// Latency factor of the Simple protocol in a ring over hosts once its messages fill more than
    /// one packet ("plateau effect" in `ncclTopoGetAlgoTime`).
    pub(super) const fn plateau(self) -> f64 {
        match self {
            Self::Volta => 1.9,
            Self::Ampere | Self::Hopper | Self::Blackwell => 1.4,
        }
    }
}

fn by_hosts(hosts: u32) -> usize {
    hosts.clamp(1, 3) as usize - 1
}

/// Fraction of a tree's rate that medium-sized vectors reach, by protocol, for 64 bytes and each
/// doubling (`treeCorrectionFactor`); larger ones reach the full rate.
const TREE_SHARE: [[f64; 23]; 3] = [
    [
        1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8,
        0.9, 1.0, 1.0, 1.0, 1.0,
    ],
    [
        1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9,
        0.9, 0.9, 0.9, 1.0, 1.0,
    ],
    [
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8,
        0.7, 0.7, 0.8, 0.9, 0.9,
    ],
];

/// Fraction of a tree's rate that a vector of `bytes` bytes reaches.
pub(super) fn tree_share(protocol: Protocol, bytes: f64) -> f64 {
    let doublings = (bytes / 64.0).max(1.0).log2().floor();
    TREE_SHARE[protocol as usize].get(doublings as usize).copied().unwrap_or(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::preset;

    #[test]
    fn a_device_belongs_to_the_generation_of_its_newest_unit() {
        let generation = |name: &str| Generation::of(&preset::get(name).unwrap().device);
        assert_eq!(generation("dgx1-v100"), Generation::Volta);
        assert_eq!(generation("dgx-a100"), Generation::Ampere);
        assert_eq!(generation("dgx-a800"), Generation::Ampere);
        assert_eq!(generation("dgx-h100"), Generation::Hopper);
        assert_eq!(generation("dgx-h200"), Generation::Hopper);
        assert_eq!(generation("dgx-b200"), Generation::Blackwell);
        assert_eq!(generation("gb200-nvl72"), Generation::Blackwell);
    }

    #[test]
    fn trees_lose_most_at_medium_sizes() {
        assert_eq!(tree_share(Protocol::Simple, 0.0), 0.9);
        assert_eq!(tree_share(Protocol::Ll128, f64::from(1 << 20)), 0.6);
        assert_eq!(tree_share(Protocol::Ll128, 1e18), 1.0);
    }
}
