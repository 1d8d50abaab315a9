//! Links between the communicating ops of all ranks: which must have started for one to be done.

use super::{Report, SectionKind, collectives, messages};
use crate::ids::{OpId, RoleId};

/// Matches sends with receives and collectives with each other, in one section of all roles.
/// Reports ops without a counterpart or with a mismatch.
pub(super) fn check(report: &mut Report<'_>, section: SectionKind) -> Links {
    let ops = Numbering::new(report, section);
    let mut pairs = Vec::new();
    messages::check(report, &ops, &mut pairs);
    collectives::check(report, &ops, &mut pairs);
    Links::new(ops, &pairs)
}

/// Global numbering of the ops of one section of all roles.
pub(super) struct Numbering {
    /// The section.
    pub(super) section: SectionKind,
    /// Number of each role's first op, followed by the total number of ops.
    first: Vec<u32>,
}

impl Numbering {
    fn new(report: &Report<'_>, section: SectionKind) -> Self {
        let mut first = vec![0u32];
        for program in &report.plan.programs {
            let ops = section.of(program).nodes.len() as u32;
            first.push(first.last().copied().unwrap_or(0).saturating_add(ops));
        }
        Self { section, first }
    }

    /// Number of ops.
    pub(super) fn len(&self) -> usize {
        self.first.last().map_or(0, |&end| end as usize)
    }

    /// Global number of a role's op.
    pub(super) fn number(&self, role: RoleId, op: OpId) -> u32 {
        self.first[role.index()] + op.0
    }

    /// Role and op of a global number.
    pub(super) fn op(&self, number: u32) -> (RoleId, OpId) {
        let role = self.first.partition_point(|&first| first <= number) - 1;
        (RoleId(role as u32), OpId(number - self.first[role]))
    }
}

/// For every op, the ops that must have started for it to be done.
pub(super) struct Links {
    pub(super) ops: Numbering,
    start: Vec<u32>,
    others: Vec<u32>,
}

impl Links {
    /// Builds the links from pairs of ops that wait for each other.
    fn new(ops: Numbering, pairs: &[(u32, u32)]) -> Self {
        let mut start = vec![0u32; ops.len() + 1];
        for &(a, b) in pairs {
            start[a as usize] += 1;
            start[b as usize] += 1;
        }
        let mut sum = 0;
        for count in &mut start {
            sum += *count;
            *count = sum;
        }
        let mut others = vec![0; sum as usize];
        for &(a, b) in pairs {
            for (from, to) in [(a, b), (b, a)] {
                start[from as usize] -= 1;
                others[start[from as usize] as usize] = to;
            }
        }
        Self { ops, start, others }
    }

    /// Counterparts of an op.
    pub(super) fn of(&self, op: u32) -> &[u32] {
        &self.others[self.start[op as usize] as usize..self.start[op as usize + 1] as usize]
    }
}
