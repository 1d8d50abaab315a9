use super::Prepared;
use crate::cluster::{
    BandwidthChange, BandwidthSchedule, Cluster, DeviceOverride, DimensionKind, IndexRange,
    LinkOverride, Selector, Straggler, Tree, measured, preset,
};
use crate::engine::{Costs, Load, Timeline, Unrolled, run_folded};
use crate::network::flow::Folding;
use crate::{Library, NetworkKind, Options, Outcome, Profile, SimError, simulate};
use paceline_plan::collective::{Algorithm, SummationOrder};
use paceline_plan::ids::{Microbatch, Rank, RoleId};
use paceline_plan::lower::lower;
use paceline_plan::model::{Model, built_in};
use paceline_plan::program::{Op, Plan};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Strategy, Sync, Zero};
use paceline_plan::text;
use paceline_plan::units::{BytesPerSec, Seconds};
use proptest::prelude::*;
use proptest::strategy::Strategy as Generate;

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

/// Outcome of the plan's own collective steps on either network.
fn outcome(plan: &Plan, cluster: &Cluster, network: NetworkKind) -> Outcome {
    let profile = Profile { library: Library::Steps, ..Profile::default() };
    simulate(plan, cluster, &Options { profile, network, ..Options::default() }).unwrap()
}

fn both(plan: &Plan, cluster: &Cluster) -> (Outcome, Outcome) {
    let [analytic, flow] = [NetworkKind::Analytic, NetworkKind::Flow];
    (outcome(plan, cluster, analytic), outcome(plan, cluster, flow))
}

#[track_caller]
fn close(a: f64, b: f64) {
    assert!((a / b - 1.0).abs() < 1e-9, "{a} is not {b}");
}

/// Without shared links both networks agree, except for a few bytes of vectors that a group cannot
/// split evenly: those count as the largest part.
#[test]
fn without_contention_the_networks_agree() {
    let mini = model("mini");
    let base = strategy(&mini, 1, 8, ScheduleKind::OneFOneB);
    let layouts = [
        base.clone(),
        Strategy { tp: 4, ..base.clone() },
        Strategy { tp: 2, dp: 4, ..base.clone() },
        Strategy { pp: 4, ..base.clone() },
        Strategy { pp: 2, tp: 2, ..base.clone() },
        Strategy { dp: 8, zero: Zero::Optimizer, ..base },
    ];
    for layout in layouts {
        let layout = Strategy { overlap: false, ..layout };
        let plan = lower(&mini, &layout).unwrap();
        let cluster = preset::holding("dgx-a100", plan.mesh.world().into()).unwrap();
        let (analytic, flow) = both(&plan, &cluster);
        let apart = flow.iteration.0 / analytic.iteration.0 - 1.0;
        assert!((-1e-9..1e-6).contains(&apart), "{apart}");
        close(flow.compute.0, analytic.compute.0);
        assert_eq!(flow.ops.len(), analytic.ops.len());
    }
}

/// Both networks account for hidden tensor-parallel exchanges and the copies around them.
#[test]
fn the_networks_agree_on_what_software_hides() {
    let mini = model("mini");
    let layout = Strategy {
        tp: 4,
        sp: true,
        overlap: false,
        micro_batch: 2,
        ..strategy(&mini, 1, 8, ScheduleKind::OneFOneB)
    };
    let plan = lower(&mini, &layout).unwrap();
    let mut cluster = preset::holding("dgx-a100", 4).unwrap();
    for dimension in &mut cluster.dimensions {
        (dimension.latency, dimension.bandwidth) = (Seconds::ZERO, BytesPerSec(1e9));
    }
    let iteration = |network, overlapped_tensor, copies_tokens| {
        let profile = Profile {
            library: Library::Steps,
            tp_comm_overlap: overlapped_tensor,
            copies_tokens,
            ..Profile::MODERN
        };
        let options = Options { profile, network, ..Options::default() };
        simulate(&plan, &cluster, &options).unwrap().iteration.0
    };
    for (overlapped, copies) in [(false, false), (true, false), (false, true)] {
        let analytic = iteration(NetworkKind::Analytic, overlapped, copies);
        let flow = iteration(NetworkKind::Flow, overlapped, copies);
        // The hidden rest may overlap the next exchange, so flow is never faster.
        let apart = flow / analytic - 1.0;
        let most = if overlapped { 1.0 } else { 1e-6 };
        assert!((-1e-9..most).contains(&apart), "{overlapped} {copies}: {analytic} {flow}");
        let plain = iteration(NetworkKind::Flow, false, false);
        assert!(if copies { flow > plain } else { flow <= plain * (1.0 + 1e-9) }, "{flow} {plain}");
    }
}

