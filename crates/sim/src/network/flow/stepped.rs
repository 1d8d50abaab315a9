//! Exchanges in flight, run step by step over a network of single messages.
//!
//! A rank sends the messages of its next round when its own messages of the previous round are
//! through. How long a message takes is the matter of a [`PointToPoint`] network.

use super::fold::{Folded, FoldedExchange};
use std::collections::VecDeque;

/// Network that carries single messages.
pub(crate) trait PointToPoint {
    /// Sends a message of a transfer class now. The caller numbers messages, and may use the number
    /// of one that is through again.
    fn send(&mut self, message: u32, transfer: u32, bytes: f64);

    /// Reports a number at time `at`, which is not before now.
    fn wake(&mut self, number: u32, at: f64);

    /// Advances to the next event; `None` if none is due up to `until`.
    fn next(&mut self, until: f64) -> Option<(Event, f64)>;
}

/// Event of a network of single messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The last byte of a message has arrived.
    Through(u32),
    /// The time has come that was set for a number.
    Woken(u32),
}

/// Exchanges in flight on a network.
pub(crate) struct Stepped<'f, T> {
    folded: &'f Folded,
    net: T,
    now: f64,
    runs: Vec<PostedExchange>,
    free_runs: Vec<u32>,
    messages: Vec<Message>,
    free_messages: Vec<u32>,
    /// Message bytes by size, referenced by posted exchanges.
    tables: Vec<Vec<f64>>,
    ended: VecDeque<Ended>,
    /// Number of completed messages.
    drained: u64,
}

/// End of a party: all of its messages have completed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ended {
    /// Tag under which the exchange was posted.
    pub(crate) tag: u32,
    /// Index among the exchange's parties.
    pub(crate) party: u32,
    /// End time.
    pub(crate) at: f64,
}

/// Posted exchange.
struct PostedExchange {
    exchange: u32,
    table: u32,
    tag: u32,
    actors: Vec<Actor>,
    /// Number of unfinished actors of each party.
    open: Vec<u32>,
    /// Number of unfinished parties.
    left: u32,
}

#[derive(Clone, Default)]
struct Actor {
    round: u32,
    /// Number of completed ends of its own messages, for this round and later ones.
    through: VecDeque<u32>,
    /// True if it waits for another actor before its round.
    gated: bool,
}

/// Message in flight.
#[derive(Clone, Copy)]
struct Message {
    run: u32,
    /// Index in the exchange's flows.
    flow: u32,
    round: u32,
}

impl<'f, T: PointToPoint> Stepped<'f, T> {
    /// Runs exchanges over an idle network.
    pub(crate) fn new(folded: &'f Folded, net: T) -> Self {
        Self {
            folded,
            net,
            now: 0.0,
            runs: Vec::new(),
            free_runs: Vec::new(),
            messages: Vec::new(),
            free_messages: Vec::new(),
            tables: Vec::new(),
            ended: VecDeque::new(),
            drained: 0,
        }
    }

    /// Registers message bytes by size and returns their index.
    pub(crate) fn table(&mut self, bytes: Vec<f64>) -> u32 {
        self.tables.push(bytes);
        self.tables.len() as u32 - 1
    }

    /// Posts an exchange of a class at time `at`, which is not before now.
    pub(crate) fn post(&mut self, exchange: u32, table: u32, tag: u32, at: f64) {
        let folded = &self.folded.exchanges[exchange as usize];
        let mut open = vec![0; folded.parties.len()];
        folded.actors.iter().for_each(|&party| open[party as usize] += 1);
        let actors = vec![Actor::default(); folded.actors.len()];
        let left = open.len() as u32;
        let run = PostedExchange { exchange, table, tag, actors, open, left };
        let run = match self.free_runs.pop() {
            Some(free) => {
                self.runs[free as usize] = run;
                free
            }
            None => {
                self.runs.push(run);
                self.runs.len() as u32 - 1
            }
        };
        self.net.wake(run, at.max(self.now));
    }

    /// Advances until a party ends; `None` if none ends up to `limit`.
    pub(crate) fn next_until(&mut self, limit: f64) -> Option<Ended> {
        loop {
            if let Some(ended) = self.ended.pop_front() {
                return Some(ended);
            }
            let (event, at) = self.net.next(limit)?;
            self.now = at;
            match event {
                Event::Woken(run) => self.start(run),
                Event::Through(message) => self.finish(message),
            }
        }
    }

