//! Upcoming events of the engine, in time order.
//!
//! Lanes may run ahead of each other, which is safe where nothing competes. What competes, for copy
//! engines or for a server, becomes an event, and so does whatever ends the competition.

use super::copy_engines::EngineRequest;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Event kind; the variant order breaks ties between simultaneous events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// A class releases its compute units.
    Done(u32),
    /// A request joins the queue for copy engines.
    Wants(EngineRequest),
    /// A message with an asynchronous server, known by its op match, is through.
    Through(u32),
    /// An asynchronous server has applied the gradients of a message.
    Applied(u32),
    /// A replica is ready for a message with an asynchronous server.
    Arrives(u32),
    /// All ops of a class that repeats its body have ended.
    Repeats(u32),
}

/// Scheduled event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coming {
    pub(super) at: f64,
    pub(super) what: Event,
}

/// Events that have been scheduled.
#[derive(Debug, Default)]
pub(super) struct Events {
    coming: BinaryHeap<Reverse<Coming>>,
}

impl Events {
    /// Schedules an event.
    pub(super) fn come(&mut self, at: f64, what: Event) {
        self.coming.push(Reverse(Coming { at, what }));
    }

    /// Time of the next event; infinity if there is none.
    pub(super) fn due(&self) -> f64 {
        self.coming.peek().map_or(f64::INFINITY, |Reverse(first)| first.at)
    }

    /// Removes and returns the next event.
    pub(super) fn next(&mut self) -> Option<Coming> {
        self.coming.pop().map(|Reverse(first)| first)
    }
}

impl PartialEq for Coming {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Coming {}

impl PartialOrd for Coming {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Coming {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.total_cmp(&other.at).then(self.what.cmp(&other.what))
    }
}
