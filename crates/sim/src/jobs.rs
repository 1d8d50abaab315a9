//! Several jobs on one cluster at the same time.

use crate::cluster::Cluster;
use crate::engine::{self, Costs, Load, Timeline, Unrolled};
use crate::error::SimError;
use crate::outcome::{Outcome, outcome};
use crate::{Options, check, library, shares_links};
use paceline_plan::ids::Rank;
use paceline_plan::program::{IterationFilter, Plan};
use paceline_plan::units::Seconds;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Devices of a plan's ranks; by default, rank r runs on device r.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    devices: Option<Arc<[Rank]>>,
}

impl Placement {
    /// Places rank r on the r-th of these devices.
    pub fn on(devices: impl IntoIterator<Item = Rank>) -> Self {
        Self { devices: Some(devices.into_iter().collect()) }
    }

    /// Device of a rank, as a rank of the cluster.
    pub fn device(&self, rank: Rank) -> Rank {
        let placed = self.devices.as_ref().and_then(|devices| devices.get(rank.index()));
        placed.copied().unwrap_or(rank)
    }
}

/// Training job on a cluster that it may share.
#[derive(Clone, Debug)]
pub struct Job<'p> {
    /// Program of its ranks.
    pub plan: &'p Plan,
    /// Devices of its ranks.
    pub placement: Placement,
    /// Time at which it starts.
    pub start: Seconds,
    /// Number of iterations that it runs.
    pub iterations: u32,
}

