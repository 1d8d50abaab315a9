//! Load of every link of a ring, torus or graph in each round of a collective.
//!
//! If ranks do different things, the busiest link is known only once all messages are placed: in
//! halving-doubling on a ring, pairs 2ᵏ apart all cross the middle of their block. Every message of
//! every round is therefore followed, up to a limit.

use super::{Analytic, Group, slowest};
use crate::cluster::DimensionKind;
use crate::network::NoPath;
use crate::network::flow::Links;
use paceline_plan::collective::{Action, Pattern, Rotation, Step};

/// Number of torus axes with separate links; further axes share those of the last.
pub(super) const MAX_AXES: usize = 4;

/// Maximum number of messages followed individually; beyond it, a rank's own represent all.
pub(super) const MAX_MESSAGES: u64 = 1 << 21;

/// Messages of a group and the links they use.
pub(super) struct LinkLoads<'a> {
    network: &'a Analytic<'a>,
    group: &'a Group<'a>,
    /// Steps of each rank.
    steps: &'a dyn Fn(u32) -> Vec<Step>,
    messages: Vec<Message>,
}

#[derive(Clone, Copy)]
struct Message {
    round: u32,
    from: u32,
    to: u32,
    bytes: f64,
}

impl<'a> LinkLoads<'a> {
    /// Collects the messages of a collective; `None` if not needed or more than `most`.
    pub(super) fn of(
        network: &'a Analytic<'a>,
        group: &'a Group<'a>,
        most: u64,
        steps: &'a dyn Fn(u32) -> Vec<Step>,
    ) -> Option<Self> {
        let pattern = group.pattern;
        let each = steps(pattern.root()).len() as u64;
        let many = each.saturating_mul(pattern.ranks().into()) / 2 > most;
        if many || !is_needed(network, group) {
            return None;
        }
        let cut = group.vector.cut(pattern);
        let mut messages = Vec::new();
        for me in 0..pattern.ranks() {
            for step in steps(me) {
                let (to, chunks) = match step.action {
                    Action::Send { to, chunks }
                    | Action::Lend { to, chunks }
                    | Action::Write { to, chunks } => (to, chunks),
                    Action::Offer { to, chunks } => (super::across(to, me), chunks),
                    // Already counted at the sender.
                    Action::Recv { .. } | Action::Read { .. } => continue,
                    // Data from a switch crosses other links than data to it.
                    Action::Take { .. } | Action::Fold { .. } | Action::Emit { .. } => continue,
                };
                let bytes = group.vector.bytes_in(&cut, chunks);
                messages.push(Message { round: step.round, from: me, to, bytes });
            }
        }
        messages.sort_by_key(|message| message.round);
        Some(Self { network, group, steps, messages })
    }

    /// Time of every round.
    pub(super) fn rounds(&self) -> Result<Vec<f64>, NoPath> {
        let (network, group) = (self.network, self.group);
        let all: Vec<u32> = (0..group.pattern.ranks()).collect();
        let steps = |me: u32| {
            // Steps through switch ports only; ring, torus and graph links are counted below.
            let steps = (self.steps)(me).into_iter();
            steps.filter(|step| self.through_a_port(me, &step.action)).collect()
        };
        let mut rounds = network.rounds_of(group, &all, steps)?;
        let mut links = Loads::new(network);
        let mut start = 0;
        while let Some(first) = self.messages.get(start) {
            let length = self.messages[start..].partition_point(|m| m.round == first.round);
            let mut latency: f64 = 0.0;
            for message in &self.messages[start..start + length] {
                latency = latency.max(links.add(group, message)?);
            }
            slowest(&mut rounds, first.round, links.close(latency));
            start += length;
        }
        Ok(rounds)
    }

    /// Returns true if a step's data crosses only switches or dedicated links.
    fn through_a_port(&self, me: u32, action: &Action) -> bool {
        let peer = match *action {
            Action::Send { to, .. } | Action::Lend { to, .. } | Action::Write { to, .. } => to,
            Action::Recv { from, .. } | Action::Read { from, .. } => from,
            Action::Offer { to, .. } => super::across(to, me),
            Action::Take { from, .. } => super::across(from, me),
            Action::Fold { .. } | Action::Emit { .. } => return false,
        };
        let members = self.group.members;
        let crossed = self.network.cluster.crossing(members[me as usize], members[peer as usize]);
        crossed.is_none_or(|(dimension, ..)| {
            matches!(
                self.network.cluster.dimensions[dimension].kind,
                DimensionKind::Switch | DimensionKind::FullyConnected
            )
        })
    }
}

