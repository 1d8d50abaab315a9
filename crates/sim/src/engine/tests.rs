use super::{Classes, ClusterEpochs, Costs, Load, run_classes};
use crate::cluster::{
    BandwidthChange, BandwidthSchedule, Cluster, DeviceOverride, IndexRange, LinkOverride,
    Selector, Straggler, preset,
};
use crate::jobs::Placement;
use crate::network::{Analytic, CostModel};
use crate::{Library, NetworkKind, Options, Outcome, Profile, SimError, simulate};
use paceline_plan::collective::SummationOrder;
use paceline_plan::compress::Compression;
use paceline_plan::ids::{Microbatch, Rank};
use paceline_plan::lower::lower;
use paceline_plan::model::{Model, built_in};
use paceline_plan::program::{Op, Plan};
use paceline_plan::schedule::{ScheduleKind, Versions};
use paceline_plan::strategy::{OptimizerKind, Strategy, Sync, Zero};
use paceline_plan::trace::{Breakdown, SpanKind};
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use proptest::prelude::*;

/// Cluster of cores limited only by arithmetic, on a network that takes no time.
fn ideal(devices: u64) -> Cluster {
    let mut cluster = preset::holding("laptop", devices).unwrap();
    cluster.device.memory_bandwidth = BytesPerSec(1e30);
    cluster.device.launch_overhead = Seconds::ZERO;
    for dimension in &mut cluster.dimensions {
        dimension.bandwidth = BytesPerSec(1e30);
        dimension.latency = Seconds::ZERO;
    }
    cluster
}

fn model(name: &str) -> Model {
    built_in::get(name).unwrap().unwrap()
}

fn strategy(model: &Model, pp: u32, microbatches: u64, schedule: ScheduleKind) -> Strategy {
    Strategy {
        pp,
        schedule,
        global_batch: microbatches,
        seq: model.seq,
        order: SummationOrder::Free,
        ..Strategy::default()
    }
}

/// Plan in which only layers have a cost, so that stages with equally many layers are equal.
fn blocks_only(model: &Model, strategy: &Strategy) -> Plan {
    let mut plan = lower(model, strategy).unwrap();
    for template in &mut plan.templates {
        if !template.name.contains(".block.") {
            template.ops.clear();
        }
    }
    plan
}

fn run(plan: &Plan, cluster: &Cluster) -> Outcome {
    simulate(plan, cluster, &Options::default()).unwrap()
}

/// A warm-up iteration takes as long as one without compression; a later one takes as long as one
/// without warm-up.
#[test]
fn both_kinds_of_iterations_of_a_warm_up_are_timed() {
    let model = model("mini");
    let mut cluster = preset::holding("laptop", 2).unwrap();
    for dimension in &mut cluster.dimensions {
        dimension.bandwidth = BytesPerSec(12.5e6);
    }
    let layout = |compress, compress_warmup| Strategy {
        dp: 2,
        compress,
        compress_warmup,
        optimizer: OptimizerKind::Sgd,
        ..strategy(&model, 1, 4, ScheduleKind::OneFOneB)
    };
    let time = |layout: &Strategy| run(&lower(&model, layout).unwrap(), &cluster);
    let onebit = Compression::OneBit;
    let (whole, compressed) =
        (time(&layout(Compression::None, None)), time(&layout(onebit, Some(0))));
    assert!(3.0 * compressed.iteration.0 < whole.iteration.0);
    assert_eq!((whole.warm_up, compressed.warm_up), (None, None));
    let both = time(&layout(onebit, Some(100)));
    let near = |found: Seconds, wanted: Seconds| (found.0 / wanted.0 - 1.0).abs() < 1e-3;
    assert!(near(both.iteration, compressed.iteration));
    // Buckets are padded so that their blocks can be sharded.
    let warm_up = both.warm_up.unwrap();
    assert!((warm_up.0 / whole.iteration.0 - 1.0).abs() < 0.02, "{warm_up} {}", whole.iteration);
}

