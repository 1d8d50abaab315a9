//! A cluster as text: its file, and a readable summary.

mod measured;

use super::quantity::{self, FLOPS, POWER, RATE, TIME};
use super::{
    BandwidthChange, BandwidthSchedule, Cluster, Device, Dimension, DimensionKind, FlopsPerSec,
    GraphLink, Heterogeneity, HostPorts, IndexRange, LinkOverride, Peak, Selector, Straggler, Tree,
};
use paceline_plan::units::{BytesPerSec, Seconds};
use std::fmt::Write;

impl Cluster {
    /// Writes the cluster file; [`Cluster::parse`] reads it back as an equal cluster.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_toml(&mut text);
        text
    }

    /// Short readable summary, as shown by `paceline clusters`.
    pub fn summary(&self) -> String {
        let mut text = String::new();
        let _ = self.write_summary(&mut text);
        text
    }

    fn write_toml(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "name = {}", quoted(&self.name))?;
        writeln!(out, "hosts = {}", self.hosts)?;
        let kinds = &self.heterogeneity.kinds;
        write_device(
            out,
            &self.device,
            if kinds.is_empty() { None } else { Some(&Selector::Everywhere) },
        )?;
        kinds.iter().try_for_each(|kind| write_device(out, &kind.device, Some(&kind.at)))?;
        self.host_ports.iter().try_for_each(|ports| self.write_ports(out, ports))?;
        let ported = self.host_ports.as_ref().map(|ports| ports.dimension);
        for (index, dimension) in self.dimensions.iter().enumerate() {
            write_dimension(out, dimension, ported == Some(index))?;
        }
        self.write_heterogeneity(out)?;
        self.measured.iter().try_for_each(|table| measured::write(out, table))
    }

    fn write_ports(&self, out: &mut String, ports: &HostPorts) -> std::fmt::Result {
        let name = quoted(&self.dimensions[ports.dimension].name);
        writeln!(out, "\n[host]\ndimension = {name}\nnics = {}", ports.nics)?;
        writeln!(out, "nic_bandwidth = \"{}\"", RATE.write(ports.nic_bandwidth.0))?;
        if let Some(efficiency) = ports.efficiency {
            writeln!(out, "efficiency = {efficiency:?}")?;
        }
        // What follows from the protocol is left out, so that `--set host.protocol` changes it too.
        let protocol = ports.protocol;
        writeln!(out, "protocol = \"{}\"", protocol.name())?;
        if ports.mtu != protocol.mtu() {
            writeln!(out, "mtu = {}", ports.mtu)?;
        }
        if ports.message_overhead != protocol.message_overhead() {
            writeln!(out, "message_overhead = \"{}\"", TIME.write(ports.message_overhead.0))?;
        }
        if let Some(control) = ports.control.filter(|_| ports.control != protocol.control()) {
            writeln!(out, "control = \"{}\"", control.name())?;
        }
        if ports.gpudirect != protocol.reaches_devices() {
            writeln!(out, "gpudirect = {}", ports.gpudirect)?;
        }
        writeln!(out, "devices_per_switch = {}", ports.devices_per_switch)?;
        writeln!(out, "nics_on_switches = {}", ports.nics_on_switches)?;
        let rates = [("pcie", ports.pcie_bandwidth), ("memory", ports.memory_bandwidth)];
        for (what, rate) in rates {
            if let Some(rate) = rate {
                writeln!(out, "{what}_bandwidth = \"{}\"", RATE.write(rate.0))?;
            }
        }
        if let Some(cores) = ports.cores {
            writeln!(out, "cores = {cores}")?;
        }
        writeln!(out, "core_bandwidth = \"{}\"", RATE.write(ports.core_bandwidth.0))
    }

    fn write_heterogeneity(&self, out: &mut String) -> std::fmt::Result {
        let name = |index: usize| quoted(&self.dimensions[index].name);
        for LinkOverride { dimension, at, bandwidth, latency } in &self.heterogeneity.links {
            writeln!(out, "\n[[link]]\ndimension = {}", name(*dimension))?;
            write_place(out, at)?;
            if let Some(bandwidth) = bandwidth {
                writeln!(out, "bandwidth = \"{}\"", RATE.write(bandwidth.0))?;
            }
            if let Some(latency) = latency {
                writeln!(out, "latency = \"{}\"", TIME.write(latency.0))?;
            }
        }
        for Straggler { at, factor, from, until } in &self.heterogeneity.stragglers {
            writeln!(out, "\n[[straggler]]")?;
            write_place(out, at)?;
            writeln!(out, "factor = {factor:?}\nfrom = \"{}\"", TIME.write(from.0))?;
            if let Some(until) = until {
                writeln!(out, "until = \"{}\"", TIME.write(until.0))?;
            }
        }
        for BandwidthSchedule { dimension, at, changes } in &self.heterogeneity.schedules {
            writeln!(out, "\n[[bandwidth_schedule]]\ndimension = {}", name(*dimension))?;
            write_place(out, at)?;
            writeln!(out, "changes = [")?;
            for BandwidthChange { at, bandwidth } in changes {
                let at = TIME.write(at.0);
                writeln!(out, "  {{ at = \"{at}\", bandwidth = {bandwidth:?} }},")?;
            }
            writeln!(out, "]")?;
        }
        Ok(())
    }

    fn write_summary(&self, out: &mut String) -> std::fmt::Result {
        let count = |n: u64, noun: &str| format!("{n} {noun}{}", if n == 1 { "" } else { "s" });
        let (devices, hosts) = (count(self.devices(), "device"), count(self.hosts.into(), "host"));
        writeln!(out, "{}: {devices} on {hosts}", self.name)?;
        let labels = self.dimensions.iter().map(|d| d.name.chars().count());
        let width = labels.chain(["device".len()]).max().unwrap_or(0);
        let device = &self.device;
        writeln!(
            out,
            "  {:width$}  {}, {} at {}",
            "device",
            device.name,
            device.memory,
            RATE.write(device.memory_bandwidth.0)
        )?;
        let rates: Vec<_> = rates(&device.peak)
            .map(|(name, rate)| format!("{name} {}", FLOPS.write(rate.0)))
            .collect();
        let share = percent(device.sustained_efficiency);
        writeln!(out, "  {:width$}  {} (large products sustain {share})", "", rates.join(", "))?;
        for dimension in &self.dimensions {
            let Dimension { name, bandwidth, latency, efficiency, devices_per_link, .. } =
                dimension;
            let shared = match devices_per_link {
                0 | 1 => String::new(),
                sharing => format!(" shared by {sharing} devices"),
            };
            writeln!(
                out,
                "  {name:width$}  {}, links of {}{shared} ({} achievable), {latency}",
                shape(dimension),
                RATE.write(bandwidth.0),
                percent(*efficiency)
            )?;
        }
        self.exception_lines().into_iter().try_for_each(|line| writeln!(out, "  {line}"))
    }

    /// Describes the overrides, one per line.
    pub fn exception_lines(&self) -> Vec<String> {
        let Heterogeneity { kinds, links, stragglers, schedules, .. } = &self.heterogeneity;
        let dimension = |index: usize| &self.dimensions[index].name;
        let kinds = kinds.iter().map(|kind| format!("{}: {}", kind.at, kind.device.name));
        let links = links.iter().map(|link| {
            let rate = link.bandwidth.map(|rate| format!(" links of {}", RATE.write(rate.0)));
            let time = link.latency.map(|time| format!(" {time} away"));
            let (rate, time) = (rate.unwrap_or_default(), time.unwrap_or_default());
            format!("{}: {}{rate}{time}", link.at, dimension(link.dimension))
        });
        let stragglers = stragglers.iter().map(|slow| {
            let until = slow.until.map(|until| format!(" to {until}")).unwrap_or_default();
            let from = match (slow.from, slow.until) {
                (Seconds::ZERO, None) => String::new(),
                (from, _) => format!(" from {from}{until}"),
            };
            format!("{}: {} times slower{from}", slow.at, slow.factor)
        });
        let schedules = schedules.iter().map(|schedule| {
            let changes = schedule.changes.iter();
            let changes: Vec<_> =
                changes.map(|c| format!("{} from {}", percent(c.bandwidth), c.at)).collect();
            format!("{}: {} at {}", schedule.at, dimension(schedule.dimension), changes.join(", "))
        });
        kinds.chain(links).chain(stragglers).chain(schedules).collect()
    }
}

