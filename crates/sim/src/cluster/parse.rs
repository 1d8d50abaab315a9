//! Cluster files: TOML in, a cluster or every problem at once out.
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
//! older_instructions = 0.6           # optional, 1 if absent
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
//! A switch that is a tree adds `oversubscription = 4.0` and, where several members stand under one
//! leaf switch, `leaf = 16`.
//! A torus adds `shape = [4, 4]` and, for a mesh, `wrap = false`; its size may be left out.
//! A graph adds `links = [{ between = [0, 1], width = 2 }, …]`, each link with a `bandwidth` or
//! `latency` of its own where they differ, and `switches = 2` for points 'size' and 'size + 1'
//! that have no device.
//!
//! What `paceline calibrate` measured stands in a `[measured]` table; see `measured`.

mod measured;

use super::quantity::{self, FLOPS, Quantity, RATE, TIME};
use super::{Cluster, Device, Dimension, DimensionKind, FlopsPerSec, GraphLink, Peak, Tree};
use paceline_plan::nearest::nearest;
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use thiserror::Error;
use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

/// Everything that is wrong with a cluster file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct ClusterErrors {
    /// The file, as the user named it.
    pub file: String,
    /// The problems, in the order of their lines; never empty.
    pub problems: Vec<ClusterProblem>,
}

/// One thing that is wrong with a cluster file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterProblem {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong.
    pub what: String,
    /// What would work.
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
    /// Reads a cluster file; `file` is what messages call it.
    pub fn parse(text: &str, file: &str) -> Result<Self, ClusterErrors> {
        let mut reader = Reader { text, problems: Vec::new() };
        let (document, syntax) = DeTable::parse_recoverable(text);
        for error in &syntax {
            let span = error.span().unwrap_or(0..0);
            let message = error.message().replace('\n', ", ");
            reader.problem(span, format!("not TOML: {message}"), "correct the syntax here".into());
        }
        // Behind a syntax error half a file may be missing: what it then lacks is no news.
        let cluster = if syntax.is_empty() { reader.cluster(document.get_ref()) } else { None };
        let mut problems = reader.problems;
        problems.sort_by_key(|problem| problem.line);
        match cluster {
            Some(cluster) if problems.is_empty() => Ok(cluster),
            _ => Err(ClusterErrors { file: file.into(), problems }),
        }
    }
}

/// The most points of a graph: its routes are searched for, not computed.
const MAX_POINTS: u32 = 4096;

const DEVICE_KEYS: [&str; 12] = [
    "name",
    "peak",
    "max_efficiency",
    "sustained_efficiency",
    "older_instructions",
    "multiprocessors",
    "systolic_width",
    "sparse_speedup",
    "memory",
    "memory_bandwidth",
    "memory_efficiency",
    "launch_overhead",
];

const DIMENSION_KEYS: [&str; 7] =
    ["name", "kind", "size", "bandwidth", "latency", "efficiency", "devices_per_link"];

/// A table of the file, with the name that messages give it.
struct Section<'a> {
    table: &'a DeTable<'a>,
    label: String,
    span: Range<usize>,
}

impl<'a> Section<'a> {
    fn get(&self, key: &str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.table.get(key)
    }

    /// Where the key stands, or the section itself if it lacks the key.
    fn span_of(&self, key: &str) -> Range<usize> {
        self.table.get_key_value(key).map_or(self.span.clone(), |(key, _)| key.span())
    }
}

/// Collects problems while it reads: a field that cannot be read is `None`, and reading goes on.
struct Reader<'t> {
    text: &'t str,
    problems: Vec<ClusterProblem>,
}

