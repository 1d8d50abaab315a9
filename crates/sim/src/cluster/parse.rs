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

use super::quantity::{self, FLOPS, POWER, RATE, TIME};
use super::{Cluster, Device, FlopsPerSec, Heterogeneity, Peak};
use paceline_plan::located::{self, Errors, Section, Table, Value};
use paceline_plan::units::{BytesPerSec, Seconds};
use reader::{Reader, count, measured, memory, ratio, share, text, whole};

impl Cluster {
    /// Parses a cluster file; `file` is its name in messages.
    pub fn parse(text: &str, file: &str) -> Result<Self, Errors> {
        let mut reader = Reader { errors: Errors::new(file) };
        let cluster = reader.cluster(&located::parse(text, file)?);
        match cluster {
            Some(cluster) if reader.errors.problems.is_empty() => Ok(cluster),
            _ => Err(reader.errors.sorted()),
        }
    }
}

const DEVICE_KEYS: [&str; 18] = [
    "name",
    "peak",
    "max_efficiency",
    "sustained_efficiency",
    "legacy_mma_efficiency",
    "multiprocessors",
    "systolic_width",
    "systolic_arrays",
    "sparse_speedup",
    "memory",
    "memory_bandwidth",
    "memory_efficiency",
    "launch_overhead",
    "copy_engines",
    "host_bandwidth",
    "disk_bandwidth",
    "power",
    "idle_power",
];

/// Keys with which an entry selects its devices.
const PLACE_KEYS: [&str; 2] = ["hosts", "ranks"];

/// Maximum number of copy engines; more than any device has.
const MAX_ENGINES: u64 = 64;

impl Reader {
    fn cluster(&mut self, table: &Table) -> Option<Cluster> {
        let file = Section { table, label: "the file".into() };
        self.errors.known_keys(
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
        let name = self.errors.required(&file, "name", "\"my-cluster\"", text);
        let hosts = self.errors.required(&file, "hosts", "1", count);
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
            self.errors.add(file.line_of("dimension"), what, remedy);
        } else if devices % hosts != 0 {
            let what = format!("{devices} devices cannot be spread evenly over {hosts} hosts");
            let remedy = "make hosts a divisor of the product of the dimensions' sizes";
            self.errors.add(file.line_of("hosts"), what, remedy);
        }
        if devices.is_multiple_of(hosts) {
            self.host(&file, &mut cluster)?;
        }
        cluster.heterogeneity = self.heterogeneity(&file, &cluster, kinds)?;
        Some(cluster)
    }

    /// Device of `[device]`, or of the first `[[device]]` plus the sections of the others.
    fn devices<'a>(&mut self, file: &Section<'a>) -> Option<(Device, Vec<(Section<'a>, Device)>)> {
        let Some(tables) = file.get("device").and_then(|value| value.list()) else {
            let section = self.errors.table(file, "device", "[device]")?;
            return Some((self.device(&section, &[])?, Vec::new()));
        };
        let mut places: &[&str] = &[];
        let mut all = self.each(tables, "[[device]]", |reader, section| {
            let places = std::mem::replace(&mut places, &PLACE_KEYS);
            let device = reader.device(&section, places)?;
            Some((section, device))
        })?;
        if all.is_empty() {
            let remedy = "add a [device] table";
            self.errors.add(file.line_of("device"), "the list of devices is empty", remedy);
            return None;
        }
        let (_, device) = all.remove(0);
        Some((device, all))
    }

    fn device(&mut self, section: &Section<'_>, places: &[&str]) -> Option<Device> {
        self.errors.known_keys(section, &[&DEVICE_KEYS, places].concat());
        let name = self.errors.required(section, "name", "\"A100-SXM4-80GB\"", text);
        let max_efficiency = self.errors.optional(section, "max_efficiency", "0.8", share, 1.0);
        let most = max_efficiency.unwrap_or(1.0);
        let sustained = self.errors.optional(section, "sustained_efficiency", "0.7", share, most);
        let older = self.errors.optional(section, "legacy_mma_efficiency", "0.6", share, 1.0);
        let multiprocessors = self.errors.given(section, "multiprocessors", "108", count);
        let systolic_width = self.errors.given(section, "systolic_width", "128", count);
        let systolic_arrays = self.errors.optional(section, "systolic_arrays", "8", count, 1);
        let sparse_speedup = self.errors.optional(section, "sparse_speedup", "2.0", ratio, 1.0);
        let memory = self.errors.required(section, "memory", quantity::BYTES_EXAMPLE, memory);
        let memory_bandwidth = self.quantity(section, "memory_bandwidth", &RATE);
        let memory_efficiency =
            self.errors.optional(section, "memory_efficiency", "0.9", share, 1.0);
        let read_time = |value: &Value| measured(value, &TIME);
        let launch = self.errors.optional(section, "launch_overhead", TIME.example, read_time, 0.0);
        let few = |value: &Value| whole(value, 0, MAX_ENGINES);
        let copy_engines = self.errors.given(section, "copy_engines", "2", few);
        let mut store = |key| {
            let read = |value: &Value| measured(value, &RATE).map(BytesPerSec);
            self.errors.given(section, key, "25 GB/s", read)
        };
        let (host_bandwidth, disk_bandwidth) = (store("host_bandwidth"), store("disk_bandwidth"));
        let mut watts = |key| {
            let read = |value: &Value| measured(value, &POWER);
            self.errors.given(section, key, POWER.example, read)
        };
        let (power, idle_power) = (watts("power"), watts("idle_power"));
        let peak = match self.errors.table(section, "peak", "[device.peak]") {
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
            systolic_arrays: systolic_arrays?,
            sparse_speedup: sparse_speedup?,
            memory: memory?,
            memory_bandwidth: BytesPerSec(memory_bandwidth?),
            memory_efficiency: memory_efficiency?,
            launch_overhead: Seconds(launch?),
            copy_engines: copy_engines?,
            host_bandwidth: host_bandwidth?,
            disk_bandwidth: disk_bandwidth?,
            power: power?,
            idle_power: idle_power?,
        })
    }

    fn peak(&mut self, section: &Section<'_>) -> Option<Peak> {
        self.errors.known_keys(section, &["f32", "tf32", "bf16", "f16", "fp8", "fp4"]);
        let f32 = self.quantity(section, "f32", &FLOPS).map(FlopsPerSec);
        let mut rate = |key| {
            let read = |value: &Value| measured(value, &FLOPS).map(FlopsPerSec);
            self.errors.given(section, key, FLOPS.example, read)
        };
        let (tf32, bf16, f16) = (rate("tf32"), rate("bf16"), rate("f16"));
        let (fp8, fp4) = (rate("fp8"), rate("fp4"));
        Some(Peak { f32: f32?, tf32: tf32?, bf16: bf16?, f16: f16?, fp8: fp8?, fp4: fp4? })
    }
}

#[cfg(test)]
mod tests;
