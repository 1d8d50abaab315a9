//! The event loop, and the queues of chunks at each rank.
//!
//! A rank has a queue for each dimension. The first `active_chunks` of a queue run; the others
//! wait. A chunk whose phase ends leaves its queue, is appended to the queue of its next phase, and
//! lets the next waiting chunk start.

mod climb;

use super::calls::{Call, Calls};
use super::case::{AstraError, Case};
use super::event_queue::EventQueue;
use super::exchange::Packet;
use super::fold::Fold;
use super::mailbox::{Mailboxes, Place};
use super::schedule::{Phase, Schedule, Work};
use super::{Outcome, exchange, tree};
use std::collections::VecDeque;

/// Runs a schedule to its end. Returns `None` if the order of events in a tick could distinguish
/// ranks that the fold treats as equal.
pub(super) fn run<N: Network>(
    case: &Case,
    schedule: &Schedule,
    fold: &Fold,
    network: N,
) -> Result<Option<Outcome>, AstraError> {
    let mut engine = Engine::new(case, schedule, fold, network);
    let dim = schedule.phases[0].dim;
    for rank in 0..fold.ranks {
        engine.queue(rank, dim).chunks.extend(0..schedule.chunks);
        engine.start_waiting(rank, dim);
    }
    while let Some(mut tick) = engine.agenda.next_tick() {
        while let Some(event) = engine.agenda.next(&mut tick) {
            engine.happen(event);
        }
        if engine.ambiguous {
            return Ok(None);
        }
    }
    let Finished { ranks, first, last } = engine.finished;
    if ranks < fold.ranks {
        let finished = u64::from(ranks) * fold.copies;
        return Err(AstraError::Stuck { finished, ranks: case.ranks() });
    }
    let messages = engine.messages * fold.copies;
    Ok(Some(Outcome { time_ns_max: last, time_ns_min: first, messages }))
}

/// Model of message transport.
pub(super) trait Network {
    /// Network events.
    type Event: Copy;

    /// Sends a message.
    fn send(&mut self, shipment: &Shipment<'_>, agenda: &mut EventQueue<Event<Self::Event>>);

    /// Handles a network event; returns the message that arrives with it, if any.
    fn happen(
        &mut self,
        event: Self::Event,
        agenda: &mut EventQueue<Event<Self::Event>>,
    ) -> Option<Message>;
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// Receiver.
    pub(super) to: u32,
    chunk: u32,
    label: u32,
    phase: u8,
}

/// A message with everything that its route depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shipment<'a> {
    /// The message.
    pub(super) message: Message,
    /// Sender.
    pub(super) from: u32,
    /// Distance from sender to receiver in the group.
    pub(super) offset: u32,
    /// Index of its size in the phase.
    pub(super) size: usize,
    /// Phase of the sender.
    pub(super) phase: &'a Phase,
}

/// An event in a tick.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event<N> {
    /// A rank runs a group of callbacks.
    Calls { rank: u32, group: u32 },
    /// A receive matches a message that had arrived before it was posted.
    Receive { rank: u32, chunk: u32 },
    /// A network event.
    Network(N),
}

struct Engine<'a, N: Network> {
    schedule: &'a Schedule,
    fold: &'a Fold,
    active_chunks: u32,
    endpoint_ns: u64,
    agenda: EventQueue<Event<N::Event>>,
    calls: Calls,
    mailboxes: Mailboxes,
    network: N,
    /// Chunk states by rank and chunk.
    lanes: Vec<ChunkState>,
    /// Queues by rank and dimension.
    queues: Vec<Queue>,
    /// Number of unfinished chunks per rank.
    unfinished: Vec<u32>,
    finished: Finished,
    messages: u64,
    ambiguous: bool,
}

/// State of a chunk at a rank.
#[derive(Clone, Copy, Debug, Default)]
struct ChunkState {
    phase: u8,
    /// Progress in the phase, if it is an exchange.
    exchange: exchange::Progress,
    /// Progress in the phase, if it is a tree.
    tree: tree::Progress,
    /// Tick in which the phase started.
    started: u64,
}

