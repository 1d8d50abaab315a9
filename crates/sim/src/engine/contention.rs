//! Contention between ranks that share cores, and between a rank's own compute and exchanges.
//!
//! On a measured host a rank has one core. It does not compute while it moves the bytes of an
//! exchange, and ranks take turns if there are more ranks than cores. Both are processor sharing:
//! each of d concurrent ops of a rank runs at 1/d of its speed, and with a active ranks on c cores
//! each runs at c/a of its speed.
//!
//! An exchange over a slow link needs the core for only part of its time and is slowed down only in
//! that part. For the rest it uses the link, which a rank's exchanges share in the same way. In
//! addition, active ranks slow each other down through memory. This was measured with all cores
//! busy and is scaled proportionally for fewer.
//!
//! Inside a host, an exchange is not continuous work: its ranks wait for each other's messages, and
//! each time for a core if the cores are computing. The resulting delay was measured
//! ([`ExchangeCost`]); an exchange keeps cores busy for no longer than it takes on idle cores.
//!
//! An op's duration thus depends on what runs concurrently, and what runs concurrently depends on
//! durations. [`slowdowns`] derives durations from a timeline; the engine reruns with them until
//! both agree.

use super::exchange_cost::ExchangeCost;
use super::{Costs, Timeline};
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::{Op, Plan};

/// Returns slowdown factors by class and body op, relative to running alone on a dedicated core.
pub(super) fn slowdowns(
    plan: &Plan,
    costs: &Costs<'_>,
    timeline: &Timeline,
    host: Host,
) -> Vec<Vec<f64>> {
    let classes = timeline.classes();
    let spans = |class: u32| {
        let nodes = plan.programs[classes.get(class).role.index()].body.nodes.iter().enumerate();
        nodes.map(move |(at, node)| {
            let (start, end) = timeline.span_of(class, OpId::from(at));
            let (role, id) = (classes.get(class).role, OpId::from(at));
            let (lasts, stretch) = (end.0 - start.0, costs.slowdown(class, id));
            let load = load(costs, (role, id), &node.op, lasts, stretch);
            Spent { start: start.0, end: end.0, load }
        })
    };
    let numbers = || 0..classes.len() as u32;
    let mut moments: Vec<f64> =
        numbers().flat_map(spans).flat_map(|spent| [spent.start, spent.end]).collect();
    moments.sort_unstable_by(f64::total_cmp);
    moments.dedup();
    let index = |time: f64| moments.partition_point(|&moment| moment < time);
    // Per interval between consecutive moments: concurrent load of each class, number of active
    // ranks, and number of computing ranks.
    let mut at_work = vec![0.0; moments.len()];
    let mut computing = vec![0.0; moments.len()];
    let mut doing: Vec<Vec<f64>> = Vec::new();
    let mut sending: Vec<Vec<f64>> = Vec::new();
    for class in numbers() {
        let at_once = |of: fn(&Load) -> f64| {
            let mut changes = vec![0.0; moments.len() + 1];
            for Spent { start, end, load } in spans(class).filter(|spent| spent.end > spent.start) {
                changes[index(start)] += of(&load);
                changes[index(end)] -= of(&load);
            }
            let mut sum = 0.0;
            let sums = moments.iter().zip(&changes).map(|(_, change)| {
                sum += change;
                sum
            });
            sums.collect::<Vec<f64>>()
        };
        let own = at_once(|load| load.core);
        sending.push(at_once(|load| load.link));
        let ranks = f64::from(classes.get(class).ranks) / host.count;
        let add = |all: &mut [f64], own: &[f64]| {
            all.iter_mut().zip(own).for_each(|(all, own)| *all += own.min(1.0) * ranks);
        };
        add(&mut at_work, &own);
        add(&mut computing, &at_once(|load| load.compute));
        doing.push(own);
    }
    let cores = host.cores.max(1.0);
    numbers()
        .map(|class| {
            let role = classes.get(class).role;
            // Integrals up to each moment: the slowdown, its part with busy neighbours, and the
            // slowdown at the link.
            let (mut turns, mut company, mut queues) = (vec![0.0], vec![0.0], vec![0.0]);
            for (at, pair) in moments.windows(2).enumerate() {
                let slower =
                    doing[class as usize][at].max(1.0) * (at_work[at].max(1.0) / cores).max(1.0);
                let others = (at_work[at].min(cores) - 1.0).max(0.0) / (cores - 1.0).max(1.0);
                turns.push(turns[at] + slower * (pair[1] - pair[0]));
                company.push(company[at] + slower * others * (pair[1] - pair[0]));
                let queue = sending[class as usize][at].max(1.0);
                queues.push(queues[at] + queue * (pair[1] - pair[0]));
            }
            let mean = |integral: &[f64], start: f64, end: f64| {
                (integral[index(end)] - integral[index(start)]) / (end - start)
            };
            let nodes = plan.programs[role.index()].body.nodes.iter().enumerate();
            // Exchange inside the host, with the CPU oversubscription of each interval.
            let exchange = |moving: ExchangeCost, (start, end): (f64, f64), stretch: f64| {
                let alone = (end - start) / stretch;
                let pieces = (index(start)..index(end)).map(|at| {
                    let length = (moments[at + 1] - moments[at]) / alone;
                    (length, moving.oversubscription(computing[at], cores))
                });
                moving.through(pieces)
            };
            let stretch = |(at, Spent { start, end, load }): (usize, Spent)| {
                let moving = costs.exchange_cost(role, OpId::from(at));
                if end <= start {
                    return moving.map_or(1.0, |moving| moving.cold_factor);
                }
                if let Some(moving) = moving {
                    return exchange(moving, (start, end), costs.slowdown(class, OpId::from(at)));
                }
                let all_cores = costs.all_cores_time(role, OpId::from(at));
                let turns = 1.0 + load.core * (mean(&turns, start, end) - 1.0);
                let queues = load.link * (mean(&queues, start, end) - 1.0);
                turns + queues + (all_cores - 1.0) * mean(&company, start, end)
            };
            nodes.zip(spans(class)).map(|((at, _), span)| stretch((at, span))).collect()
        })
        .collect()
}