/// Messages of both replicas cross the one uplink between two stages at once; each gets half of it.
#[test]
fn what_overlaps_shares_the_links() {
    let mini = model("mini");
    let layout = Strategy { dp: 2, ..strategy(&mini, 2, 4, ScheduleKind::GPipe) };
    let plan = lower(&mini, &layout).unwrap();
    let mut cluster = preset::get("laptop:4").unwrap();
    cluster.dimensions[0].size = 1;
    cluster.dimensions[1].devices_per_link = 1;
    cluster.dimensions[1].size = 4;
    let (_, apart) = both(&plan, &cluster);
    cluster.dimensions[1].tree = Some(Tree { leaf: 2, oversubscription: 2.0 });
    let (_, shared) = both(&plan, &cluster);
    assert!(shared.iteration.0 > apart.iteration.0 * 1.01);
}

/// Gathering the next layer's weights and reducing the last one's gradients overlap on one port.
/// The port's bandwidth bounds them on the flow network; the analytic one times ops individually
/// and ignores it.
#[test]
fn no_port_moves_more_than_it_can() {
    let mini = model("mini");
    let layout = Strategy {
        dp: 4,
        zero: Zero::Parameters,
        overlap: true,
        ..strategy(&mini, 1, 4, ScheduleKind::OneFOneB)
    };
    let plan = lower(&mini, &layout).unwrap();
    let mut cluster = preset::holding("laptop", 4).unwrap();
    cluster.device.launch_overhead = Seconds::ZERO;
    cluster.device.peak.f32.0 = 1e18;
    cluster.device.memory_bandwidth = BytesPerSec(1e18);
    cluster.dimensions.truncate(1);
    cluster.dimensions[0].size = 4;
    let rate = cluster.dimensions[0].achievable().0;
    let program = &plan.programs[0];
    let sent = program.body.nodes.iter().filter_map(|node| {
        let Op::Collective { call, .. } = node.op else { return None };
        let call = program.call(call);
        let pattern = call.pattern(4).unwrap();
        Some(pattern.counts(call.bytes()).bytes_sent_per_rank_max.as_f64())
    });
    let bound = sent.sum::<f64>() / rate;
    let (analytic, flow) = both(&plan, &cluster);
    assert!(flow.iteration.0 >= bound, "{} under {bound}", flow.iteration.0);
    assert!(analytic.iteration.0 < bound, "{} over {bound}", analytic.iteration.0);
}

/// Every replica pushes to a server and receives weights, all through the server's one port.
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
    let mut cluster = preset::holding("laptop", 8).unwrap();
    cluster.device.launch_overhead = Seconds::ZERO;
    for dimension in &mut cluster.dimensions {
        dimension.bandwidth = BytesPerSec(1e6);
        dimension.latency = Seconds::ZERO;
        dimension.efficiency = 1.0;
        dimension.devices_per_link = 1;
    }
    let flow = outcome(&plan, &cluster, NetworkKind::Flow);
    let elements: u64 = plan.programs[0].buckets.iter().map(|bucket| bucket.elements).sum();
    let through_one_server = 2.0 * 6.0 * (elements / 2 * 4) as f64 / 1e6;
    assert!(flow.iteration.0 >= through_one_server);
    let most = through_one_server * (1.0 + 1.0 / 6.0) + flow.compute.0;
    assert!(flow.iteration.0 <= most, "{} {most}", flow.iteration.0);
}

