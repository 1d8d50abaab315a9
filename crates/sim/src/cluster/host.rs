//! Host model between a device and the inter-host fabric: NICs, PCIe, host memory, protocol.
//!
//! ```text
//! device ── PCIe ──┬── PCIe switch ──── root ── host memory, cores
//! device ── PCIe ──┘        │             │
//!                          NIC    or     NIC ────► fabric
//! ```
//!
//! The inter-host dimension then states no rates of its own; they follow from this model. A message
//! passes a series of [`Gate`]s on its way out and the same on its way in, each shared by some
//! neighbouring devices:
//!
//! - **NIC.** Its rate times the payload fraction of each packet.
//! - **PCIe.** The device's own link; and if the NIC is not behind the same switch, or data goes
//!   through host memory, the switch's link to the root. Staged data crosses that link to memory
//!   and, if the NIC is behind it, once more on its way to the NIC; received data does the
//!   same in reverse, so that each direction carries everything twice.
//! - **Memory.** Staged data is written and read once on the way out and once on the way in.
//! - **Cores.** TCP data is copied and processed by cores, in both directions.
//!
//! All devices of a host are assumed to send and receive at once, as they do in training.

use super::{Cluster, DimensionKind};
use paceline_plan::units::{BytesPerSec, Seconds};
use serde::Serialize;

/// Connection of a host's devices to the fabric.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostPorts {
    /// Index into [`Cluster::dimensions`] of the inter-host dimension.
    pub dimension: usize,
    /// Number of NICs per host, each serving the same number of neighbouring devices.
    pub nics: u32,
    /// Datasheet bandwidth of one NIC in one direction.
    pub nic_bandwidth: BytesPerSec,
    /// Fraction of a NIC's rate that payload gets, as measured; the headers' share if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub efficiency: Option<f64>,
    /// Protocol on the NICs.
    pub protocol: Protocol,
    /// Bytes of a packet after the Ethernet header: including TCP/IP headers for TCP, payload only
    /// for RDMA.
    pub mtu: u32,
    /// Overhead per message in addition to its bytes and the fabric's latency: system calls, work
    /// queues, completions.
    pub message_overhead: Seconds,
    /// Processor of the control plane, whose hand-off then delays every message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<Control>,
    /// True if NICs access device memory directly; otherwise data is staged in host memory.
    pub gpudirect: bool,
    /// Bandwidth of one PCIe link in one direction; unlimited if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie_bandwidth: Option<BytesPerSec>,
    /// Number of neighbouring devices behind one PCIe switch, which share its link to the root.
    pub devices_per_switch: u32,
    /// True if NICs are behind these switches too, false if at the root.
    pub nics_on_switches: bool,
    /// Host memory bandwidth, reads plus writes; unlimited if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bandwidth: Option<BytesPerSec>,
    /// Number of cores that process TCP data; unlimited if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// Bandwidth that one of them processes.
    pub core_bandwidth: BytesPerSec,
}

/// Network protocol on the NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Kernel TCP: packets with Ethernet, IP and TCP headers, copied by cores.
    Tcp,
    /// RDMA by the NIC alone: packets with Ethernet, IP, UDP and InfiniBand headers (RoCE v2).
    Rdma,
    /// RDMA whose work requests the device triggers in stream order (GPUDirect Async; Agostini,
    /// Rossetti and Potluri, "GPUDirect Async: Exploring GPU synchronous communication techniques
    /// for InfiniBand clusters", JPDC 2018).
    #[serde(rename = "gpudirect-async")]
    GpuDirectAsync,
    /// Connectionless reads of at most 4 KiB that the receiving side solicits, encrypted by the NIC
    /// (Singhvi et al., "1RMA: Re-envisioning Remote Memory Access for Multi-tenant Datacenters",
    /// SIGCOMM 2020).
    #[serde(rename = "1rma")]
    OneRma,
}

/// Processor of the control plane: it notices that data is ready, and starts the NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Control {
    /// A core waits for the device's stream, then posts the work request.
    Cpu,
    /// The device rings the NIC's doorbell in stream order.
    Gpu,
}