/// Narayanan et al. (arXiv 2104.04473), sections 2.2.1 and 2.2.2, as a fraction of the iteration.
#[test]
fn equal_stages_have_the_bubble_of_the_textbook() {
    let mini = model("mini");
    for (pp, chunks) in [(1, 1), (2, 1), (4, 1), (2, 2)] {
        let schedules: &[ScheduleKind] = match chunks {
            1 => &[ScheduleKind::GPipe, ScheduleKind::OneFOneB],
            _ => &[ScheduleKind::Interleaved { chunks: 2 }],
        };
        for &schedule in schedules {
            for microbatches in [4, 8, 32] {
                let plan = blocks_only(&mini, &strategy(&mini, pp, microbatches, schedule));
                let outcome = run(&plan, &ideal(pp.into()));
                let (p, m) = (f64::from(pp), microbatches as f64 * f64::from(chunks));
                let textbook = (p - 1.0) / (m + p - 1.0);
                let bubble = outcome.bubble_fraction;
                assert!(
                    (bubble - textbook).abs() < 1e-9,
                    "{schedule} {pp} {m}: {bubble} {textbook}"
                );
                assert!(outcome.exposed_communication.0 < 1e-12);
            }
        }
    }
}

/// Qi et al. (arXiv 2401.10241), table 1: ranks idle (p − 1)(F + B − W), with the pass times that
/// the simulator computes.
#[test]
fn a_split_backward_has_the_bubble_of_the_paper() {
    let mini = model("mini");
    for (pp, chunks, microbatches) in [(2, 1, 8), (4, 1, 8), (2, 2, 8)] {
        let schedule = ScheduleKind::ZbH1 { chunks };
        let plan = blocks_only(&mini, &strategy(&mini, pp, microbatches, schedule));
        let outcome = run(&plan, &ideal(pp.into()));
        let of = |pass: &str| {
            let ops = outcome.ops.iter().filter(|op| op.name.starts_with(pass));
            let time: f64 = ops.map(|op| op.time.0).sum();
            time / (microbatches * u64::from(chunks)) as f64
        };
        let [f, b, w] = [of("forward"), of("backward input"), of("backward weight")];
        assert!(f > 0.0 && b > 0.0 && w > 0.0, "{:?}", outcome.ops);
        let idle = f64::from(pp - 1) * (f + b - w);
        let busy = (microbatches * u64::from(chunks)) as f64 * (f + b + w);
        let paper = idle / (idle + busy);
        let bubble = outcome.bubble_fraction;
        assert!((bubble - paper).abs() < 1e-9, "{schedule} {pp}: {bubble} {paper}");
    }
}

/// Narayanan et al. (SOSP 2019, section 3.2): once full, a pipeline without flush has no idle stage
/// for any number of microbatches; an iteration takes the time of its slowest stage.
#[test]
fn a_pipeline_without_flush_never_waits() {
    let model = model("mini-llama");
    for (versions, pp, microbatches) in
        [(Versions::Stashed, 2, 1), (Versions::Stashed, 4, 1), (Versions::Two, 4, 4)]
    {
        let schedule = ScheduleKind::PipeDream { versions };
        let plan = blocks_only(&model, &strategy(&model, pp, microbatches, schedule));
        let outcome = run(&plan, &ideal(pp.into()));
        let bubble = outcome.bubble_fraction;
        assert!(bubble.abs() < 1e-9, "{schedule} {pp}: {bubble}");
        let slowest = outcome.roles.iter().map(|role| role.compute.0).fold(0.0, f64::max);
        assert!((outcome.iteration.0 / slowest - 1.0).abs() < 1e-9, "{schedule} {pp}");
        // Same with shared links.
        let options = Options { network: NetworkKind::Flow, ..Options::default() };
        let flow = simulate(&plan, &ideal(pp.into()), &options).unwrap();
        assert!((flow.iteration.0 / outcome.iteration.0 - 1.0).abs() < 1e-6, "{schedule} {pp}");
    }
}

/// With one microbatch the pipeline is a chain: every stage's compute, every message, and the
/// gradient norm over the stages.
#[test]
fn a_single_microbatch_is_a_chain_of_stages_and_messages() {
    let mini = model("mini");
    let plan = blocks_only(&mini, &strategy(&mini, 4, 1, ScheduleKind::OneFOneB));
    let mut cluster = ideal(4);
    for dimension in &mut cluster.dimensions {
        dimension.bandwidth = BytesPerSec(1e9);
        dimension.latency = Seconds(1e-3);
        dimension.devices_per_link = 1;
        dimension.efficiency = 1.0;
    }
    let outcome = run(&plan, &cluster);
    let compute: f64 = outcome.roles.iter().map(|role| role.compute.0).sum();
    let activation = Bytes(mini.seq * mini.d_model * 4);
    let message = Analytic::new(&cluster).message(Rank(0), Rank(1), activation).unwrap();
    let time = |name: &str| {
        outcome.ops.iter().filter(|op| op.name == name).map(|op| op.time.0).sum::<f64>()
    };
    let chain = compute + 6.0 * message.0 + time("all_reduce pp") + time("all_reduce pp ends");
    assert!((outcome.iteration.0 / chain - 1.0).abs() < 1e-9, "{} {chain}", outcome.iteration.0);
}

