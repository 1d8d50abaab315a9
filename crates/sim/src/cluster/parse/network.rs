//! Parser for `[[dimension]]`: the dimensions of the network.

use super::reader::{Reader, boolean, count, measured, ratio, share, text, whole};
use crate::cluster::quantity::{RATE, TIME};
use crate::cluster::{Cluster, Dimension, DimensionKind, GraphLink, Tree};
use paceline_plan::located::{Entry, Section, Value};
use paceline_plan::suggest::suggest;
use paceline_plan::units::{BytesPerSec, Seconds};
use std::collections::BTreeSet;

/// Maximum number of points of a graph; its routes are searched, not computed.
const MAX_POINTS: u32 = 4096;

const DIMENSION_KEYS: [&str; 7] =
    ["name", "kind", "size", "bandwidth", "latency", "efficiency", "devices_per_link"];

impl Reader {
    pub(super) fn dimensions(&mut self, file: &Section<'_>) -> Option<Vec<Dimension>> {
        let remedy = "describe the network in [[dimension]] tables, the innermost first";
        let Some(value) = file.get("dimension") else {
            self.errors.add(1, "the file has no [[dimension]]", remedy);
            return None;
        };
        let tables = value.list().filter(|array| !array.is_empty());
        let Some(tables) = tables else {
            let what = format!("dimension is {}", value);
            self.errors.add(file.line_of("dimension"), what, remedy);
            return None;
        };
        let mut names = BTreeSet::new();
        let ported = self.ported(file);
        let known = tables.iter().filter_map(|entry| entry.value.table()?.entries.get("name"));
        let known: Vec<&str> = known.filter_map(|name| name.value.text()).collect();
        if let Some(name) = ported.filter(|ported| !known.contains(ported)) {
            let what = format!("[host] names the dimension '{name}', and there is none");
            let remedy = format!("name one of: {}", known.join(", "));
            self.errors.add(file.line_of("host"), what, remedy);
        }
        self.each(tables, "[[dimension]]", |reader, section| {
            let dimension = reader.dimension(&section, ported)?;
            if !names.insert(dimension.name.clone()) {
                let what = format!("two dimensions are called '{}'", dimension.name);
                let remedy = "give each a name of its own";
                reader.errors.add(section.line_of("name"), what, remedy);
            }
            Some(dimension)
        })
    }

