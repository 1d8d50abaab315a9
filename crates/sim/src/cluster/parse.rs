//! Parser for cluster files in TOML; reports all problems at once.
//!
//! ```toml
//! name = "two-hosts"
//! hosts = 2                          # must divide the devices, here 4 × 2
//!
//! [device]
//! name = "A100-SXM4-80GB"
//! memory = "80 GiB"                  # or a bare number of bytes
//! memory_bandwidth = "2039 GB/s"
//! memory_efficiency = 0.88           # optional, 1 if absent
//! max_efficiency = 0.8               # optional, 1 if absent
//! sustained_efficiency = 0.7         # optional, that of the line before if absent
//! legacy_mma_efficiency = 0.6        # optional, 1 if absent
//! multiprocessors = 108              # optional, or systolic_width = 128
//! sparse_speedup = 2.0               # optional, 1 if absent
//! launch_overhead = "2 us"           # optional, 0 if absent
//! peak = { f32 = "19.5 TFLOP/s", bf16 = "312 TFLOP/s" }
//!
//! [[dimension]]                      # the innermost first
//! name = "nvlink"
//! kind = "switch"
//! size = 4
//! bandwidth = "300 GB/s"             # of one link, in one direction
//! latency = "2 us"
//! efficiency = 0.78                  # optional, 1 if absent
//!
//! [[dimension]]
//! name = "infiniband"
//! kind = "switch"
//! size = 2
//! bandwidth = "200 Gbit/s"
//! latency = "5 us"
//! devices_per_link = 2               # optional, 1 if absent
//! ```
//!
//! A switch that is a tree adds `oversubscription = 4.0` and, if several members share a leaf
//! switch, `leaf = 16`. A torus adds `shape = [4, 4]` and, for a mesh, `wrap = false`; its size may
//! be omitted. A graph adds `links = [{ between = [0, 1], width = 2 }, …]`, each link with its own
//! `bandwidth` or `latency` if they differ, and `switches = 2` for points 'size' and 'size + 1'
//! that have no device.
//!
//! A `[host]` table describes the host hardware between devices and the inter-host dimension, which
//! then has no rates of its own.
//!
//! Overrides, each with `hosts = [1, "4-7"]` or `ranks = [3]` to select devices:
//!
//! ```toml
//! [[device]]                         # in place of [device]: the default, then the overrides
//! hosts = [1]
//! name = "H100-SXM5-80GB"            # and all the keys of a device
//!
//! [[link]]                           # links of these hosts into a dimension
//! dimension = "infiniband"
//! hosts = [3]
//! bandwidth = "100 Gbit/s"           # or latency, or both
//!
//! [[straggler]]                      # computations take 1.5 times as long
//! ranks = [5]
//! factor = 1.5
//! from = "2 s"                       # optional, from the iteration's start if absent
//! until = "4 s"                      # optional, permanent if absent
//!
//! [[bandwidth_schedule]]             # links whose bandwidth changes, all if none are selected
//! dimension = "infiniband"
//! changes = [{ at = "1 s", bandwidth = 0.5 }, { at = "3 s", bandwidth = 1.0 }]
//! ```
//!
//! Measurements by `paceline calibrate` are in a `[measured]` table; see `measured`.
//! `docs/clusters.md` explains every key.

mod heterogeneity;
mod host;
mod measured;
mod network;
mod reader;

use super::quantity::{self, FLOPS, RATE, TIME};
use super::{Cluster, Device, FlopsPerSec, Heterogeneity, Peak};
use paceline_plan::units::{BytesPerSec, Seconds};
use reader::{Reader, Section, count, measured, memory, ratio, share, text, whole};
use std::fmt;
use thiserror::Error;
use toml::de::{DeTable, DeValue};

/// All problems of a cluster file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct ClusterErrors {
    /// File name as given by the user.
    pub file: String,
    /// The problems, sorted by line; never empty.
    pub problems: Vec<ClusterProblem>,
}

/// One problem of a cluster file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterProblem {
    /// Line number, counted from 1.
    pub line: usize,
    /// Description of the problem.
    pub what: String,
    /// A fix that would work.
    pub remedy: String,
}

