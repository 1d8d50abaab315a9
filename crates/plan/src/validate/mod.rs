//! Static validation of a plan before any rank runs it.
//!
//! A plan that passes can be run by an executor without checks. Every reference resolves, and every
//! message is both sent and received. Every collective is joined by all of its members in one
//! order, and no rank is deadlocked. No op reads memory that was never written, is being
//! overwritten by another op, or was freed.
//!
//! The passes build on each other. `structure` comes first, because nothing can be looked up in a
//! plan with dangling references. A role that fails it is excluded from the later passes, and the
//! passes over all roles are skipped. Then `memory` and `dataflow` check each role separately, and
//! `links` checks all roles together. `deadlock` runs only if every op has a counterpart: an
//! unmatched message hangs anyway and is already reported.
//!
//! **Cost.** Linear in ops and `after` edges, times the number of lanes: a million ops take well
//! under a second.

mod cells;
mod clocks;
mod collectives;
mod dataflow;
mod deadlock;
mod effects;
mod groups;
mod links;
mod memory;
mod messages;
mod padding;
mod structure;
mod violation;

pub use violation::{Location, Site, Violation, ViolationKind};

use crate::ids::{OpId, Rank, RoleId};
use crate::program::{IterationFilter, Plan, Program, Section, label};
use crate::units::Bytes;
use std::fmt;

/// Returns all violations of a plan; empty if it may run.
///
/// With a limit, roles whose arena exceeds `limit` bytes are reported too.
pub fn validate(plan: &Plan, limit: Option<Bytes>) -> Vec<Violation> {
    let mut found = check_roles(plan, limit);
    found.extend(check_across_roles(plan));
    found
}

/// Returns violations of the plan itself and of each role alone: references, memory, dataflow.
///
/// Independent of [`check_across_roles`], so a caller can run both in parallel.
pub fn check_roles(plan: &Plan, limit: Option<Bytes>) -> Vec<Violation> {
    for_each_filter(plan, |plan| alone_in(plan, limit))
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

/// Returns violations between roles: messages and collectives without counterpart, and deadlocks.
/// Empty if [`check_roles`] finds dangling references.
pub fn check_across_roles(plan: &Plan) -> Vec<Violation> {
    for_each_filter(plan, check_across_roles_in)
}

fn check_across_roles_in(plan: &Plan) -> Vec<Violation> {
    let mut report = Report { plan, violations: Vec::new() };
    let sound = structure(&mut report);
    report.violations.clear();
    if sound.is_some_and(|sound| sound.iter().all(|&sound| sound)) {
        for section in SectionKind::ALL {
            let found = report.violations.len();
            let links = links::check(&mut report, section);
            if report.violations.len() == found {
                deadlock::check(&mut report, section, &links);
            }
        }
    }
    report.violations
}

/// Checks the iterations of each filter phase as if there were no others. Iterations of different
/// phases never run concurrently, and state passes between any two iterations in the same way.
/// Violations found in both phases are reported once.
fn for_each_filter(plan: &Plan, check: impl Fn(&Plan) -> Vec<Violation>) -> Vec<Violation> {
    if !plan.has_filters() {
        return check(plan);
    }
    let mut found = check(&plan.filtered(IterationFilter::Warmup));
    for violation in check(&plan.filtered(IterationFilter::AfterWarmup)) {
        if !found.contains(&violation) {
            found.push(violation);
        }
    }
    found
}

/// Flags the roles without dangling references; `None` if the plan itself has some.
fn structure(report: &mut Report<'_>) -> Option<Vec<bool>> {
    let roles = (0..report.plan.programs.len()).map(RoleId::from);
    structure::check_plan(report)
        .then(|| roles.map(|role| structure::check_role(report, role)).collect())
}

/// Section of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SectionKind {
    /// Runs once before the first iteration.
    Prologue,
    /// Runs in every iteration.
    Body,
    /// Runs once after the last iteration.
    Epilogue,
}

impl SectionKind {
    /// All sections in execution order.
    pub const ALL: [Self; 3] = [Self::Prologue, Self::Body, Self::Epilogue];

    /// Name used in messages and in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prologue => "prologue",
            Self::Body => "body",
            Self::Epilogue => "epilogue",
        }
    }

    /// Returns this section of a program.
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

/// Collects the violations that the passes find. Ops are described only here, so that a pass over a
/// valid plan allocates nothing for messages.
struct Report<'a> {
    plan: &'a Plan,
    violations: Vec<Violation>,
}

impl<'a> Report<'a> {
    fn program(&self, role: RoleId) -> &'a Program {
        &self.plan.programs[role.index()]
    }

    /// Reports a violation of the plan as a whole.
    fn plan(&mut self, kind: ViolationKind) {
        self.violations.push(Violation { place: Location::Plan, kind });
    }

    /// Reports a violation in a role's declarations.
    fn role(&mut self, role: RoleId, kind: ViolationKind) {
        let rank = self.plan.representative(role);
        self.violations.push(Violation { place: Location::Role { role, rank }, kind });
    }

    /// Reports a violation by an op, on the role's first rank.
    fn op(&mut self, role: RoleId, section: SectionKind, op: OpId, kind: ViolationKind) {
        self.op_on(self.plan.representative(role), role, section, op, kind);
    }

    /// Reports a violation by an op on a particular rank.
    fn op_on(
        &mut self,
        rank: Rank,
        role: RoleId,
        section: SectionKind,
        op: OpId,
        kind: ViolationKind,
    ) {
        let site = self.site(role, section, op);
        self.violations.push(Violation { place: Location::Op { role, rank, site }, kind });
    }

    fn site(&self, role: RoleId, section: SectionKind, op: OpId) -> Site {
        let program = self.program(role);
        let what = label::describe(self.plan, program, &section.of(program).nodes[op.index()].op);
        Site { section, op, what }
    }
}

#[cfg(test)]
mod tests;
