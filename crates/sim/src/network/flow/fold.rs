//! Traffic in which everything that cannot be told apart stands once.
//!
//! Points of the [`super::world`]'s graph start with the colours of what they are: a rank with its
//! role's, a link with its capacity's, a transfer with its round's, size's and latency's. In the
//! coarsest equitable partition ([`super::refine`]) two transfers of a class start at the same time,
//! because their senders have had the same messages and computed the same; they get the same rate,
//! because they cross links of the same classes, and two links of a class have equally many flows
//! of every class and therefore fill alike; and so they end at the same time. One of each class is
//! simulated. Where nothing is to be folded, every point is a class of its own.

use super::FlowError;
use super::fair::Crossing;
use super::script::Party;
use super::traffic::{Exchange, Traffic};
use super::world::World;
use std::collections::BTreeMap;
use std::ops::Range;

/// Whether what is alike is simulated once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Folding {
    /// One of each class is.
    On,
    /// Everything is by itself.
    Off,
}

/// Traffic with one of each class.
#[derive(Debug)]
pub(crate) struct Folded {
    /// The class of every rank of the traffic, counted in the order in which classes first appear.
    pub(crate) ranks: Vec<u32>,
    /// The class of every exchange.
    pub(crate) classes: Vec<u32>,
    /// One exchange of each class.
    pub(crate) exchanges: Vec<FoldedExchange>,
    /// From each moment on, what one link of each class carries; the first from the start.
    pub(super) capacities: Vec<(f64, Vec<f64>)>,
    /// One transfer of each class.
    pub(super) transfers: Vec<Transfer>,
    crossings: Vec<Crossing>,
}

/// One exchange of a class, its actors and messages folded too.
#[derive(Debug)]
pub(crate) struct FoldedExchange {
    /// For whom actors act: a class of ranks, and as what. A party has ended when all of its actors
    /// have.
    pub(crate) parties: Vec<(u32, Party)>,
    /// The party of each actor.
    pub(super) actors: Vec<u32>,
    /// The shape of every round.
    pub(super) rounds: Vec<u32>,
    /// Messages, by shape and sender.
    pub(super) flows: Vec<FoldedFlow>,
    /// For every shape and actor.
    parts: Vec<Part>,
}

/// A message of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FoldedFlow {
    pub(super) shape: u32,
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) transfer: u32,
    /// Position among the script's sizes.
    pub(super) size: u32,
}

/// What an actor has to do with a shape.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    /// What it sends, in the exchange's flows.
    pub(super) sends: Range<u32>,
    /// How many ends of messages are its own: it has done its part when so many are through.
    pub(super) ends: u32,
}

/// A transfer of a class.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub(super) latency: f64,
    crossings: Range<u32>,
}

impl Folded {
    /// Folds traffic between ranks of these colours, one for each rank in order.
    pub(crate) fn new(
        traffic: &Traffic<'_>,
        colours: &[u32],
        folding: Folding,
    ) -> Result<Self, FlowError> {
        let world = World::new(traffic, colours)?;
        let classes = match folding {
            Folding::On => world.graph.classes(&world.colours),
            Folding::Off => (0..world.colours.len() as u32).collect(),
        };
        Ok(Quotient { traffic, world: &world, classes: &classes }.build())
    }

    /// The links that a transfer crosses.
    pub(super) fn crossings(&self, transfer: u32) -> &[Crossing] {
        let range = &self.transfers[transfer as usize].crossings;
        &self.crossings[range.start as usize..range.end as usize]
    }
}

impl FoldedExchange {
    /// What an actor does in a round of a shape.
    pub(super) fn part(&self, shape: u32, actor: u32) -> &Part {
        &self.parts[shape as usize * self.actors.len() + actor as usize]
    }
}

/// A world and the class of each of its points.
struct Quotient<'w> {
    traffic: &'w Traffic<'w>,
    world: &'w World,
    classes: &'w [u32],
}

/// Classes of one kind of points.
struct Numbered {
    /// By point.
    class: Vec<u32>,
    /// The first point of each class.
    first: Vec<u32>,
}