impl fmt::Display for ClusterErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, ClusterProblem { line, what, remedy }) in self.problems.iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(f, "{separator}{}:{line}: {what}; {remedy}", self.file)?;
        }
        Ok(())
    }
}

impl Cluster {
    /// Parses a cluster file; `file` is its name in messages.
    pub fn parse(text: &str, file: &str) -> Result<Self, ClusterErrors> {
        let mut reader = Reader { text, problems: Vec::new() };
        let (document, syntax) = DeTable::parse_recoverable(text);
        for error in &syntax {
            let span = error.span().unwrap_or(0..0);
            let message = error.message().replace('\n', ", ");
            reader.problem(span, format!("not TOML: {message}"), "correct the syntax here".into());
        }
        // After a syntax error half the file may be missing; reporting missing keys would not help.
        let cluster = if syntax.is_empty() { reader.cluster(document.get_ref()) } else { None };
        let mut problems = reader.problems;
        problems.sort_by_key(|problem| problem.line);
        match cluster {
            Some(cluster) if problems.is_empty() => Ok(cluster),
            _ => Err(ClusterErrors { file: file.into(), problems }),
        }
    }
}

const DEVICE_KEYS: [&str; 15] = [
    "name",
    "peak",
    "max_efficiency",
    "sustained_efficiency",
    "legacy_mma_efficiency",
    "multiprocessors",
    "systolic_width",
    "sparse_speedup",
    "memory",
    "memory_bandwidth",
    "memory_efficiency",
    "launch_overhead",
    "copy_engines",
    "host_bandwidth",
    "disk_bandwidth",
];

/// Keys with which an entry selects its devices.
const PLACE_KEYS: [&str; 2] = ["hosts", "ranks"];

/// Maximum number of copy engines; more than any device has.
const MAX_ENGINES: u64 = 64;

