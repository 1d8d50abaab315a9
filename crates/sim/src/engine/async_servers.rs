//! Asynchronous replicas: time of one iteration's worth of work.
//!
//! Every class of replicas runs at its own pace, as if servers were always ready, and a server
//! needs time for each request. One iteration is as many requests as there are replicas. It takes
//! the longer of two times: the servers' time for these requests, and the replicas' time to send
//! them. Replicas with iteration times T₁…T_P send P requests in P / Σ(1/Tᵢ).
//!
//! With a staleness bound, all replicas run at the pace of the slowest in the long run, independent
//! of the bound. The bound only helps against transient delays (Ho et al., NIPS 2013), and there
//! are none here.

use super::timeline::Timeline;
use paceline_plan::ids::OpId;
use paceline_plan::program::Plan;
use paceline_plan::strategy::Sync;

/// Cuts a timeline of all bodies to the time of one iteration if replicas are asynchronous.
pub(crate) fn resolve(plan: &Plan, mut timeline: Timeline) -> Timeline {
    let staleness = match plan.strategy.sync {
        Sync::Async { staleness, .. } => staleness,
        Sync::Hogwild => None,
        Sync::AllReduce | Sync::Servers(_) => return timeline,
    };
    let (mut rate, mut slowest, mut serving) = (0.0, 0.0f64, 0.0f64);
    for class in 0..timeline.classes().len() as u32 {
        let of = timeline.classes().get(class);
        let ops = plan.programs[of.role.index()].body.nodes.len();
        let ends = (0..ops).map(|op| timeline.span_of(class, OpId::from(op)).1.0);
        let end = ends.fold(0.0, f64::max);
        if of.role.0 >= plan.mesh.pp {
            serving = serving.max(end);
        } else if end > 0.0 {
            rate += f64::from(of.ranks) / end;
            slowest = slowest.max(end);
        }
    }
    let aggregate = if rate > 0.0 { f64::from(plan.mesh.size()) / rate } else { 0.0 };
    let replicas = if staleness.is_some() { slowest } else { aggregate };
    timeline.cut(replicas.max(serving));
    timeline
}

#[cfg(test)]
mod tests {
    use crate::cluster::{Cluster, IndexRange, Selector, Straggler, preset};
    use crate::{Options, SimError, simulate};
    use paceline_plan::collective::SummationOrder;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::{Strategy, Sync};
    use paceline_plan::units::Seconds;

    /// Iteration time of `dp` replicas with four samples each that share their weights.
    fn shared(dp: u32, cluster: &Cluster) -> Result<f64, SimError> {
        let model = built_in::get("mini").unwrap().unwrap();
        let strategy = Strategy {
            dp,
            sync: Sync::Hogwild,
            order: SummationOrder::Free,
            global_batch: 4 * u64::from(dp),
            micro_batch: 4,
            seq: model.seq,
            ..Strategy::default()
        };
        let plan = lower(&model, &strategy).unwrap();
        simulate(&plan, cluster, &Options::default()).map(|outcome| outcome.iteration.0)
    }

    #[test]
    fn threads_that_share_weights_wait_for_nobody() {
        let mut laptop = preset::get("laptop").unwrap();
        let alone = shared(1, &laptop).unwrap();
        assert_eq!(shared(2, &laptop).unwrap(), alone, "another one costs nothing");
        let at = Selector::Ranks(vec![IndexRange::one(1)]);
        let slow = Straggler { at, factor: 4.0, from: Seconds::ZERO, until: None };
        laptop.heterogeneity.stragglers.push(slow);
        // In four iteration times the replicas run 1 + 4 iterations, not 8: a factor of 1.6.
        let found = shared(2, &laptop).unwrap() / alone;
        assert!((found - 1.6).abs() < 0.05, "{found}");
    }

    #[test]
    fn they_need_a_memory_that_all_reach() {
        let refused = |dp, cluster: &str| {
            let error = shared(dp, &preset::get(cluster).unwrap()).unwrap_err();
            assert!(matches!(error, SimError::NoSharedMemory { .. }), "{cluster}: {error}");
        };
        refused(2, "dgx-a100:1");
        refused(4, "laptop:2");
    }
}