#[test]
fn a_plan_that_gets_stuck_is_told_with_rank_and_op() {
    let mini = model("mini");
    let mut plan = lower(&mini, &strategy(&mini, 2, 2, ScheduleKind::GPipe)).unwrap();
    let nodes = &mut plan.programs[1].body.nodes;
    let receive = nodes.iter_mut().find(|node| matches!(node.op, Op::Recv { .. })).unwrap();
    receive.op = Op::Free { frame: 0, microbatch: Microbatch(0) };
    let options = Options { network: NetworkKind::Flow, ..Options::default() };
    let error = simulate(&plan, &preset::get("dgx-a100").unwrap(), &options).unwrap_err();
    let SimError::Stuck { rank, what, .. } = &error else { panic!("{error}") };
    assert_eq!(*rank, Rank(0));
    assert!(what.starts_with("send '") && what.ends_with("to stage 1 ch 0 mb 0"), "{what}");
}

/// Hand-written plans contain features that lowering does not emit yet: asynchronous servers,
/// messages along an axis, carryover ops.
#[test]
fn golden_plans_take_the_same_time_folded_or_not() {
    let plans = [
        include_str!("../../../../../plans/gpt2-dp2-tp2-pp2.plan"),
        include_str!("../../../../../plans/gpt2-zero3-pp2.plan"),
        include_str!("../../../../../plans/hand-downpour.plan"),
        include_str!("../../../../../plans/moe-dp2-tp2-ep2-etp2.plan"),
        include_str!("../../../../../plans/hand-pipedream.plan"),
        include_str!("../../../../../plans/hand-ring-attention.plan"),
        include_str!("../../../../../plans/llama-pp2-interleaved.plan"),
        include_str!("../../../../../plans/mlp-ps2.plan"),
    ];
    for text in plans {
        let plan = text::parse(text).unwrap();
        for name in ["dgx-a100:2", "dgx1-v100:2", "laptop:8"] {
            let cluster = preset::get(name).unwrap();
            let folded = timeline(&plan, &cluster, Folding::On).end().0;
            close(folded, timeline(&plan, &cluster, Folding::Off).end().0);
            assert!(folded > 0.0, "{} on {name}", plan.model);
        }
    }
}

/// Messages that wait for copy engines or compute units are served in the same order.
#[test]
fn copy_engines_are_the_same_on_both_networks() {
    let mini = model("mini");
    for (pp, schedule) in [(4, ScheduleKind::OneFOneB), (2, ScheduleKind::GPipe)] {
        let plan = lower(&mini, &strategy(&mini, pp, 8, schedule)).unwrap();
        let mut cluster = preset::holding("dgx-a100", pp.into()).unwrap();
        let (free, _) = both(&plan, &cluster);
        for engines in [0, 1] {
            cluster.device.copy_engines = Some(engines);
            let (analytic, flow) = both(&plan, &cluster);
            close(flow.iteration.0, analytic.iteration.0);
            assert!(analytic.iteration >= free.iteration, "{engines} engines, {pp} stages");
        }
    }
}

/// The steady state of overlapping iterations is that of the ranks that the run tells apart.
#[test]
fn a_steady_state_is_the_same_folded_or_not() {
    let plan = text::parse(include_str!("../../../../../plans/hand-pipedream.plan")).unwrap();
    let unrolled = Unrolled::of(&plan, 1).unwrap();
    for name in ["dgx-a100:2", "dgx1-v100:2", "laptop:8"] {
        let mut cluster = preset::get(name).unwrap();
        cluster.dimensions[0].devices_per_link = 1;
        let period = |folding| {
            let run = timeline(&unrolled.plan, &cluster, folding);
            unrolled.last(&plan, &run).end().0
        };
        close(period(Folding::On), period(Folding::Off));
    }
}