impl Quotient<'_> {
    fn build(&self) -> Folded {
        let World { exchanges, actors, transfers, links, .. } = *self.world;
        let ranks = self.number(0..exchanges);
        let classes = self.number(exchanges..actors);
        let transfer = self.number(transfers..links);
        let link = self.number(links..self.classes.len() as u32);
        let (crossings, ranges) = self.crossings(&transfer, &link);
        let latency = |&first: &u32| self.world.latencies[first as usize];
        let latencies = transfer.first.iter().map(latency);
        let firsts = self.first_points();
        let exchange =
            |&index: &u32| self.exchange(index, firsts[index as usize], &ranks, &transfer);
        Folded {
            exchanges: classes.first.iter().map(exchange).collect(),
            ranks: ranks.class,
            classes: classes.class,
            capacities: (self.world.capacities.iter())
                .map(|(moment, all)| {
                    (*moment, link.first.iter().map(|&link| all[link as usize]).collect())
                })
                .collect(),
            transfers: latencies
                .zip(ranges)
                .map(|(latency, crossings)| Transfer { latency, crossings })
                .collect(),
            crossings,
        }
    }

    /// Numbers the classes of a range of points in the order of their first appearance.
    fn number(&self, points: Range<u32>) -> Numbered {
        let mut known: BTreeMap<u32, u32> = BTreeMap::new();
        let mut first = Vec::new();
        let mut number = |point: u32| {
            *known.entry(self.classes[point as usize]).or_insert_with(|| {
                first.push(point - points.start);
                first.len() as u32 - 1
            })
        };
        let class = points.clone().map(&mut number).collect();
        Numbered { class, first }
    }

    /// What each class of transfers crosses, end to end: all that hangs on one link of each class.
    fn crossings(&self, transfer: &Numbered, link: &Numbered) -> (Vec<Crossing>, Vec<Range<u32>>) {
        let World { transfers, links, .. } = *self.world;
        let mut all: Vec<(u32, u32)> = Vec::new();
        for (class, &first) in link.first.iter().enumerate() {
            let hanging = self.world.graph.neighbours(links + first).iter();
            let of_class = hanging.map(|&(point, _)| transfer.class[(point - transfers) as usize]);
            all.extend(of_class.map(|transfer| (transfer, class as u32)));
        }
        all.sort_unstable();
        let mut crossings = Vec::new();
        let mut ranges = Vec::with_capacity(transfer.first.len());
        for transfer in all.chunk_by(|a, b| a.0 == b.0) {
            let start = crossings.len() as u32;
            for link in transfer.chunk_by(|a, b| a.1 == b.1) {
                crossings.push(Crossing { link: link[0].1, flows: link.len() as f64 });
            }
            ranges.push(start..crossings.len() as u32);
        }
        (crossings, ranges)
    }

    /// The first actor and the first transfer of every exchange.
    fn first_points(&self) -> Vec<(u32, u32)> {
        let mut next = (self.world.actors, self.world.transfers);
        let first = |exchange: &Exchange| {
            let script = &self.traffic.scripts[exchange.script as usize];
            let (actors, transfers) = next;
            next = (actors + exchange.ranks.len() as u32, transfers + script.transfers() as u32);
            (actors, transfers)
        };
        self.traffic.exchanges.iter().map(first).collect()
    }

    fn exchange(
        &self,
        index: u32,
        (first_actor, first_transfer): (u32, u32),
        ranks: &Numbered,
        transfer: &Numbered,
    ) -> FoldedExchange {
        let Exchange { script, ranks: members, .. } = &self.traffic.exchanges[index as usize];
        let script = &self.traffic.scripts[*script as usize];
        let actor = self.number(first_actor..first_actor + members.len() as u32);
        let mut parties: Vec<(u32, Party)> = Vec::new();
        let mut known: BTreeMap<(u32, Party), u32> = BTreeMap::new();
        let mut actors = Vec::with_capacity(actor.first.len());
        for &first in &actor.first {
            let rank = self.traffic.place(members[first as usize]);
            let party = (ranks.class[rank as usize], script.parties[first as usize]);
            actors.push(*known.entry(party).or_insert_with(|| {
                parties.push(party);
                parties.len() as u32 - 1
            }));
        }
        let mut flows = Vec::new();
        let mut at = first_transfer - self.world.transfers;
        for (shape, sends) in script.shapes.iter().enumerate() {
            for send in sends {
                flows.push(FoldedFlow {
                    shape: shape as u32,
                    from: actor.class[send.from as usize],
                    to: actor.class[send.to as usize],
                    transfer: transfer.class[at as usize],
                    size: send.size,
                });
                at += 1;
            }
        }
        flows.sort_unstable();
        flows.dedup();
        let parts = parts(&flows, script.shapes.len(), actors.len());
        FoldedExchange { parties, actors, rounds: script.rounds.clone(), flows, parts }
    }
}

/// What every actor does in every shape.
fn parts(flows: &[FoldedFlow], shapes: usize, actors: usize) -> Vec<Part> {
    let mut parts = vec![Part::default(); shapes * actors];
    for (index, flow) in flows.iter().enumerate() {
        let part = |actor: u32| flow.shape as usize * actors + actor as usize;
        let sender = &mut parts[part(flow.from)];
        if sender.sends.is_empty() {
            sender.sends.start = index as u32;
        }
        sender.sends.end = index as u32 + 1;
        sender.ends += 1;
        parts[part(flow.to)].ends += 1;
    }
    parts
}
