//! Limits of an iteration: its time if one component cost nothing.

use super::details::SimContext;
use crate::engine::{self, NetworkEpochs, Run};
use crate::error::SimError;
use crate::network::{CostModel, NoPath, Vector};
use crate::{Options, simulate};
use paceline_plan::collective::Pattern;
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use serde::Serialize;

/// Iteration time with one cost removed at a time.
///
/// The savings do not add up to the iteration: with one cost removed, another that was hidden
/// behind it may be exposed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Limits {
    /// With communication that takes no time: simulated again, so waiting for other ranks' compute
    /// remains.
    pub no_network: Seconds,
    /// With compute that takes no time.
    pub no_compute: Seconds,
    /// Without waiting for other ranks: compute plus exposed communication of the busiest rank.
    /// This is a lower bound while the ranks' work is unchanged; reaching it takes a better
    /// schedule or more microbatches.
    pub no_bubble: Seconds,
    /// With homogeneous devices and links at the cluster's defaults; `None` if the cluster is
    /// homogeneous.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub homogeneous: Option<Seconds>,
}

/// Simulates the plan again, without communication and without compute. `busiest` is the busy time
/// of the busiest rank.
pub(super) fn limits(
    context: &SimContext<'_>,
    run: &Run,
    busiest: Seconds,
) -> Result<Limits, SimError> {
    let SimContext { plan, cluster, costs, .. } = *context;
    // Links with infinite bandwidth have no contention, on any network.
    let no_network = match run.stands_alone(plan, costs) {
        true => run.instant(plan, costs)?.end(),
        false => {
            let instant = NetworkEpochs::constant(Instant);
            engine::run_without_collectives(plan, cluster, costs, &instant)?.end()
        }
    };
    let idle = costs.without_compute();
    let no_compute = match run.rerun(plan, &idle) {
        Some(timeline) => timeline?,
        None => (context.run)(&idle)?.timeline,
    };
    let no_compute = (context.resolve)(no_compute).end();
    let even = match cluster.is_homogeneous() {
        true => None,
        false => {
            let options = Options { trace: false, details: false, ..*context.options };
            Some(simulate(plan, &cluster.homogeneous(), &options)?.iteration)
        }
    };
    Ok(Limits { no_network, no_compute, no_bubble: busiest, homogeneous: even })
}

/// Network on which everything arrives immediately.
struct Instant;

impl CostModel for Instant {
    fn message(&self, _: Rank, _: Rank, _: Bytes) -> Result<Seconds, NoPath> {
        Ok(Seconds::ZERO)
    }

    fn collective(&self, _: &Pattern, _: &[Rank], _: &Vector) -> Result<Seconds, NoPath> {
        Ok(Seconds::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases::{blocks_only, close, cluster, ideal, mini, run, strategy};
    use super::{Instant, NetworkEpochs, SimError, engine};
    use crate::cluster::preset;
    use crate::engine::{ClusterEpochs, Costs, Load, Timeline};
    use crate::{Library, Profile};
    use paceline_plan::lower::lower;
    use paceline_plan::strategy::{Strategy, Zero};
    use proptest::prelude::*;

    /// One microbatch through four stages is a chain, so its parts add up.
    #[test]
    fn a_chain_is_its_computation_and_its_communication() {
        let plan = blocks_only(&strategy(4, 1));
        let (outcome, details) = run(&plan, &cluster(4, 1e9, 1e-3));
        let limits = details.limits;
        let compute: f64 = outcome.roles.iter().map(|role| role.compute.0).sum();
        close(limits.no_network.0, compute);
        close(limits.no_network.0 + limits.no_compute.0, outcome.iteration.0);
    }

    #[test]
    fn equal_stages_on_free_links_are_limited_by_their_bubble() {
        let plan = blocks_only(&strategy(4, 8));
        let (outcome, details) = run(&plan, &ideal(4));
        close(details.limits.no_network.0, outcome.iteration.0);
        close(details.limits.no_bubble.0, outcome.iteration.0 * 8.0 / 11.0);
        assert!(details.limits.no_compute.0 < 1e-12 * outcome.iteration.0);
    }

    #[test]
    fn slow_links_hold_up_even_an_instant_device() {
        let replicas = Strategy { dp: 4, global_batch: 4, overlap: false, ..strategy(1, 1) };
        let plan = lower(&mini(), &replicas).unwrap();
        let (outcome, details) = run(&plan, &cluster(4, 1e5, 0.0));
        close(details.limits.no_compute.0, outcome.communication.0);
        close(details.limits.no_network.0, outcome.compute.0);
    }

    /// Reusing known op matches gives bitwise the same result as finding them again.
    #[test]
    fn known_encounters_change_nothing() {
        let layout = Strategy { tp: 2, dp: 2, zero: Zero::Parameters, ..strategy(4, 8) };
        let plan = lower(&mini(), &layout).unwrap();
        let cluster = preset::holding("dgx-a100", plan.mesh.world().into()).unwrap();
        let moments = ClusterEpochs::new(&cluster);
        let (eras, profile) = (moments.networks(Library::Nccl), Profile::default());
        let costs = Costs::new(&plan, &cluster, &profile);
        let run = |costs| engine::run(&Load::new(&plan, costs), &cluster, &eras).unwrap();
        let first = run(&costs);
        assert!(first.stands_alone(&plan, &costs));
        let end = |timeline: Result<Timeline, SimError>| timeline.unwrap().end();
        assert_eq!(end(first.rerun(&plan, &costs).unwrap()), first.timeline.end());
        let idle = costs.without_compute();
        let found = run(&idle).timeline.end();
        assert!(found < first.timeline.end());
        assert_eq!(end(first.rerun(&plan, &idle).unwrap()), found);
        let still = NetworkEpochs::constant(Instant);
        let found = engine::run_without_collectives(&plan, &cluster, &costs, &still).unwrap().end();
        assert!(found < first.timeline.end());
        assert_eq!(end(first.instant(&plan, &costs)), found);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn taking_a_cost_away_never_costs_time(
            tp in prop_oneof![Just(1u32), Just(2)],
            pp in prop_oneof![Just(1u32), Just(2), Just(4)],
            dp in prop_oneof![Just(1u32), Just(2)],
            stage in 0u8..4,
            microbatches in 1u64..6,
        ) {
            let zero = Zero::from_stage(stage).unwrap();
            let layout = strategy(pp, microbatches * u64::from(dp));
            let plan = lower(&mini(), &Strategy { tp, dp, zero, ..layout }).unwrap();
            let cluster = preset::holding("dgx-a100", plan.mesh.world().into()).unwrap();
            let (outcome, details) = run(&plan, &cluster);
            let limits = details.limits;
            for less in [limits.no_network, limits.no_compute, limits.no_bubble] {
                prop_assert!(less.0 <= outcome.iteration.0 * (1.0 + 1e-12), "{limits:?}");
            }
            prop_assert!(limits.no_network.0 >= outcome.compute.0 * (1.0 - 1e-12));
        }
    }
}
