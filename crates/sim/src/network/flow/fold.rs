//! Folded traffic, in which indistinguishable items are represented once.
//!
//! Points of the graph in [`super::traffic_graph`] start with a colour: a rank with its role's, a
//! link with its capacity's, a transfer with its round's, size's and latency's. Consider two
//! transfers of one class in the coarsest equitable partition ([`crate::symmetry`]). They start at
//! the same time, because their senders have had the same messages and computed the same. They get
//! the same rate, because they cross links of the same classes, and two links of a class have
//! equally many flows of every class and so fill alike. They therefore end at the same time, and
//! one of each class is simulated. Without folding, every point is its own class.

use super::FlowError;
use super::fair::Crossing;
use super::script::{Party, RoundScript};
use super::traffic::{Exchange, Traffic};
use super::traffic_graph::TrafficGraph;
use std::collections::BTreeMap;
use std::ops::Range;

/// Selects between simulating one item per class and simulating all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Folding {
    /// Simulate one of each class.
    On,
    /// Simulate everything individually.
    Off,
}

/// Traffic with one representative per class.
#[derive(Debug)]
pub(crate) struct Folded {
    /// Class of every rank of the traffic, numbered in order of first appearance.
    pub(crate) ranks: Vec<u32>,
    /// Class of every exchange.
    pub(crate) classes: Vec<u32>,
    /// One exchange of each class.
    pub(crate) exchanges: Vec<FoldedExchange>,
    /// Start of each epoch and capacity of one link of each class; the first epoch starts at 0.
    pub(super) capacities: Vec<(f64, Vec<f64>)>,
    /// One transfer of each class.
    pub(super) transfers: Vec<Transfer>,
    crossings: Vec<Crossing>,
}

/// Representative exchange of a class, with folded actors and messages.
#[derive(Debug)]
pub(crate) struct FoldedExchange {
    /// Parties that actors act for: rank class and function. A party has ended when all of its
    /// actors have.
    pub(crate) parties: Vec<(u32, Party)>,
    /// Party of each actor.
    pub(super) actors: Vec<u32>,
    /// Shape of every round.
    pub(super) rounds: Vec<u32>,
    /// Messages, sorted by shape and sender.
    pub(super) flows: Vec<FoldedFlow>,
    /// Indexed by shape and actor.
    parts: Vec<ActorShare>,
    /// Sorted by the actor and round that wait.
    gates: Vec<FoldedGate>,
}

/// Round before which an actor waits until another one has begun a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FoldedGate {
    actor: u32,
    round: u32,
    /// Actor that it waits for.
    pub(super) after: u32,
    /// Round that must have begun there.
    pub(super) until: u32,
}

/// Message of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FoldedFlow {
    pub(super) shape: u32,
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) transfer: u32,
    /// Index among the script's sizes.
    pub(super) size: u32,
}

/// Part of an actor in a shape.
#[derive(Clone, Debug, Default)]
pub(super) struct ActorShare {
    /// Messages it sends, as a range of the exchange's flows.
    pub(super) sends: Range<u32>,
    /// Number of message ends it owns: its part is done when this number has completed.
    pub(super) ends: u32,
}

/// Transfer of a class.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub(super) latency: f64,
    crossings: Range<u32>,
}

impl Folded {
    /// Folds traffic; `colours` has one initial colour per rank, in order.
    pub(crate) fn new(
        traffic: &Traffic<'_>,
        colours: &[u32],
        folding: Folding,
    ) -> Result<Self, FlowError> {
        let world = TrafficGraph::new(traffic, colours)?;
        let classes = match folding {
            Folding::On => world.graph.classes(&world.colours),
            Folding::Off => (0..world.colours.len() as u32).collect(),
        };
        Ok(Quotient { traffic, world: &world, classes: &classes }.build())
    }

    /// Links that a transfer crosses.
    pub(super) fn crossings(&self, transfer: u32) -> &[Crossing] {
        let range = &self.transfers[transfer as usize].crossings;
        &self.crossings[range.start as usize..range.end as usize]
    }
}

impl FoldedExchange {
    /// Part of an actor in a round of a shape.
    pub(super) fn part(&self, shape: u32, actor: u32) -> &ActorShare {
        &self.parts[shape as usize * self.actors.len() + actor as usize]
    }

    /// Actors that wait for an actor at some gate.
    pub(super) fn waiters(&self, after: u32) -> impl Iterator<Item = u32> + '_ {
        let gates = self.gates.iter().filter(move |gate| gate.after == after);
        let mut last = None;
        gates.map(|gate| gate.actor).filter(move |&actor| last.replace(actor) != Some(actor))
    }

    /// Gate of an actor before a round.
    pub(super) fn gate(&self, actor: u32, round: u32) -> Option<FoldedGate> {
        let key = |gate: &FoldedGate| (gate.actor, gate.round);
        let at = self.gates.binary_search_by_key(&(actor, round), key).ok()?;
        Some(self.gates[at])
    }
}

/// Traffic graph with the class of each of its points.
struct Quotient<'w> {
    traffic: &'w Traffic<'w>,
    world: &'w TrafficGraph,
    classes: &'w [u32],
}

/// Classes of one kind of point.
struct Numbered {
    /// Class of each point.
    class: Vec<u32>,
    /// First point of each class.
    first: Vec<u32>,
}

impl Quotient<'_> {
    fn build(&self) -> Folded {
        let TrafficGraph { exchanges, actors, transfers, links, .. } = *self.world;
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

    /// Numbers the classes of a range of points in order of first appearance.
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

    /// Crossings of each transfer class: all transfers attached to one link of each class.
    fn crossings(&self, transfer: &Numbered, link: &Numbered) -> (Vec<Crossing>, Vec<Range<u32>>) {
        let TrafficGraph { transfers, links, .. } = *self.world;
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

    /// First actor and first transfer of every exchange.
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
        let gates = gates(script, &actor);
        FoldedExchange { parties, actors, rounds: script.rounds.clone(), flows, parts, gates }
    }
}

/// Gates of the representative of each class of actors.
fn gates(script: &RoundScript, actors: &Numbered) -> Vec<FoldedGate> {
    let mut gates = Vec::new();
    for (actor, &first) in (0..).zip(&actors.first) {
        let lane = first % script.lanes;
        for gate in script.gates.iter().filter(|gate| gate.lane == lane) {
            let after = actors.class[(first - lane + gate.after) as usize];
            gates.push(FoldedGate { actor, round: gate.round, after, until: gate.until });
        }
    }
    gates.sort_unstable();
    gates
}

/// Computes the part of every actor in every shape.
fn parts(flows: &[FoldedFlow], shapes: usize, actors: usize) -> Vec<ActorShare> {
    let mut parts = vec![ActorShare::default(); shapes * actors];
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