    /// Number of completed messages, each class counted once.
    pub(crate) fn drained(&self) -> u64 {
        self.drained
    }

    fn exchange(&self, run: u32) -> &'f FoldedExchange {
        &self.folded.exchanges[self.runs[run as usize].exchange as usize]
    }

    fn start(&mut self, run: u32) {
        let actors = self.runs[run as usize].actors.len() as u32;
        // No message ends before all actors have started: each takes at least one event.
        for actor in 0..actors {
            self.enter(run, actor);
        }
    }

    /// Lets an actor enter its round: it sends its messages and skips rounds with nothing to wait
    /// for.
    fn enter(&mut self, run: u32, actor: u32) {
        let exchange = self.exchange(run);
        loop {
            let round = self.runs[run as usize].actors[actor as usize].round;
            let Some(&shape) = exchange.rounds.get(round as usize) else {
                return self.retire(run, exchange.actors[actor as usize]);
            };
            let gate = exchange.gate(actor, round);
            let actors = &mut self.runs[run as usize].actors;
            if gate.is_some_and(|gate| actors[gate.after as usize].round < gate.until) {
                actors[actor as usize].gated = true;
                return;
            }
            for flow in exchange.part(shape, actor).sends.clone() {
                self.send(Message { run, flow, round });
            }
            if !self.step(run, actor, shape) {
                return;
            }
            self.open_gates(run, actor);
        }
    }

    /// Lets the actors enter that waited for an actor to leave its round.
    fn open_gates(&mut self, run: u32, left: u32) {
        let exchange = self.exchange(run);
        for actor in exchange.waiters(left) {
            let actors = &mut self.runs[run as usize].actors;
            let (round, reached) = (actors[actor as usize].round, actors[left as usize].round);
            let open = exchange.gate(actor, round).is_some_and(|gate| gate.until <= reached);
            if actors[actor as usize].gated && open {
                actors[actor as usize].gated = false;
                self.enter(run, actor);
            }
        }
    }

    /// Lets an actor leave its round if its part is done; returns true if so.
    fn step(&mut self, run: u32, actor: u32, shape: u32) -> bool {
        let ends = self.exchange(run).part(shape, actor).ends;
        let state = &mut self.runs[run as usize].actors[actor as usize];
        let done = state.through.front().copied().unwrap_or(0) == ends;
        if done {
            state.through.pop_front();
            state.round += 1;
        }
        done
    }

    /// Ends an actor that has no more rounds.
    fn retire(&mut self, run: u32, party: u32) {
        let state = &mut self.runs[run as usize];
        state.open[party as usize] -= 1;
        if state.open[party as usize] == 0 {
            self.ended.push_back(Ended { tag: state.tag, party, at: self.now });
            state.left -= 1;
            if state.left == 0 {
                self.free_runs.push(run);
            }
        }
    }

    fn send(&mut self, message: Message) {
        let flow = self.exchange(message.run).flows[message.flow as usize];
        let table = &self.tables[self.runs[message.run as usize].table as usize];
        let bytes = table.get(flow.size as usize).copied().unwrap_or(0.0);
        let number = match self.free_messages.pop() {
            Some(free) => {
                self.messages[free as usize] = message;
                free
            }
            None => {
                self.messages.push(message);
                self.messages.len() as u32 - 1
            }
        };
        self.net.send(number, flow.transfer, bytes);
    }

    /// Completes a message: both ends count it and continue if they waited for it.
    fn finish(&mut self, number: u32) {
        self.drained += 1;
        let Message { run, flow, round } = self.messages[number as usize];
        self.free_messages.push(number);
        let flow = self.exchange(run).flows[flow as usize];
        for actor in [flow.from, flow.to] {
            let state = &mut self.runs[run as usize].actors[actor as usize];
            let ahead = (round - state.round) as usize;
            if state.through.len() <= ahead {
                state.through.resize(ahead + 1, 0);
            }
            state.through[ahead] += 1;
        }
        let ends = if flow.from == flow.to { 1 } else { 2 };
        for actor in [flow.from, flow.to].into_iter().take(ends) {
            let state = &self.runs[run as usize].actors[actor as usize];
            if state.round == round && !state.gated && self.step(run, actor, flow.shape) {
                self.open_gates(run, actor);
                self.enter(run, actor);
            }
        }
    }
}