impl Control {
    /// All processors, in the order of cluster files.
    pub(super) const ALL: [Self; 2] = [Self::Cpu, Self::Gpu];

    /// Name in cluster files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
        }
    }

    /// Time from the end of the kernel to the work request, an estimate: a core that synchronises
    /// with a stream sees its end after several microseconds; a doorbell write over PCIe takes less
    /// than one.
    const fn hand_off(self) -> Seconds {
        match self {
            Self::Cpu => Seconds(7e-6),
            Self::Gpu => Seconds(0.8e-6),
        }
    }
}

impl Protocol {
    /// All protocols, in the order of cluster files.
    pub(super) const ALL: [Self; 4] = [Self::Tcp, Self::Rdma, Self::GpuDirectAsync, Self::OneRma];

    /// Name in cluster files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
            Self::GpuDirectAsync => "gpudirect-async",
            Self::OneRma => "1rma",
        }
    }

    /// Processor of the control plane if the file names none; `None` leaves its hand-off to the
    /// dimension's latency.
    pub(super) const fn control(self) -> Option<Control> {
        match self {
            Self::GpuDirectAsync => Some(Control::Gpu),
            Self::Tcp | Self::Rdma | Self::OneRma => None,
        }
    }

    /// Returns true if NICs can access device memory.
    pub(super) const fn reaches_devices(self) -> bool {
        !matches!(self, Self::Tcp)
    }

    /// Default bytes of a packet: Ethernet's MTU, and the largest of InfiniBand.
    pub(super) const fn mtu(self) -> u32 {
        match self {
            Self::Tcp => 1500,
            Self::Rdma | Self::GpuDirectAsync | Self::OneRma => 4096,
        }
    }

    /// Headers within the MTU: IP and TCP with time stamps (RFC 791, 9293, 7323); none for RDMA.
    pub(super) const fn inner_headers(self) -> u32 {
        match self {
            Self::Tcp => 20 + 20 + 12,
            Self::Rdma | Self::GpuDirectAsync | Self::OneRma => 0,
        }
    }

    /// Bytes transmitted in addition to the MTU. Ethernet (IEEE 802.3): 8 preamble, 14 header, 4
    /// check and 12 gap. RoCE v2 (InfiniBand specification, annex A17): 20 IP, 8 UDP, 12 transport
    /// header and 4 check. 1RMA, an estimate: 20 IP, 8 UDP, 16 of a command and its
    /// acknowledgement, 16 of authentication.
    const fn outer_headers(self) -> u32 {
        const ETHERNET: u32 = 8 + 14 + 4 + 12;
        match self {
            Self::Tcp => ETHERNET,
            Self::Rdma | Self::GpuDirectAsync => ETHERNET + 20 + 8 + 12 + 4,
            Self::OneRma => ETHERNET + 20 + 8 + 16 + 16,
        }
    }

    /// Default overhead per message, an estimate: the kernel path from `send` to `recv` takes some
    /// ten microseconds more than the link, a work request about one.
    pub(super) const fn message_overhead(self) -> Seconds {
        match self {
            Self::Tcp => Seconds(12e-6),
            Self::Rdma | Self::GpuDirectAsync | Self::OneRma => Seconds(1e-6),
        }
    }
}

/// Default TCP bandwidth of one core: 42 Gbit/s with all kernel offloads (Cai et al.,
/// "Understanding host network stack overheads", SIGCOMM 2021, section 3.1).
pub(super) const CORE_BANDWIDTH: BytesPerSec = BytesPerSec(42e9 / 8.0);

/// A bandwidth limit between a device and the fabric, separate for each direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gate {
    /// Capacity in bytes per second, in one direction.
    pub(crate) capacity: f64,
    /// Number of neighbouring devices of a host that share it.
    pub(crate) devices: u32,
}

impl HostPorts {
    /// Fraction of a NIC's rate left for payload: as measured, or after headers.
    pub fn payload(&self) -> f64 {
        let Self { protocol, mtu, efficiency, .. } = *self;
        if let Some(measured) = efficiency {
            return measured;
        }
        let payload = mtu.saturating_sub(protocol.inner_headers()).max(1);
        f64::from(payload) / (f64::from(mtu) + f64::from(protocol.outer_headers()))
    }

