//! Checks that the members of a group make the same calls in the same order.
//!
//! Members of one role run the same program, so they agree; groups across roles are compared call
//! by call, as [`crate::matching`] matches them.

use super::groups::{crosses_roles, roles};
use super::links::Numbering;
use super::{Report, ViolationKind};
use crate::collective::CollectiveKind;
use crate::ids::{OpId, RoleId};
use crate::matching::calls;
use crate::mesh::GroupKind;
use crate::program::{Call, Op};

/// Checks one section of all roles; appends the matching pairs of ops.
pub(super) fn check(report: &mut Report<'_>, ops: &Numbering, pairs: &mut Vec<(u32, u32)>) {
    let plan = report.plan;
    let of_role = |program| calls(plan, program, ops.section.of(program));
    let all_calls: Vec<_> = plan.programs.iter().map(of_role).collect();
    let mut keys: Vec<(GroupKind, &str)> =
        all_calls.iter().flat_map(|calls| calls.keys().copied()).collect();
    keys.retain(|&(group, _)| crosses_roles(&plan.mesh, group));
    keys.sort_unstable();
    keys.dedup();
    for key in keys {
        let is_member = |role: &RoleId| !roles(&plan.mesh, key.0, *role).is_empty();
        let members: Vec<RoleId> =
            (0..plan.programs.len()).map(RoleId::from).filter(is_member).collect();
        // The member with most calls leads, so a missing call is reported where it is missing.
        let calls_of =
            |role: RoleId| all_calls[role.index()].get(&key).map_or(&[][..], Vec::as_slice);
        let Some(&leader) = members.iter().rev().max_by_key(|&&role| calls_of(role).len()) else {
            continue;
        };
        for &member in members.iter().filter(|&&member| member != leader) {
            compare(report, ops, (leader, calls_of(leader)), (member, calls_of(member)));
        }
        for position in 0..calls_of(leader).len() {
            for (index, &a) in members.iter().enumerate() {
                for &b in &members[index + 1..] {
                    let (a_calls, b_calls) = (calls_of(a), calls_of(b));
                    if let (Some(&x), Some(&y)) = (a_calls.get(position), b_calls.get(position)) {
                        pairs.push((ops.number(a, x), ops.number(b, y)));
                    }
                }
            }
        }
    }
}

/// Reports the first difference between the calls of two members; later ones follow from it.
fn compare(
    report: &mut Report<'_>,
    ops: &Numbering,
    (leader, leader_calls): (RoleId, &[OpId]),
    (member, member_calls): (RoleId, &[OpId]),
) {
    let section = ops.section;
    for (position, (&a, &b)) in leader_calls.iter().zip(member_calls).enumerate() {
        let (mine, theirs) = (call(report, ops, leader, a), call(report, ops, member, b));
        if let Some(what) = difference(mine, theirs) {
            let kind = ViolationKind::CollectiveMismatch {
                position: position as u64,
                rank: report.plan.representative(member),
                other: report.site(member, section, b),
                what,
            };
            return report.op(leader, section, a, kind);
        }
    }
    if let Some(&op) = leader_calls.get(member_calls.len()) {
        let kind = ViolationKind::CollectiveMissing {
            rank: report.plan.representative(member),
            calls: member_calls.len() as u64,
        };
        report.op(leader, section, op, kind);
    }
}

fn call<'a>(report: &Report<'a>, ops: &Numbering, role: RoleId, op: OpId) -> &'a Call {
    let program = report.program(role);
    match ops.section.of(program).nodes[op.index()].op {
        Op::Collective { call, .. } => program.call(call),
        ref other => unreachable!("only collectives are compared, not {other:?}"),
    }
}

/// Property in which two matching calls differ, if any.
fn difference(a: &Call, b: &Call) -> Option<&'static str> {
    // Only the root of a gather or scatter holds the whole vector; the others do not know its length.
    let elements = |call: &Call| match call.kind {
        CollectiveKind::Gather | CollectiveKind::Scatter => 0,
        _ => call.elements(),
    };
    if a.kind != b.kind {
        Some("kinds")
    } else if elements(a) != elements(b) {
        Some("elements")
    } else if a.dtype != b.dtype {
        Some("types")
    } else if a.kind.reduces() && a.reduction != b.reduction {
        Some("reductions")
    } else if a.method != b.method {
        Some("methods")
    } else if a.order != b.order {
        Some("orders of summation")
    } else if a.kind.has_root() && a.root != b.root {
        Some("roots")
    } else if a.block != b.block {
        Some("blocks")
    } else {
        None
    }
}
