//! Parser for `[host]`: connection of a host's devices to the fabric.

use super::reader::{Reader, boolean, count, measured, share, text, whole};
use crate::cluster::host::CORE_BANDWIDTH;
use crate::cluster::quantity::{RATE, TIME};
use crate::cluster::{Cluster, Control, DimensionKind, HostPorts, Protocol};
use paceline_plan::located::{Section, Value};
use paceline_plan::units::{BytesPerSec, Seconds};

const KEYS: [&str; 15] = [
    "dimension",
    "nics",
    "nic_bandwidth",
    "efficiency",
    "protocol",
    "mtu",
    "message_overhead",
    "control",
    "gpudirect",
    "pcie_bandwidth",
    "devices_per_switch",
    "nics_on_switches",
    "memory_bandwidth",
    "cores",
    "core_bandwidth",
];

impl Reader {
    /// Name of the dimension whose rates follow from `[host]`.
    pub(super) fn ported<'a>(&self, file: &Section<'a>) -> Option<&'a str> {
        file.get("host")?.table()?.entries.get("dimension")?.value.text()
    }

    /// Reads `[host]`, if present, and sets the resulting rates of its dimension.
    pub(super) fn host(&mut self, file: &Section<'_>, cluster: &mut Cluster) -> Option<()> {
        if file.get("host").is_none() {
            return Some(());
        }
        let section = self.errors.table(file, "host", "[host]")?;
        let ports = self.host_ports(&section, cluster)?;
        let host = u32::try_from(cluster.devices_per_host()).unwrap_or(u32::MAX);
        for (key, parts) in [("nics", ports.nics), ("devices_per_switch", ports.devices_per_switch)]
        {
            if !host.is_multiple_of(parts) {
                let what = format!("[host] has {key} = {parts} for the {host} devices of a host");
                let remedy = format!("make {key} a divisor of {host}");
                self.errors.add(section.line_of(key), what, remedy);
                return None;
            }
        }
        let dimension = &mut cluster.dimensions[ports.dimension];
        if dimension.kind != DimensionKind::Switch {
            let what = format!("the dimension of [host] is a {}", dimension.kind.name());
            let remedy = "name one that is a switch";
            self.errors.add(section.line_of("dimension"), what, remedy);
            return None;
        }
        dimension.bandwidth = ports.nic_bandwidth;
        dimension.efficiency = ports.payload();
        dimension.devices_per_link = host / ports.nics;
        cluster.host_ports = Some(ports);
        Some(())
    }

    fn host_ports(&mut self, section: &Section<'_>, cluster: &Cluster) -> Option<HostPorts> {
        self.errors.known_keys(section, &KEYS);
        let dimension = self.dimension_named(section, cluster);
        let nics = self.errors.required(section, "nics", "4", count);
        let nic_bandwidth = self.quantity(section, "nic_bandwidth", &RATE);
        let efficiency = self.errors.given(section, "efficiency", "0.93", share);
        let protocol =
            self.errors.optional(section, "protocol", "\"tcp\"", protocol, Protocol::Rdma)?;
        let packet = |value: &Value| whole(value, 256, 65536);
        let mtu = self.errors.optional(section, "mtu", "9000", packet, protocol.mtu());
        let time = |value: &Value| measured(value, &TIME).map(Seconds);
        let message_overhead = self.errors.optional(
            section,
            "message_overhead",
            TIME.example,
            time,
            protocol.message_overhead(),
        );
        let direct = protocol.reaches_devices();
        let control = match section.get("control") {
            None => Some(protocol.control()),
            Some(_) => self.errors.given(section, "control", "\"gpu\"", control),
        };
        let gpudirect = self.errors.optional(section, "gpudirect", "true", boolean, direct);
        let rate = |value: &Value| measured(value, &RATE).map(BytesPerSec);
        let pcie = self.errors.given(section, "pcie_bandwidth", RATE.example, rate);
        let behind = self.errors.optional(section, "devices_per_switch", "2", count, 1);
        let on_switches = self.errors.optional(section, "nics_on_switches", "true", boolean, true);
        let memory = self.errors.given(section, "memory_bandwidth", RATE.example, rate);
        let cores = self.errors.given(section, "cores", "8", count);
        let core =
            self.errors.optional(section, "core_bandwidth", RATE.example, rate, CORE_BANDWIDTH);
        if gpudirect == Some(true) && protocol == Protocol::Tcp {
            let what = "[host] has gpudirect = true with protocol = \"tcp\"";
            let remedy = "the kernel's TCP goes through host memory: use \"rdma\" or false";
            self.errors.add(section.line_of("gpudirect"), what, remedy);
            return None;
        }
        if gpudirect == Some(false) && control == Some(Some(Control::Gpu)) {
            let what = "[host] has control by the GPU with gpudirect = false";
            let remedy = "cores move staged data: use control = \"cpu\" or gpudirect = true";
            let key = if section.get("control").is_some() { "control" } else { "protocol" };
            self.errors.add(section.line_of(key), what, remedy);
            return None;
        }
        Some(HostPorts {
            dimension: dimension?,
            nics: nics?,
            nic_bandwidth: BytesPerSec(nic_bandwidth?),
            efficiency: efficiency?,
            protocol,
            mtu: mtu?,
            message_overhead: message_overhead?,
            control: control?,
            gpudirect: gpudirect?,
            pcie_bandwidth: pcie?,
            devices_per_switch: behind?,
            nics_on_switches: on_switches?,
            memory_bandwidth: memory?,
            cores: cores?,
            core_bandwidth: core?,
        })
    }
}

fn protocol(value: &Value) -> Result<Protocol, String> {
    let word = text(value)?;
    let known = Protocol::ALL.into_iter().find(|protocol| protocol.name() == word);
    known
        .ok_or_else(|| "there is no such protocol (known: tcp, rdma, gpudirect-async, 1rma)".into())
}

fn control(value: &Value) -> Result<Control, String> {
    let word = text(value)?;
    let known = Control::ALL.into_iter().find(|control| control.name() == word);
    known.ok_or_else(|| "there is no such control plane (known: cpu, gpu)".into())
}