/// Hosts that ranks share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Host {
    /// Cores per host.
    pub(super) cores: f64,
    /// Number of hosts.
    pub(super) count: f64,
}

/// Time span of an op and its load.
#[derive(Clone, Copy, Debug)]
struct Spent {
    start: f64,
    end: f64,
    load: Load,
}

/// Fraction of its rank's core and link that an op keeps busy while it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Load {
    core: f64,
    /// Part of `core` that does not wait for other ranks and delays ops that do.
    compute: f64,
    link: f64,
}

impl Load {
    const WORK: Self = Self { core: 1.0, compute: 1.0, link: 0.0 };
    const NONE: Self = Self { core: 0.0, compute: 0.0, link: 0.0 };

    /// Load of an exchange that needs the core for part of its time, and for the rest the link if
    /// `link`.
    fn exchange(core: f64, link: bool) -> Self {
        let core = core.clamp(0.0, 1.0);
        Self { core, compute: 0.0, link: if link { 1.0 - core } else { 0.0 } }
    }
}

/// Returns the load of an op that takes `lasts` seconds, `stretch` times its time alone. A message
/// is a copy at the sender and at the receiver; the time between belongs to the transport, and a
/// pipeline's messages travel in opposite directions.
fn load(costs: &Costs<'_>, (role, id): (RoleId, OpId), op: &Op, lasts: f64, stretch: f64) -> Load {
    match op {
        // Mostly disk time.
        Op::Stash { .. } | Op::Restore { .. } if costs.offloads(role, op) => Load::NONE,
        Op::Load { .. }
        | Op::Compute { .. }
        | Op::Accumulate { .. }
        | Op::Step { .. }
        | Op::Stash { .. }
        | Op::Restore { .. } => Load::WORK,
        Op::Collective { .. } => match (costs.core_busy(role, id), costs.exchange_cost(role, id)) {
            (Some(carried), _) if lasts > carried => Load::exchange(carried / lasts, true),
            (None, Some(moving)) => Load::exchange(moving.cold_factor / stretch, false),
            (Some(_) | None, _) => Load::exchange(1.0, false),
        },
        Op::Send { .. } | Op::Recv { .. } | Op::Free { .. } | Op::Serve { .. } => Load::NONE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Cluster, measured, preset};
    use crate::profile::Profile;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::{Strategy, Zero};

    /// Load of each collective of a plan if it lasts one second.
    fn loads(cluster: &Cluster) -> Vec<Load> {
        let model = built_in::get("mini").unwrap().unwrap();
        let strategy =
            Strategy { dp: 2, leaves: 2, global_batch: 2, seq: model.seq, ..Strategy::default() };
        let plan = lower(&model, &strategy).unwrap();
        let profile = Profile::default();
        let costs = Costs::new(&plan, cluster, &profile);
        let nodes = plan.programs[0].body.nodes.iter().enumerate();
        let collectives = nodes.filter(|(_, node)| matches!(node.op, Op::Collective { .. }));
        collectives
            .map(|(at, node)| {
                let place = (RoleId::from(0usize), OpId::from(at));
                load(&costs, place, &node.op, 1.0, 1.0)
            })
            .collect()
    }

    #[test]
    fn an_exchange_between_hosts_leaves_most_of_the_core_free() {
        let mut cluster = preset::get("laptop").unwrap();
        cluster.measured = Some(measured::tests::two_cores());
        let inside = loads(&cluster);
        assert!(inside.iter().all(|load| load.core == 1.0 && load.compute == 0.0), "{inside:?}");
        cluster.hosts = 2;
        let between = loads(&cluster);
        assert!(!between.is_empty());
        // At 1 GB/s, a few megabytes take a few milliseconds of the second.
        assert!(between.iter().all(|l| l.core > 0.0 && l.core < 0.05), "{between:?}");
        assert!(between.iter().all(|l| l.core + l.link == 1.0), "{between:?}");
    }

    /// ZeRO-3 gathers and reductions overlap; the link still needs the time of all their bytes.
    #[test]
    fn exchanges_at_once_do_not_have_the_link_twice() {
        let mut cluster = preset::get("laptop").unwrap();
        cluster.measured = Some(measured::tests::two_cores());
        cluster.hosts = 2;
        for (dimension, size) in cluster.dimensions.iter_mut().zip([1, 2]) {
            (dimension.size, dimension.devices_per_link) = (size, 1);
        }
        let link = cluster.dimensions.last().unwrap();
        let rate = link.bandwidth.0 * link.efficiency;
        let model = built_in::get("mini").unwrap().unwrap();
        let zero = Zero::Parameters;
        let strategy = Strategy {
            dp: 2,
            leaves: 2,
            global_batch: 4,
            seq: model.seq,
            zero,
            ..Strategy::default()
        };
        let plan = lower(&model, &strategy).unwrap();
        let program = &plan.programs[0];
        let halves = program.body.nodes.iter().filter_map(|node| node.op.call()).map(|call| {
            let call = program.call(call);
            call.elements() as f64 * call.dtype.size() as f64 / 2.0
        });
        let least = halves.sum::<f64>() / rate;
        let iteration =
            crate::simulate(&plan, &cluster, &crate::Options::default()).unwrap().iteration;
        assert!(iteration.0 > 0.97 * least, "{} s for what takes {least} s", iteration.0);
    }
}