    /// Gates in addition to the NIC, on a host with `devices` devices.
    pub(crate) fn gates(&self, devices: u32) -> Vec<Gate> {
        let staged = !self.gpudirect;
        let mut gates = Vec::new();
        if let Some(BytesPerSec(link)) = self.pcie_bandwidth {
            gates.push(Gate { capacity: link, devices: 1 });
            let behind = self.devices_per_switch.clamp(1, devices);
            let crossings = match (staged, self.nics_on_switches) {
                (false, true) => 0.0,
                (false, false) | (true, false) => 1.0,
                (true, true) => 2.0,
            };
            // A switch with one device is the device's own link.
            if crossings > 0.0 && (behind > 1 || crossings > 1.0) {
                gates.push(Gate { capacity: link / crossings, devices: behind });
            }
        }
        if let Some(BytesPerSec(memory)) = self.memory_bandwidth.filter(|_| staged) {
            gates.push(Gate { capacity: memory / 4.0, devices });
        }
        if let Some(cores) = self.cores.filter(|_| self.protocol == Protocol::Tcp) {
            gates.push(Gate { capacity: f64::from(cores) * self.core_bandwidth.0 / 2.0, devices });
        }
        gates
    }

    /// Fraction of a device's NIC share that the gates allow if all devices send at once.
    fn narrowing(&self, devices: u32) -> f64 {
        let sharing = f64::from((devices / self.nics.max(1)).max(1));
        let nic = self.nic_bandwidth.0 * self.payload() / sharing;
        let narrowest = self.gates(devices).into_iter();
        let narrowest = narrowest.map(|gate| gate.capacity / f64::from(gate.devices));
        (narrowest.fold(f64::INFINITY, f64::min) / nic).min(1.0)
    }
}

impl Cluster {
    /// The cluster with the host model that its description implies, if it has none: NICs that the
    /// devices share as they share links, at the same rate, with access to device memory, behind
    /// PCIe links that are at least as fast. Its times are the same until a field is changed.
    ///
    /// Returns the reason if there is no switch between hosts that NICs could be ports of.
    pub fn with_ports(&self) -> Result<Self, String> {
        if self.host_ports.is_some() {
            return Ok(self.clone());
        }
        let host = self.devices_per_host();
        let mut inner = 1u64;
        let across = self.dimensions.iter().position(|dimension| {
            let is_across = inner >= host;
            inner = inner.saturating_mul(u64::from(dimension.size));
            is_across
        });
        let Some(index) = across else {
            return Err("no dimension joins hosts, so that there is no NIC to describe".to_owned());
        };
        let dimension = &self.dimensions[index];
        if dimension.kind != DimensionKind::Switch {
            let (name, kind) = (&dimension.name, dimension.kind.name());
            return Err(format!(
                "hosts are joined by {name}, a {kind}; NICs are ports of a switch"
            ));
        }
        let sharing = dimension.devices_per_link.max(1);
        let share = dimension.achievable().0 / f64::from(sharing);
        let ports = HostPorts {
            dimension: index,
            nics: self.host_size() / sharing,
            nic_bandwidth: dimension.bandwidth,
            efficiency: Some(dimension.efficiency),
            protocol: Protocol::Rdma,
            mtu: Protocol::Rdma.mtu(),
            // The dimension's latency is that of whole messages.
            message_overhead: Seconds::ZERO,
            control: None,
            gpudirect: true,
            pcie_bandwidth: self.device.host_bandwidth.map(|rate| BytesPerSec(rate.0.max(share))),
            devices_per_switch: sharing,
            nics_on_switches: true,
            memory_bandwidth: None,
            cores: None,
            core_bandwidth: CORE_BANDWIDTH,
        };
        Ok(Self { host_ports: Some(ports), ..self.clone() })
    }