/// Inside a calibrated host, exchanges take their measured time on both networks; between such
/// hosts, ranks that share cores compute as slowly on both.
#[test]
fn measured_hosts_are_as_slow_on_both_networks() {
    let mini = model("mini");
    let layout = Strategy { dp: 2, leaves: 2, ..strategy(&mini, 1, 2, ScheduleKind::OneFOneB) };
    let plan = lower(&mini, &layout).unwrap();
    let mut cluster = preset::get("laptop").unwrap();
    cluster.measured = Some(measured::tests::two_cores());
    let (analytic, flow) = both(&plan, &cluster);
    assert_eq!(flow, analytic);
    cluster.hosts = 2;
    for (dimension, size) in cluster.dimensions.iter_mut().zip([4, 2]) {
        (dimension.size, dimension.devices_per_link) = (size, 1);
    }
    let layout = Strategy { dp: 8, leaves: 8, global_batch: 8, ..layout };
    let plan = lower(&mini, &layout).unwrap();
    let (analytic, flow) = both(&plan, &cluster);
    let apart = flow.compute.0 / analytic.compute.0 - 1.0;
    assert!(apart.abs() < 0.05, "{} {}", flow.compute, analytic.compute);
}

/// The trace shows the ranks whose times it reports.
#[test]
fn the_slowest_rank_of_a_role_is_the_one_that_is_shown() {
    let mini = model("mini");
    let layout = Strategy { dp: 4, ..strategy(&mini, 1, 4, ScheduleKind::OneFOneB) };
    let plan = lower(&mini, &layout).unwrap();
    let cluster = preset::holding("dgx-a100", 4).unwrap();
    let options = Options { network: NetworkKind::Flow, trace: true, ..Options::default() };
    let outcome = simulate(&plan, &cluster, &options).unwrap();
    let trace = outcome.trace.unwrap();
    trace.check().unwrap();
    assert_eq!(trace.ranks(), [Rank(0)]);
}

/// A thousand ranks of two roles form two classes: simulation time does not depend on world size.
#[test]
fn replicas_on_equal_hosts_are_alike() {
    let mini = model("mini");
    let base = Strategy { tp: 4, dp: 128, ..strategy(&mini, 2, 128, ScheduleKind::OneFOneB) };
    let plan = lower(&mini, &base).unwrap();
    let cluster = preset::holding("dgx-a100", 1024).unwrap();
    let costs = Costs::new(&plan, &cluster, &Profile::MODERN);
    let jobs = [Load::new(&plan, &costs)];
    let prepared = Prepared::new(&jobs, &cluster, Folding::On).unwrap();
    assert_eq!(prepared.classes().unwrap().len(), 2);
}

/// Makes one rank slow throughout and another for a limited time.
fn straggle(cluster: &mut Cluster) {
    let slow = |rank, factor, from, until: Option<f64>| Straggler {
        at: Selector::Ranks(vec![IndexRange::one(rank)]),
        factor,
        from: Seconds(from),
        until: until.map(Seconds),
    };
    cluster.heterogeneity.stragglers =
        vec![slow(1, 1.5, 0.0, None), slow(2, 3.0, 1e-5, Some(2e-4))];
}

/// Adds a device override on one rank, a slow link, and a bandwidth schedule on one dimension.
fn uneven(cluster: &mut Cluster, dimension: usize) {
    let at = |rank| Selector::Ranks(vec![IndexRange::one(rank)]);
    let device = preset::get("dgx-h100").unwrap().device;
    let rate = cluster.dimensions[dimension].bandwidth.0;
    cluster.heterogeneity.kinds.push(DeviceOverride { at: at(1), device });
    cluster.heterogeneity.links.push(LinkOverride {
        dimension,
        at: at(3),
        bandwidth: Some(BytesPerSec(rate / 3.0)),
        latency: Some(Seconds(2e-6)),
    });
    let change = |at, bandwidth| BandwidthChange { at: Seconds(at), bandwidth };
    let changes = vec![change(1e-5, 0.2), change(1e-4, 2.0), change(1e-3, 0.5)];
    let everywhere = Selector::Everywhere;
    cluster.heterogeneity.schedules.push(BandwidthSchedule { dimension, at: everywhere, changes });
}