/// Writes a device's table; with several, each has a selector.
fn write_device(out: &mut String, device: &Device, at: Option<&Selector>) -> std::fmt::Result {
    match at {
        None => writeln!(out, "\n[device]")?,
        Some(at) => {
            writeln!(out, "\n[[device]]")?;
            write_place(out, at)?;
        }
    }
    let Device { name, peak, max_efficiency, memory, .. } = device;
    let Device { memory_bandwidth, memory_efficiency, launch_overhead, .. } = device;
    writeln!(out, "name = {}", quoted(name))?;
    writeln!(out, "max_efficiency = {max_efficiency:?}")?;
    let Device { sustained_efficiency, legacy_mma_efficiency, sparse_speedup, .. } = device;
    writeln!(out, "sustained_efficiency = {sustained_efficiency:?}")?;
    writeln!(out, "legacy_mma_efficiency = {legacy_mma_efficiency:?}")?;
    if let Some(count) = device.multiprocessors {
        writeln!(out, "multiprocessors = {count}")?;
    }
    if let Some(width) = device.systolic_width {
        writeln!(out, "systolic_width = {width}")?;
        writeln!(out, "systolic_arrays = {}", device.systolic_arrays)?;
    }
    writeln!(out, "sparse_speedup = {sparse_speedup:?}")?;
    writeln!(out, "memory = \"{}\"", quantity::write_bytes(*memory))?;
    writeln!(out, "memory_bandwidth = \"{}\"", RATE.write(memory_bandwidth.0))?;
    writeln!(out, "memory_efficiency = {memory_efficiency:?}")?;
    writeln!(out, "launch_overhead = \"{}\"", TIME.write(launch_overhead.0))?;
    if let Some(engines) = device.copy_engines {
        writeln!(out, "copy_engines = {engines}")?;
    }
    let stores = [("host", device.host_bandwidth), ("disk", device.disk_bandwidth)];
    for (name, BytesPerSec(rate)) in stores.into_iter().filter_map(|(n, rate)| Some((n, rate?))) {
        writeln!(out, "{name}_bandwidth = \"{}\"", RATE.write(rate))?;
    }
    let powers = [("power", device.power), ("idle_power", device.idle_power)];
    for (name, watts) in powers.into_iter().filter_map(|(name, watts)| Some((name, watts?))) {
        writeln!(out, "{name} = \"{}\"", POWER.write(watts))?;
    }
    writeln!(out, "\n[device.peak]")?;
    for (name, rate) in rates(peak) {
        writeln!(out, "{name} = \"{}\"", FLOPS.write(rate.0))?;
    }
    Ok(())
}

