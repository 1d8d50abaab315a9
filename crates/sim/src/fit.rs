//! Whether a plan fits on a cluster's devices.
//!
//! On an accelerator a rank needs what the profile's software holds ([`footprint`]); on a CPU,
//! where only Paceline runs, its arena. Some of a device's memory is never free for tensors.

use crate::cluster::{Cluster, Device};
use crate::footprint::footprint;
use crate::jobs::Placement;
use crate::profile::Profile;
use paceline_plan::ids::{Rank, RoleId};
use paceline_plan::program::Plan;
use paceline_plan::units::Bytes;
use serde::Serialize;
use std::collections::BTreeSet;

/// Memory that the fullest rank needs, against that of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// Memory that the rank's tensors need.
    pub needed: Bytes,
    /// Memory of its device that tensors cannot use.
    pub headroom: Bytes,
    /// Memory of its device.
    pub memory: Bytes,
    /// True if every rank fits, not only this one.
    pub fits: bool,
}

/// Largest part of a device's memory that the default headroom takes.
const PART: u64 = 32;

/// Memory of the ranks of a plan on a cluster, with `headroom` bytes of every device left free; by
/// default what the profile says.
pub fn fit(plan: &Plan, cluster: &Cluster, profile: &Profile, headroom: Option<Bytes>) -> Fit {
    fit_placed(plan, cluster, &Placement::default(), profile, headroom)
}

/// The same for ranks that are placed on other devices.
pub(crate) fn fit_placed(
    plan: &Plan,
    cluster: &Cluster,
    placement: &Placement,
    profile: &Profile,
    headroom: Option<Bytes>,
) -> Fit {
    let on = |role: RoleId, device: &Device| {
        let arena = plan.programs[role.index()].memory.with_shared();
        let needed = match device.is_accelerator() {
            true => footprint(plan, role, profile, device),
            false => arena,
        };
        let usual = || Bytes(profile.memory_headroom.0.min(device.memory.0 / PART));
        let headroom = headroom.unwrap_or_else(usual);
        let fits = needed.0.saturating_add(headroom.0) <= device.memory.0;
        Fit { needed, headroom, memory: device.memory, fits }
    };
    let roles = (0..plan.programs.len()).map(RoleId::from);
    let all: Vec<Fit> = if cluster.heterogeneity.kinds.is_empty() {
        roles.map(|role| on(role, &cluster.device)).collect()
    } else {
        // Each kind of device once per role.
        let ranks = (0..plan.mesh.world()).map(Rank);
        let kind = |rank| (plan.role(rank), cluster.kind_of(placement.device(rank)));
        let distinct: BTreeSet<(RoleId, usize)> = ranks.map(kind).collect();
        let devices: Vec<&Device> = cluster.kinds().collect();
        distinct.into_iter().map(|(role, kind)| on(role, devices[kind])).collect()
    };
    let share = |fit: &Fit| (fit.needed.0 + fit.headroom.0) as f64 / fit.memory.as_f64().max(1.0);
    let fullest = all.iter().max_by(|a, b| share(a).total_cmp(&share(b)));
    let none = Fit {
        needed: Bytes::ZERO,
        headroom: Bytes::ZERO,
        memory: cluster.device.memory,
        fits: true,
    };
    let fits = all.iter().all(|fit| fit.fits);
    Fit { fits, ..fullest.copied().unwrap_or(none) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{DeviceOverride, IndexRange, Selector, preset};
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::Strategy;

    #[test]
    fn a_device_is_never_filled_to_the_brim() {
        let model = built_in::get("gpt2-1.5b").unwrap().unwrap();
        let plan = lower(&model, &Strategy { seq: 1024, ..Strategy::default() }).unwrap();
        let mut cluster = preset::get("dgx-a100").unwrap();
        let fit = |cluster: &Cluster, headroom: Option<u64>| {
            fit(&plan, cluster, &Profile::MODERN, headroom.map(Bytes))
        };
        let usual = fit(&cluster, None);
        assert!(usual.fits && usual.headroom == Bytes(2 << 30) && usual.memory == Bytes(80 << 30));
        cluster.device.memory = Bytes(usual.needed.0 + (100 << 20));
        assert!(!fit(&cluster, None).fits, "{:?}", fit(&cluster, None));
        assert!(fit(&cluster, Some(0)).fits && fit(&cluster, Some(100 << 20)).fits);
        assert!(!fit(&cluster, Some((100 << 20) + 1)).fits);
    }

    /// A CPU runs Paceline, whose arena is planned; of several kinds of device the smallest counts.
    #[test]
    fn every_kind_of_device_holds_its_ranks() {
        let model = built_in::get("gpt2-1.5b").unwrap().unwrap();
        let two = Strategy { seq: 1024, dp: 2, leaves: 2, global_batch: 2, ..Strategy::default() };
        let plan = lower(&model, &two).unwrap();
        let mut cluster = preset::get("laptop").unwrap();
        let arena = plan.programs[0].memory.with_shared();
        cluster.device.memory = Bytes(2 * arena.0);
        let alike = fit(&plan, &cluster, &Profile::MEGATRON_2021, None);
        assert_eq!((alike.needed, alike.headroom.0), (arena, (arena.0 / 16).min(2 << 30)));
        assert!(alike.fits);
        let small = Device { memory: arena, ..cluster.device.clone() };
        let at = Selector::Ranks(vec![IndexRange::one(1)]);
        cluster.heterogeneity.kinds.push(DeviceOverride { at, device: small });
        let mixed = fit(&plan, &cluster, &Profile::MEGATRON_2021, None);
        assert!(!mixed.fits && mixed.memory == arena);
    }
}