#[test]
fn the_world_does_not_change_what_one_rank_does() {
    let mini = model("mini");
    let base = Strategy { overlap: false, ..strategy(&mini, 2, 8, ScheduleKind::OneFOneB) };
    let alike = |devices| {
        let mut cluster = preset::holding("dgx-a100", devices).unwrap();
        // Device variation applies to accelerators, not to cores.
        cluster.device.multiprocessors = None;
        cluster
    };
    let one = run(&lower(&mini, &base).unwrap(), &alike(2));
    let wide = Strategy { dp: 512, global_batch: 8 * 512, ..base };
    let many = run(&lower(&mini, &wide).unwrap(), &alike(1024));
    for (one, many) in one.roles.iter().zip(&many.roles) {
        assert!((one.compute.0 / many.compute.0 - 1.0).abs() < 1e-9, "{}", one.name);
    }
    assert!(many.iteration.0 > one.iteration.0, "replicas must agree");
    assert_eq!(many.roles.len(), 2);
    assert_eq!(many.roles[0].ranks, 512);
}

/// The slowest of many devices sets the pace, and concurrent traffic slows compute.
#[test]
fn the_world_slows_everyone_down_a_little() {
    let mini = model("mini");
    let compute = |dp: u32, overlap: bool| {
        let base = strategy(&mini, 2, 8, ScheduleKind::OneFOneB);
        let wide = Strategy { dp, global_batch: 8 * u64::from(dp), overlap, ..base };
        let cluster = preset::holding("dgx-a100", 2 * u64::from(dp)).unwrap();
        run(&lower(&mini, &wide).unwrap(), &cluster).roles[0].compute.0
    };
    let slower = |overlap| compute(512, overlap) / compute(1, overlap) - 1.0;
    assert!((0.02..0.04).contains(&slower(false)), "{}", slower(false));
    assert!(slower(true) > slower(false), "{}", slower(true));
}

/// Under ZeRO-1, weights arrive during the next iteration if the software overlaps the gather.
#[test]
fn gathers_hide_behind_the_next_iteration() {
    let mini = model("mini");
    let base = strategy(&mini, 1, 8, ScheduleKind::OneFOneB);
    let dealt = Strategy { dp: 8, global_batch: 64, zero: Zero::Optimizer, ..base };
    let cluster = preset::holding("dgx-a100", 8).unwrap();
    let time = |strategy: &Strategy, gathers_ahead: bool| {
        let profile = Profile { overlap_param_gather: gathers_ahead, ..Profile::MODERN };
        let plan = lower(&mini, strategy).unwrap();
        let outcome =
            simulate(&plan, &cluster, &Options { profile, ..Options::default() }).unwrap();
        let parts = outcome.compute + outcome.exposed_communication;
        let idle = outcome.bubble_fraction * outcome.iteration.0;
        assert!(((parts.0 + idle) / outcome.iteration.0 - 1.0).abs() < 1e-9);
        outcome.iteration.0
    };
    assert!(time(&dealt, true) < time(&dealt, false));
    let replicated = Strategy { zero: Zero::None, ..dealt.clone() };
    assert_eq!(time(&replicated, true), time(&replicated, false));
    let exposed = Strategy { overlap: false, ..dealt };
    assert_eq!(time(&exposed, true), time(&exposed, false));
}

#[test]
fn more_ranks_than_devices_are_refused() {
    let mini = model("mini");
    let plan = lower(&mini, &strategy(&mini, 4, 4, ScheduleKind::GPipe)).unwrap();
    let error = simulate(&plan, &preset::get("laptop").unwrap(), &Options::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the plan has 4 ranks and cluster laptop has 2 devices; use a cluster with 4 or more, \
         such as --cluster NAME:HOSTS with more hosts"
    );
}

