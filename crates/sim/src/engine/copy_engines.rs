//! Copy engines: number of messages a device moves concurrently with compute.
//!
//! A message occupies one engine at each end from start to end. A request is queued when both of
//! its sides are ready. Whenever an engine becomes free, the first request in the queue for which
//! everything it needs is free is served. A device without engines copies with its compute units,
//! so its messages and computations take turns.
//!
//! Collectives are kernels that move bytes by loads and stores; they use no engine. Requests and the
//! ends that release engines are events in time order ([`super::events`]).

use super::classes::Classes;
use paceline_plan::program::{Op, Peer, Plan};

/// Free engines and the requests that wait for them.
pub(super) struct EngineQueue {
    /// By class, number of free engines or compute units; `None` if not limited.
    free: Vec<Option<u32>>,
    /// By class, true if computations and messages take turns.
    limited: Vec<bool>,
    /// True if any class is limited.
    any: bool,
    /// In order of arrival.
    waiting: Vec<EngineRequest>,
}

/// Requester of engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EngineRequest {
    /// Compute op, by its number.
    Op(u32),
    /// Message, by its op match.
    Message(u32),
}

impl EngineQueue {
    /// Creates an empty queue for the engines of these classes.
    pub(super) fn new(classes: &Classes) -> Self {
        let all = classes.all.iter();
        Self {
            // A device without engines has one set of compute units.
            free: all.clone().map(|class| class.engines.map(|count| count.max(1))).collect(),
            limited: all.clone().map(|class| class.engines == Some(0)).collect(),
            any: all.clone().any(|class| class.engines.is_some()),
            waiting: Vec::new(),
        }
    }

    /// Returns true if any class has a limited number of engines.
    pub(super) fn any(&self) -> bool {
        self.any
    }

    /// Returns true if a class's computations and messages take turns.
    pub(super) fn is_limited(&self, class: u32) -> bool {
        self.limited[class as usize]
    }

    /// Returns true if any of these classes has a limited number of engines.
    pub(super) fn counts(&self, mut classes: impl Iterator<Item = u32>) -> bool {
        classes.any(|class| self.free[class as usize].is_some())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A request that waits for another device's engine leaves its own device's to others.
    #[test]
    fn a_request_does_not_hold_what_it_cannot_use() {
        let mut queue = EngineQueue {
            free: vec![Some(1), Some(1), None],
            limited: vec![false; 3],
            any: true,
            waiting: Vec::new(),
        };
        let needs = |who: EngineRequest| match who {
            EngineRequest::Message(1) => vec![0, 1],
            EngineRequest::Message(2) => vec![0, 2],
            EngineRequest::Message(_) | EngineRequest::Op(_) => vec![1, 2],
        };
        for message in [0, 1, 2] {
            queue.wait(EngineRequest::Message(message));
        }
        assert_eq!(queue.serve(needs), Some(EngineRequest::Message(0)));
        assert_eq!(queue.serve(needs), Some(EngineRequest::Message(2)), "it passes message 1");
        assert_eq!(queue.serve(needs), None);
        queue.release(1);
        assert_eq!(queue.serve(needs), None, "device 0 still sends message 2");
        queue.release(0);
        assert_eq!(queue.serve(needs), Some(EngineRequest::Message(1)));
    }
}
