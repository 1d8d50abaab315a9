//! The congestion-aware network: links carry one message at a time.
//!
//! Messages are stored and forwarded as a whole, hop by hop. A message occupies a link while its
//! bytes pass, and reaches the next device with its last byte. Messages queue for a link in order
//! of arrival.

use super::case::{Case, Kind};
use super::engine::{Event, Message, Network, Shipment};
use super::event_queue::EventQueue;
use super::fold::Fold;
use super::schedule::Schedule;
use std::collections::BTreeMap;

/// Links of one dimension and the messages on them.
#[derive(Debug)]
pub(super) struct Aware {
    kind: Kind,
    size: u32,
    /// Link times by packet size.
    passages: Vec<Passage>,
    /// Two links per rank: to the next and the previous rank of a ring, or to and from a switch.
    links: Vec<Link>,
    /// Links of a fully connected dimension, by sender and distance, created on first use.
    direct: BTreeMap<(u32, u32), u32>,
    flights: Vec<Flight>,
    unused: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Passage {
    /// Time until the packet reaches the other end.
    hop_ns: u64,
    /// Time until the link can accept the next packet.
    busy_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    busy: bool,
    /// First and last waiting flight.
    first: u32,
    last: u32,
}

/// A message in flight.
#[derive(Clone, Copy, Debug)]
struct Flight {
    message: Message,
    /// Current rank; on a switch, the sender.
    at: u32,
    hops_left: u32,
    /// The next waiting flight.
    next: u32,
    /// Index of its size; no algorithm has more sizes than twice the bits of a rank.
    size: u8,
    clockwise: bool,
}

/// Link events.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wire {
    /// A flight has reached the end of a link.
    Hopped(u32),
    /// A link can accept the next flight.
    Free(u32),
}

const NONE: u32 = u32::MAX;
const IDLE: Link = Link { busy: false, first: NONE, last: NONE };

impl Aware {
    pub(super) fn new(case: &Case, schedule: &Schedule, fold: &Fold) -> Aware {
        // More than one dimension is rejected earlier, so there is one phase.
        let (dim, phase) = (case.dims[0], &schedule.phases[0]);
        let passage = |size| {
            let (hop_ns, busy_ns) = (phase.wires.hop_ns(size), phase.wires.busy_ns(size));
            Passage { hop_ns, busy_ns }
        };
        let links = match dim.kind {
            Kind::Ring | Kind::Switch => vec![IDLE; 2 * fold.ranks as usize],
            Kind::FullyConnected => Vec::new(),
        };
        Aware {
            kind: dim.kind,
            size: dim.size,
            passages: (0..phase.reduce_ns.len()).map(passage).collect(),
            links,
            direct: BTreeMap::new(),
            flights: Vec::new(),
            unused: Vec::new(),
        }
    }

    /// First link of a flight.
    fn first_link(&mut self, flight: u32, offset: u32) -> u32 {
        let Flight { at, clockwise, .. } = self.flights[flight as usize];
        match self.kind {
            Kind::Ring => 2 * at + u32::from(!clockwise),
            Kind::Switch => 2 * at,
            Kind::FullyConnected => {
                let links = &mut self.links;
                *self.direct.entry((at, offset)).or_insert_with(|| {
                    links.push(IDLE);
                    links.len() as u32 - 1
                })
            }
        }
    }

    /// Moves a flight to the end of its link and returns the next link.
    fn next_link(&mut self, flight: u32) -> u32 {
        let flight = &mut self.flights[flight as usize];
        match self.kind {
            Kind::Ring => {
                flight.at = match (flight.clockwise, flight.at) {
                    (true, at) if at + 1 == self.size => 0,
                    (true, at) => at + 1,
                    (false, 0) => self.size - 1,
                    (false, at) => at - 1,
                };
                2 * flight.at + u32::from(!flight.clockwise)
            }
            // From the switch; a fully connected dimension has no second hop.
            Kind::Switch | Kind::FullyConnected => 2 * flight.message.to + 1,
        }
    }

    fn enter(&mut self, flight: u32, number: u32, agenda: &mut EventQueue<Event<Wire>>) {
        let link = &mut self.links[number as usize];
        if !link.busy {
            self.start(flight, number, agenda);
        } else if link.last == NONE {
            (link.first, link.last) = (flight, flight);
        } else {
            self.flights[link.last as usize].next = flight;
            link.last = flight;
        }
    }

    fn start(&mut self, flight: u32, link: u32, agenda: &mut EventQueue<Event<Wire>>) {
        self.links[link as usize].busy = true;
        let size = self.flights[flight as usize].size;
        let Passage { hop_ns, busy_ns } = self.passages[size as usize];
        agenda.add(hop_ns, Event::Network(Wire::Hopped(flight)));
        agenda.add(busy_ns, Event::Network(Wire::Free(link)));
    }

    fn hop(&mut self, number: u32, agenda: &mut EventQueue<Event<Wire>>) -> Option<Message> {
        let flight = &mut self.flights[number as usize];
        flight.hops_left -= 1;
        if flight.hops_left == 0 {
            self.unused.push(number);
            return Some(flight.message);
        }
        let link = self.next_link(number);
        self.enter(number, link, agenda);
        None
    }

    fn free(&mut self, number: u32, agenda: &mut EventQueue<Event<Wire>>) {
        let link = &mut self.links[number as usize];
        link.busy = false;
        let flight = link.first;
        if flight != NONE {
            link.first = std::mem::replace(&mut self.flights[flight as usize].next, NONE);
            if link.first == NONE {
                link.last = NONE;
            }
            self.start(flight, number, agenda);
        }
    }
}

impl Network for Aware {
    type Event = Wire;

    fn send(&mut self, shipment: &Shipment<'_>, agenda: &mut EventQueue<Event<Wire>>) {
        let Shipment { message, from, offset, size, .. } = *shipment;
        let flight = Flight {
            message,
            at: from,
            hops_left: self.kind.hops(self.size, offset),
            next: NONE,
            size: size as u8,
            // Ties go clockwise.
            clockwise: offset <= self.size - offset,
        };
        let number = match self.unused.pop() {
            Some(number) => {
                self.flights[number as usize] = flight;
                number
            }
            None => {
                self.flights.push(flight);
                self.flights.len() as u32 - 1
            }
        };
        let link = self.first_link(number, offset);
        self.enter(number, link, agenda);
    }

    fn happen(&mut self, event: Wire, agenda: &mut EventQueue<Event<Wire>>) -> Option<Message> {
        match event {
            Wire::Hopped(flight) => self.hop(flight, agenda),
            Wire::Free(link) => {
                self.free(link, agenda);
                None
            }
        }
    }
}
