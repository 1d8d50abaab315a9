//! Ranks that share cores, and what a rank does at once with its core and its link.
//!
//! On a measured host a rank has one core: while it moves the bytes of an exchange it does not
//! compute, and where there are more ranks than cores they take turns. Both are processor sharing:
//! each of d things that a rank does at once runs at 1/d of its pace, and with a ranks at work on c
//! cores each runs at c/a of its own. An exchange over a slow link needs the core for a part of its
//! time only, and is slowed down in that part alone; in the rest it has the link, which a rank's
//! exchanges share in the same way. Beside that, ranks at work slow each other down through
//! memory; how much was measured with all cores busy, and with fewer it is in proportion.
//!
//! Inside a host, an exchange is no steady work: its ranks wait for each other's messages, and each
//! time for a turn if the cores compute meanwhile. What that comes to was measured ([`Moving`]); cores
//! are kept busy for no more than it takes where they are free.
//!
//! How long an op takes then depends on what runs beside it, and what runs beside it on how long it
//! takes. [`stretches`] answers the first half from a timeline; the engine runs again with the
//! answer until both agree.

use super::moving::Moving;
use super::{Costs, Timeline};
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::{Op, Plan};

/// By class and op of the body: how many times longer it takes than alone on a core of its own.
pub(super) fn stretches(
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
            let (lasts, stretch) = (end.0 - start.0, costs.stretched(class, id));
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
    // What each class does at once, from each moment to the next; how many ranks are at work, and how
    // many of them compute.
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
            // Integrals up to each moment: of the slowdown, of its share with busy neighbours, and of
            // that at the link.
            let (mut turns, mut company, mut queues) = (vec![0.0], vec![0.0], vec![0.0]);
            for (at, pair) in moments.windows(2).enumerate() {
                let slower =
                    doing[class as usize][at].max(1.0) * (at_work[at].max(1.0) / cores).max(1.0);
                let beside = (at_work[at].min(cores) - 1.0).max(0.0) / (cores - 1.0).max(1.0);
                turns.push(turns[at] + slower * (pair[1] - pair[0]));
                company.push(company[at] + slower * beside * (pair[1] - pair[0]));
                let queue = sending[class as usize][at].max(1.0);
                queues.push(queues[at] + queue * (pair[1] - pair[0]));
            }
            let mean = |integral: &[f64], start: f64, end: f64| {
                (integral[index(end)] - integral[index(start)]) / (end - start)
            };
            let nodes = plan.programs[role.index()].body.nodes.iter().enumerate();
            // An exchange inside the host, from moment to moment as crowded as it is there.
            let exchange = |moving: Moving, (start, end): (f64, f64), stretch: f64| {
                let alone = (end - start) / stretch;
                let pieces = (index(start)..index(end)).map(|at| {
                    let length = (moments[at + 1] - moments[at]) / alone;
                    (length, moving.crowding(computing[at], cores))
                });
                moving.through(pieces)
            };
            let stretch = |(at, Spent { start, end, load }): (usize, Spent)| {
                let moving = costs.moving(role, OpId::from(at));
                if end <= start {
                    return moving.map_or(1.0, |moving| moving.slower);
                }
                if let Some(moving) = moving {
                    return exchange(moving, (start, end), costs.stretched(class, OpId::from(at)));
                }
                let together = costs.together(role, OpId::from(at));
                let turns = 1.0 + load.core * (mean(&turns, start, end) - 1.0);
                let queues = load.link * (mean(&queues, start, end) - 1.0);
                turns + queues + (together - 1.0) * mean(&company, start, end)
            };
            nodes.zip(spans(class)).map(|((at, _), span)| stretch((at, span))).collect()
        })
        .collect()
}

/// The hosts that ranks share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Host {
    /// Cores of each.
    pub(super) cores: f64,
    /// How many there are.
    pub(super) count: f64,
}

/// An op: when it ran, and how busy it kept what.
#[derive(Clone, Copy, Debug)]
struct Spent {
    start: f64,
    end: f64,
    load: Load,
}

/// How much of its rank's core and of its link an op keeps busy while it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Load {
    core: f64,
    /// The part of it that does not wait for others, and is in the way of those who do.
    compute: f64,
    link: f64,
}

impl Load {
    const WORK: Self = Self { core: 1.0, compute: 1.0, link: 0.0 };
    const NONE: Self = Self { core: 0.0, compute: 0.0, link: 0.0 };

    /// An exchange that needs the core for a part of its time, and a link for the rest if it goes
    /// over one.
    fn exchange(core: f64, link: bool) -> Self {
        let core = core.clamp(0.0, 1.0);
        Self { core, compute: 0.0, link: if link { 1.0 - core } else { 0.0 } }
    }
}

/// What an op keeps busy that lasts so long, which is so many times what it takes by itself. A message
/// is a copy, which is done when it is sent and when it is received; the time between is the wires',
/// and those of a pipeline go opposite ways.
fn load(costs: &Costs<'_>, (role, id): (RoleId, OpId), op: &Op, lasts: f64, stretch: f64) -> Load {
    match op {
        // The time is mostly the disk's.
        Op::Stash { .. } | Op::Restore { .. } if costs.offloads(role, op) => Load::NONE,
        Op::Load { .. }
        | Op::Compute { .. }
        | Op::Accumulate { .. }
        | Op::Step { .. }
        | Op::Stash { .. }
        | Op::Restore { .. } => Load::WORK,
        Op::Collective { .. } => match (costs.carried(role, id), costs.moving(role, id)) {
            (Some(carried), _) if lasts > carried => Load::exchange(carried / lasts, true),
            (None, Some(moving)) => Load::exchange(moving.slower / stretch, false),
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

    /// How much of a core each collective of a plan keeps busy while it lasts a second.
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
        // A gigabyte a second moves a few megabytes in some milliseconds of the second.
        assert!(between.iter().all(|l| l.core > 0.0 && l.core < 0.05), "{between:?}");
        assert!(between.iter().all(|l| l.core + l.link == 1.0), "{between:?}");
    }

    /// Gathers and reductions of ZeRO 3 are under way at once: however they overlap, a link takes as
    /// long as their bytes do.
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
