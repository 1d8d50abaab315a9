//! Graph of the traffic, in which folding finds symmetries.
//!
//! ```text
//! exchange ── actor ── rank        a transfer, a message of a distinct round, is attached to its
//!               │                  sender, its receiver and every link that it crosses
//!            transfer ── link
//! ```

use super::FlowError;
use super::links::{LinkId, Links};
use super::script::{Party, Send};
use super::traffic::{Exchange, Traffic};
use crate::cluster::Cluster;
use crate::symmetry::{EdgeKind, Graph};
use std::collections::BTreeMap;

/// The graph and the ranges of its points: ranks first, then exchanges, actors, transfers and
/// links, each kind in the order of the traffic.
pub(super) struct TrafficGraph {
    pub(super) graph: Graph,
    /// Initial colour of each point, before folding.
    pub(super) colours: Vec<u32>,
    /// First point of each kind.
    pub(super) exchanges: u32,
    pub(super) actors: u32,
    pub(super) transfers: u32,
    pub(super) links: u32,
    /// Latency of each transfer.
    pub(super) latencies: Vec<f64>,
    /// Start of each epoch and capacity of each link in it.
    pub(super) capacities: Vec<(f64, Vec<f64>)>,
}

impl TrafficGraph {
    /// Finds the route of every transfer; `colours` are those of the ranks.
    pub(super) fn new(traffic: &Traffic<'_>, colours: &[u32]) -> Result<Self, FlowError> {
        let exchanges = traffic.ranks.len() as u32;
        let actors = exchanges + traffic.exchanges.len() as u32;
        let count = |exchange: &Exchange| exchange.ranks.len() as u32;
        let transfers = actors + traffic.exchanges.iter().map(count).sum::<u32>();
        let mut palette = Palette::default();
        colours.iter().for_each(|&colour| palette.paint(Colour::Rank(colour)));
        for &Exchange { script, mark, .. } in &traffic.exchanges {
            palette.paint(Colour::Exchange { script, mark });
        }
        let mut edges = Edges { actors, transfers, ..Edges::default() };
        let mut links = Links::new(traffic.cluster);
        for (index, exchange) in traffic.exchanges.iter().enumerate() {
            edges.join(traffic, exchange, exchanges + index as u32);
            let script = &traffic.scripts[exchange.script as usize];
            for (actor, &party) in (0..).zip(&script.parties) {
                palette.paint(Colour::Actor(party, actor % script.lanes));
            }
        }
        for exchange in &traffic.exchanges {
            edges.hang(traffic, exchange, &mut links, &mut palette)?;
        }
        let Edges { mut edges, latencies, mut crossed, .. } = edges;
        crossed.sort_unstable();
        let first = transfers + latencies.len() as u32;
        let moments = traffic.cluster.moments().into_iter();
        let clusters: Vec<Cluster> = moments.map(|moment| traffic.cluster.at(moment)).collect();
        let mut capacities: Vec<(f64, Vec<f64>)> =
            traffic.cluster.moments().into_iter().map(|moment| (moment, Vec::new())).collect();
        for (point, link) in (first..).zip(crossed.chunk_by(|a, b| a.0 == b.0)) {
            edges.extend(link.iter().map(|&(_, transfer)| (transfer, point, EdgeKind::Plain)));
            let rates: Vec<f64> =
                clusters.iter().map(|then| links.capacity_at(link[0].0, then).0).collect();
            for ((_, capacities), rate) in capacities.iter_mut().zip(&rates) {
                capacities.push(*rate);
            }
            let capacities = rates.into_iter().map(f64::to_bits).collect();
            palette.paint(Colour::Link { capacities });
        }
        let colours = palette.colours;
        let graph = Graph::new(colours.len(), &edges);
        Ok(Self {
            graph,
            colours,
            exchanges,
            actors,
            transfers,
            links: first,
            latencies,
            capacities,
        })
    }
}

/// Maximum number of links crossed by all transfers in total: a few gigabytes.
const MAX_CROSSINGS: usize = 1 << 26;

/// Edges under construction.
#[derive(Default)]
struct Edges {
    /// First actor of the exchanges while joining, then of the next exchange to attach.
    actors: u32,
    transfers: u32,
    joined: u32,
    edges: Vec<(u32, u32, EdgeKind)>,
    latencies: Vec<f64>,
    /// Links and the transfers that cross them.
    crossed: Vec<(LinkId, u32)>,
}

impl Edges {
    /// Connects an exchange's actors to it and to their ranks.
    fn join(&mut self, traffic: &Traffic<'_>, exchange: &Exchange, point: u32) {
        for &rank in &exchange.ranks {
            let actor = self.actors + self.joined;
            self.edges.push((actor, traffic.place(rank), EdgeKind::Plain));
            self.edges.push((actor, point, EdgeKind::Plain));
            self.joined += 1;
        }
    }

    /// Attaches an exchange's transfers to its actors and records the links they cross.
    fn hang(
        &mut self,
        traffic: &Traffic<'_>,
        exchange: &Exchange,
        links: &mut Links<'_>,
        palette: &mut Palette,
    ) -> Result<(), FlowError> {
        let Exchange { script, ref ranks, .. } = *exchange;
        let mut route = Vec::new();
        for (shape, sends) in traffic.scripts[script as usize].shapes.iter().enumerate() {
            for &Send { from, to, size, via } in sends {
                let transfer = self.transfers + self.latencies.len() as u32;
                self.edges.push((transfer, self.actors + from, EdgeKind::Sender));
                self.edges.push((transfer, self.actors + to, EdgeKind::Plain));
                let latency = links.route(ranks[from as usize], ranks[to as usize], &mut route)?.0;
                route.retain(|&link| links.is_on(link, via));
                self.crossed.extend(route.drain(..).map(|link| (link, transfer)));
                if self.crossed.len() > MAX_CROSSINGS {
                    return Err(FlowError::TooManyMessages);
                }
                self.latencies.push(latency);
                let (shape, latency) = (shape as u32, latency.to_bits());
                palette.paint(Colour::Transfer { script, shape, size, latency });
            }
        }
        self.actors += ranks.len() as u32;
        Ok(())
    }
}

/// Identity of a point before folding.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Colour {
    Rank(u32),
    Exchange { script: u32, mark: u32 },
    Actor(Party, u32),
    Transfer { script: u32, shape: u32, size: u32, latency: u64 },
    Link { capacities: Vec<u64> },
}

/// Numbers colours in order of appearance and assigns one to each point.
#[derive(Default)]
struct Palette {
    known: BTreeMap<Colour, u32>,
    colours: Vec<u32>,
}

impl Palette {
    fn paint(&mut self, colour: Colour) {
        let all = self.known.len() as u32;
        self.colours.push(*self.known.entry(colour).or_insert(all));
    }
}