/// A message without a receiver blocks its sender, and the error names rank and op.
#[test]
fn a_plan_that_gets_stuck_is_told_with_rank_and_op() {
    let mini = model("mini");
    let mut plan = lower(&mini, &strategy(&mini, 2, 2, ScheduleKind::GPipe)).unwrap();
    let nodes = &mut plan.programs[1].body.nodes;
    let receive = nodes.iter_mut().find(|node| matches!(node.op, Op::Recv { .. })).unwrap();
    receive.op = Op::Free { frame: 0, microbatch: Microbatch(0) };
    let error = simulate(&plan, &ideal(2), &Options::default()).unwrap_err();
    let SimError::Stuck { rank, what, .. } = &error else { panic!("{error}") };
    assert_eq!(*rank, Rank(0));
    assert!(what.starts_with("send '") && what.ends_with("to stage 1 ch 0 mb 0"), "{what}");
    assert!(
        error
            .to_string()
            .starts_with("rank 0 (pipeline rank 0 (embedding..blocks.1)) is deadlocked")
    );
}

/// A server receives every replica's gradients one after the other and sends weights back likewise.
#[test]
fn servers_are_as_slow_as_their_one_link() {
    let mini = model("mini");
    let served = Strategy {
        dp: 6,
        leaves: 6,
        global_batch: 6,
        sync: Sync::Servers(2),
        seq: mini.seq,
        ..Strategy::default()
    };
    let plan = lower(&mini, &served).unwrap();
    let mut cluster = ideal(8);
    for dimension in &mut cluster.dimensions {
        dimension.bandwidth = BytesPerSec(1e6);
        dimension.efficiency = 1.0;
        dimension.devices_per_link = 1;
    }
    let outcome = run(&plan, &cluster);
    let elements: u64 = plan.programs[0].buckets.iter().map(|bucket| bucket.elements).sum();
    let through_one_server = 2.0 * 6.0 * (elements / 2 * 4) as f64 / 1e6;
    assert!(outcome.iteration.0 >= through_one_server);
    // Both servers work concurrently, offset by one message: a sixth of the time at each end.
    let most = through_one_server * (1.0 + 1.0 / 6.0) + outcome.compute.0;
    assert!(outcome.iteration.0 <= most, "{} {most}", outcome.iteration.0);
    assert_eq!(outcome.roles.len(), 3);
    assert_eq!(outcome.roles[1].communication, outcome.roles[2].communication);
}

/// N ranks that send to one server share its single link inbound and again outbound, on every
/// network: data never arrives faster than that link's bandwidth.
#[test]
fn a_server_takes_in_no_more_than_its_link_carries() {
    let mini = model("mini");
    let rate = 1e6;
    for replicas in [1u32, 2, 4, 8] {
        let served = Strategy {
            dp: replicas,
            leaves: replicas,
            global_batch: replicas.into(),
            sync: Sync::Servers(1),
            seq: mini.seq,
            ..Strategy::default()
        };
        let plan = lower(&mini, &served).unwrap();
        let mut cluster = ideal(u64::from(replicas) + 1);
        cluster.dimensions.truncate(1);
        cluster.dimensions[0].size = replicas + 1;
        cluster.dimensions[0].bandwidth = BytesPerSec(rate);
        cluster.dimensions[0].efficiency = 1.0;
        cluster.dimensions[0].devices_per_link = 1;
        let elements: u64 = plan.programs[0].buckets.iter().map(|bucket| bucket.elements).sum();
        let inwards = f64::from(replicas) * (elements * 4) as f64 / rate;
        for network in [NetworkKind::Analytic, NetworkKind::Flow] {
            let profile = Profile { library: Library::Steps, ..Profile::MODERN };
            let options = Options { profile, network, ..Options::default() };
            let outcome = simulate(&plan, &cluster, &options).unwrap();
            let server = outcome.roles.last().unwrap();
            let told = format!("{network}, {replicas} ranks: {} {inwards}", server.communication.0);
            assert!(server.communication.0 >= inwards * (1.0 - 1e-9), "{told}");
            assert!(outcome.iteration.0 >= 2.0 * inwards * (1.0 - 1e-9), "{told}");
            assert!(outcome.iteration.0 <= 2.0 * inwards * 1.05 + outcome.compute.0, "{told}");
        }
    }
}

#[test]
fn the_same_input_gives_the_same_bits() {
    let mini = model("mini-llama");
    let strategy = Strategy {
        tp: 2,
        dp: 2,
        zero: Zero::Optimizer,
        global_batch: 16,
        ..strategy(&mini, 2, 16, ScheduleKind::Interleaved { chunks: 2 })
    };
    let plan = lower(&mini, &strategy).unwrap();
    let cluster = preset::get("dgx-a100").unwrap();
    let options = Options { trace: true, ..Options::default() };
    let (a, b) = (simulate(&plan, &cluster, &options), simulate(&plan, &cluster, &options));
    assert_eq!(a.unwrap(), b.unwrap());
}

