//! Rings through several hosts, one per NIC of the group.
//!
//! A ring in rank order through g members per host leaves every host through its last member, whose
//! NIC carries everything while g−1 are idle. Libraries avoid that: NCCL builds one ring per NIC,
//! rotated so that a different member sends in each, and gives each an equal share of the vector.
//! The analytic backend scales the bandwidth for this. Here the rings are built explicitly, because
//! the traffic inside the hosts matters too.
//!
//! With more than two dimensions, units are rotated within each other: of 2 racks × 2 hosts × 2
//! devices, ring 1 visits 0 1 2 3 | 4 5 6 7, ring 2 visits 1 0 3 2 | 5 4 7 6, ring 3 visits 2 3 0 1
//! | 6 7 4 5 and ring 4 visits 3 2 1 0 | 7 6 5 4.

use crate::cluster::Cluster;
use paceline_plan::collective::{Algorithm, CollectiveKind, Pattern};
use paceline_plan::ids::Rank;

/// Returns the member at each position of every ring of a collective: one ring in group order if
/// the pattern is no ring or stays within a host.
pub(super) fn rails(cluster: &Cluster, pattern: &Pattern, members: &[Rank]) -> Vec<Vec<u32>> {
    let everyone: Vec<u32> = (0..pattern.ranks()).collect();
    // The "ring" of an all_to_all is a rotation that already uses every NIC.
    let turns =
        pattern.algorithm() == Algorithm::Ring && pattern.kind() != CollectiveKind::AllToAll;
    if !turns || members.len() != everyone.len() {
        return vec![everyone];
    }
    let mut units = vec![1u64];
    for dimension in &cluster.dimensions {
        let inner = units.last().copied().unwrap_or(1);
        units.push(inner.saturating_mul(u64::from(dimension.size.max(1))));
    }
    // The outermost unit is the cluster; the innermost is a device.
    units.pop();
    while let Some(unit) = units.pop() {
        let parts = split(members, everyone.clone(), unit);
        if parts.len() > 1 {
            let turned: Vec<_> =
                parts.into_iter().map(|part| rail_turns(members, part, &units)).collect();
            let rings = turned.iter().map(Vec::len).min().unwrap_or(1);
            let ring = |turn: usize| turned.iter().flat_map(|part| part[turn].clone()).collect();
            return (0..rings).map(ring).collect();
        }
    }
    vec![everyone]
}

/// All visiting orders of a unit's members, each with a different member last.
fn rail_turns(members: &[Rank], part: Vec<u32>, units: &[u64]) -> Vec<Vec<u32>> {
    let Some((&unit, inner)) = units.split_last() else {
        return vec![part];
    };
    let parts = split(members, part, unit);
    let turned: Vec<_> = parts.into_iter().map(|part| rail_turns(members, part, inner)).collect();
    let each = turned.iter().map(Vec::len).min().unwrap_or(1);
    let count = turned.len();
    let order = |turn: usize| {
        let (first, inside) = (turn / each, turn % each);
        (0..count).flat_map(|place| turned[(first + place) % count][inside].clone()).collect()
    };
    (0..count * each).map(order).collect()
}

/// Groups members by their unit of `unit` devices, in order of appearance.
fn split(members: &[Rank], part: Vec<u32>, unit: u64) -> Vec<Vec<u32>> {
    let mut sorted: Vec<(u64, u32)> =
        part.iter().map(|&m| (u64::from(members[m as usize].0) / unit.max(1), m)).collect();
    sorted.sort_by_key(|&(unit, _)| unit);
    let runs = sorted.chunk_by(|a, b| a.0 == b.0);
    let mut parts: Vec<Vec<u32>> =
        runs.map(|run| run.iter().map(|&(_, member)| member).collect()).collect();
    parts.sort_by_key(|part| part[0]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::preset;
    use paceline_plan::collective::SummationOrder;

    fn laid(cluster: &Cluster, kind: CollectiveKind, members: &[u32]) -> Vec<Vec<u32>> {
        let members: Vec<Rank> = members.iter().copied().map(Rank).collect();
        let ranks = members.len() as u32;
        let pattern = Pattern::new(kind, Algorithm::Ring, SummationOrder::Free, ranks, 0).unwrap();
        rails(cluster, &pattern, &members)
    }

    #[test]
    fn every_nic_of_the_group_gets_a_ring() {
        let cluster = preset::get("dgx-a100:2").unwrap();
        let rings = laid(&cluster, CollectiveKind::AllReduce, &[0, 2, 4, 8, 10, 12]);
        assert_eq!(rings, [[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3], [2, 0, 1, 5, 3, 4]]);
        let rings = laid(&cluster, CollectiveKind::AllToAll, &[0, 2, 8, 10]);
        assert_eq!(rings, [[0, 1, 2, 3]]);
    }

    #[test]
    fn within_a_host_and_with_one_member_each_there_is_one_ring() {
        let cluster = preset::get("dgx-a100:4").unwrap();
        assert_eq!(laid(&cluster, CollectiveKind::AllGather, &[0, 1, 2]), [[0, 1, 2]]);
        assert_eq!(laid(&cluster, CollectiveKind::AllGather, &[0, 8, 16]), [[0, 1, 2]]);
        assert_eq!(laid(&cluster, CollectiveKind::AllGather, &[5]), [[0]]);
        assert_eq!(laid(&cluster, CollectiveKind::AllGather, &[16, 8, 0]), [[0, 1, 2]]);
        let backwards = laid(&cluster, CollectiveKind::AllGather, &[9, 8, 1, 0]);
        assert_eq!(backwards, [[0, 1, 2, 3], [1, 0, 3, 2]], "in the group's order");
        assert_eq!(
            laid(&cluster, CollectiveKind::AllGather, &[0, 1, 8]),
            [[0, 1, 2]],
            "the fewest"
        );
    }

    #[test]
    fn racks_and_hosts_turn_within_each_other() {
        let mut cluster = preset::get("dgx-a100:2").unwrap();
        cluster.dimensions.push(cluster.dimensions[1].clone());
        for dimension in &mut cluster.dimensions {
            dimension.size = 2;
        }
        let rings = laid(&cluster, CollectiveKind::ReduceScatter, &[0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(
            rings,
            [
                [0, 1, 2, 3, 4, 5, 6, 7],
                [1, 0, 3, 2, 5, 4, 7, 6],
                [2, 3, 0, 1, 6, 7, 4, 5],
                [3, 2, 1, 0, 7, 6, 5, 4]
            ]
        );
    }
}