fn write_place(out: &mut String, at: &Selector) -> std::fmt::Result {
    let (key, runs) = match at {
        Selector::Everywhere => return Ok(()),
        Selector::Hosts(runs) => ("hosts", runs),
        Selector::Ranks(runs) => ("ranks", runs),
    };
    let item = |run: &IndexRange| match run.first == run.last {
        true => run.to_string(),
        false => format!("\"{run}\""),
    };
    let items: Vec<_> = runs.iter().map(item).collect();
    writeln!(out, "{key} = [{}]", items.join(", "))
}

/// Writes a dimension's table, without rates if they follow from `[host]`.
fn write_dimension(out: &mut String, dimension: &Dimension, ported: bool) -> std::fmt::Result {
    writeln!(out, "\n[[dimension]]\nname = {}", quoted(&dimension.name))?;
    writeln!(out, "kind = \"{}\"", dimension.kind.name())?;
    writeln!(out, "size = {}", dimension.size)?;
    writeln!(out, "latency = \"{}\"", TIME.write(dimension.latency.0))?;
    if !ported {
        writeln!(out, "bandwidth = \"{}\"", RATE.write(dimension.bandwidth.0))?;
        writeln!(out, "efficiency = {:?}", dimension.efficiency)?;
        writeln!(out, "devices_per_link = {}", dimension.devices_per_link)?;
    }
    if let Some(Tree { leaf, oversubscription }) = dimension.tree {
        writeln!(out, "leaf = {leaf}\noversubscription = {oversubscription:?}")?;
    }
    if dimension.in_network_reduction {
        writeln!(out, "in_network_reduction = true")?;
    }
    match &dimension.kind {
        DimensionKind::Ring | DimensionKind::Switch | DimensionKind::FullyConnected => Ok(()),
        DimensionKind::Torus { shape, wrap } => {
            writeln!(out, "shape = {shape:?}\nwrap = {wrap}")
        }
        DimensionKind::Graph { switches, links } => {
            writeln!(out, "switches = {switches}\nlinks = [")?;
            for link in links {
                let GraphLink { between, width, bandwidth, latency } = link;
                write!(out, "  {{ between = {between:?}, width = {width}")?;
                if let Some(bandwidth) = bandwidth {
                    write!(out, ", bandwidth = \"{}\"", RATE.write(bandwidth.0))?;
                }
                if let Some(latency) = latency {
                    write!(out, ", latency = \"{}\"", TIME.write(latency.0))?;
                }
                writeln!(out, " }},")?;
            }
            writeln!(out, "]")
        }
    }
}

