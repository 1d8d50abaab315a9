//! Messages as fluid: those that cross a link at the same time share it max–min fairly.
//!
//! A message waits for its latency, then drains at the rate given by [`super::fair`] until its last
//! byte has arrived. Between two events all rates are constant, so the time of the next end is
//! known. A rate change invalidates the old forecast. All events at the same time are processed
//! before rates are recomputed.

use super::fair::Fair;
use super::fold::Folded;
use super::stepped::{Event, PointToPoint};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Links that messages share fairly.
pub(crate) struct MaxMin<'f> {
    folded: &'f Folded,
    fair: Fair,
    now: f64,
    /// Number of link epochs so far, including the first.
    era: usize,
    events: BinaryHeap<Scheduled>,
    /// Number of events scheduled so far; breaks ties between simultaneous events.
    noted: u64,
    /// Indexed by message.
    flows: Vec<Flow>,
    /// Scratch buffer, reused between fillings.
    changed: Vec<(u32, f64)>,
}

/// Message in flight.
#[derive(Clone, Copy, Default)]
struct Flow {
    transfer: u32,
    left: f64,
    rate: f64,
    /// Time at which `left` was up to date.
    since: f64,
    /// Forecast counter; only the latest forecast is valid, and none of earlier messages of the
    /// same number.
    forecast: u32,
}

#[derive(Clone, Copy)]
struct Scheduled {
    at: f64,
    noted: u64,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    Wake { number: u32 },
    Arrive { flow: u32 },
    Drain { flow: u32, forecast: u32 },
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Scheduled {}

impl Ord for Scheduled {
    /// Reversed, so that the heap returns the earliest event first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.total_cmp(&self.at).then(other.noted.cmp(&self.noted))
    }
}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<'f> MaxMin<'f> {
    /// Creates idle links.
    pub(crate) fn new(folded: &'f Folded) -> Self {
        Self {
            folded,
            fair: Fair::new(folded.capacities[0].1.iter().copied()),
            now: 0.0,
            era: 1,
            events: BinaryHeap::new(),
            noted: 0,
            flows: Vec::new(),
            changed: Vec::new(),
        }
    }

    fn note(&mut self, at: f64, what: What) {
        let noted = self.noted;
        self.noted += 1;
        self.events.push(Scheduled { at, noted, what });
    }

    /// Takes a message that is through off the network.
    fn through(&mut self, flow: u32) -> (Event, f64) {
        self.flows[flow as usize].forecast += 1;
        (Event::Through(flow), self.now)
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

impl PointToPoint for MaxMin<'_> {
    fn send(&mut self, message: u32, transfer: u32, bytes: f64) {
        let number = message as usize;
        if self.flows.len() <= number {
            self.flows.resize(number + 1, Flow::default());
        }
        let forecast = self.flows[number].forecast;
        self.flows[number] = Flow { transfer, left: bytes, rate: 0.0, since: 0.0, forecast };
        let latency = self.folded.transfers[transfer as usize].latency;
        self.note(self.now + latency, What::Arrive { flow: message });
    }

    fn wake(&mut self, number: u32, at: f64) {
        self.note(at, What::Wake { number });
    }

    fn next(&mut self, until: f64) -> Option<(Event, f64)> {
        loop {
            let next = self.events.peek().map(|event| event.at);
            if self.fair.stale() && next.is_none_or(|at| at > self.now) {
                self.fill();
                continue;
            }
            if next? > until {
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
            let Scheduled { at, what, .. } = self.events.pop()?;
            match what {
                What::Wake { number } => {
                    self.now = at;
                    return Some((Event::Woken(number), at));
                }
                What::Arrive { flow } => {
                    self.now = at;
                    let state = &mut self.flows[flow as usize];
                    if state.left <= 0.0 {
                        return Some(self.through(flow));
                    }
                    state.since = at;
                    self.fair.add(flow, self.folded.crossings(state.transfer));
                }
                What::Drain { flow, forecast } => {
                    if self.flows[flow as usize].forecast == forecast {
                        self.now = at;
                        self.fair.remove(flow);
                        return Some(self.through(flow));
                    }
                }
            }
        }
    }
}