/// Clusters of at least twelve devices, some with heterogeneous ranks.
fn clusters() -> impl Generate<Value = Cluster> {
    let with = |name: &str, change: fn(&mut Cluster)| {
        let mut cluster = preset::get(name).unwrap();
        change(&mut cluster);
        Just(cluster)
    };
    prop_oneof![
        with("dgx-a100:2", |_| {}),
        with("dgx1-v100:2", |_| {}),
        with("tpu-v4:4", |_| {}),
        with("dgx-a100:2", |cluster| cluster.dimensions[0].kind = DimensionKind::Ring),
        with("dgx-a100:4", |cluster| {
            cluster.dimensions[0].size = 4;
            cluster.dimensions[1].devices_per_link = 2;
        }),
        with("laptop:8", |cluster| {
            cluster.dimensions[1].tree = Some(Tree { leaf: 3, oversubscription: 2.5 });
        }),
        with("dgx-a100:2", straggle),
        with("dgx-a100:2", |cluster| cluster.device.copy_engines = Some(1)),
        with("tpu-v4:4", |cluster| cluster.device.copy_engines = Some(0)),
        with("tpu-v4:4", straggle),
        with("dgx1-v100:2", |cluster| uneven(cluster, 0)),
        with("laptop:8", |cluster| uneven(cluster, 1)),
    ]
}

fn timeline(plan: &Plan, cluster: &Cluster, folding: Folding) -> Timeline {
    let costs = Costs::new(plan, cluster, &Profile::MODERN);
    run_folded(&Load::new(plan, &costs), cluster, folding).unwrap().timeline
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Folded and unfolded runs of whole plans end every role at the same time, and equal input
    /// gives bitwise equal results.
    #[test]
    fn folding_changes_nothing(
        cluster in clusters(),
        tp in prop_oneof![Just(1u32), Just(2)],
        pp in prop_oneof![Just(1u32), Just(2), Just(4)],
        dp in prop_oneof![Just(1u32), Just(2), Just(3)],
        stage in 0u8..4,
        microbatches in 1u64..4,
        flags in (any::<bool>(), any::<bool>(), any::<bool>()),
        collective in prop_oneof![
            Just(Algorithm::Auto), Just(Algorithm::Ring), Just(Algorithm::Direct)
        ],
    ) {
        prop_assume!(tp * pp * dp <= 12);
        let mini = model("mini");
        let (sp, overlap, gpipe) = flags;
        let schedule = if gpipe { ScheduleKind::GPipe } else { ScheduleKind::OneFOneB };
        let layout = Strategy {
            tp,
            dp,
            zero: Zero::from_stage(stage).unwrap(),
            overlap,
            sp: sp && tp > 1,
            collective,
            ..strategy(&mini, pp, microbatches * u64::from(dp), schedule)
        };
        let plan = lower(&mini, &layout).unwrap();
        let folded = timeline(&plan, &cluster, Folding::On);
        let unfolded = timeline(&plan, &cluster, Folding::Off);
        let end = |timeline: &Timeline, role: usize| {
            let ops = 0..plan.programs[role].body.nodes.len();
            let ends = ops.map(|op| timeline.span(RoleId::from(role), op.into()).1.0);
            ends.fold(0.0, f64::max)
        };
        for role in 0..plan.programs.len() {
            let (a, b) = (end(&folded, role), end(&unfolded, role));
            prop_assert!((a / b - 1.0).abs() < 1e-9, "role {}: {} {}", role, a, b);
        }
        let again = timeline(&plan, &cluster, Folding::On);
        for role in 0..plan.programs.len() {
            for op in 0..plan.programs[role].body.nodes.len() {
                let (role, op) = (RoleId::from(role), op.into());
                prop_assert_eq!(folded.span(role, op), again.span(role, op));
            }
        }
    }
}
