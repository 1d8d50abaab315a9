//! When everything starts and ends.

use super::classes::Classes;
use paceline_plan::ids::{OpId, Rank, RoleId};
use paceline_plan::program::{Op, Plan};
use paceline_plan::units::Seconds;

/// When every op of every class of ranks starts and ends.
///
/// Of each role, one class is what reports tell of: the one that ends last; of several the one that
/// computes longest, which the others wait for.
#[derive(Clone, Debug)]
pub struct Timeline {
    classes: Classes,
    start: Vec<f64>,
    end: Vec<f64>,
    /// By role.
    told: Vec<u32>,
}

impl Timeline {
    pub(super) fn new(plan: &Plan, classes: Classes, start: Vec<f64>, end: Vec<f64>) -> Self {
        let mut timeline = Self { classes, start, end, told: Vec::new() };
        let mut told: Vec<Option<(u32, (f64, f64))>> = vec![None; plan.programs.len()];
        for class in 0..timeline.classes.len() as u32 {
            let role = timeline.classes.get(class).role;
            let weight = timeline.weight(plan, class);
            let known = &mut told[role.index()];
            if known.is_none_or(|(_, heaviest)| weight > heaviest) {
                *known = Some((class, weight));
            }
        }
        timeline.told =
            told.into_iter().map(|of_role| of_role.map_or(0, |(class, _)| class)).collect();
        timeline
    }

    /// When a class ends, and how long it computes.
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

    /// The classes of ranks.
    pub(crate) fn classes(&self) -> &Classes {
        &self.classes
    }

    /// The classes of ranks alone.
    pub(super) fn into_classes(self) -> Classes {
        self.classes
    }

    /// Of a role, the class that reports tell of.
    pub(crate) fn told(&self, role: RoleId) -> u32 {
        self.told[role.index()]
    }

    /// The rank of a role that reports tell of.
    pub fn rank(&self, role: RoleId) -> Rank {
        self.classes.get(self.told(role)).rank
    }

    /// From an op's start to its end, on the rank of its role that reports tell of.
    pub fn span(&self, role: RoleId, op: OpId) -> (Seconds, Seconds) {
        self.span_of(self.told(role), op)
    }

    /// The same on a rank of a class.
    pub(crate) fn span_of(&self, class: u32, op: OpId) -> (Seconds, Seconds) {
        let (start, end) = self.times(self.classes.number(class, op));
        (Seconds(start), Seconds(end))
    }

    /// The same for an op by its number over all classes.
    pub(crate) fn times(&self, number: u32) -> (f64, f64) {
        (self.start[number as usize], self.end[number as usize])
    }

    /// Ends everything at a moment: what would run on is left to the next iteration.
    pub(super) fn cut(&mut self, at: f64) {
        let times = self.start.iter_mut().chain(&mut self.end);
        times.for_each(|time| *time = time.min(at));
    }

    /// When the last op of all ends.
    pub fn end(&self) -> Seconds {
        Seconds(self.end.iter().copied().fold(0.0, f64::max))
    }
}