impl Reader<'_> {
    fn cluster(&mut self, table: &DeTable<'_>) -> Option<Cluster> {
        let file = Section { table, label: "the file".into(), span: 0..0 };
        self.known_keys(&file, &["name", "hosts", "device", "dimension", "measured"]);
        let name = self.required(&file, "name", "\"my-cluster\"", text);
        let hosts = self.required(&file, "hosts", "1", count);
        let device = match self.table(&file, "device", "[device]") {
            Some(section) => self.device(&section),
            None => None,
        };
        let dimensions = self.dimensions(&file);
        let measured = self.measured(&file);
        let cluster = Cluster {
            name: name?,
            hosts: hosts?,
            device: device?,
            dimensions: dimensions?,
            measured: measured?,
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
        Some(cluster)
    }

    fn device(&mut self, section: &Section<'_>) -> Option<Device> {
        self.known_keys(section, &DEVICE_KEYS);
        let name = self.required(section, "name", "\"A100-SXM4-80GB\"", text);
        let max_efficiency = self.optional(section, "max_efficiency", "0.8", share, 1.0);
        let most = max_efficiency.unwrap_or(1.0);
        let sustained = self.optional(section, "sustained_efficiency", "0.7", share, most);
        let older = self.optional(section, "older_instructions", "0.6", share, 1.0);
        let some = |value: &DeValue<'_>| count(value).map(Some);
        let multiprocessors = self.optional(section, "multiprocessors", "108", some, None);
        let systolic_width = self.optional(section, "systolic_width", "128", some, None);
        let sparse_speedup = self.optional(section, "sparse_speedup", "2.0", ratio, 1.0);
        let memory = self.required(section, "memory", quantity::BYTES_EXAMPLE, memory);
        let memory_bandwidth = self.quantity(section, "memory_bandwidth", &RATE);
        let memory_efficiency = self.optional(section, "memory_efficiency", "0.9", share, 1.0);
        let read_time = |value: &DeValue<'_>| measured(value, &TIME);
        let launch = self.optional(section, "launch_overhead", TIME.example, read_time, 0.0);
        let peak = match self.table(section, "peak", "[device.peak]") {
            Some(section) => self.peak(&section),
            None => None,
        };
        Some(Device {
            name: name?,
            peak: peak?,
            max_efficiency: max_efficiency?,
            sustained_efficiency: sustained?,
            older_instructions: older?,
            multiprocessors: multiprocessors?,
            systolic_width: systolic_width?,
            sparse_speedup: sparse_speedup?,
            memory: memory?,
            memory_bandwidth: BytesPerSec(memory_bandwidth?),
            memory_efficiency: memory_efficiency?,
            launch_overhead: Seconds(launch?),
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

    fn dimensions(&mut self, file: &Section<'_>) -> Option<Vec<Dimension>> {
        let remedy = "describe the network in [[dimension]] tables, the innermost first";
        let Some(value) = file.get("dimension") else {
            self.problem(0..0, "the file has no [[dimension]]".into(), remedy.into());
            return None;
        };
        let tables = value.get_ref().as_array().filter(|array| !array.is_empty());
        let Some(tables) = tables else {
            let what = format!("dimension is {}", shown(value.get_ref()));
            self.problem(file.span_of("dimension"), what, remedy.into());
            return None;
        };
        let mut names = BTreeSet::new();
        let dimensions: Vec<_> = tables
            .iter()
            .enumerate()
            .map(|(index, value)| {
                let label = format!("[[dimension]] {}", index + 1);
                let section = self.as_table(value, label)?;
                let dimension = self.dimension(&section)?;
                if !names.insert(dimension.name.clone()) {
                    let what = format!("two dimensions are called '{}'", dimension.name);
                    let remedy = "give each a name of its own".into();
                    self.problem(section.span_of("name"), what, remedy);
                }
                Some(dimension)
            })
            .collect();
        dimensions.into_iter().collect()
    }

    fn dimension(&mut self, section: &Section<'_>) -> Option<Dimension> {
        let kind = self.required(section, "kind", "\"switch\"", kind_name);
        let own: &[&str] = match kind {
            Some("torus") => &["shape", "wrap"],
            Some("graph") => &["switches", "links"],
            Some("switch") => &["leaf", "oversubscription", "in_network_reduction"],
            Some(_) => &[],
            None => &[
                "shape",
                "wrap",
                "switches",
                "links",
                "leaf",
                "oversubscription",
                "in_network_reduction",
            ],
        };
        self.known_keys(section, &[&DIMENSION_KEYS, own].concat());
        let name = self.required(section, "name", "\"nvlink\"", text);
        let bandwidth = self.quantity(section, "bandwidth", &RATE);
        let latency = self.quantity(section, "latency", &TIME);
        let efficiency = self.optional(section, "efficiency", "0.9", share, 1.0);
        let devices_per_link = self.optional(section, "devices_per_link", "1", count, 1);
        let tree = self.tree(section);
        let reduces = self.optional(section, "in_network_reduction", "true", boolean, false);
        let (kind, size) = match kind {
            Some("torus") => self.torus(section)?,
            other => {
                let size = self.required(section, "size", "8", count)?;
                let kind = match other? {
                    "ring" => DimensionKind::Ring,
                    "switch" => DimensionKind::Switch,
                    "fully-connected" => DimensionKind::FullyConnected,
                    _ => self.graph(section, size)?,
                };
                (kind, size)
            }
        };
        Some(Dimension {
            name: name?,
            kind,
            size,
            bandwidth: BytesPerSec(bandwidth?),
            latency: Seconds(latency?),
            efficiency: efficiency?,
            devices_per_link: devices_per_link?,
            tree: tree?,
            in_network_reduction: reduces?,
        })
    }

    /// What a switch is made of; other kinds have none of the keys.
    fn tree(&mut self, section: &Section<'_>) -> Option<Option<Tree>> {
        let leaf = self.optional(section, "leaf", "16", count, 1)?;
        let read = |value: &DeValue<'_>| ratio(value).map(Some);
        let tree = match self.optional(section, "oversubscription", "4.0", read, None)? {
            Some(oversubscription) => Some(Tree { leaf, oversubscription }),
            None if section.get("leaf").is_some() => {
                let what = format!("{} has a leaf but no oversubscription", section.label);
                let remedy = "add for example oversubscription = 4.0, or leave leaf out".into();
                self.problem(section.span_of("leaf"), what, remedy);
                return None;
            }
            None => None,
        };
        Some(tree)
    }

    fn torus(&mut self, section: &Section<'_>) -> Option<(DimensionKind, u32)> {
        let wrap = self.optional(section, "wrap", "true", boolean, true);
        let shape = self.required(section, "shape", "[4, 4, 4]", |value| {
            let axes = value.as_array().filter(|axes| !axes.is_empty());
            let axes = axes.ok_or("it is no list of sizes")?;
            axes.iter().map(|axis| count(axis.get_ref())).collect::<Result<Vec<_>, _>>()
        })?;
        let product = shape.iter().fold(1u64, |product, &axis| product.saturating_mul(axis.into()));
        let Some(size) = u32::try_from(product).ok().filter(|_| product <= Cluster::MAX_DEVICES)
        else {
            let what = format!("{} shape multiplies to {product} devices", section.label);
            let remedy = format!("use at most {}", Cluster::MAX_DEVICES);
            self.problem(section.span_of("shape"), what, remedy);
            return None;
        };
        let stated = self.optional(section, "size", "64", count, size)?;
        if stated != size {
            let what = format!(
                "{} has size = {stated}, but its shape multiplies to {size}",
                section.label
            );
            self.problem(
                section.span_of("size"),
                what,
                format!("write size = {size} or leave it out"),
            );
        }
        Some((DimensionKind::Torus { shape, wrap: wrap? }, size))
    }

    fn graph(&mut self, section: &Section<'_>, size: u32) -> Option<DimensionKind> {
        let read = |value: &DeValue<'_>| whole(value, 0, u64::from(MAX_POINTS));
        let switches = self.optional(section, "switches", "0", read, 0)?;
        let points = size.saturating_add(switches);
        if points > MAX_POINTS {
            let what = format!("{} is a graph of {points} points", section.label);
            let remedy =
                format!("list at most {MAX_POINTS}; build larger networks from dimensions");
            self.problem(section.span_of("size"), what, remedy);
            return None;
        }
        let example = "[{ between = [0, 1] }]";
        self.required(section, "links", example, |value| {
            if value.is_array() { Ok(()) } else { Err("it is no list of links".into()) }
        })?;
        let list = section.get("links")?.get_ref().as_array()?;
        let mut pairs = BTreeSet::new();
        let links: Vec<_> = list
            .iter()
            .enumerate()
            .map(|(index, value)| {
                let label = format!("{} link {}", section.label, index + 1);
                let link_section = self.as_table(value, label)?;
                let link = self.graph_link(&link_section, points)?;
                let [a, b] = link.between;
                if !pairs.insert([a.min(b), a.max(b)]) {
                    let what = format!("points {a} and {b} are joined twice");
                    let remedy = "write one link with width = 2".into();
                    self.problem(link_section.span, what, remedy);
                }
                Some(link)
            })
            .collect();
        let links: Vec<_> = links.into_iter().collect::<Option<_>>()?;
        if let Some(lonely) = unreachable_member(size, points, &links) {
            let what =
                format!("no way leads from device 0 to device {lonely} of {}", section.label);
            self.problem(section.span_of("links"), what, "add the links that join them".into());
        }
        Some(DimensionKind::Graph { switches, links })
    }

    fn graph_link(&mut self, section: &Section<'_>, points: u32) -> Option<GraphLink> {
        self.known_keys(section, &["between", "width", "bandwidth", "latency"]);
        let between = self.required(section, "between", "[0, 1]", |value| {
            let ends = value.as_array().map(|ends| ends.iter().map(Spanned::get_ref));
            let ends: Vec<_> = ends.into_iter().flatten().collect();
            let [a, b] = ends[..] else { return Err("it is no pair of points".into()) };
            let point = |end| whole(end, 0, u64::from(points.saturating_sub(1)));
            match [point(a)?, point(b)?] {
                [a, b] if a == b => Err("it joins a point to itself".into()),
                between => Ok(between),
            }
        });
        let width = self.optional(section, "width", "1", count, 1);
        let read_rate = |value: &DeValue<'_>| measured(value, &RATE).map(BytesPerSec).map(Some);
        let bandwidth = self.optional(section, "bandwidth", RATE.example, read_rate, None);
        let read_time = |value: &DeValue<'_>| measured(value, &TIME).map(Seconds).map(Some);
        let latency = self.optional(section, "latency", TIME.example, read_time, None);
        Some(GraphLink {
            between: between?,
            width: width?,
            bandwidth: bandwidth?,
            latency: latency?,
        })
    }

    fn quantity(&mut self, section: &Section<'_>, key: &str, kind: &Quantity) -> Option<f64> {
        self.required(section, key, kind.example, |value| measured(value, kind))
    }

    fn required<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        example: &str,
        read: impl Fn(&DeValue<'_>) -> Result<T, String>,
    ) -> Option<T> {
        if section.get(key).is_none() {
            let what = format!("{} has no {key}", section.label);
            self.problem(section.span.clone(), what, format!("add for example {key} = {example}"));
        }
        self.optional(section, key, example, |value| read(value).map(Some), None).flatten()
    }

    fn optional<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        example: &str,
        read: impl Fn(&DeValue<'_>) -> Result<T, String>,
        absent: T,
    ) -> Option<T> {
        let Some(value) = section.get(key) else { return Some(absent) };
        match read(value.get_ref()) {
            Ok(value) => Some(value),
            Err(why) => {
                let what =
                    format!("{} has {key} = {}: {why}", section.label, shown(value.get_ref()));
                self.problem(value.span(), what, format!("write for example {key} = {example}"));
                None
            }
        }
    }

    fn table<'a>(&mut self, parent: &Section<'a>, key: &str, label: &str) -> Option<Section<'a>> {
        match parent.get(key) {
            Some(value) => self.as_table(value, label.into()),
            None => {
                let what = format!("{} has no {label}", parent.label);
                self.problem(parent.span.clone(), what, format!("add a {label} table"));
                None
            }
        }
    }

    fn as_table<'a>(
        &mut self,
        value: &'a Spanned<DeValue<'a>>,
        label: String,
    ) -> Option<Section<'a>> {
        let span = value.span();
        match value.get_ref().as_table() {
            Some(table) => Some(Section { table, label, span }),
            None => {
                let what = format!("{label} is {}", shown(value.get_ref()));
                self.problem(span, what, "make it a table of keys and values".into());
                None
            }
        }
    }

    fn known_keys(&mut self, section: &Section<'_>, known: &[&str]) {
        for (key, _) in section.table.iter() {
            let name = key.get_ref().as_ref();
            if !known.contains(&name) {
                let what = format!("{} has an unknown key '{}'", section.label, short(name));
                let remedy = match nearest(name, known.iter().copied()) {
                    Some(meant) => format!("did you mean {meant}?"),
                    None => format!("known here: {}", known.join(", ")),
                };
                self.problem(key.span(), what, remedy);
            }
        }
    }

    fn problem(&mut self, at: Range<usize>, what: String, remedy: String) {
        let before = self.text.as_bytes().iter().take(at.start);
        let line = 1 + before.filter(|&&byte| byte == b'\n').count();
        self.problems.push(ClusterProblem { line, what, remedy });
    }
}

