//! Roles that share a group.

use crate::ids::{Rank, RoleId};
use crate::mesh::{GroupKind, Mesh};
use crate::program::Plan;

/// Roles with members in the group of this role's first rank; empty if that rank is in no such
/// group. Groups along an axis other than `pp` stay within one role, whose ranks agree by
/// construction.
pub(super) fn roles(mesh: &Mesh, group: GroupKind, role: RoleId) -> Vec<RoleId> {
    let stages = 0..mesh.pp;
    let servers = mesh.pp..mesh.pp + mesh.servers;
    let all: Vec<RoleId> = match group {
        GroupKind::Axis(crate::mesh::Axis::Pp) => stages.map(RoleId).collect(),
        GroupKind::Axis(_) | GroupKind::Replicas if stages.contains(&role.0) => vec![role],
        GroupKind::Axis(_) | GroupKind::Replicas => Vec::new(),
        GroupKind::Ends if mesh.pp > 1 => vec![RoleId(0), RoleId(mesh.pp - 1)],
        GroupKind::Ends => vec![RoleId(0)],
        GroupKind::Served(k) => stages.chain([mesh.pp + k]).map(RoleId).collect(),
        GroupKind::Servers => servers.map(RoleId).collect(),
    };
    if all.contains(&role) { all } else { Vec::new() }
}

/// Returns true if groups of this kind contain ranks of different roles.
pub(super) fn crosses_roles(mesh: &Mesh, group: GroupKind) -> bool {
    match group {
        GroupKind::Axis(crate::mesh::Axis::Pp) | GroupKind::Ends => mesh.pp > 1,
        GroupKind::Axis(_) | GroupKind::Replicas => false,
        GroupKind::Served(_) => true,
        GroupKind::Servers => mesh.servers > 1,
    }
}

/// Presence of root and non-root ranks in a role, for one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Roots {
    /// Some rank of the role is the root.
    pub(super) some: bool,
    /// Some rank of the role is not the root.
    pub(super) others: bool,
}

/// Determines if a role's ranks are the root of a group, other members, or both.
pub(super) fn roots(plan: &Plan, group: GroupKind, role: RoleId, root: u32) -> Roots {
    let members = plan.mesh.members(group, plan.representative(role));
    let mine = |rank: &Rank| plan.role(*rank) == role;
    let some = members.get(root as usize).is_some_and(mine);
    let others = members.iter().enumerate().any(|(at, rank)| at != root as usize && mine(rank));
    Roots { some, others }
}
