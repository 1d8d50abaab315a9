//! Event-driven simulation of exchanges in flight: flows that start, share links and end.
//!
//! A message waits for its latency, then drains at the rate given by [`super::fair`] until its last
//! byte has arrived. Between two events all rates are constant, so the time of the next end is
//! known. A rate change invalidates the old forecast. All events at the same time are processed
//! before rates are recomputed.

use super::fair::Fair;
use super::fold::{Folded, FoldedExchange};
use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

/// Exchanges in flight on a network.
pub(crate) struct Fluid<'f> {
    folded: &'f Folded,
    fair: Fair,
    now: f64,
    /// Number of link epochs so far, including the first.
    era: usize,
    events: BinaryHeap<Event>,
    /// Number of events scheduled so far; breaks ties between simultaneous events.
    noted: u64,
    runs: Vec<PostedExchange>,
    free_runs: Vec<u32>,
    flows: Vec<Flow>,
    free_flows: Vec<u32>,
    /// Message bytes by size, referenced by posted exchanges.
    tables: Vec<Vec<f64>>,
    ended: VecDeque<Ended>,
    /// Scratch buffer, reused between fillings.
    changed: Vec<(u32, f64)>,
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
}

/// Message in flight.
#[derive(Clone, Copy)]
struct Flow {
    run: u32,
    /// Index in the exchange's flows.
    message: u32,
    round: u32,
    left: f64,
    rate: f64,
    /// Time at which `left` was up to date.
    since: f64,
    /// Forecast counter; only the latest forecast is valid.
    forecast: u32,
}

#[derive(Clone, Copy)]
struct Event {
    at: f64,
    noted: u64,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    Start { run: u32 },
    Arrive { flow: u32 },
    Drain { flow: u32, forecast: u32 },
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}

impl Ord for Event {
    /// Reversed, so that the heap returns the earliest event first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.total_cmp(&self.at).then(other.noted.cmp(&self.noted))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<'f> Fluid<'f> {
    /// Creates an idle network.
    pub(crate) fn new(folded: &'f Folded) -> Self {
        Self {
            folded,
            fair: Fair::new(folded.capacities[0].1.iter().copied()),
            now: 0.0,
            era: 1,
            events: BinaryHeap::new(),
            noted: 0,
            runs: Vec::new(),
            free_runs: Vec::new(),
            flows: Vec::new(),
            free_flows: Vec::new(),
            tables: Vec::new(),
            ended: VecDeque::new(),
            changed: Vec::new(),
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
        self.note(at.max(self.now), What::Start { run });
    }

    /// Advances until a party ends; `None` if nothing is in flight any more.
    pub(crate) fn next(&mut self) -> Option<Ended> {
        self.next_until(f64::INFINITY)
    }

    /// Advances until a party ends; `None` if none ends up to `limit`.
    pub(crate) fn next_until(&mut self, limit: f64) -> Option<Ended> {
        loop {
            if let Some(ended) = self.ended.pop_front() {
                return Some(ended);
            }
            let next = self.events.peek().map(|event| event.at);
            if self.fair.stale() && next.is_none_or(|at| at > self.now) {
                self.fill();
                continue;
            }
            if next? > limit {
                return None;
            }
            // Link changes matter only while something is in flight.
            if let Some((moment, capacities)) = self.folded.capacities.get(self.era)
                && *moment <= next?
            {
                self.now = self.now.max(*moment);
                self.fair.change(capacities);
                self.era += 1;
                continue;
            }
            let Event { at, what, .. } = self.events.pop()?;
            match what {
                What::Start { run } => {
                    self.now = at;
                    self.start(run);
                }
                What::Arrive { flow } => {
                    self.now = at;
                    self.arrive(flow);
                }
                What::Drain { flow, forecast } => {
                    if self.flows[flow as usize].forecast == forecast {
                        self.now = at;
                        self.fair.remove(flow);
                        self.finish(flow);
                    }
                }
            }
        }
    }

    /// Number of completed messages, each class counted once.
    pub(crate) fn drained(&self) -> u64 {
        self.drained
    }

    fn note(&mut self, at: f64, what: What) {
        let noted = self.noted;
        self.noted += 1;
        self.events.push(Event { at, noted, what });
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
            for message in exchange.part(shape, actor).sends.clone() {
                self.send(run, message, round);
            }
            if !self.step(run, actor, shape) {
                return;
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

    fn send(&mut self, run: u32, message: u32, round: u32) {
        let (latency, left) = self.size(run, message);
        let flow = Flow { run, message, round, left, rate: 0.0, since: 0.0, forecast: 0 };
        let flow = match self.free_flows.pop() {
            Some(free) => {
                // Forecasts of the previous flow in this slot stay invalid.
                let forecast = self.flows[free as usize].forecast;
                self.flows[free as usize] = Flow { forecast, ..flow };
                free
            }
            None => {
                self.flows.push(flow);
                self.flows.len() as u32 - 1
            }
        };
        self.note(self.now + latency, What::Arrive { flow });
    }

    /// Latency and bytes of a message.
    fn size(&self, run: u32, message: u32) -> (f64, f64) {
        let message = self.exchange(run).flows[message as usize];
        let table = &self.tables[self.runs[run as usize].table as usize];
        let bytes = table.get(message.size as usize).copied().unwrap_or(0.0);
        (self.folded.transfers[message.transfer as usize].latency, bytes)
    }

    fn arrive(&mut self, flow: u32) {
        let Flow { run, message, left, .. } = self.flows[flow as usize];
        if left <= 0.0 {
            return self.finish(flow);
        }
        self.flows[flow as usize].since = self.now;
        let transfer = self.exchange(run).flows[message as usize].transfer;
        self.fair.add(flow, self.folded.crossings(transfer));
    }

    /// Completes a message: both ends count it and continue if they waited for it.
    fn finish(&mut self, flow: u32) {
        self.drained += 1;
        let Flow { run, message, round, .. } = self.flows[flow as usize];
        self.flows[flow as usize].forecast += 1;
        self.free_flows.push(flow);
        let exchange = self.exchange(run);
        let message = exchange.flows[message as usize];
        for actor in [message.from, message.to] {
            let state = &mut self.runs[run as usize].actors[actor as usize];
            let ahead = (round - state.round) as usize;
            if state.through.len() <= ahead {
                state.through.resize(ahead + 1, 0);
            }
            state.through[ahead] += 1;
        }
        let ends = if message.from == message.to { 1 } else { 2 };
        for actor in [message.from, message.to].into_iter().take(ends) {
            let at = self.runs[run as usize].actors[actor as usize].round;
            if at == round && self.step(run, actor, message.shape) {
                self.enter(run, actor);
            }
        }
    }

    /// Recomputes rates and forecasts the end of every flow whose rate changed.
    fn fill(&mut self) {
        let mut changed = std::mem::take(&mut self.changed);
        self.fair.fill(&mut changed);
        for (flow, rate) in changed.drain(..) {
            let state = &mut self.flows[flow as usize];
            state.left = (state.left - state.rate * (self.now - state.since)).max(0.0);
            state.since = self.now;
            state.rate = rate;
            state.forecast += 1;
            let (at, forecast) = (self.now + state.left / rate, state.forecast);
            self.note(at, What::Drain { flow, forecast });
        }
        self.changed = changed;
    }
}