/// On a homogeneous cluster, ranks of a role are one class; one slow rank adds few more.
#[test]
fn a_straggler_splits_a_role_into_few_classes() {
    let mini = model("mini");
    let base = Strategy { tp: 4, dp: 64, ..strategy(&mini, 2, 64 * 4, ScheduleKind::OneFOneB) };
    let plan = lower(&mini, &base).unwrap();
    let mut cluster = preset::holding("dgx-a100", 512).unwrap();
    assert_eq!(Classes::of(&plan, &cluster, &Placement::default()).unwrap().len(), 2);
    cluster.heterogeneity.stragglers.push(slow(rank(5), 2.0));
    let classes = Classes::of(&plan, &cluster, &Placement::default()).unwrap();
    // In the slow pipeline: the straggler, its receiver, and their neighbours. In the others:
    // replicas of the slow ranks, and replicas of their neighbours.
    assert_eq!(classes.len(), 8);
    let counted: u32 = (0..8).map(|class| classes.get(class).ranks).sum();
    assert_eq!(counted, 512);
    cluster.heterogeneity.stragglers[0].at =
        Selector::Hosts(vec![IndexRange { first: 0, last: 63 }]);
    assert_eq!(
        Classes::of(&plan, &cluster, &Placement::default()).unwrap().len(),
        2,
        "everybody is slow"
    );
}

fn rank(rank: u32) -> Selector {
    Selector::Ranks(vec![IndexRange::one(rank)])
}

fn slow(at: Selector, factor: f64) -> Straggler {
    Straggler { at, factor, from: Seconds::ZERO, until: None }
}

/// All ranks wait for the slowest when they synchronise.
#[test]
fn a_straggler_holds_up_its_replicas() {
    let mini = model("mini");
    let layout =
        Strategy { dp: 4, overlap: false, ..strategy(&mini, 1, 16, ScheduleKind::OneFOneB) };
    let plan = blocks_only(&mini, &layout);
    let even = run(&plan, &ideal(4));
    let mut cluster = ideal(4);
    cluster.heterogeneity.stragglers.push(slow(rank(2), 1.5));
    let held = run(&plan, &cluster);
    assert!((held.iteration.0 / even.iteration.0 - 1.5).abs() < 1e-6, "{}", held.iteration.0);
    // From half of the homogeneous iteration on: half at full speed, the rest at two thirds.
    cluster.heterogeneity.stragglers[0].from = even.iteration * 0.5;
    let half = run(&plan, &cluster);
    assert!((half.iteration.0 / even.iteration.0 - 1.25).abs() < 1e-6, "{}", half.iteration.0);
    cluster.heterogeneity.stragglers[0].until = Some(even.iteration * 0.8);
    let bounded = run(&plan, &cluster);
    assert!((bounded.iteration.0 / even.iteration.0 - 1.1).abs() < 1e-6, "{}", bounded.iteration.0);
}

/// The slowest rank is reported with host and device, and traced next to the others.
#[test]
fn a_straggler_is_told_and_traced() {
    let mini = model("mini");
    let layout = Strategy { dp: 16, ..strategy(&mini, 1, 16, ScheduleKind::OneFOneB) };
    let plan = lower(&mini, &layout).unwrap();
    let mut cluster = preset::get("dgx-a100:2").unwrap();
    cluster.heterogeneity.stragglers.push(slow(rank(11), 4.0));
    for network in [NetworkKind::Analytic, NetworkKind::Flow] {
        let options = Options { network, trace: true, details: true, ..Options::default() };
        let outcome = simulate(&plan, &cluster, &options).unwrap();
        let slowest = &outcome.slowest;
        assert_eq!(
            (slowest.rank, slowest.host.0, slowest.slowdown),
            (Rank(11), 1, 4.0),
            "{network}"
        );
        assert_eq!(slowest.device, "A100-SXM4-80GB");
        let [others, slow] = &outcome.rank_groups[..] else { panic!("{:?}", outcome.rank_groups) };
        assert_eq!((others.ranks, slow.ranks, slow.slowest.rank), (15, 1, Rank(11)));
        assert!(slow.compute.0 > 3.0 * others.compute.0 && slow.idle.0 < others.idle.0);
        let mut ranks = outcome.trace.as_ref().unwrap().ranks();
        ranks.sort_unstable();
        assert_eq!(ranks, [Rank(0), Rank(11)], "{network}");
        let even = outcome.details.unwrap().limits.homogeneous.unwrap();
        assert!(even.0 < outcome.iteration.0, "{network}");
        let alone = simulate(
            &plan,
            &preset::get("dgx-a100:2").unwrap(),
            &Options { network, ..Options::default() },
        );
        assert_eq!(alone.unwrap().iteration, even);
    }
}

