//! Copy engines: number of messages a device moves concurrently with compute.
//!
//! A message occupies one engine at each end from start to end. If all engines of a device are
//! busy, it waits. Waiting messages are served in the order in which both of their sides became
//! ready. A device without engines copies with its compute units, so its messages and computations
//! take turns.
//!
//! Collectives are kernels that move bytes by loads and stores; they use no engine.
//!
//! **Order.** Elsewhere in this engine, lanes may run ahead of each other, which is safe without
//! competition. Competing requests are queued here and served once no lane can advance without
//! them. Everything a lane then discovers is later than the end of the served request, so the first
//! request in the queue really is the earliest.

use super::classes::Classes;
use paceline_plan::program::{Op, Peer, Plan};
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Queue of engine requests and the times at which engines become free.
#[derive(Default)]
pub(super) struct Engines {
    line: BinaryHeap<Reverse<Request>>,
    /// Indexed by class.
    slots: Vec<Slots>,
}

/// Times at which a device's engines are free.
enum Slots {
    /// Always free: the number of engines is not limited.
    Enough,
    /// One time per engine.
    Of(Vec<f64>),
    /// No engines: the time at which the compute units are free.
    Units(f64),
}

/// Queued request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    /// Time at which it was queued.
    pub(super) ready: f64,
    pub(super) what: EngineRequest,
}

/// Requester; the variant order breaks ties between simultaneous requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EngineRequest {
    /// Compute op, by its number.
    Op(u32),
    /// Message, by its op match.
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
    /// Returns the engines of every class's device; `None` if no device limits them.
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

    /// Returns true if a class's computations and messages take turns.
    pub(super) fn is_limited(&self, class: u32) -> bool {
        matches!(self.slots[class as usize], Slots::Units(_))
    }

    /// Queues a request.
    pub(super) fn wait(&mut self, ready: f64, what: EngineRequest) {
        self.line.push(Reverse(Request { ready, what }));
    }

    /// Removes and returns the first request in the queue.
    pub(super) fn next(&mut self) -> Option<Request> {
        self.line.pop().map(|Reverse(first)| first)
    }

    /// Time at which a class has a free engine or free compute units.
    pub(super) fn free(&self, class: u32) -> f64 {
        match &self.slots[class as usize] {
            Slots::Enough => 0.0,
            Slots::Of(free) => free.iter().copied().fold(f64::INFINITY, f64::min),
            Slots::Units(free) => *free,
        }
    }

    /// Keeps a class's first free engine, or its compute units, busy until `until`.
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

/// Returns true if an op occupies the compute units.
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

/// Returns true if ranks of one role send messages to each other. One representative cannot then
/// stand for both ends, because each end occupies an engine of its own.
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
