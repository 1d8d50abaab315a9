//! Concurrent messages and collectives with dependencies or start times.

use super::FlowError;
use super::fold::{Folded, Folding};
use super::max_min::MaxMin;
use super::script::Party;
use super::stepped::Stepped;
use super::traffic::Traffic;
use crate::cluster::Cluster;
use crate::network::Vector;
use paceline_plan::collective::Pattern;
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};

/// Message or collective to simulate.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Data movement of the job.
    pub work: Work,
    /// Earliest start time.
    pub start: Seconds,
    /// Indices of the jobs that must have ended before it starts.
    pub after: Vec<usize>,
}

/// Data movement of a job.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// A single message.
    Message {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// Message size.
        bytes: Bytes,
    },
    /// A collective.
    Collective {
        /// Messages of the collective.
        pattern: Pattern,
        /// Ranks of the group, in group order.
        members: Vec<Rank>,
        /// Vector that is exchanged.
        vector: Vector,
    },
}

impl Job {
    /// Creates a job that starts at time 0.
    pub const fn new(work: Work) -> Self {
        Self { work, start: Seconds::ZERO, after: Vec::new() }
    }
}

/// Returns the end time of each job if all share a cluster's links from time 0 on.
pub fn simulate_flows(cluster: &Cluster, jobs: &[Job]) -> Result<Vec<Seconds>, FlowError> {
    run(cluster, jobs, Folding::On).map(|(ends, _)| ends)
}

/// Time of one collective without other traffic.
pub fn collective_time(
    cluster: &Cluster,
    pattern: &Pattern,
    members: &[Rank],
    vector: &Vector,
) -> Result<Seconds, FlowError> {
    let members = members.to_vec();
    let work = Work::Collective { pattern: *pattern, members, vector: *vector };
    let ends = simulate_flows(cluster, &[Job::new(work)])?;
    Ok(ends.first().copied().unwrap_or(Seconds::ZERO))
}

/// Returns the end of each job and the number of messages simulated.
pub(super) fn run(
    cluster: &Cluster,
    jobs: &[Job],
    folding: Folding,
) -> Result<(Vec<Seconds>, u64), FlowError> {
    let ranks = jobs.iter().flat_map(|job| match &job.work {
        Work::Message { from, to, .. } => vec![*from, *to],
        Work::Collective { members, .. } => members.clone(),
    });
    let mut traffic = Traffic::new(cluster, ranks.collect());
    let exchanges = jobs
        .iter()
        .enumerate()
        .map(|(index, job)| exchange(&mut traffic, index, job))
        .collect::<Result<Vec<_>, _>>()?;
    let folded = Folded::new(&traffic, &vec![0; traffic.ranks.len()], folding)?;
    let mut agenda = Agenda::new(jobs)?;
    let mut net = Stepped::new(&folded, MaxMin::new(&folded));
    let post = |net: &mut Stepped<'_, MaxMin<'_>>, job: usize, at: f64| {
        let (exchange, vector) = &exchanges[job];
        let table = net.table(traffic.bytes(*exchange, vector));
        net.post(folded.classes[*exchange as usize], table, job as u32, at);
    };
    for job in agenda.ready() {
        post(&mut net, job, jobs[job].start.0);
    }
    let mut open: Vec<u32> = exchanges
        .iter()
        .map(|(exchange, _)| {
            let class = folded.classes[*exchange as usize];
            folded.exchanges[class as usize].parties.len() as u32
        })
        .collect();
    let mut ends = vec![Seconds::ZERO; jobs.len()];
    while let Some(ended) = net.next_until(f64::INFINITY) {
        let job = ended.tag as usize;
        open[job] -= 1;
        if open[job] == 0 {
            ends[job] = Seconds(ended.at);
            for next in agenda.end(job) {
                post(&mut net, next, jobs[next].start.0.max(ended.at));
            }
        }
    }
    match open.iter().position(|&open| open > 0) {
        Some(job) => Err(FlowError::After { job }),
        None => Ok((ends, net.drained())),
    }
}

/// Adds a job's exchange; returns its number and its vector.
fn exchange(
    traffic: &mut Traffic<'_>,
    job: usize,
    Job { work, start, .. }: &Job,
) -> Result<(u32, Vector), FlowError> {
    if !(start.0 >= 0.0 && start.0.is_finite()) {
        return Err(FlowError::Start { job });
    }
    match work {
        Work::Message { from, to, bytes } => {
            let ends = ((*from, Party::Sender), (*to, Party::Receiver));
            Ok((traffic.message(job as u32, ends.0, ends.1)?, Vector::of_bytes(*bytes)))
        }
        Work::Collective { pattern, members, vector } => {
            if members.len() != pattern.ranks() as usize {
                let (ranks, members) = (pattern.ranks(), members.len());
                return Err(FlowError::Members { job, ranks, members });
            }
            Ok((traffic.collective(job as u32, pattern, members)?, *vector))
        }
    }
}

/// Dependency counters of jobs.
struct Agenda {
    waiting: Vec<usize>,
    /// Jobs that wait for each job.
    waiters: Vec<Vec<usize>>,
}

impl Agenda {
    fn new(jobs: &[Job]) -> Result<Self, FlowError> {
        let mut waiters = vec![Vec::new(); jobs.len()];
        for (job, Job { after, .. }) in jobs.iter().enumerate() {
            for &before in after {
                waiters.get_mut(before).ok_or(FlowError::After { job })?.push(job);
            }
        }
        Ok(Self { waiting: jobs.iter().map(|job| job.after.len()).collect(), waiters })
    }

    fn ready(&self) -> Vec<usize> {
        (0..self.waiting.len()).filter(|&job| self.waiting[job] == 0).collect()
    }

    /// Marks a job as ended and returns the jobs that became ready.
    fn end(&mut self, job: usize) -> Vec<usize> {
        let mut ready = std::mem::take(&mut self.waiters[job]);
        ready.retain(|&waiter| {
            self.waiting[waiter] -= 1;
            self.waiting[waiter] == 0
        });
        ready
    }
}
