//! Plans and clusters whose times can be computed by hand.

use crate::cluster::{Cluster, preset};
use crate::{Details, Options, Outcome, simulate};
use paceline_plan::collective::SummationOrder;
use paceline_plan::lower::lower;
use paceline_plan::model::{Model, built_in};
use paceline_plan::program::Plan;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::Strategy;
use paceline_plan::units::{BytesPerSec, Seconds};

pub(super) fn mini() -> Model {
    built_in::get("mini").unwrap().unwrap()
}

/// Plain 1F1B strategy for the small model with `pp` stages and `microbatches` microbatches.
pub(super) fn strategy(pp: u32, microbatches: u64) -> Strategy {
    Strategy {
        pp,
        schedule: ScheduleKind::OneFOneB,
        global_batch: microbatches,
        seq: mini().seq,
        order: SummationOrder::Free,
        ..Strategy::default()
    }
}

/// Plan in which only layers have a cost, so that stages with equally many layers are equal.
pub(super) fn blocks_only(strategy: &Strategy) -> Plan {
    let mut plan = lower(&mini(), strategy).unwrap();
    for template in &mut plan.templates {
        if !template.name.contains(".block.") {
            template.ops.clear();
        }
    }
    plan
}

/// Cluster of cores limited only by arithmetic, with links of this rate and latency.
pub(super) fn cluster(devices: u64, rate: f64, latency: f64) -> Cluster {
    let mut cluster = preset::holding("laptop", devices).unwrap();
    cluster.device.memory_bandwidth = BytesPerSec(1e30);
    cluster.device.launch_overhead = Seconds::ZERO;
    for dimension in &mut cluster.dimensions {
        dimension.bandwidth = BytesPerSec(rate);
        dimension.latency = Seconds(latency);
        dimension.devices_per_link = 1;
        dimension.efficiency = 1.0;
    }
    cluster
}

/// Cluster with negligible communication time.
pub(super) fn ideal(devices: u64) -> Cluster {
    cluster(devices, 1e30, 0.0)
}

pub(super) fn run(plan: &Plan, cluster: &Cluster) -> (Outcome, Details) {
    let options = Options { details: true, ..Options::default() };
    let mut outcome = simulate(plan, cluster, &options).unwrap();
    let details = outcome.details.take().unwrap();
    (outcome, details)
}

#[track_caller]
pub(super) fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()), "{a} is not {b}");
}