    fn dimension(&mut self, section: &Section<'_>, ported: Option<&str>) -> Option<Dimension> {
        let kind = self.errors.required(section, "kind", "\"switch\"", kind_name);
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
        self.errors.known_keys(section, &[&DIMENSION_KEYS, own].concat());
        let name = self.errors.required(section, "name", "\"nvlink\"", text);
        let follows = ported.is_some_and(|ported| name.as_deref() == Some(ported));
        let bandwidth = match follows {
            true => self.without_rates(section),
            false => self.quantity(section, "bandwidth", &RATE),
        };
        let latency = self.quantity(section, "latency", &TIME);
        let efficiency = self.errors.optional(section, "efficiency", "0.9", share, 1.0);
        let devices_per_link = self.errors.optional(section, "devices_per_link", "1", count, 1);
        let tree = self.tree(section);
        let reduces = self.errors.optional(section, "in_network_reduction", "true", boolean, false);
        let (kind, size) = match kind {
            Some("torus") => self.torus(section)?,
            other => {
                let size = self.errors.required(section, "size", "8", count)?;
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

    /// Rejects rates in a dimension whose rates follow from `[host]`; returns a placeholder rate.
    fn without_rates(&mut self, section: &Section<'_>) -> Option<f64> {
        for key in ["bandwidth", "efficiency", "devices_per_link"] {
            if section.get(key).is_some() {
                let what = format!("{} has {key}, which follows from [host]", section.label);
                let remedy = format!("leave {key} out, or leave out [host]");
                self.errors.add(section.line_of(key), what, remedy);
            }
        }
        Some(1.0)
    }

    /// Reads the tree structure of a switch; other kinds do not have these keys.
    fn tree(&mut self, section: &Section<'_>) -> Option<Option<Tree>> {
        let leaf = self.errors.optional(section, "leaf", "16", count, 1)?;
        let tree = match self.errors.given(section, "oversubscription", "4.0", ratio)? {
            Some(oversubscription) => Some(Tree { leaf, oversubscription }),
            None if section.get("leaf").is_some() => {
                let what = format!("{} has a leaf but no oversubscription", section.label);
                let remedy = "add for example oversubscription = 4.0, or leave leaf out";
                self.errors.add(section.line_of("leaf"), what, remedy);
                return None;
            }
            None => None,
        };
        Some(tree)
    }

    fn torus(&mut self, section: &Section<'_>) -> Option<(DimensionKind, u32)> {
        let wrap = self.errors.optional(section, "wrap", "true", boolean, true);
        let shape = self.errors.required(section, "shape", "[4, 4, 4]", |value| {
            let axes = value.list().filter(|axes| !axes.is_empty());
            let axes = axes.ok_or("it is not a list of sizes")?;
            axes.iter().map(|axis| count(&axis.value)).collect::<Result<Vec<_>, _>>()
        })?;
        let product = shape.iter().fold(1u64, |product, &axis| product.saturating_mul(axis.into()));
        let Some(size) = u32::try_from(product).ok().filter(|_| product <= Cluster::MAX_DEVICES)
        else {
            let what = format!("{} shape multiplies to {product} devices", section.label);
            let remedy = format!("use at most {}", Cluster::MAX_DEVICES);
            self.errors.add(section.line_of("shape"), what, remedy);
            return None;
        };
        let stated = self.errors.optional(section, "size", "64", count, size)?;
        if stated != size {
            let what = format!(
                "{} has size = {stated}, but its shape multiplies to {size}",
                section.label
            );
            self.errors.add(
                section.line_of("size"),
                what,
                format!("write size = {size} or leave it out"),
            );
        }
        Some((DimensionKind::Torus { shape, wrap: wrap? }, size))
    }

    fn graph(&mut self, section: &Section<'_>, size: u32) -> Option<DimensionKind> {
        let read = |value: &Value| whole(value, 0, u64::from(MAX_POINTS));
        let switches = self.errors.optional(section, "switches", "0", read, 0)?;
        let points = size.saturating_add(switches);
        if points > MAX_POINTS {
            let what = format!("{} is a graph of {points} points", section.label);
            let remedy =
                format!("list at most {MAX_POINTS}; build larger networks from dimensions");
            self.errors.add(section.line_of("size"), what, remedy);
            return None;
        }
        let example = "[{ between = [0, 1] }]";
        self.errors.required(section, "links", example, |value| {
            value.list().map(|_| ()).ok_or_else(|| "it is not a list of links".to_owned())
        })?;
        let list = section.get("links")?.list()?;
        let mut pairs = BTreeSet::new();
        let links = self.each(list, &format!("{} link", section.label), |reader, section| {
            let link = reader.graph_link(&section, points)?;
            let [a, b] = link.between;
            if !pairs.insert([a.min(b), a.max(b)]) {
                let what = format!("points {a} and {b} are joined twice");
                let remedy = "write one link with width = 2";
                reader.errors.add(section.table.line, what, remedy);
            }
            Some(link)
        })?;
        if let Some(lonely) = unreachable_member(size, points, &links) {
            let what =
                format!("no way leads from device 0 to device {lonely} of {}", section.label);
            self.errors.add(section.line_of("links"), what, "add the links that join them");
        }
        Some(DimensionKind::Graph { switches, links })
    }

    fn graph_link(&mut self, section: &Section<'_>, points: u32) -> Option<GraphLink> {
        self.errors.known_keys(section, &["between", "width", "bandwidth", "latency"]);
        let between = self.errors.required(section, "between", "[0, 1]", |value| {
            let Some([a, b]) = value.list() else {
                return Err("it is not a pair of points".into());
            };
            let point = |end: &Entry| whole(&end.value, 0, u64::from(points.saturating_sub(1)));
            match [point(a)?, point(b)?] {
                [a, b] if a == b => Err("it joins a point to itself".into()),
                between => Ok(between),
            }
        });
        let width = self.errors.optional(section, "width", "1", count, 1);
        let rate = |value: &Value| measured(value, &RATE).map(BytesPerSec);
        let bandwidth = self.errors.given(section, "bandwidth", RATE.example, rate);
        let time = |value: &Value| measured(value, &TIME).map(Seconds);
        let latency = self.errors.given(section, "latency", TIME.example, time);
        Some(GraphLink {
            between: between?,
            width: width?,
            bandwidth: bandwidth?,
            latency: latency?,
        })
    }
}

/// Returns a member of a graph that member 0 cannot reach.
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

fn kind_name(value: &Value) -> Result<&'static str, String> {
    let word = text(value)?;
    let names = DimensionKind::NAMES;
    names.into_iter().find(|name| *name == word).ok_or_else(|| match suggest(&word, names) {
        Some(meant) => format!("there is no such kind, perhaps you mean \"{meant}\""),
        None => format!("there is no such kind (known: {})", names.join(", ")),
    })
}