#[derive(Clone, Debug, Default)]
struct Queue {
    /// Running chunks, then waiting ones.
    chunks: VecDeque<u32>,
    running: u32,
    /// Entry of the last chunk: the tick, the phase that it left, and the start tick of that phase.
    entered: Option<(u64, u8, u64)>,
}

struct Finished {
    ranks: u32,
    first: u64,
    last: u64,
}

impl<'a, N: Network> Engine<'a, N> {
    fn new(case: &Case, schedule: &'a Schedule, fold: &'a Fold, network: N) -> Engine<'a, N> {
        let ranks = fold.ranks as usize;
        Engine {
            schedule,
            fold,
            active_chunks: case.active_chunks,
            endpoint_ns: case.endpoint_delay_ns,
            agenda: EventQueue::new(),
            calls: Calls::new(fold.ranks),
            mailboxes: Mailboxes::new(fold.ranks, schedule.chunks, &schedule.phases),
            network,
            lanes: vec![ChunkState::default(); ranks * schedule.chunks as usize],
            queues: vec![Queue::default(); ranks * schedule.queues],
            unfinished: vec![schedule.chunks; ranks],
            finished: Finished { ranks: 0, first: u64::MAX, last: 0 },
            messages: 0,
            ambiguous: false,
        }
    }

    fn happen(&mut self, event: Event<N::Event>) {
        match event {
            Event::Calls { rank, group } => {
                let mut number = 0;
                while let Some(call) = self.calls.get(group, number) {
                    match call {
                        Call::Ready(chunk) => self.ready(rank, chunk),
                        Call::Reduce(chunk, ns) => self.call(rank, ns, Call::Ready(chunk)),
                    }
                    number += 1;
                }
                self.calls.end(rank, group);
            }
            Event::Receive { rank, chunk } => self.receive(rank, chunk),
            Event::Network(event) => {
                if let Some(message) = self.network.happen(event, &mut self.agenda) {
                    let place =
                        Place { rank: message.to, chunk: message.chunk, phase: message.phase };
                    if self.mailboxes.arrive(place, message.label) {
                        self.receive(message.to, message.chunk);
                    }
                }
            }
        }
    }

    /// Requests a callback for a rank.
    fn call(&mut self, rank: u32, delay: u64, call: Call) {
        if let Some(group) = self.calls.add(rank, self.agenda.now() + delay, call) {
            self.agenda.add(delay, Event::Calls { rank, group });
        }
    }

    /// Passes a packet through the rank's endpoint, then reduces it if its size is given.
    fn pass_endpoint(&mut self, rank: u32, chunk: u32, reduced: Option<usize>) {
        let call = match reduced {
            Some(size) => Call::Reduce(chunk, self.phase_of(rank, chunk).reduce_ns[size]),
            None => Call::Ready(chunk),
        };
        self.call(rank, self.endpoint_ns, call);
    }

    fn lane(&mut self, rank: u32, chunk: u32) -> &mut ChunkState {
        &mut self.lanes[rank as usize * self.schedule.chunks as usize + chunk as usize]
    }

    fn queue(&mut self, rank: u32, dim: usize) -> &mut Queue {
        &mut self.queues[rank as usize * self.schedule.queues + dim]
    }

    fn phase_of(&mut self, rank: u32, chunk: u32) -> &'a Phase {
        let schedule = self.schedule;
        &schedule.phases[self.lane(rank, chunk).phase as usize]
    }

    fn start(&mut self, rank: u32, chunk: u32) {
        let now = self.agenda.now();
        self.lane(rank, chunk).started = now;
        match &self.phase_of(rank, chunk).work {
            Work::Exchange(exchange) => {
                for _ in 0..exchange.window {
                    let reduced = exchange.prepare(&mut self.lane(rank, chunk).exchange);
                    self.pass_endpoint(rank, chunk, reduced);
                }
            }
            Work::Tree(tree) => self.start_tree(rank, chunk, tree),
        }
    }

    fn receive(&mut self, rank: u32, chunk: u32) {
        match &self.phase_of(rank, chunk).work {
            Work::Exchange(exchange) => {
                let reduced = exchange.receive(&mut self.lane(rank, chunk).exchange);
                self.pass_endpoint(rank, chunk, reduced);
            }
            Work::Tree(tree) => self.receive_in_tree(rank, chunk, tree),
        }
    }

    fn ready(&mut self, rank: u32, chunk: u32) {
        let phase = self.phase_of(rank, chunk);
        match &phase.work {
            Work::Exchange(exchange) => {
                let (packets, ends) = exchange.ready(&mut self.lane(rank, chunk).exchange);
                if !packets.is_empty() {
                    let index = self.fold.index(rank, phase);
                    for number in packets {
                        let Packet { offset, label, size } = exchange.packet(number, index);
                        self.send(rank, chunk, index, offset, label, size);
                        self.post(rank, chunk, label);
                    }
                }
                if ends {
                    self.end_phase(rank, chunk);
                }
            }
            Work::Tree(tree) => self.ready_in_tree(rank, chunk, tree),
        }
    }

    fn send(&mut self, rank: u32, chunk: u32, index: u32, offset: u32, label: u32, size: usize) {
        let number = self.lane(rank, chunk).phase;
        let phase = self.phase_of(rank, chunk);
        let to = self.fold.member(rank, index, offset, phase);
        let message = Message { to, chunk, label, phase: number };
        self.messages += 1;
        let shipment = Shipment { message, from: rank, offset, size, phase };
        self.network.send(&shipment, &mut self.agenda);
    }

    fn post(&mut self, rank: u32, chunk: u32, label: u32) {
        let phase = self.lane(rank, chunk).phase;
        if self.mailboxes.post(Place { rank, chunk, phase }, label) {
            self.agenda.add(0, Event::Receive { rank, chunk });
        }
    }

    /// Advances a chunk to its next phase, or finishes it.
    fn end_phase(&mut self, rank: u32, chunk: u32) {
        let now = self.agenda.now();
        let schedule = self.schedule;
        let phases = &schedule.phases;
        let ChunkState { phase: left, started, .. } = *self.lane(rank, chunk);
        let left_dim = phases[left as usize].dim;
        self.mailboxes.end(Place { rank, chunk, phase: left });
        let queue = self.queue(rank, left_dim);
        if let Some(at) = queue.chunks.iter().position(|&other| other == chunk) {
            queue.chunks.remove(at);
        }
        queue.running -= 1;
        let Some(phase) = phases.get(left as usize + 1) else {
            self.finish_chunk(rank);
            self.start_waiting(rank, left_dim);
            return;
        };
        *self.lane(rank, chunk) = ChunkState { phase: left + 1, ..ChunkState::default() };
        let folds = self.fold.folds();
        let queue = self.queue(rank, phase.dim);
        queue.chunks.push_back(chunk);
        // Chunks that ran concurrently end their phase in start order at every rank. The order of
        // others within a tick depends only on the rank numbering.
        let entered = (now, left, started);
        let side_by_side = match phases[left as usize].work {
            Work::Exchange(_) => queue.entered == Some(entered),
            Work::Tree(_) => false,
        };
        let same_tick = queue.entered.is_some_and(|(tick, ..)| tick == now);
        queue.entered = Some(entered);
        self.ambiguous |= folds && same_tick && !side_by_side;
        self.start_waiting(rank, left_dim);
        self.start_waiting(rank, phase.dim);
    }

    fn finish_chunk(&mut self, rank: u32) {
        let unfinished = &mut self.unfinished[rank as usize];
        *unfinished -= 1;
        if *unfinished == 0 {
            let now = self.agenda.now();
            let Finished { ranks, first, last } = &mut self.finished;
            *ranks += 1;
            *first = now.min(*first);
            *last = now.max(*last);
        }
    }

    /// Starts waiting chunks of a queue, up to `active_chunks`.
    fn start_waiting(&mut self, rank: u32, dim: usize) {
        let active_chunks = self.active_chunks;
        loop {
            let queue = self.queue(rank, dim);
            if queue.running >= active_chunks {
                return;
            }
            let Some(&chunk) = queue.chunks.get(queue.running as usize) else { return };
            queue.running += 1;
            self.start(rank, chunk);
        }
    }
}
