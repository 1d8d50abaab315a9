use crate::cluster::{Cluster, IndexRange, Selector, Straggler, preset};
use crate::{NetworkKind, Options, Outcome, SimError, simulate};
use paceline_plan::collective::SummationOrder;
use paceline_plan::ids::Rank;
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::program::Plan;
use paceline_plan::strategy::{Strategy, Sync};
use paceline_plan::units::{BytesPerSec, Seconds};
use proptest::prelude::*;

const NETWORKS: [NetworkKind; 2] = [NetworkKind::Analytic, NetworkKind::Flow];

fn plan(dp: u32, sync: Sync) -> Plan {
    let model = built_in::get("mini").unwrap().unwrap();
    let strategy = Strategy {
        dp,
        sync,
        order: SummationOrder::Free,
        global_batch: 64 * u64::from(dp),
        micro_batch: 4,
        seq: model.seq,
        ..Strategy::default()
    };
    lower(&model, &strategy).unwrap()
}

fn bounded(staleness: Option<u32>) -> Sync {
    Sync::Async { servers: 1, staleness }
}

fn run(plan: &Plan, cluster: &Cluster, network: NetworkKind) -> Outcome {
    simulate(plan, cluster, &Options { network, ..Options::default() }).unwrap()
}

/// Eight devices on one switch whose links carry everything in next to no time.
fn fast_links() -> Cluster {
    let mut cluster = preset::get("dgx-a100").unwrap();
    cluster.dimensions[0].bandwidth = BytesPerSec(1e15);
    cluster.dimensions[0].latency = Seconds(1e-12);
    cluster
}

/// The same with one device that is slower until some time.
fn straggling(cluster: Cluster, rank: u32, factor: f64, until: Option<Seconds>) -> Cluster {
    let mut cluster = cluster;
    let at = Selector::Ranks(vec![IndexRange::one(rank)]);
    cluster.heterogeneity.stragglers.push(Straggler { at, factor, from: Seconds::ZERO, until });
    cluster
}

#[track_caller]
fn close(found: f64, expected: f64, tolerance: f64) {
    assert!((found / expected - 1.0).abs() <= tolerance, "{found} instead of {expected}");
}

#[test]
fn a_bound_on_staleness_blocks_fast_replicas() {
    let (even, uneven) = (fast_links(), straggling(fast_links(), 1, 4.0, None));
    for network in NETWORKS {
        let time =
            |staleness, cluster| run(&plan(4, bounded(staleness)), cluster, network).iteration.0;
        let alone = run(&plan(1, bounded(None)), &even, network).iteration.0;
        // In four times as long the replicas run 1 + 3 · 4 iterations.
        close(time(None, &uneven), alone * 4.0 * 4.0 / 13.0, 0.03);
        close(time(Some(0), &uneven), alone * 4.0, 0.03);
        // The fast ones lead by the bound plus one iteration and then wait.
        let blocked = |lead: f64| {
            let slow = (64.0 * 4.0 - 3.0 * lead) / 4.0;
            alone * 4.0 * slow / 64.0
        };
        close(time(Some(4), &uneven), blocked(5.0), 0.03);
        close(time(Some(16), &uneven), blocked(17.0), 0.03);
        close(time(Some(4), &even), time(None, &even), 0.03);
        assert_eq!(time(Some(1000), &uneven), time(None, &uneven));
    }
}

/// A delay that passes costs what the bound does not cover.
#[test]
fn a_bound_covers_short_delays() {
    for network in NETWORKS {
        let alone = run(&plan(1, bounded(None)), &fast_links(), network).iteration.0;
        // Rank 1 runs its first iteration in the time of nine.
        let cluster = straggling(fast_links(), 1, 9.0, Some(Seconds(9.0 * alone)));
        let time =
            |staleness| run(&plan(4, bounded(Some(staleness))), &cluster, network).iteration.0;
        let (lockstep, short, long) = (time(0), time(4), time(16));
        let even = run(&plan(4, bounded(Some(0))), &fast_links(), network).iteration.0;
        close(lockstep, even + alone * 8.0 / 64.0, 0.02);
        assert!(long < 0.99 * short && short < 0.99 * lockstep, "{long} {short} {lockstep}");
    }
}