    /// Effect of the host ports on a dimension: the remaining fraction of its bandwidth, and the
    /// added latency.
    pub(super) fn ports(&self, dimension: usize) -> (f64, Seconds) {
        match self.host_ports.as_ref().filter(|ports| ports.dimension == dimension) {
            Some(ports) => {
                let hand_off = ports.control.map_or(Seconds::ZERO, Control::hand_off);
                // A solicited read crosses the fabric twice: the request, then the data.
                let request = match ports.protocol {
                    Protocol::OneRma => self.dimensions[dimension].latency,
                    Protocol::Tcp | Protocol::Rdma | Protocol::GpuDirectAsync => Seconds::ZERO,
                };
                let overhead = ports.message_overhead + hand_off + request;
                (ports.narrowing(self.host_size()), overhead)
            }
            None => (1.0, Seconds::ZERO),
        }
    }

    /// Overhead of a message into a dimension, beyond its bytes and the dimension's latency.
    pub(crate) fn message_cost(&self, dimension: usize) -> Seconds {
        self.ports(dimension).1
    }

    /// Gates that messages into a dimension pass in addition to its links.
    pub(crate) fn gates(&self, dimension: usize) -> Vec<Gate> {
        let ports = self.host_ports.as_ref().filter(|ports| ports.dimension == dimension);
        ports.map_or_else(Vec::new, |ports| ports.gates(self.host_size()))
    }

    /// Number of devices per host; always fits in a valid cluster.
    fn host_size(&self) -> u32 {
        u32::try_from(self.devices_per_host()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight devices in pairs behind PCIe switches, each pair with a NIC.
    fn ports() -> HostPorts {
        HostPorts {
            dimension: 1,
            nics: 4,
            nic_bandwidth: BytesPerSec(25e9),
            efficiency: None,
            protocol: Protocol::Rdma,
            mtu: 4096,
            message_overhead: Seconds(1e-6),
            control: None,
            gpudirect: true,
            pcie_bandwidth: Some(BytesPerSec(32e9)),
            devices_per_switch: 2,
            nics_on_switches: true,
            memory_bandwidth: Some(BytesPerSec(200e9)),
            cores: Some(16),
            core_bandwidth: CORE_BANDWIDTH,
        }
    }

    #[test]
    fn headers_cost_what_they_are_long() {
        let jumbo = HostPorts { protocol: Protocol::Tcp, mtu: 9000, ..ports() };
        assert_eq!(jumbo.payload(), 8948.0 / 9038.0);
        let plain = HostPorts { mtu: 1500, ..jumbo };
        assert_eq!(plain.payload(), 1448.0 / 1538.0);
        assert_eq!(ports().payload(), 4096.0 / 4178.0);
    }

    #[test]
    fn a_nic_behind_the_same_switch_is_all_that_counts() {
        assert_eq!(ports().gates(8), [Gate { capacity: 32e9, devices: 1 }]);
        assert_eq!(ports().narrowing(8), 1.0, "two share 25 GB/s; each could have 32");
        let wide = HostPorts { nic_bandwidth: BytesPerSec(100e9), ..ports() };
        assert!((wide.narrowing(8) - 32e9 / (50e9 * wide.payload())).abs() < 1e-12);
    }

    #[test]
    fn staging_crosses_the_uplink_twice_and_memory_four_times() {
        let staged = HostPorts { gpudirect: false, ..ports() };
        let gates = staged.gates(8);
        assert_eq!(gates[1], Gate { capacity: 16e9, devices: 2 });
        assert_eq!(gates[2], Gate { capacity: 50e9, devices: 8 });
        let rate = staged.narrowing(8) * 25e9 * staged.payload() / 2.0;
        assert!((rate / 6.25e9 - 1.0).abs() < 1e-12, "an eighth of what memory passes: {rate}");
        let at_root = HostPorts { nics_on_switches: false, ..staged };
        assert_eq!(at_root.gates(8)[1], Gate { capacity: 32e9, devices: 2 });
    }

    #[test]
    fn cores_bound_tcp_and_not_rdma() {
        let tcp = HostPorts { protocol: Protocol::Tcp, cores: Some(2), ..ports() };
        assert_eq!(tcp.gates(8).last(), Some(&Gate { capacity: 5.25e9, devices: 8 }));
        assert_eq!(ports().gates(8).len(), 1);
    }
}
