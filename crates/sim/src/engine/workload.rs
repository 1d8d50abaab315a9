//! Plans that run on a cluster at the same time, and the classes of their ranks.

use super::classes::Classes;
use super::{Costs, describe_op};
use crate::error::SimError;
use crate::network::NoPath;
use paceline_plan::program::{Plan, Program};

/// Plans that run at the same time.
pub(crate) struct Workload<'a> {
    pub(crate) jobs: &'a [Load<'a>],
    pub(crate) classes: &'a Classes,
}

/// Plan of a workload, with the costs of its ops.
#[derive(Clone, Copy)]
pub(crate) struct Load<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) costs: &'a Costs<'a>,
    /// Time at which its first ops may start.
    pub(crate) start: f64,
}

impl<'a> Load<'a> {
    /// Plan that starts at time 0.
    pub(crate) fn new(plan: &'a Plan, costs: &'a Costs<'a>) -> Self {
        Self { plan, costs, start: 0.0 }
    }
}

impl<'a> Workload<'a> {
    /// Job of a class.
    pub(super) fn job(&self, class: u32) -> &'a Load<'a> {
        &self.jobs[self.classes.get(class).job]
    }

    /// Program that a class runs.
    pub(super) fn program(&self, class: u32) -> &'a Program {
        &self.job(class).plan.programs[self.classes.get(class).role.index()]
    }

    /// Error of a deadlocked op.
    pub(super) fn stuck(&self, number: u32) -> SimError {
        let (class, op) = self.classes.op(number);
        let (at, plan) = (self.classes.get(class), self.job(class).plan);
        let (rank, what) = (at.rank, describe_op(plan, at.role, op));
        let role = self.program(class).name.clone();
        SimError::Stuck { rank, role, op, what }
    }

    /// Error of an op whose message has no path.
    pub(super) fn no_path(&self, number: u32, source: NoPath) -> SimError {
        let (class, op) = self.classes.op(number);
        let (at, plan) = (self.classes.get(class), self.job(class).plan);
        let (rank, what) = (at.rank, describe_op(plan, at.role, op));
        let role = self.program(class).name.clone();
        SimError::NoPath { rank, role, op, what, source }
    }
}
