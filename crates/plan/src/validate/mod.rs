//! Finds everything that is wrong with a plan before any rank runs it.
//!
//! A plan that passes can be run by an executor that checks nothing: every name leads somewhere,
//! every message is both sent and received, every collective is joined by all of its members in
//! one order, no rank waits for ever, and no op reads memory that nobody wrote, that another op
//! overwrites meanwhile, or that was given up.
//!
//! The passes build on each other. `structure` comes first, because nothing can be looked up in a
//! plan with dangling names; a role that fails it is left out of the later passes, and so are the
//! passes over all roles. Then each role's `memory` and `dataflow` are checked by themselves, and
//! all roles together by `matching`. `deadlock` runs only where everything has a counterpart: a
//! message that nobody receives hangs anyway, and saying it twice helps nobody.
//!
//! **Cost.** Linear in ops and `after` edges, times the number of lanes: a million ops take well
//! under a second.

mod cells;
mod clocks;
mod collectives;
mod dataflow;
mod deadlock;
mod describe;
mod effects;
mod groups;
mod matching;
mod memory;
mod messages;
mod padding;
mod structure;
mod violation;

pub use describe::describe;
pub use violation::{Place, Site, Violation, ViolationKind};

use crate::ids::{OpId, Rank, RoleId};
use crate::program::{Plan, Program, Section, Turn};
use crate::units::Bytes;
use std::fmt;

/// Everything that is wrong with a plan; empty if it may run.
///
/// With a limit, roles whose arena is larger than so many bytes are reported too.
pub fn validate(plan: &Plan, limit: Option<Bytes>) -> Vec<Violation> {
    let mut found = alone(plan, limit);
    found.extend(together(plan));
    found
}

/// What is wrong with the plan as such and with each role by itself: names, memory, dataflow.
///
/// This and [`together`] need nothing of each other, so that a caller with two threads can use both.
pub fn alone(plan: &Plan, limit: Option<Bytes>) -> Vec<Violation> {
    in_each_turn(plan, |plan| alone_in(plan, limit))
}

fn alone_in(plan: &Plan, limit: Option<Bytes>) -> Vec<Violation> {
    let mut report = Report { plan, violations: Vec::new() };
    let Some(sound) = structure(&mut report) else { return report.violations };
    let mut dataflow = dataflow::Checker::default();
    for role in (0..sound.len()).filter(|&role| sound[role]).map(RoleId::from) {
        memory::check(&mut report, role, limit);
        dataflow.check(&mut report, role);
    }
    report.violations
}

/// What is wrong between roles: messages and collectives without counterpart, and waiting in a
/// circle. Nothing where [`alone`] finds names that lead nowhere.
pub fn together(plan: &Plan) -> Vec<Violation> {
    in_each_turn(plan, together_in)
}

fn together_in(plan: &Plan) -> Vec<Violation> {
    let mut report = Report { plan, violations: Vec::new() };
    let sound = structure(&mut report);
    report.violations.clear();
    if sound.is_some_and(|sound| sound.iter().all(|&sound| sound)) {
        for section in SectionKind::ALL {
            let found = report.violations.len();
            let links = matching::check(&mut report, section);
            if report.violations.len() == found {
                deadlock::check(&mut report, section, &links);
            }
        }
    }
    report.violations
}

/// Checks the iterations of every turn as if they were all there is: no two of them run at once, and what one leaves the
/// next takes up where any two iterations meet. What is wrong in several turns is said once.
fn in_each_turn(plan: &Plan, check: impl Fn(&Plan) -> Vec<Violation>) -> Vec<Violation> {
    if !plan.has_turns() {
        return check(plan);
    }
    let mut found = check(&plan.in_turn(Turn::WarmUp));
    for violation in check(&plan.in_turn(Turn::Steady)) {
        if !found.contains(&violation) {
            found.push(violation);
        }
    }
    found
}

/// Which roles' names all lead somewhere; none if those of the plan do not.
fn structure(report: &mut Report<'_>) -> Option<Vec<bool>> {
    let roles = (0..report.plan.programs.len()).map(RoleId::from);
    structure::check_plan(report)
        .then(|| roles.map(|role| structure::check_role(report, role)).collect())
}

/// Which of a program's three sections an op stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SectionKind {
    /// Once before the first iteration.
    Prologue,
    /// Every iteration.
    Body,
    /// Once after the last iteration.
    Epilogue,
}

impl SectionKind {
    /// All sections, in the order in which they run.
    pub const ALL: [Self; 3] = [Self::Prologue, Self::Body, Self::Epilogue];

    /// The word used in messages and in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prologue => "prologue",
            Self::Body => "body",
            Self::Epilogue => "epilogue",
        }
    }

    /// The section of a program.
    pub fn of(self, program: &Program) -> &Section {
        match self {
            Self::Prologue => &program.prologue,
            Self::Body => &program.body,
            Self::Epilogue => &program.epilogue,
        }
    }
}

impl fmt::Display for SectionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Collects what the passes find. Only here are ops put into words, so that a pass over a good
/// plan allocates nothing for messages.
struct Report<'a> {
    plan: &'a Plan,
    violations: Vec<Violation>,
}

impl<'a> Report<'a> {
    fn program(&self, role: RoleId) -> &'a Program {
        &self.plan.programs[role.index()]
    }

    /// Something wrong with the plan as a whole.
    fn plan(&mut self, kind: ViolationKind) {
        self.violations.push(Violation { place: Place::Plan, kind });
    }

    /// Something wrong with a role's declarations.
    fn role(&mut self, role: RoleId, kind: ViolationKind) {
        let rank = self.plan.representative(role);
        self.violations.push(Violation { place: Place::Role { role, rank }, kind });
    }

    /// Something wrong with an op, told of the role's first rank.
    fn op(&mut self, role: RoleId, section: SectionKind, op: OpId, kind: ViolationKind) {
        self.op_on(self.plan.representative(role), role, section, op, kind);
    }

    /// Something wrong with an op on a particular rank.
    fn op_on(
        &mut self,
        rank: Rank,
        role: RoleId,
        section: SectionKind,
        op: OpId,
        kind: ViolationKind,
    ) {
        let site = self.site(role, section, op);
        self.violations.push(Violation { place: Place::Op { role, rank, site }, kind });
    }

    fn site(&self, role: RoleId, section: SectionKind, op: OpId) -> Site {
        let program = self.program(role);
        let what = describe(self.plan, program, &section.of(program).nodes[op.index()].op);
        Site { section, op, what }
    }
}

#[cfg(test)]
mod tests;