impl Reader<'_> {
    fn cluster(&mut self, table: &DeTable<'_>) -> Option<Cluster> {
        let file = Section { table, label: "the file".into(), span: 0..0 };
        self.known_keys(
            &file,
            &[
                "name",
                "hosts",
                "device",
                "host",
                "dimension",
                "link",
                "straggler",
                "bandwidth_schedule",
                "measured",
            ],
        );
        let name = self.required(&file, "name", "\"my-cluster\"", text);
        let hosts = self.required(&file, "hosts", "1", count);
        let devices = self.devices(&file);
        let dimensions = self.dimensions(&file);
        let measured = self.measured(&file);
        let (name, hosts, (device, kinds), dimensions) = (name?, hosts?, devices?, dimensions?);
        let (measured, host_ports, uneven) = (measured?, None, Heterogeneity::default());
        let mut cluster = Cluster {
            name,
            hosts,
            device,
            dimensions,
            measured,
            host_ports,
            heterogeneity: uneven,
        };
        let (devices, hosts) = (cluster.devices(), u64::from(cluster.hosts));
        if devices > Cluster::MAX_DEVICES {
            let what = format!("the dimensions' sizes multiply to {devices} devices");
            let remedy = format!("use at most {}", Cluster::MAX_DEVICES);
            self.problem(file.span_of("dimension"), what, remedy);
        } else if devices % hosts != 0 {
            let what = format!("{devices} devices cannot be spread evenly over {hosts} hosts");
            let remedy = "make hosts a divisor of the product of the dimensions' sizes".into();
            self.problem(file.span_of("hosts"), what, remedy);
        }
        if devices.is_multiple_of(hosts) {
            self.host(&file, &mut cluster)?;
        }
        cluster.heterogeneity = self.heterogeneity(&file, &cluster, kinds)?;
        Some(cluster)
    }

    /// Device of `[device]`, or of the first `[[device]]` plus the sections of the others.
    fn devices<'a>(&mut self, file: &Section<'a>) -> Option<(Device, Vec<(Section<'a>, Device)>)> {
        let Some(tables) = file.get("device").and_then(|value| value.get_ref().as_array()) else {
            let section = self.table(file, "device", "[device]")?;
            return Some((self.device(&section, &[])?, Vec::new()));
        };
        let mut all = Vec::new();
        for (index, value) in tables.iter().enumerate() {
            let section = self.as_table(value, format!("[[device]] {}", index + 1));
            let places: &[&str] = if index == 0 { &[] } else { &PLACE_KEYS };
            all.push(section.and_then(|section| {
                let device = self.device(&section, places)?;
                Some((section, device))
            }));
        }
        let mut all = all.into_iter().collect::<Option<Vec<_>>>()?;
        if all.is_empty() {
            let remedy = "add a [device] table".into();
            self.problem(file.span_of("device"), "the list of devices is empty".into(), remedy);
            return None;
        }
        let (_, device) = all.remove(0);
        Some((device, all))
    }

    fn device(&mut self, section: &Section<'_>, places: &[&str]) -> Option<Device> {
        self.known_keys(section, &[&DEVICE_KEYS, places].concat());
        let name = self.required(section, "name", "\"A100-SXM4-80GB\"", text);
        let max_efficiency = self.optional(section, "max_efficiency", "0.8", share, 1.0);
        let most = max_efficiency.unwrap_or(1.0);
        let sustained = self.optional(section, "sustained_efficiency", "0.7", share, most);
        let older = self.optional(section, "legacy_mma_efficiency", "0.6", share, 1.0);
        let some = |value: &DeValue<'_>| count(value).map(Some);
        let multiprocessors = self.optional(section, "multiprocessors", "108", some, None);
        let systolic_width = self.optional(section, "systolic_width", "128", some, None);
        let sparse_speedup = self.optional(section, "sparse_speedup", "2.0", ratio, 1.0);
        let memory = self.required(section, "memory", quantity::BYTES_EXAMPLE, memory);
        let memory_bandwidth = self.quantity(section, "memory_bandwidth", &RATE);
        let memory_efficiency = self.optional(section, "memory_efficiency", "0.9", share, 1.0);
        let read_time = |value: &DeValue<'_>| measured(value, &TIME);
        let launch = self.optional(section, "launch_overhead", TIME.example, read_time, 0.0);
        let few = |value: &DeValue<'_>| whole(value, 0, MAX_ENGINES).map(Some);
        let copy_engines = self.optional(section, "copy_engines", "2", few, None);
        let mut store = |key| {
            let read = |value: &DeValue<'_>| measured(value, &RATE).map(|v| Some(BytesPerSec(v)));
            self.optional(section, key, "25 GB/s", read, None)
        };
        let (host_bandwidth, disk_bandwidth) = (store("host_bandwidth"), store("disk_bandwidth"));
        let peak = match self.table(section, "peak", "[device.peak]") {
            Some(section) => self.peak(&section),
            None => None,
        };
        Some(Device {
            name: name?,
            peak: peak?,
            max_efficiency: max_efficiency?,
            sustained_efficiency: sustained?,
            legacy_mma_efficiency: older?,
            multiprocessors: multiprocessors?,
            systolic_width: systolic_width?,
            sparse_speedup: sparse_speedup?,
            memory: memory?,
            memory_bandwidth: BytesPerSec(memory_bandwidth?),
            memory_efficiency: memory_efficiency?,
            launch_overhead: Seconds(launch?),
            copy_engines: copy_engines?,
            host_bandwidth: host_bandwidth?,
            disk_bandwidth: disk_bandwidth?,
        })
    }

    fn peak(&mut self, section: &Section<'_>) -> Option<Peak> {
        self.known_keys(section, &["f32", "tf32", "bf16", "f16", "fp8"]);
        let f32 = self.quantity(section, "f32", &FLOPS).map(FlopsPerSec);
        let mut rate = |key| {
            let read = |value: &DeValue<'_>| measured(value, &FLOPS).map(|v| Some(FlopsPerSec(v)));
            self.optional(section, key, FLOPS.example, read, None)
        };
        let (tf32, bf16, f16, fp8) = (rate("tf32"), rate("bf16"), rate("f16"), rate("fp8"));
        Some(Peak { f32: f32?, tf32: tf32?, bf16: bf16?, f16: f16?, fp8: fp8? })
    }
}

#[cfg(test)]
mod tests;
