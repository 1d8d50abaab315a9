//! Energy of an iteration.
//!
//! A device draws its idle power and, in proportion to the fraction of time in which it computes, the
//! rest of its rated power: the linear model of Fan, Weber and Barroso ("Power Provisioning for a
//! Warehouse-sized Computer", ISCA 2007, section 4), which they found within 1 % for a cluster.

use super::RoleStats;
use crate::cluster::Cluster;
use crate::jobs::Placement;
use paceline_plan::ids::{Rank, RoleId};
use paceline_plan::program::Plan;
use paceline_plan::units::Seconds;
use serde::Serialize;

/// Energy that the devices of all ranks take for an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Energy {
    /// Joules.
    pub joules: f64,
    /// Mean power of all devices together, in watts.
    pub watts: f64,
}

/// Energy of an iteration; `None` if the power of a device is unknown.
pub(super) fn energy(
    plan: &Plan,
    cluster: &Cluster,
    placement: &Placement,
    roles: &[RoleStats],
    iteration: Seconds,
) -> Option<Energy> {
    if cluster.kinds().any(|device| device.power.is_none()) {
        return None;
    }
    let of_rank = |rank: Rank, role: RoleId| {
        let device = cluster.device_of(placement.device(rank));
        let rated = device.power?;
        let idle = device.idle_power.unwrap_or(0.0).min(rated);
        Some(idle * iteration.0 + (rated - idle) * roles[role.index()].compute.0)
    };
    let joules: Option<f64> = if cluster.heterogeneity.kinds.is_empty() {
        let each = (0..roles.len()).map(|role| {
            let joules = of_rank(Rank(0), RoleId::from(role))?;
            Some(joules * f64::from(roles[role].ranks))
        });
        each.sum()
    } else {
        (0..plan.mesh.world()).map(Rank).map(|rank| of_rank(rank, plan.role(rank))).sum()
    };
    let joules = joules?;
    Some(Energy { joules, watts: if iteration.0 > 0.0 { joules / iteration.0 } else { 0.0 } })
}

#[cfg(test)]
mod tests {
    use super::super::cases::{close, mini, run, strategy};
    use crate::cluster::preset;
    use paceline_plan::lower::lower;
    use paceline_plan::strategy::Strategy;

    /// A device that always computes draws its rated power, one that never does its idle power.
    #[test]
    fn power_lies_between_idle_and_rated() {
        let mut cluster = preset::get("dgx-a100").unwrap();
        let alone = lower(&mini(), &strategy(1, 4)).unwrap();
        let (outcome, _) = run(&alone, &cluster);
        let energy = outcome.energy.unwrap();
        let busy = outcome.compute.0 / outcome.iteration.0;
        let (rated, idle) = (400.0, cluster.device.idle_power.unwrap());
        close(energy.watts, idle + (rated - idle) * busy);
        close(energy.joules, energy.watts * outcome.iteration.0);

        let eight = lower(&mini(), &Strategy { dp: 8, ..strategy(1, 8) }).unwrap();
        let (outcome, _) = run(&eight, &cluster);
        let watts = outcome.energy.unwrap().watts;
        assert!((8.0 * idle..8.0 * rated).contains(&watts), "{watts}");

        cluster.device.power = None;
        assert_eq!(run(&eight, &cluster).0.energy, None, "nothing is made up");
    }
}
