use crate::cluster::{Cluster, preset};
use crate::network::{Analytic, Network};
use crate::{Options, Outcome, Profile, SimError, simulate};
use paceline_plan::collective::Order;
use paceline_plan::ids::{Microbatch, Rank};
use paceline_plan::lower::lower;
use paceline_plan::model::{Model, built_in};
use paceline_plan::program::{Op, Plan};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Strategy, Sync, Zero};
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use proptest::prelude::*;

/// Cores that do nothing but arithmetic, on a network that takes no time.
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
        order: Order::Free,
        ..Strategy::default()
    }
}

/// A plan whose layers alone cost anything, so that stages of equally many layers are equal.
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

/// Narayanan et al. (arXiv 2104.04473), sections 2.2.1 and 2.2.2, as a share of the iteration.
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

/// With one microbatch the pipeline is a chain: every stage's compute, every message, and the
/// gradient's norm over the stages.
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
        // Cores do not differ, accelerators do.
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

/// The slowest of many devices sets the pace, and what is moved beside computations slows them.
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

/// Under ZeRO-1, weights arrive while the next iteration begins, if the software does that.
#[test]
fn gathers_hide_behind_the_next_iteration() {
    let mini = model("mini");
    let base = strategy(&mini, 1, 8, ScheduleKind::OneFOneB);
    let dealt = Strategy { dp: 8, global_batch: 64, zero: Zero::Optimizer, ..base };
    let cluster = preset::holding("dgx-a100", 8).unwrap();
    let time = |strategy: &Strategy, gathers_ahead: bool| {
        let profile = Profile { gathers_ahead, ..Profile::MODERN };
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

/// A message that nobody receives holds its sender for ever, and the error says where.
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
    assert!(error.to_string().starts_with("rank 0 (pipeline rank 0 (embedding..blocks.1)) waits"));
}

/// A server takes in every replica's gradients one after the other and sends weights back likewise.
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
    // Both servers are at work at once, a message apart: a sixth of the time, at either end.
    let most = through_one_server * (1.0 + 1.0 / 6.0) + outcome.compute.0;
    assert!(outcome.iteration.0 <= most, "{} {most}", outcome.iteration.0);
    assert_eq!(outcome.roles.len(), 3);
    assert_eq!(outcome.roles[1].communication, outcome.roles[2].communication);
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// On every rank, computing, exposed communication and waiting make up the iteration; the trace
    /// says the same as the statistics.
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
}
