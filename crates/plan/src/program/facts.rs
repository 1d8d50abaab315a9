//! Facts that follow from a plan's strategy, so that no executor needs to know the strategy.

use super::{Outputs, Plan, Program};
use crate::ids::{Rank, RoleId};
use std::ops::Range;

/// Facts of a run that no single op states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Pace of the ranks.
    pub pacing: Pacing,
    /// Rank that reports the loss.
    pub loss: Option<Rank>,
    /// Rank that reports the gradient norm.
    pub norm: Option<Rank>,
    /// True if an iteration with a non-finite gradient leaves every rank unchanged and known to all
    /// of them, so that it can be repeated to find the cause.
    pub repeatable: bool,
    /// Number of a step among all steps of a bucket.
    pub numbering: Numbering,
}

/// Pace at which ranks run their iterations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pacing {
    /// All ranks run the same iterations.
    Lockstep,
    /// Each replica is granted its iterations by the first of these servers, at its own pace.
    Granted {
        /// Ranks of the servers.
        servers: Range<u32>,
    },
    /// The replicas of one process share their weights and take iterations from one pool.
    Pool {
        /// Number of replicas.
        replicas: u32,
    },
}

/// Number of a step, on which moments and the learning rate depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// One step per iteration.
    Iteration,
    /// This many local steps per iteration.
    Local(u32),
    /// Steps on shared weights are numbered as they arrive.
    Arrival,
}

impl Plan {
    /// Facts that follow from the plan's strategy.
    pub fn facts(&self) -> Facts {
        let first = |has: fn(&Outputs) -> bool| {
            let role = self.programs.iter().position(|program| has(&program.outputs));
            role.map(|role| self.representative(RoleId::from(role)))
        };
        let servers = self.mesh.size()..self.mesh.world();
        let pacing = match (self.strategy.sync.is_async(), servers.is_empty()) {
            (false, _) => Pacing::Lockstep,
            (true, false) => Pacing::Granted { servers },
            (true, true) => Pacing::Pool { replicas: self.mesh.size() },
        };
        // The server that grants iterations receives the reports of all replicas.
        let served = match &pacing {
            Pacing::Granted { servers } => Some(Rank(servers.start)),
            Pacing::Lockstep | Pacing::Pool { .. } => None,
        };
        let shares = |program: &Program| program.memory.shared().0 > 0;
        let numbering = match self.strategy.local {
            Some(local) => Numbering::Local(local.steps),
            None if self.programs.iter().any(shares) => Numbering::Arrival,
            None => Numbering::Iteration,
        };
        // Overlapping iterations cannot be repeated one by one.
        let separate = self.programs.iter().all(|program| program.in_flight.is_empty());
        Facts {
            // Among local steps and asynchronous replicas, other ranks do not know of a norm.
            repeatable: separate && !self.states_differ() && pacing == Pacing::Lockstep,
            pacing,
            loss: served.or_else(|| first(|outputs| outputs.loss.is_some())),
            norm: served.or_else(|| first(|outputs| outputs.norm.is_some())),
            numbering,
        }
    }
}
