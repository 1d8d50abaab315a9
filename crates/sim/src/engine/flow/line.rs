//! Copy engines where nobody knows beforehand when a message ends.
//!
//! What [`crate::engine::engines`] says holds here too. Whoever needs an engine comes into line when
//! both of its sides are ready, and is served as soon as all that it needs is free; a message gives
//! its engines back when the network says that it is through.

use crate::engine::classes::Classes;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Who comes into line when, who waits in it, and what is free.
pub(super) struct Line {
    /// By class, engines that are free, or the units that compute; none where there are enough.
    free: Vec<Option<u32>>,
    /// By class, whether computations and messages take turns.
    turns: Vec<bool>,
    coming: BinaryHeap<Reverse<Coming>>,
    /// In the order in which they came.
    waiting: Vec<Wanting>,
}

/// Something that happens to the line at a moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coming {
    pub(super) at: f64,
    pub(super) what: Event,
}

/// What happens; of several at once, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// A class gives its computing units back.
    Done(u32),
    /// Someone comes into line.
    Wants(Wanting),
}

/// Who wants engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wanting {
    /// An op that computes, by its number.
    Op(u32),
    /// A message, by its meeting.
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

impl Line {
    /// An empty line before the engines of these classes.
    pub(super) fn new(classes: &Classes) -> Self {
        let all = classes.all.iter();
        Self {
            // A device without engines has one set of units that compute.
            free: all.clone().map(|class| class.engines.map(|count| count.max(1))).collect(),
            turns: all.map(|class| class.engines == Some(0)).collect(),
            coming: BinaryHeap::new(),
            waiting: Vec::new(),
        }
    }

    /// A line before no engines, to stand in for one that is being served.
    pub(super) fn empty() -> Self {
        let (free, turns) = (Vec::new(), Vec::new());
        Self { free, turns, coming: BinaryHeap::new(), waiting: Vec::new() }
    }

    /// Whether a class's computations and messages take turns.
    pub(super) fn takes_turns(&self, class: u32) -> bool {
        self.turns[class as usize]
    }

    /// Whether any of these classes has its engines counted.
    pub(super) fn counts(&self, mut classes: impl Iterator<Item = u32>) -> bool {
        classes.any(|class| self.free[class as usize].is_some())
    }

    /// Something is going to happen.
    pub(super) fn come(&mut self, at: f64, what: Event) {
        self.coming.push(Reverse(Coming { at, what }));
    }

    /// When the next thing happens; never, if nothing is going to.
    pub(super) fn due(&self) -> f64 {
        self.coming.peek().map_or(f64::INFINITY, |Reverse(first)| first.at)
    }

    /// What happens next.
    pub(super) fn next(&mut self) -> Option<Coming> {
        self.coming.pop().map(|Reverse(first)| first)
    }

    /// Puts someone at the end of the line.
    pub(super) fn wait(&mut self, who: Wanting) {
        self.waiting.push(who);
    }

    /// Gives one engine of a class back, or its units.
    pub(super) fn give_back(&mut self, class: u32) {
        if let Some(free) = &mut self.free[class as usize] {
            *free += 1;
        }
    }

    /// Takes the first out of the line for which all is free that `needs` says, and takes that.
    pub(super) fn serve(&mut self, needs: impl Fn(Wanting) -> Vec<u32>) -> Option<Wanting> {
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