/// A member of a graph that member 0 cannot reach.
fn unreachable_member(size: u32, points: u32, links: &[GraphLink]) -> Option<u32> {
    let mut neighbours = vec![Vec::new(); points as usize];
    for &GraphLink { between: [a, b], .. } in links {
        neighbours[a as usize].push(b);
        neighbours[b as usize].push(a);
    }
    let mut reached = vec![false; points as usize];
    let mut frontier = vec![0];
    while let Some(point) = frontier.pop() {
        if !std::mem::replace(&mut reached[point as usize], true) {
            frontier.extend(&neighbours[point as usize]);
        }
    }
    (0..size).find(|&member| !reached[member as usize])
}

fn text(value: &DeValue<'_>) -> Result<String, String> {
    match value.as_str() {
        Some(text) if !text.trim().is_empty() => Ok(text.into()),
        Some(_) => Err("it is empty".into()),
        None => Err("it is no text".into()),
    }
}

fn kind_name(value: &DeValue<'_>) -> Result<&'static str, String> {
    let word = text(value)?;
    let names = DimensionKind::NAMES;
    names.into_iter().find(|name| *name == word).ok_or_else(|| match nearest(&word, names) {
        Some(meant) => format!("there is no such kind, perhaps you mean \"{meant}\""),
        None => format!("there is no such kind (known: {})", names.join(", ")),
    })
}

fn boolean(value: &DeValue<'_>) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| "it is neither true nor false".into())
}

fn count(value: &DeValue<'_>) -> Result<u32, String> {
    whole(value, 1, Cluster::MAX_DEVICES)
}

fn whole(value: &DeValue<'_>, least: u64, most: u64) -> Result<u32, String> {
    let number = value.as_integer().and_then(integer);
    number
        .filter(|&number| (u128::from(least)..=u128::from(most)).contains(&number))
        .and_then(|number| u32::try_from(number).ok())
        .ok_or_else(|| format!("it is no whole number from {least} to {most}"))
}

/// A share of something reached: above nothing, at most all.
fn share(value: &DeValue<'_>) -> Result<f64, String> {
    let number = number(value).filter(|share| *share > 0.0 && *share <= 1.0);
    number.ok_or_else(|| "it is no number above 0 and at most 1".into())
}

/// How many times more goes in than comes out.
fn ratio(value: &DeValue<'_>) -> Result<f64, String> {
    let number = number(value).filter(|ratio| (1.0..=1e6).contains(ratio));
    number.ok_or_else(|| "it is no number from 1 to 1000000".into())
}

fn memory(value: &DeValue<'_>) -> Result<Bytes, String> {
    match (value.as_str(), value.as_integer().and_then(integer)) {
        (Some(text), _) => quantity::read_bytes(text),
        (None, Some(bytes)) => quantity::check_bytes(bytes),
        (None, None) => Err("it is no number of bytes".into()),
    }
}

fn measured(value: &DeValue<'_>, kind: &Quantity) -> Result<f64, String> {
    match (value.as_str(), number(value)) {
        (Some(text), _) => kind.read(text),
        (None, Some(number)) => kind.check(number),
        (None, None) => Err(format!("it is not {}", kind.noun)),
    }
}

fn number(value: &DeValue<'_>) -> Option<f64> {
    match (value.as_float(), value.as_integer()) {
        (Some(float), _) => float.as_str().parse().ok(),
        (None, Some(whole)) => integer(whole).map(|whole| whole as f64),
        (None, None) => None,
    }
}

fn integer(value: &DeInteger<'_>) -> Option<u128> {
    u128::from_str_radix(value.as_str(), value.radix()).ok()
}

/// A value as a message repeats it.
fn shown(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("\"{}\"", short(text)),
        DeValue::Integer(number) => short(&number.to_string()),
        DeValue::Float(number) => short(&number.to_string()),
        DeValue::Boolean(value) => value.to_string(),
        DeValue::Datetime(_) => "a date".into(),
        DeValue::Array(array) if array.is_empty() => "an empty list".into(),
        DeValue::Array(_) => "a list".into(),
        DeValue::Table(_) => "a table".into(),
    }
}

fn short(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests;