/// Returns true if links of rings, tori or graphs may carry different loads.
fn is_needed(network: &Analytic<'_>, group: &Group<'_>) -> bool {
    let span = network.cluster.span(group.members);
    let dimensions = network.cluster.dimensions.iter().zip(span);
    let used: Vec<_> = dimensions.filter(|(_, span)| *span > 1).collect();
    let axes = |kind: &DimensionKind| match kind {
        DimensionKind::Switch | DimensionKind::FullyConnected => 0,
        DimensionKind::Ring | DimensionKind::Graph { .. } => 1,
        DimensionKind::Torus { shape, .. } => shape.iter().filter(|&&size| size > 1).count(),
    };
    let wired: usize = used.iter().map(|(dimension, _)| axes(&dimension.kind)).sum();
    let even = network.cluster.is_homogeneous();
    let whole = even && used.iter().all(|(dimension, span)| *span == dimension.size);
    wired > 0 && !(whole && is_uniform(group.pattern, wired))
}

/// Returns true if every rank's steps are a rotation of any other's, so that every link of a kind
/// carries the same load. With several axes, ranks at equal distances in rank order may or may not
/// be neighbours.
fn is_uniform(pattern: &Pattern, axes: usize) -> bool {
    let rotation = pattern.algorithm().def().hints.rotation;
    !pattern.kind().has_root()
        && match rotation(pattern) {
            Rotation::None => false,
            Rotation::Ranks => axes == 1,
            Rotation::Axes => true,
        }
}

/// Seconds that the messages of a round occupy each link.
struct Loads<'a> {
    network: &'a Analytic<'a>,
    routes: Links<'a>,
    /// Indexed by dimension, then device and link class.
    wires: Vec<Vec<f64>>,
    /// Non-zero entries of `wires`.
    touched: Vec<(usize, usize)>,
    /// Links of graphs, by dimension, plane and edge.
    edges: std::collections::BTreeMap<(usize, u64, u32), f64>,
    inner: Vec<u64>,
    alone: f64,
}

impl<'a> Loads<'a> {
    fn new(network: &'a Analytic<'a>) -> Self {
        let mut inner = Vec::new();
        let mut product = 1u64;
        for dimension in &network.cluster.dimensions {
            inner.push(product);
            product = product.saturating_mul(u64::from(dimension.size.max(1)));
        }
        Self {
            network,
            routes: Links::new(network.cluster),
            wires: vec![Vec::new(); inner.len()],
            touched: Vec::new(),
            edges: std::collections::BTreeMap::new(),
            inner,
            alone: 0.0,
        }
    }

    /// Adds a message and returns its latency; 0 if it crosses no ring, torus or graph link.
    fn add(&mut self, group: &Group<'_>, message: &Message) -> Result<f64, NoPath> {
        let ends = [message.from, message.to].map(|place| group.members[place as usize]);
        let path = self.network.path(ends[0], ends[1])?;
        let (index, cluster) = (path.dimension, self.network.cluster);
        let dimension = &cluster.dimensions[index];
        let rail = group.rail(index, message.from, message.to);
        let seconds = message.bytes / (self.network.rate(&path) * rail);
        let Some((_, from, to)) = cluster.crossing(ends[0], ends[1]) else { return Ok(0.0) };
        match &dimension.kind {
            DimensionKind::Switch | DimensionKind::FullyConnected => return Ok(0.0),
            DimensionKind::Ring | DimensionKind::Torus { .. } => {
                let inner = self.inner[index];
                let shared = u64::from(dimension.devices_per_link.max(1));
                let plane = u64::from(ends[0].0) % inner / shared * shared;
                let block = inner.saturating_mul(u64::from(dimension.size));
                let base = u64::from(ends[0].0) / block * block + plane;
                // The rate already accounts for devices that share a link and use it concurrently.
                let seconds = seconds / path.sharing;
                let wires = &mut self.wires[index];
                let touched = &mut self.touched;
                walk(&dimension.kind, dimension.size, from, to, |place, class, share| {
                    let link = (base + u64::from(place) * inner) as usize * CLASSES + class;
                    if wires.len() <= link {
                        wires.resize(link + 1, 0.0);
                    }
                    if wires[link] == 0.0 {
                        touched.push((index, link));
                    }
                    wires[link] += seconds * share;
                });
            }
            DimensionKind::Graph { .. } => {
                let mut way = Vec::new();
                self.routes.route(ends[0], ends[1], &mut way)?;
                for link in way {
                    let (plane, edge) = link.parts();
                    let carries = self.routes.capacity_at(link, cluster).0 * rail;
                    let load = self.edges.entry((index, plane, edge)).or_insert(0.0);
                    *load += message.bytes / carries;
                }
            }
        }
        self.alone = self.alone.max(seconds);
        Ok(path.latency.0)
    }