/// A device with half the rate takes twice as long, at any position in the role.
#[test]
fn the_slowest_device_sets_the_pace() {
    let mini = model("mini");
    let layout =
        Strategy { dp: 4, overlap: false, ..strategy(&mini, 1, 16, ScheduleKind::OneFOneB) };
    let plan = blocks_only(&mini, &layout);
    let even = run(&plan, &ideal(4));
    for place in 0..4 {
        let mut cluster = ideal(4);
        let mut device = cluster.device.clone();
        device.name = "half".into();
        device.peak.f32.0 /= 2.0;
        cluster.heterogeneity.kinds.push(DeviceOverride { at: rank(place), device });
        let held = run(&plan, &cluster);
        assert!((held.iteration.0 / even.iteration.0 - 2.0).abs() < 1e-6, "rank {place}");
        // MFU is relative to the peak of the actual devices.
        let peaks = 4.0 / 3.5;
        assert!((held.mfu / (even.mfu * peaks / 2.0) - 1.0).abs() < 1e-6, "rank {place}");
    }
}

/// A transfer that spans a bandwidth change proceeds partly at each rate.
#[test]
fn links_that_change_are_integrated() {
    let mini = model("mini");
    let plan = blocks_only(&mini, &strategy(&mini, 2, 1, ScheduleKind::OneFOneB));
    let mut cluster = ideal(2);
    for dimension in &mut cluster.dimensions {
        (dimension.bandwidth, dimension.latency) = (BytesPerSec(1e9), Seconds(1e-3));
        (dimension.devices_per_link, dimension.efficiency) = (1, 1.0);
    }
    let even = simulate(&plan, &cluster, &Options { trace: true, ..Options::default() }).unwrap();
    let trace = even.trace.as_ref().unwrap();
    let sent = trace.spans.iter().find(|span| span.kind == SpanKind::Send).unwrap();
    let transfer = (sent.end - sent.start).0 - 1e-3;
    let dimension = plan_dimension(&cluster);
    // Half of the transfer is done when the bandwidth drops to a quarter.
    let changes = vec![BandwidthChange { at: sent.end - Seconds(transfer / 2.0), bandwidth: 0.25 }];
    let at = Selector::Everywhere;
    cluster.heterogeneity.schedules.push(BandwidthSchedule { dimension, at, changes });
    for network in [NetworkKind::Analytic, NetworkKind::Flow] {
        let options = Options { network, trace: true, ..Options::default() };
        let outcome = simulate(&plan, &cluster, &options).unwrap();
        let spans = &outcome.trace.as_ref().unwrap().spans;
        let first = spans.iter().find(|span| span.kind == SpanKind::Send).unwrap();
        let expected = sent.end.0 + transfer / 2.0 * 3.0;
        assert!((first.end.0 / expected - 1.0).abs() < 1e-9, "{network}: {first:?} {expected}");
        // The reverse direction has a quarter of the bandwidth throughout.
        let back = spans.iter().rfind(|span| span.kind == SpanKind::Send).unwrap();
        let expected = 1e-3 + transfer * 4.0;
        assert!(((back.end - back.start).0 / expected - 1.0).abs() < 1e-9, "{network}: {back:?}");
    }
}

/// With one engine a stage's messages are serialized; with none they also block its compute.
#[test]
fn copy_engines_bound_what_runs_beside_computing() {
    let mini = model("mini");
    let plan = blocks_only(&mini, &strategy(&mini, 4, 8, ScheduleKind::OneFOneB));
    for network in [NetworkKind::Analytic, NetworkKind::Flow] {
        engines_bound(&mini, &plan, network);
    }
}

