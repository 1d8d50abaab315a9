//! Start and end times of all ops.

use super::async_servers::MeanIteration;
use super::classes::Classes;
use super::lanes::Times;
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::{Op, Plan};
use paceline_plan::staleness::Staleness;
use paceline_plan::units::Seconds;

/// Start and end of every op of every rank class.
///
/// Reports show one representative class per role: the one that ends last; of several, the one with
/// the most compute, which the others wait for.
#[derive(Clone, Debug)]
pub(crate) struct Timeline {
    classes: Classes,
    start: Vec<f64>,
    end: Vec<f64>,
    /// Representative class of each role.
    representatives: Vec<u32>,
    /// Mean iteration, with asynchronous servers.
    mean: Option<MeanIteration>,
    /// Time at which the next iteration begins, if that is not when the last op ends.
    period: Option<f64>,
}

impl Timeline {
    pub(super) fn new(plan: &Plan, classes: Classes, times: Times) -> Self {
        let Times { start, end, means } = times;
        let mean = means.into_iter().next().flatten();
        let representatives = Vec::new();
        let mut timeline = Self { classes, start, end, representatives, mean, period: None };
        let mut told: Vec<Option<(u32, (f64, f64))>> = vec![None; plan.programs.len()];
        for class in 0..timeline.classes.len() as u32 {
            let role = timeline.classes.get(class).role;
            let weight = timeline.weight(plan, class);
            let known = &mut told[role.index()];
            if known.is_none_or(|(_, heaviest)| weight > heaviest) {
                *known = Some((class, weight));
            }
        }
        timeline.representatives =
            told.into_iter().map(|of_role| of_role.map_or(0, |(class, _)| class)).collect();
        timeline
    }

    /// End time and total compute time of a class.
    fn weight(&self, plan: &Plan, class: u32) -> (f64, f64) {
        let nodes = &plan.programs[self.classes.get(class).role.index()].body.nodes;
        let (mut last, mut compute) = (0.0f64, 0.0);
        for (index, node) in nodes.iter().enumerate() {
            let (start, end) = self.times(self.classes.number(class, OpId::from(index)));
            last = last.max(end);
            if matches!(node.op, Op::Compute { .. }) {
                compute += end - start;
            }
        }
        (last, compute)
    }

    /// Rank classes.
    pub(crate) fn classes(&self) -> &Classes {
        &self.classes
    }

    /// Timeline of one job of a workload, from the job's start on.
    pub(super) fn of_job(
        plan: &Plan,
        (classes, job): (&Classes, usize),
        times: &Times,
        from: f64,
    ) -> Self {
        let first = classes.of_job(job).start;
        let own = classes.with_plan(job, plan);
        let first = classes.all.get(first as usize).map_or(0, |class| class.first as usize);
        let cut = |times: &[f64]| -> Vec<f64> {
            times[first..][..own.ops as usize].iter().map(|time| time - from).collect()
        };
        let (start, end) = (cut(&times.start), cut(&times.end));
        let means = times.means.get(job).cloned().into_iter().collect();
        Self::new(plan, own, Times { start, end, means })
    }

    /// Extracts the rank classes.
    pub(super) fn into_classes(self) -> Classes {
        self.classes
    }

    /// Representative class of a role, shown in reports.
    pub(crate) fn representative(&self, role: RoleId) -> u32 {
        self.representatives[role.index()]
    }

    /// Start and end of an op on the representative rank of its role.
    pub(crate) fn span(&self, role: RoleId, op: OpId) -> (Seconds, Seconds) {
        self.span_of(self.representative(role), op)
    }

    /// Start and end of an op on a class.
    pub(crate) fn span_of(&self, class: u32, op: OpId) -> (Seconds, Seconds) {
        let (start, end) = self.times(self.classes.number(class, op));
        (Seconds(start), Seconds(end))
    }

    /// Start and end of an op, by its number over all classes.
    pub(crate) fn times(&self, number: u32) -> (f64, f64) {
        (self.start[number as usize], self.end[number as usize])
    }

    /// Mean iteration, with asynchronous servers.
    pub(super) fn mean(&self) -> Option<&MeanIteration> {
        self.mean.as_ref()
    }

    /// Staleness of the gradients that asynchronous servers applied.
    pub(crate) fn staleness(&self) -> Option<Staleness> {
        self.mean.as_ref()?.staleness
    }

    /// Ends the iteration at `at` and clamps all times: anything later belongs to the next one.
    pub(super) fn cut(&mut self, at: f64) {
        self.period = Some(self.period.map_or(at, |period| period.min(at)));
        let times = self.start.iter_mut().chain(&mut self.end);
        times.for_each(|time| *time = time.min(at));
    }

    /// End of the iteration: of its last op, or the mean over asynchronous replicas.
    pub(crate) fn end(&self) -> Seconds {
        let mean = self.mean.as_ref().map(|mean| mean.time);
        let last = || self.end.iter().copied().fold(0.0, f64::max);
        Seconds(self.period.or(mean).unwrap_or_else(last))
    }
}