/// Rates of a device, by their names in the file.
fn rates(peak: &Peak) -> impl Iterator<Item = (&'static str, FlopsPerSec)> {
    let Peak { f32, tf32, bf16, f16, fp8, fp4 } = *peak;
    [("f32", Some(f32)), ("tf32", tf32), ("bf16", bf16), ("f16", f16), ("fp8", fp8), ("fp4", fp4)]
        .into_iter()
        .filter_map(|(name, rate)| Some((name, rate?)))
}

fn shape(dimension: &Dimension) -> String {
    let size = dimension.size;
    match &dimension.kind {
        DimensionKind::Ring | DimensionKind::Switch => {
            let thin = dimension.tree.map(|tree| format!(", {}:1", tree.oversubscription));
            let sums = if dimension.in_network_reduction { " that sums" } else { "" };
            format!("{} of {size}{}{sums}", dimension.kind.name(), thin.unwrap_or_default())
        }
        DimensionKind::FullyConnected => format!("{size} fully connected"),
        DimensionKind::Torus { shape, wrap } => {
            let shape: Vec<_> = shape.iter().map(u32::to_string).collect();
            format!("{} {}", if *wrap { "torus" } else { "mesh" }, shape.join("×"))
        }
        DimensionKind::Graph { links, .. } => format!("graph of {size}, {} edges", links.len()),
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// Formats a TOML string with the necessary escapes.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::preset;

    #[test]
    fn a_summary_reads_well() {
        let text = preset::get("dgx-a100:128").unwrap().summary();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "dgx-a100:128: 1024 devices on 128 hosts");
        assert_eq!(lines[1], "  device      A100-SXM4-80GB, 80.0 GiB at 2.039 TB/s");
        assert!(lines[2].contains("tf32 156 TFLOP/s, bf16 312 TFLOP/s, f16 312 TFLOP/s ("));
        assert!(lines[3].starts_with("  nvlink      switch of 8, links of 300 GB/s ("));
        assert!(lines[4].starts_with("  infiniband  switch of 128 that sums, links of 25 GB/s ("));
        assert_eq!(lines.len(), 5);
    }

    #[test]
    fn a_summary_names_shapes_and_sharing() {
        let pod = preset::get("tpu-v4").unwrap().summary();
        assert!(pod.contains("torus 16×16×16"), "{pod}");
        let dgx1 = preset::get("dgx1-v100:2").unwrap().summary();
        assert!(dgx1.contains("graph of 8, 16 edges"), "{dgx1}");
        assert!(dgx1.contains("shared by 2 devices"), "{dgx1}");
        let one = preset::get("laptop").unwrap().summary();
        assert!(one.starts_with("laptop: 2 devices on 1 host\n"), "{one}");
    }

    #[test]
    fn json_keeps_the_kind_beside_the_size() {
        let value = toml::Value::try_from(preset::get("tpu-v4").unwrap()).unwrap();
        let ici = &value["dimensions"][0];
        assert_eq!(ici["kind"].as_str(), Some("torus"));
        assert_eq!(ici["size"].as_integer(), Some(4096));
        assert_eq!(ici["shape"][2].as_integer(), Some(16));
        assert_eq!(value["device"]["peak"]["bf16"].as_float(), Some(275e12));
    }
}