#[test]
fn gradients_of_replicas_in_lockstep_miss_those_of_their_own_iteration() {
    let cluster = straggling(fast_links(), 2, 1.5, None);
    for network in NETWORKS {
        let found = run(&plan(4, bounded(Some(0))), &cluster, network).staleness.unwrap();
        assert_eq!((found.max, found.max_lead), (3, 0));
        close(found.mean, 1.5, 0.01);
        let free = run(&plan(4, bounded(None)), &cluster, network).staleness.unwrap();
        assert!(free.max_lead > 10, "{free:?}");
        let alone = run(&plan(1, bounded(None)), &cluster, network).staleness.unwrap();
        assert_eq!((alone.max, alone.max_lead), (0, 0));
    }
}

/// All gradients come in and all weights leave through the server's link.
#[test]
fn a_busy_server_sets_the_pace() {
    let mut cluster = fast_links();
    cluster.dimensions[0].bandwidth = BytesPerSec(1e7);
    let bytes = built_in::get("mini").unwrap().unwrap().parameters() as f64 * 4.0;
    for network in NETWORKS {
        let outcome = run(&plan(4, bounded(None)), &cluster, network);
        let one_way = 4.0 * bytes / (1e7 * cluster.dimensions[0].efficiency);
        let both_ways = 2.0 * one_way;
        let least = if network == NetworkKind::Flow { one_way } else { both_ways };
        let iteration = outcome.iteration.0;
        assert!(
            iteration >= 0.98 * least && iteration < 1.3 * both_ways,
            "{network}: {iteration} {least}"
        );
        let server = outcome.roles.last().unwrap();
        close(server.communication.0, iteration, 0.05);
        // Replicas queue up, so each gradient misses those of all others.
        close(outcome.staleness.unwrap().mean, 3.0, 0.1);
    }
}

#[test]
fn several_jobs_are_served_by_servers_of_their_own() {
    let plan = plan(2, bounded(Some(1)));
    let cluster = fast_links();
    for network in NETWORKS {
        let options = Options { network, ..Options::default() };
        let solo = simulate(&plan, &cluster, &options).unwrap();
        let job = |devices: [u32; 3], start| crate::Job {
            plan: &plan,
            placement: crate::Placement::on(devices.map(Rank)),
            start: Seconds(start),
            iterations: 1,
        };
        let jobs = [job([0, 1, 2], 0.0), job([5, 4, 3], 1.0)];
        for outcome in crate::simulate_jobs(&jobs, &cluster, &options).unwrap() {
            close(outcome.iteration.0, solo.iteration.0, 1e-9);
            assert_eq!(outcome.staleness, solo.staleness);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// A tighter bound never makes a run shorter, from lockstep to no bound at all.
    #[test]
    fn bounds_lie_between_lockstep_and_free_replicas(
        dp in 2u32..5,
        slow in 0u32..2,
        factor in 1.0f64..6.0,
        bandwidth in 9.0f64..12.0,
        flow in any::<bool>(),
    ) {
        let mut cluster = straggling(fast_links(), slow, factor, None);
        cluster.dimensions[0].bandwidth = BytesPerSec(10f64.powf(bandwidth));
        let network = if flow { NetworkKind::Flow } else { NetworkKind::Analytic };
        let bounds = [Some(0), Some(2), Some(8), Some(1 << 20), None];
        let runs = bounds.map(|bound| run(&plan(dp, bounded(bound)), &cluster, network));
        for pair in runs.windows(2) {
            // Other orders of arrival may cost a little.
            prop_assert!(pair[1].iteration.0 <= 1.02 * pair[0].iteration.0);
        }
        prop_assert_eq!(runs[3].iteration, runs[4].iteration);
        for (run, bound) in runs.iter().zip(bounds) {
            let lead = run.staleness.unwrap().max_lead;
            prop_assert!(bound.is_none_or(|bound| lead <= bound), "{lead} over {bound:?}");
        }
    }
}

/// Iteration time of `dp` replicas that share their weights.
fn shared(dp: u32, cluster: &Cluster) -> Result<f64, SimError> {
    simulate(&plan(dp, Sync::Hogwild), cluster, &Options::default()).map(|found| found.iteration.0)
}

#[test]
fn threads_that_share_weights_wait_for_nobody() {
    let laptop = preset::get("laptop").unwrap();
    let alone = shared(1, &laptop).unwrap();
    assert_eq!(shared(2, &laptop).unwrap(), alone, "another one costs nothing");
    let laptop = straggling(laptop, 1, 4.0, None);
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