/// Times jobs that run on a cluster at the same time: the last iteration of each, after the
/// warm-up of compression.
///
/// On the flow network, the traffic of all jobs shares the links. On the analytic network, jobs do
/// not affect each other. Every device runs at most one rank. Details are not available, and
/// contention for the cores of calibrated hosts is left out where jobs share links.
pub fn simulate_jobs(
    jobs: &[Job<'_>],
    cluster: &Cluster,
    options: &Options,
) -> Result<Vec<Outcome>, SimError> {
    let mut taken: BTreeMap<Rank, usize> = BTreeMap::new();
    for (number, job) in jobs.iter().enumerate() {
        check_job(number, job, cluster, &mut taken)?;
    }
    let plans: Vec<Plan> = jobs
        .iter()
        .map(|job| job.plan.filtered(IterationFilter::AfterWarmup).into_owned())
        .collect();
    let unrolled: Vec<Option<Unrolled>> =
        plans.iter().zip(jobs).map(|(plan, job)| Unrolled::of(plan, job.iterations)).collect();
    let timed: Vec<&Plan> = plans
        .iter()
        .zip(&unrolled)
        .map(|(plan, unrolled)| unrolled.as_ref().map_or(plan, |unrolled| &unrolled.plan))
        .collect();
    let costs: Vec<Costs<'_>> = timed
        .iter()
        .zip(jobs)
        .map(|(plan, job)| Costs::new(plan, cluster, &options.profile).on(job.placement.clone()))
        .collect();
    let loads: Vec<Load<'_>> = timed
        .iter()
        .zip(&costs)
        .zip(jobs)
        .map(|((plan, costs), job)| Load { plan, costs, start: job.start.0 })
        .collect();
    let timelines = timelines(&loads, cluster, options)?;
    let of_job = |(number, timeline): (usize, Timeline)| {
        let plan = &plans[number];
        let timeline = match &unrolled[number] {
            Some(unrolled) => unrolled.last(plan, &timeline),
            None => engine::resolve(
                plan,
                engine::overlap_param_gather(plan, &options.profile, timeline),
            ),
        };
        outcome(plan, cluster, &jobs[number].placement, &timeline, options)
    };
    Ok(timelines.into_iter().enumerate().map(of_job).collect())
}

fn timelines(
    loads: &[Load<'_>],
    cluster: &Cluster,
    options: &Options,
) -> Result<Vec<Timeline>, SimError> {
    if shares_links(cluster, options) && !loads.is_empty() {
        return engine::run_jobs(loads, cluster);
    }
    let moments = engine::ClusterEpochs::new(cluster);
    let epochs = moments.networks(library(options));
    let run = |load| engine::run(load, cluster, &epochs).map(|run| run.timeline);
    loads.iter().map(run).collect()
}

/// Checks a job and the devices that it takes.
fn check_job(
    number: usize,
    job: &Job<'_>,
    cluster: &Cluster,
    taken: &mut BTreeMap<Rank, usize>,
) -> Result<(), SimError> {
    if !(job.start.0 >= 0.0 && job.start.0.is_finite()) {
        return Err(SimError::JobStart { job: number });
    }
    check(job.plan, cluster, &job.placement)?;
    let given = job.placement.devices.as_ref().map_or(u32::MAX, |devices| devices.len() as u32);
    for rank in (0..job.plan.mesh.world()).map(Rank) {
        let device = job.placement.device(rank);
        let place = |why| SimError::Placement { job: number, rank, device, why };
        if rank.0 >= given {
            return Err(place("the placement has no device for it".to_owned()));
        }
        if u64::from(device.0) >= cluster.devices() {
            let (name, devices) = (&cluster.name, cluster.devices());
            return Err(place(format!("cluster {name} has {devices} devices")));
        }
        if let Some(other) = taken.insert(device, number) {
            return Err(place(format!("job {other} has a rank there")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::preset;
    use crate::{NetworkKind, simulate};
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::{Strategy, Zero};
    use paceline_plan::units::BytesPerSec;

    fn replicas(dp: u32) -> Plan {
        let model = built_in::get("mini").unwrap().unwrap();
        let layout = Strategy {
            dp,
            leaves: dp,
            global_batch: u64::from(dp),
            zero: Zero::Optimizer,
            seq: model.seq,
            ..Strategy::default()
        };
        lower(&model, &layout).unwrap()
    }

    /// Eight devices on one switch, with slow links of their own.
    fn switch() -> Cluster {
        let mut cluster = preset::get("dgx-a100").unwrap();
        cluster.dimensions.truncate(1);
        cluster.dimensions[0].bandwidth = BytesPerSec(1e9);
        cluster
    }

    /// The same devices on a ring, whose links carry what passes by.
    fn ring() -> Cluster {
        let mut cluster = switch();
        cluster.dimensions[0].kind = crate::cluster::DimensionKind::Ring;
        cluster
    }

    fn job(plan: &Plan, devices: [u32; 4]) -> Job<'_> {
        let placement = Placement::on(devices.map(Rank));
        Job { plan, placement, start: Seconds::ZERO, iterations: 1 }
    }

    fn flow() -> Options {
        Options { network: NetworkKind::Flow, ..Options::default() }
    }

    fn times(jobs: &[Job<'_>], cluster: &Cluster, options: &Options) -> Vec<Seconds> {
        let outcomes = simulate_jobs(jobs, cluster, options).unwrap();
        outcomes.into_iter().map(|outcome| outcome.iteration).collect()
    }

    #[test]
    fn one_job_is_a_simulation() {
        let plan = replicas(4);
        for options in [flow(), Options::default()] {
            let solo = simulate(&plan, &switch(), &options).unwrap();
            let jobs = simulate_jobs(&[job(&plan, [0, 1, 2, 3])], &switch(), &options).unwrap();
            assert_eq!(jobs, [solo]);
        }
    }

    #[test]
    fn jobs_on_disjoint_links_take_their_solo_times() {
        let plan = replicas(4);
        let (a, b) = (job(&plan, [0, 2, 4, 6]), job(&plan, [7, 5, 3, 1]));
        for options in [flow(), Options::default()] {
            let solo = [&a, &b].map(|job| times(std::slice::from_ref(job), &switch(), &options)[0]);
            assert_eq!(times(&[a.clone(), b.clone()], &switch(), &options), solo);
        }
    }

    #[test]
    fn jobs_on_shared_links_slow_each_other_down() {
        let plan = replicas(4);
        let (a, b) = (job(&plan, [0, 2, 4, 6]), job(&plan, [1, 3, 5, 7]));
        let solo = times(std::slice::from_ref(&a), &ring(), &flow())[0];
        let both = times(&[a.clone(), b.clone()], &ring(), &flow());
        assert!(both.iter().all(|time| time.0 > 1.01 * solo.0), "{both:?} {solo}");
        let late = Job { start: Seconds(10.0 * solo.0), ..b.clone() };
        let apart = times(&[a.clone(), late], &ring(), &flow());
        assert!(apart.iter().all(|time| (time.0 / solo.0 - 1.0).abs() < 1e-9), "{apart:?} {solo}");
        let analytic = times(&[a, b], &ring(), &Options::default());
        assert_eq!(analytic[0], analytic[1], "each is alone");
    }

    #[test]
    fn further_iterations_take_as_long_as_the_first() {
        let plan = replicas(4);
        let one = job(&plan, [0, 1, 2, 3]);
        let three = Job { iterations: 3, ..one.clone() };
        for options in [flow(), Options::default()] {
            let first = times(std::slice::from_ref(&one), &switch(), &options)[0].0;
            let third = times(std::slice::from_ref(&three), &switch(), &options)[0].0;
            assert!((third / first - 1.0).abs() < 1e-9, "{third} {first}");
        }
    }

    #[test]
    fn a_device_has_one_rank() {
        let plan = replicas(4);
        let refused =
            |jobs: &[Job<'_>]| simulate_jobs(jobs, &switch(), &flow()).unwrap_err().to_string();
        let (a, b) = (job(&plan, [0, 1, 2, 3]), job(&plan, [3, 4, 5, 6]));
        assert!(refused(&[a.clone(), b]).contains("job 0 has a rank there"));
        assert!(refused(&[job(&plan, [0, 1, 2, 8])]).contains("has 8 devices"));
        let short = Job { placement: Placement::on([Rank(5)]), ..a.clone() };
        assert!(refused(&[short]).contains("no device"));
        let never = Job { start: Seconds(f64::NAN), ..a };
        assert!(refused(&[never]).contains("start"));
        assert_eq!(simulate_jobs(&[], &switch(), &flow()).unwrap(), []);
    }
}