fn engines_bound(mini: &Model, plan: &Plan, network: NetworkKind) {
    let iteration = |engines: Option<u32>, rate: f64| {
        let mut cluster = ideal(4);
        cluster.device.copy_engines = engines;
        for dimension in &mut cluster.dimensions {
            (dimension.bandwidth, dimension.devices_per_link) = (BytesPerSec(rate), 1);
        }
        let options = Options { network, ..Options::default() };
        simulate(plan, &cluster, &options).unwrap().iteration.0
    };
    assert_eq!(iteration(Some(64), 1e9), iteration(None, 1e9), "more than there are messages");
    let slow = 2e7;
    let (none, one, many) =
        (iteration(Some(0), slow), iteration(Some(1), slow), iteration(None, slow));
    assert!(many < one && one < none, "{network}: {many} {one} {none}");
    // A middle stage sends and receives eight activations and eight gradients each. With one engine
    // none of these 32 messages overlap; with none, compute does not overlap with them either.
    let message = (mini.seq * mini.d_model * 4) as f64 / slow;
    assert!(one >= 32.0 * message, "{one} {message}");
    let computed = run(plan, &ideal(4)).compute.0;
    assert!(none >= 32.0 * message + computed * (1.0 - 1e-9), "{none}");
}

/// Dimension of the link between the first two ranks.
fn plan_dimension(cluster: &Cluster) -> usize {
    cluster.link(Rank(0), Rank(1)).unwrap().dimension
}

