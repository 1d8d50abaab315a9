//! Parser for `[[dimension]]`: the dimensions of the network.

use super::reader::{Reader, Section, boolean, count, measured, ratio, share, shown, text, whole};
use crate::cluster::quantity::{RATE, TIME};
use crate::cluster::{Cluster, Dimension, DimensionKind, GraphLink, Tree};
use paceline_plan::suggest::suggest;
use paceline_plan::units::{BytesPerSec, Seconds};
use std::collections::BTreeSet;
use toml::Spanned;
use toml::de::DeValue;

/// Maximum number of points of a graph; its routes are searched, not computed.
const MAX_POINTS: u32 = 4096;

const DIMENSION_KEYS: [&str; 7] =
    ["name", "kind", "size", "bandwidth", "latency", "efficiency", "devices_per_link"];

impl Reader<'_> {
    pub(super) fn dimensions(&mut self, file: &Section<'_>) -> Option<Vec<Dimension>> {
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
        let ported = self.ported(file);
        let known = tables.iter().filter_map(|value| value.get_ref().as_table()?.get("name"));
        let known: Vec<&str> = known.filter_map(|name| name.get_ref().as_str()).collect();
        if let Some(name) = ported.filter(|ported| !known.contains(ported)) {
            let what = format!("[host] names the dimension '{name}', and there is none");
            let remedy = format!("name one of: {}", known.join(", "));
            self.problem(file.span_of("host"), what, remedy);
        }
        let dimensions: Vec<_> = tables
            .iter()
            .enumerate()
            .map(|(index, value)| {
                let label = format!("[[dimension]] {}", index + 1);
                let section = self.as_table(value, label)?;
                let dimension = self.dimension(&section, ported)?;
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

    fn dimension(&mut self, section: &Section<'_>, ported: Option<&str>) -> Option<Dimension> {
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
        let follows = ported.is_some_and(|ported| name.as_deref() == Some(ported));
        let bandwidth = match follows {
            true => self.without_rates(section),
            false => self.quantity(section, "bandwidth", &RATE),
        };
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

    /// Rejects rates in a dimension whose rates follow from `[host]`; returns a placeholder rate.
    fn without_rates(&mut self, section: &Section<'_>) -> Option<f64> {
        for key in ["bandwidth", "efficiency", "devices_per_link"] {
            if section.get(key).is_some() {
                let what = format!("{} has {key}, which follows from [host]", section.label);
                let remedy = format!("leave {key} out, or leave out [host]");
                self.problem(section.span_of(key), what, remedy);
            }
        }
        Some(1.0)
    }

    /// Reads the tree structure of a switch; other kinds do not have these keys.
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

fn kind_name(value: &DeValue<'_>) -> Result<&'static str, String> {
    let word = text(value)?;
    let names = DimensionKind::NAMES;
    names.into_iter().find(|name| *name == word).ok_or_else(|| match suggest(&word, names) {
        Some(meant) => format!("there is no such kind, perhaps you mean \"{meant}\""),
        None => format!("there is no such kind (known: {})", names.join(", ")),
    })
}
