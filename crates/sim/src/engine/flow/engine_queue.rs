//! Copy engines on the flow network, where the end of a message is not known in advance.
//!
//! The rules of [`crate::engine::copy_engines`] hold here too. A request is queued when both of its
//! sides are ready and served once everything it needs is free. A message releases its engines when
//! the network reports its end.

use crate::engine::classes::Classes;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Upcoming events, waiting requests and free engines.
pub(super) struct EngineQueue {
    /// By class, number of free engines or compute units; `None` if not limited.
    free: Vec<Option<u32>>,
    /// By class, true if computations and messages take turns.
    limited: Vec<bool>,
    coming: BinaryHeap<Reverse<Coming>>,
    /// In order of arrival.
    waiting: Vec<EngineRequest>,
}

/// Scheduled queue event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coming {
    pub(super) at: f64,
    pub(super) what: Event,
}

/// Event kind; the variant order breaks ties between simultaneous events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// A class releases its compute units.
    Done(u32),
    /// A request joins the queue.
    Wants(EngineRequest),
}

/// Requester of engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EngineRequest {
    /// Compute op, by its number.
    Op(u32),
    /// Message, by its op match.
    Message(u32),
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

impl EngineQueue {
    /// Creates an empty queue for the engines of these classes.
    pub(super) fn new(classes: &Classes) -> Self {
        let all = classes.all.iter();
        Self {
            // A device without engines has one set of compute units.
            free: all.clone().map(|class| class.engines.map(|count| count.max(1))).collect(),
            limited: all.map(|class| class.engines == Some(0)).collect(),
            coming: BinaryHeap::new(),
            waiting: Vec::new(),
        }
    }

    /// Creates a queue without engines, as a placeholder while the real one is being served.
    pub(super) fn empty() -> Self {
        let (free, turns) = (Vec::new(), Vec::new());
        Self { free, limited: turns, coming: BinaryHeap::new(), waiting: Vec::new() }
    }

    /// Returns true if a class's computations and messages take turns.
    pub(super) fn is_limited(&self, class: u32) -> bool {
        self.limited[class as usize]
    }

    /// Returns true if any of these classes has a limited number of engines.
    pub(super) fn counts(&self, mut classes: impl Iterator<Item = u32>) -> bool {
        classes.any(|class| self.free[class as usize].is_some())
    }

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

    /// Appends a request to the queue.
    pub(super) fn wait(&mut self, who: EngineRequest) {
        self.waiting.push(who);
    }

    /// Releases one engine of a class, or its compute units.
    pub(super) fn release(&mut self, class: u32) {
        if let Some(free) = &mut self.free[class as usize] {
            *free += 1;
        }
    }

    /// Removes the first request for which everything named by `needs` is free, and occupies it.
    pub(super) fn serve(
        &mut self,
        needs: impl Fn(EngineRequest) -> Vec<u32>,
    ) -> Option<EngineRequest> {
        let place = (0..self.waiting.len()).find(|&place| {
            let needed = needs(self.waiting[place]);
            needed.iter().all(|&class| {
                let count = needed.iter().filter(|&&other| other == class).count();
                self.free[class as usize].is_none_or(|free| free as usize >= count)
            })
        })?;
        let who = self.waiting.remove(place);
        for class in needs(who) {
            if let Some(free) = &mut self.free[class as usize] {
                *free -= 1;
            }
        }
        Some(who)
    }
}