/// A group is as fast as its slowest member's link, at any position of that member.
#[test]
fn one_slow_link_slows_its_group() {
    let mini = model("mini");
    let layout =
        Strategy { dp: 4, overlap: false, ..strategy(&mini, 1, 4, ScheduleKind::OneFOneB) };
    let plan = lower(&mini, &layout).unwrap();
    let mut cluster = ideal(4);
    cluster.dimensions.truncate(1);
    cluster.dimensions[0].size = 4;
    cluster.dimensions[0].bandwidth = BytesPerSec(1e8);
    let even = run(&plan, &cluster);
    for place in 0..4 {
        let bandwidth = Some(BytesPerSec(2.5e7));
        let link = LinkOverride { dimension: 0, at: rank(place), bandwidth, latency: None };
        cluster.heterogeneity.links = vec![link];
        let slowed = run(&plan, &cluster);
        let four = slowed.communication.0 / even.communication.0;
        assert!((four - 4.0).abs() < 1e-6, "rank {place}: {four}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// On every rank, compute, exposed communication and idle time add up to the iteration; trace
    /// and statistics agree.
    #[test]
    fn the_parts_make_the_iteration(
        tp in prop_oneof![Just(1u32), Just(2)],
        pp in prop_oneof![Just(1u32), Just(2), Just(4)],
        dp in prop_oneof![Just(1u32), Just(2), Just(3)],
        stage in 0u8..4,
        microbatches in 1u64..6,
        sp: bool,
        overlap: bool,
        gpipe: bool,
    ) {
        let mini = model("mini");
        let schedule = if gpipe { ScheduleKind::GPipe } else { ScheduleKind::OneFOneB };
        let strategy = Strategy {
            tp,
            dp,
            zero: Zero::from_stage(stage).unwrap(),
            overlap,
            sp: sp && tp > 1,
            ..strategy(&mini, pp, microbatches * u64::from(dp), schedule)
        };
        let plan = lower(&mini, &strategy).unwrap();
        let cluster = preset::holding("dgx-a100", plan.mesh.world().into()).unwrap();
        let options = Options { trace: true, ..Options::default() };
        let outcome = simulate(&plan, &cluster, &options).unwrap();
        let trace = outcome.trace.as_ref().unwrap();
        trace.check().unwrap();
        let breakdowns = trace.breakdowns();
        prop_assert_eq!(breakdowns.len(), outcome.roles.len());
        for (role, (_, breakdown)) in outcome.roles.iter().zip(&breakdowns) {
            let sum = role.compute + role.exposed + role.idle;
            prop_assert!((sum - outcome.iteration).0.abs() < 1e-9 * outcome.iteration.0);
            prop_assert!(role.exposed.0 <= role.communication.0 * (1.0 + 1e-9));
            prop_assert!((breakdown.compute - role.compute).0.abs() < 1e-9 * outcome.iteration.0);
            let exposed = breakdown.exposed_communication - role.exposed;
            prop_assert!(exposed.0.abs() < 1e-9 * outcome.iteration.0);
            let total = breakdown.total - outcome.iteration;
            prop_assert!(total.0.abs() < 1e-9 * outcome.iteration.0);
        }
        let whole = outcome.compute + outcome.exposed_communication
            + outcome.iteration * outcome.bubble_fraction;
        prop_assert!((whole - outcome.iteration).0.abs() < 1e-9 * outcome.iteration.0);
    }

    /// Ranks folded into classes end at bitwise the same times as when simulated individually.
    #[test]
    fn classes_end_when_their_ranks_do(
        tp in prop_oneof![Just(1u32), Just(2)],
        pp in prop_oneof![Just(1u32), Just(2), Just(4)],
        dp in prop_oneof![Just(1u32), Just(2), Just(4)],
        stage in 0u8..4,
        microbatches in 1u64..4,
        overlap: bool,
        slow_ranks in proptest::collection::vec((0u32..32, 1.0f64..3.0), 0..3),
        other in proptest::option::of(0u32..32),
        host in proptest::option::of(0u32..4),
        change in proptest::option::of((1e-5f64..1e-2, 0.1f64..2.0)),
        engines in proptest::option::of(0u32..3),
    ) {
        let mini = model("mini");
        let layout = Strategy {
            tp,
            dp,
            zero: Zero::from_stage(stage).unwrap(),
            overlap,
            ..strategy(&mini, pp, microbatches * u64::from(dp), ScheduleKind::OneFOneB)
        };
        let plan = lower(&mini, &layout).unwrap();
        let mut cluster = preset::get("dgx-a100:4").unwrap();
        cluster.device.copy_engines = engines;
        for (at, factor) in slow_ranks {
            cluster.heterogeneity.stragglers.push(slow(rank(at), factor));
        }
        if let Some(at) = other {
            let device = preset::get("dgx-h100").unwrap().device;
            cluster.heterogeneity.kinds.push(DeviceOverride { at: rank(at), device });
        }
        if let Some(host) = host {
            let at = Selector::Hosts(vec![IndexRange::one(host)]);
            let bandwidth = Some(BytesPerSec(50e9));
            cluster.heterogeneity.links.push(LinkOverride { dimension: 0, at, bandwidth, latency: None });
        }
        if let Some((at, bandwidth)) = change {
            let changes = vec![BandwidthChange { at: Seconds(at), bandwidth }];
            let at = Selector::Everywhere;
            cluster.heterogeneity.schedules.push(BandwidthSchedule { dimension: 0, at, changes });
        }
        let profile = Profile { library: Library::Steps, ..Profile::MODERN };
        let costs = Costs::new(&plan, &cluster, &profile);
        let moments = ClusterEpochs::new(&cluster);
        let eras = moments.networks(profile.library);
        let (load, place) = (Load::new(&plan, &costs), Placement::default());
        let run = |classes: Result<Classes, _>| {
            run_classes(&load, classes.unwrap(), &eras).unwrap().timeline
        };
        let folded = run(Classes::of(&plan, &cluster, &place));
        let apart = run(Classes::per_rank(&plan, &cluster, &place));
        prop_assert!(folded.classes().len() <= apart.classes().len());
        for r in 0..plan.mesh.world() {
            let class = folded.classes().of_rank(&plan, 0, Rank(r));
            for op in 0..plan.program(Rank(r)).body.nodes.len() {
                let op = paceline_plan::ids::OpId::from(op);
                prop_assert_eq!(folded.span_of(class, op), apart.span_of(r, op), "rank {}", r);
            }
        }
    }
}

/// For any ZeRO stage, all communication is exposed without overlap, and some is hidden with it.
#[test]
fn without_overlap_nothing_is_computed_beside_an_exchange() {
    let (model, cluster) = (model("mini"), preset::holding("laptop", 4).unwrap());
    let stages = [Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Parameters];
    for (zero, order) in stages
        .into_iter()
        .flat_map(|z| [SummationOrder::Canonical, SummationOrder::Free].map(|o| (z, o)))
    {
        let base = strategy(&model, 1, 16, ScheduleKind::OneFOneB);
        let base = Strategy { dp: 4, leaves: 4, zero, order, bucket: Bytes(1 << 16), ..base };
        let hidden = |overlap| {
            let plan = lower(&model, &Strategy { overlap, ..base.clone() }).unwrap();
            let options = Options { trace: true, ..Options::default() };
            let trace = simulate(&plan, &cluster, &options).unwrap().trace.unwrap();
            let hidden = |b: &Breakdown| b.communication.0 - b.exposed_communication.0;
            trace.breakdowns().iter().map(|(_, b)| hidden(b)).fold(0.0, f64::max)
        };
        let (apart, beside) = (hidden(false), hidden(true));
        // Iterations follow without a gap, so the first gather may overlap the last step.
        assert!(
            apart < 0.02 * beside,
            "{zero:?}, {order}: {apart} s are hidden, {beside} with overlap"
        );
        assert!(beside > 1e-5, "{zero:?}, {order}: nothing is hidden");
    }
}
