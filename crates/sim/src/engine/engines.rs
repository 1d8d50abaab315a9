//! Copy engines: how many messages a device moves at once, beside what it computes.
//!
//! A message takes an engine at either end from its start to its end. Where all of a device's
//! engines are busy it waits, and those that wait are served in the order in which both of their
//! sides were ready. A device without engines copies with the units that compute: its messages and
//! its computations take turns.
//!
//! Collectives are kernels of their own, which move bytes by loads and stores; they take no engine.
//!
//! **Order.** Lanes run ahead of each other elsewhere in this engine, which is fine as long as
//! nobody competes. What competes is put in line here and served when no lane can go on without it.
//! What a lane then finds out lies behind the end of what was served, so that whoever is first in
//! line really is the first.

use super::classes::Classes;
use paceline_plan::program::{Op, Peer, Plan};
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// What waits for engines, and when engines are free.
#[derive(Default)]
pub(super) struct Engines {
    line: BinaryHeap<Reverse<Request>>,
    /// By class.
    slots: Vec<Slots>,
}

/// When a device's engines are free.
enum Slots {
    /// At all times: there are as many as needed.
    Enough,
    /// One of them each.
    Of(Vec<f64>),
    /// There is none: when the units that compute are.
    Units(f64),
}

/// What waits to be served.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    /// Since when.
    pub(super) ready: f64,
    pub(super) what: Wanting,
}

/// Who waits; of several ready at once, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wanting {
    /// An op that computes, by its number.
    Op(u32),
    /// A message, by its meeting.
    Message(u32),
}

impl PartialEq for Request {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Request {}

impl PartialOrd for Request {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Request {
    fn cmp(&self, other: &Self) -> Ordering {
        self.ready.total_cmp(&other.ready).then(self.what.cmp(&other.what))
    }
}

impl Engines {
    /// The engines of every class's device; none that need counting where all have enough.
    pub(super) fn of(classes: &Classes) -> Option<Self> {
        let slots = classes.all.iter().map(|class| match class.engines {
            None => Slots::Enough,
            Some(0) => Slots::Units(0.0),
            Some(count) => Slots::Of(vec![0.0; count as usize]),
        });
        let slots: Vec<Slots> = slots.collect();
        let counted = slots.iter().any(|slots| !matches!(slots, Slots::Enough));
        counted.then(|| Self { line: BinaryHeap::new(), slots })
    }

    /// Whether a class's computations and messages take turns.
    pub(super) fn takes_turns(&self, class: u32) -> bool {
        matches!(self.slots[class as usize], Slots::Units(_))
    }

    /// Puts something in line.
    pub(super) fn wait(&mut self, ready: f64, what: Wanting) {
        self.line.push(Reverse(Request { ready, what }));
    }

    /// Who is first in line.
    pub(super) fn next(&mut self) -> Option<Request> {
        self.line.pop().map(|Reverse(first)| first)
    }

    /// When a class has an engine free, or its computing units.
    pub(super) fn free(&self, class: u32) -> f64 {
        match &self.slots[class as usize] {
            Slots::Enough => 0.0,
            Slots::Of(free) => free.iter().copied().fold(f64::INFINITY, f64::min),
            Slots::Units(free) => *free,
        }
    }

    /// Keeps a class's first free engine, or its computing units, busy until a moment.
    pub(super) fn keep(&mut self, class: u32, until: f64) {
        match &mut self.slots[class as usize] {
            Slots::Enough => {}
            Slots::Of(free) => {
                if let Some(first) = free.iter_mut().min_by(|a, b| a.total_cmp(b)) {
                    *first = until;
                }
            }
            Slots::Units(free) => *free = until,
        }
    }
}

/// Whether an op keeps the units busy that compute.
pub(super) fn computes(op: &Op) -> bool {
    match op {
        Op::Compute { .. }
        | Op::Accumulate { .. }
        | Op::Step { .. }
        | Op::Stash { .. }
        | Op::Restore { .. } => true,
        Op::Load { .. }
        | Op::Send { .. }
        | Op::Recv { .. }
        | Op::Collective { .. }
        | Op::Free { .. }
        | Op::Serve { .. } => false,
    }
}

/// Whether ranks of one role send messages to each other: one that takes an engine for what it sends
/// and another for what it receives cannot stand for both.
pub(super) fn sends_within_roles(plan: &Plan) -> bool {
    let within = |op: &Op| match op {
        Op::Send { to, .. } => match to {
            Peer::Next(axis) | Peer::Previous(axis) => *axis != paceline_plan::mesh::Axis::Pp,
            Peer::Stage(_) | Peer::Server(_) | Peer::Replica(_) => false,
        },
        Op::Load { .. }
        | Op::Compute { .. }
        | Op::Recv { .. }
        | Op::Accumulate { .. }
        | Op::Step { .. }
        | Op::Stash { .. }
        | Op::Restore { .. }
        | Op::Collective { .. }
        | Op::Free { .. }
        | Op::Serve { .. } => false,
    };
    plan.programs.iter().flat_map(|program| &program.body.nodes).any(|node| within(&node.op))
}