    /// Returns the time of the round and resets the loads for the next one.
    fn close(&mut self, latency: f64) -> f64 {
        let mut busiest = std::mem::take(&mut self.alone);
        for (dimension, link) in self.touched.drain(..) {
            busiest = busiest.max(std::mem::take(&mut self.wires[dimension][link]));
        }
        for load in std::mem::take(&mut self.edges).into_values() {
            busiest = busiest.max(load);
        }
        latency + busiest
    }
}

const CLASSES: usize = 2 * MAX_AXES;

/// Visits the link classes that a message between two positions crosses, with the number of links
/// of each: on each axis the shorter way round, half each way if both are equally long.
pub(super) fn hops(
    kind: &DimensionKind,
    size: u32,
    from: u32,
    to: u32,
    mut each: impl FnMut(usize, f64),
) {
    along(kind, size, from, to, |way| each(way.class, f64::from(way.hops) * way.share));
}

/// Like [`hops`], link by link: start position, class, and fraction of the message that crosses it.
fn walk(
    kind: &DimensionKind,
    size: u32,
    from: u32,
    to: u32,
    mut each: impl FnMut(u32, usize, f64),
) {
    along(kind, size, from, to, |way| {
        let LinkRoute { class, hops, share, up, here, size, stride, base } = way;
        for hop in 0..hops {
            let at = if up { (here + hop) % size } else { (here + size - hop) % size };
            each(base + at * stride, class, share);
        }
    });
}

/// Section of a route along one axis.
struct LinkRoute {
    class: usize,
    hops: u32,
    /// Fraction of the message that takes this direction.
    share: f64,
    up: bool,
    here: u32,
    size: u32,
    stride: u32,
    /// Position with coordinate 0 on this axis.
    base: u32,
}

fn along(kind: &DimensionKind, size: u32, from: u32, to: u32, mut each: impl FnMut(LinkRoute)) {
    let ring = [size];
    let (shape, wrap) = match kind {
        DimensionKind::Ring => (&ring[..], true),
        DimensionKind::Torus { shape, wrap } => (&shape[..], *wrap),
        DimensionKind::Switch | DimensionKind::FullyConnected | DimensionKind::Graph { .. } => {
            return;
        }
    };
    let (mut stride, mut place) = (1u32, from);
    for (axis, &size) in shape.iter().enumerate() {
        let size = size.max(1);
        let (here, there) = (from / stride % size, to / stride % size);
        let ahead = (there + size - here) % size;
        let base = place - here * stride;
        let class = 2 * axis.min(MAX_AXES - 1);
        let mut go = |up: bool, share: f64| {
            let hops = if up { ahead } else { (size - ahead) % size };
            // Two members share a single link: there is no other direction.
            let class = class + usize::from(!up && size > 2);
            each(LinkRoute { class, hops, share, up, here, size, stride, base });
        };
        match wrap {
            _ if ahead == 0 => {}
            false => go(there > here, 1.0),
            true if size == 2 || 2 * ahead < size => go(true, 1.0),
            true if 2 * ahead > size => go(false, 1.0),
            true => {
                go(true, 0.5);
                go(false, 0.5);
            }
        }
        place = base + there * stride;
        stride = stride.saturating_mul(size);
    }
}
