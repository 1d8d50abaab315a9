//! Asynchronous parameter servers: replicas that repeat their iteration, each at its own pace, and
//! servers that answer their requests in order of arrival.
//!
//! **Server.** A replica pushes its gradients of a bucket and pulls the weights. The server receives
//! a push, applies it, and sends the weights back once the bound on staleness allows it: no sooner
//! than every replica has pushed at most that many fewer gradients of this bucket (Ho et al., NIPS
//! 2013). Meanwhile it serves others. The memory of a bucket holds one message at a time, and the
//! server applies one push at a time. On a network that times messages one by one, a server handles
//! one request after the other, because its link would otherwise carry any number of them; where
//! messages share links, requests for different buckets are in flight together.
//!
//! **Iteration.** A run begins with idle servers and lasts as many iterations as [`WINDOW`]. An
//! iteration is as many bodies as there are replicas, whichever run them, and takes the mean time
//! over the run. The last body of each replica stands for all of them.

use super::lanes::Times;
use super::matching::{MatchedOps, Request};
use super::timeline::Timeline;
use super::workload::Workload;
use paceline_plan::ids::OpId;
use paceline_plan::program::Plan;
use paceline_plan::staleness::{Staleness, StalenessCounter};
use std::collections::VecDeque;
use std::ops::Range;

/// Number of iterations of a run; fewer if there are very many ops.
const WINDOW: u64 = 64;

/// Number of ops that a run executes at most, if it has more than [`SHORTEST`] iterations.
const MOST_OPS: u64 = 1 << 22;

/// Minimum number of iterations of a run.
const SHORTEST: u64 = 8;

/// Number of windows within which even the slowest replica is awaited for one iteration.
const PATIENCE: u64 = 16;

/// Returns true if a plan has servers that answer requests as they arrive.
pub(super) fn has_servers(plan: &Plan) -> bool {
    plan.programs.iter().any(|program| !program.services.is_empty())
}

/// Mean iteration of a job with asynchronous servers.
#[derive(Clone, Debug)]
pub(super) struct MeanIteration {
    pub(super) time: f64,
    /// Staleness of the gradients that servers applied.
    pub(super) staleness: Option<Staleness>,
}

/// Asynchronous servers of all jobs and the replicas that they serve.
pub(super) struct Servers {
    /// By job; `None` for one without such servers.
    jobs: Vec<Option<Job>>,
}

impl Servers {
    /// Idle servers. Unless messages share links, a server handles one request at a time.
    pub(super) fn new(load: &Workload<'_>, matches: &MatchedOps, share_links: bool) -> Self {
        let jobs = load.jobs.iter().enumerate();
        let job = |(job, of): (usize, &super::Load<'_>)| {
            has_servers(of.plan).then(|| Job::new(load, matches, job, share_links))
        };
        Self { jobs: jobs.map(job).collect() }
    }

    /// Returns true if any job has such servers.
    pub(super) fn any(&self) -> bool {
        self.jobs.iter().any(Option::is_some)
    }

    /// Job of these servers, if it has any.
    pub(super) fn job(&mut self, job: usize) -> Option<&mut Job> {
        self.jobs[job].as_mut()
    }

    /// Returns true if a job's replicas are not expected to end what they have begun.
    pub(super) fn is_over(&self, job: usize) -> bool {
        self.jobs[job].as_ref().is_some_and(|job| job.mean.is_some())
    }

    /// Mean iteration of each job; replaces the times of its ops by those of an iteration.
    pub(super) fn finish(self, load: &Workload<'_>, times: &mut Times) {
        let finish = |job: Option<Job>| job.and_then(|job| job.finish(load, times));
        let means = self.jobs.into_iter().map(finish).collect();
        times.means = means;
    }
}

/// Servers and replicas of a job, each a class of its own, in order of ranks.
pub(super) struct Job {
    /// Class of the first replica.
    first: u32,
    start: f64,
    replicas: Vec<Replica>,
    servers: Vec<Server>,
    /// Number of bodies that replicas run together.
    target: u64,
    /// Number of bodies that have ended.
    ended: u64,
    staleness: StalenessCounter,
    /// Result, once the target has been reached.
    mean: Option<MeanIteration>,
}

/// Replica in its current body.
#[derive(Clone, Debug, Default)]
struct Replica {
    /// Number of its ops, and of those that have not ended.
    ops: u32,
    open: u32,
    begun: f64,
    /// End of the last op so far.
    until: f64,
    /// Number of bodies that have ended.
    ended: u32,
    /// Duration of the last one that ended, and its ops' times from its start on.
    last: f64,
    times: Vec<(f64, f64)>,
}

/// Asynchronous server.
struct Server {
    class: u32,
    /// Number of iterations by which a replica may lead the slowest.
    bound: Option<u32>,
    share_links: bool,
    /// By channel.
    shards: Vec<Shard>,
    /// Number of requests seen so far.
    arrived: u64,
    /// Time at which the last push will have been applied.
    free: f64,
    /// Number of requests being handled, the time since there are any, and the time with any before.
    open: u32,
    since: f64,
    busy: f64,
    /// Busy time per iteration.
    per_iteration: f64,
}

/// Server's shard of a bucket.
#[derive(Clone, Debug)]
struct Shard {
    /// Time to apply a push at the device's nominal speed.
    update: f64,
    /// True while its memory holds a message.
    in_use: bool,
    /// Number of pushes that have been applied.
    version: u64,
    /// Waiting messages with their arrival numbers, in order of arrival.
    pushes: VecDeque<(u64, u32)>,
    pulls: Vec<(u64, u32)>,
    /// By replica.
    clients: Vec<Client>,
}

/// Server's view of a replica.
#[derive(Clone, Copy, Debug, Default)]
struct Client {
    pushes: u32,
    /// Version of its weights.
    has: u64,
    /// True if it has pushed and not pulled since.
    owed: bool,
}

impl Job {
    fn new(load: &Workload<'_>, matches: &MatchedOps, job: usize, share_links: bool) -> Self {
        let (plan, start) = (load.jobs[job].plan, load.jobs[job].start);
        let Range { start: first, .. } = load.classes.of_job(job);
        let (replicas, servers) = (plan.mesh.size(), plan.mesh.servers);
        let replica = |class| {
            let ops = load.program(class).body.nodes.len() as u32;
            Replica { ops, open: ops, begun: start, until: start, ..Replica::default() }
        };
        let replicas: Vec<Replica> = (first..first + replicas).map(replica).collect();
        let of_server = |server: u32| {
            let channels =
                matches.requests().filter(|asked| (asked.job, asked.server) == (job, server));
            let shards = channels.map(|asked| u32::from(asked.channel) + 1).max().unwrap_or(0);
            Server::new(load, job, first + replicas.len() as u32 + server, shards, share_links)
        };
        let servers = (0..servers).map(of_server).collect();
        let all: u64 = replicas.iter().map(|replica| u64::from(replica.ops)).sum();
        let iterations = (MOST_OPS / all.max(1)).clamp(SHORTEST, WINDOW);
        let target = iterations * replicas.len() as u64;
        let staleness = StalenessCounter::default();
        Self { first, start, replicas, servers, target, ended: 0, staleness, mean: None }
    }

    /// Counts an op of a class that has ended; returns the end of the body if it was its last op.
    pub(super) fn end_op(&mut self, class: u32, at: f64) -> Option<f64> {
        let replica = self.replicas.get_mut((class - self.first) as usize)?;
        replica.open -= 1;
        replica.until = replica.until.max(at);
        (replica.open == 0).then_some(replica.until)
    }

    /// Records the times of a body that ends now. Returns true if the class is to run another one.
    pub(super) fn repeat(&mut self, class: u32, now: f64, start: &[f64], end: &[f64]) -> bool {
        let replica = &mut self.replicas[(class - self.first) as usize];
        let begun = replica.begun;
        replica.times.clear();
        replica.times.extend(start.iter().zip(end).map(|(s, e)| (s - begun, e - begun)));
        replica.last = now - begun;
        (replica.ended, replica.begun) = (replica.ended + 1, now);
        self.ended += 1;
        let every = || self.replicas.iter().all(|replica| replica.ended > 0);
        if self.ended >= self.target && (every() || self.ended >= PATIENCE * self.target) {
            self.reach(now);
        }
        if self.mean.is_some() {
            return false;
        }
        let replica = &mut self.replicas[(class - self.first) as usize];
        (replica.open, replica.until) = (replica.ops, now);
        true
    }

    /// Takes the mean over all bodies until now, with what has been done of those in progress.
    fn reach(&mut self, now: f64) {
        if self.mean.is_some() {
            return;
        }
        let done = |replica: &Replica| {
            let begun = (now - replica.begun) / replica.last;
            f64::from(replica.ended) + if replica.last > 0.0 { begun.min(1.0) } else { 0.0 }
        };
        let bodies: f64 = self.replicas.iter().map(done).sum();
        let iterations = bodies / self.replicas.len() as f64;
        for server in &mut self.servers {
            let last = if server.open > 0 { now - server.since } else { 0.0 };
            server.per_iteration = (server.busy + last) / iterations;
        }
        let time = (now - self.start) / iterations;
        self.mean = Some(MeanIteration { time, staleness: self.staleness.staleness() });
    }

    fn finish(self, load: &Workload<'_>, times: &mut Times) -> Option<MeanIteration> {
        let mean = self.mean?;
        let mut set = |class: u32, op: usize, (start, end): (f64, f64)| {
            let number = load.classes.number(class, OpId::from(op)) as usize;
            times.start[number] = self.start + start;
            times.end[number] = self.start + end;
        };
        for (class, replica) in (self.first..).zip(&self.replicas) {
            // A replica that never ended a body is still in its first one.
            let throughout = (0.0, mean.time);
            for op in 0..replica.ops as usize {
                set(class, op, replica.times.get(op).copied().unwrap_or(throughout));
            }
        }
        for server in &self.servers {
            for op in 0..load.program(server.class).body.nodes.len() {
                set(server.class, op, (0.0, server.per_iteration));
            }
        }
        Some(mean)
    }

    /// Adds a request of a class to its server's queue.
    pub(super) fn arrive(&mut self, request: &Request, op_match: u32) {
        let server = &mut self.servers[request.server as usize];
        let number = server.arrived;
        server.arrived += 1;
        let shard = &mut server.shards[usize::from(request.channel)];
        match request.pushes {
            true => shard.pushes.push_back((number, op_match)),
            false => shard.pulls.push((number, op_match)),
        }
    }

    /// Handles the end of a message at time `now`. Returns when a push will have been applied.
    pub(super) fn through(
        &mut self,
        request: &Request,
        load: &Workload<'_>,
        now: f64,
    ) -> Option<f64> {
        let server = &mut self.servers[request.server as usize];
        if !request.pushes {
            server.release(request.channel, now);
            return None;
        }
        let update = server.shards[usize::from(request.channel)].update;
        server.free = load.classes.pace(server.class).end(now.max(server.free), update);
        Some(server.free)
    }

    /// Handles a push that has been applied.
    pub(super) fn applied(&mut self, request: &Request, now: f64) {
        let server = &mut self.servers[request.server as usize];
        let shard = &mut server.shards[usize::from(request.channel)];
        let client = &mut shard.clients[(request.class - self.first) as usize];
        self.staleness.count(shard.version - client.has);
        shard.version += 1;
        client.pushes += 1;
        client.owed = true;
        server.release(request.channel, now);
    }

    /// Takes the next request that a server can handle now.
    pub(super) fn next(&mut self, server: u32, matches: &MatchedOps, now: f64) -> Option<u32> {
        let first = self.first;
        let replica = |op_match| matches.request(op_match).map_or(0, |asked| asked.class - first);
        let server = &mut self.servers[server as usize];
        if !server.share_links && server.open > 0 {
            return None;
        }
        let next = |shard: &Shard| {
            let pull = shard.pull(server.bound, replica);
            let push = shard.pushes.front().map(|&(number, _)| (1, number));
            pull.map(|number| (0, number)).or(push)
        };
        let shards = server.shards.iter().enumerate().filter(|(_, shard)| !shard.in_use);
        let waiting = shards.filter_map(|(at, shard)| Some((next(shard)?, at)));
        let ((kind, number), at) = waiting.min()?;
        let shard = &mut server.shards[at];
        shard.in_use = true;
        if server.open == 0 {
            server.since = now;
        }
        server.open += 1;
        if kind == 1 {
            return shard.pushes.pop_front().map(|(_, op_match)| op_match);
        }
        let place = shard.pulls.iter().position(|pull| pull.0 == number)?;
        let (_, op_match) = shard.pulls.remove(place);
        let slowest = shard.slowest();
        let client = &mut shard.clients[replica(op_match) as usize];
        (client.has, client.owed) = (shard.version, false);
        self.staleness.note_ahead(client.pushes - slowest);
        Some(op_match)
    }
}

impl Server {
    fn new(load: &Workload<'_>, job: usize, class: u32, shards: u32, share_links: bool) -> Self {
        let of = &load.jobs[job];
        let program = load.program(class);
        let shard = |bucket: u32| Shard {
            update: of.costs.apply(load.classes.get(class), bucket).0,
            in_use: false,
            version: 0,
            pushes: VecDeque::new(),
            pulls: Vec::new(),
            clients: vec![Client::default(); of.plan.mesh.size() as usize],
        };
        Self {
            class,
            bound: program.services.first().and_then(|service| service.staleness),
            share_links,
            shards: (0..shards).map(shard).collect(),
            arrived: 0,
            free: of.start,
            open: 0,
            since: of.start,
            busy: 0.0,
            per_iteration: 0.0,
        }
    }

    /// Ends a request for a bucket.
    fn release(&mut self, channel: u16, now: f64) {
        self.shards[usize::from(channel)].in_use = false;
        self.open -= 1;
        if self.open == 0 {
            self.busy += now - self.since;
        }
    }
}

impl Shard {
    /// Arrival number of the first pull that may be answered.
    fn pull(&self, bound: Option<u32>, replica: impl Fn(u32) -> u32) -> Option<u64> {
        let most = match bound {
            Some(bound) if !self.pulls.is_empty() => self.slowest().saturating_add(bound),
            Some(_) | None => u32::MAX,
        };
        let may = |&&(_, op_match): &&(u64, u32)| {
            let client = &self.clients[replica(op_match) as usize];
            client.owed && client.pushes <= most
        };
        self.pulls.iter().find(may).map(|&(number, _)| number)
    }

    /// Lowest number of pushes by a replica.
    fn slowest(&self) -> u32 {
        self.clients.iter().map(|client| client.pushes).min().unwrap_or(0)
    }
}

/// Cuts a timeline of all bodies to the time of one iteration if replicas are asynchronous.
///
/// With shared weights (Hogwild), replicas do not wait for anything. One iteration is as many bodies
/// as there are replicas: replicas with iteration times T₁…T_P run P bodies in P / Σ(1/Tᵢ).
pub(crate) fn resolve(plan: &Plan, mut timeline: Timeline) -> Timeline {
    if let Some(MeanIteration { time, .. }) = timeline.mean() {
        timeline.cut(*time);
    } else if plan.strategy.sync == paceline_plan::strategy::Sync::Hogwild {
        let mut rate = 0.0;
        for class in 0..timeline.classes().len() as u32 {
            let of = timeline.classes().get(class);
            let ops = plan.programs[of.role.index()].body.nodes.len();
            let ends = (0..ops).map(|op| timeline.span_of(class, OpId::from(op)).1.0);
            let end = ends.fold(0.0, f64::max);
            if end > 0.0 {
                rate += f64::from(of.ranks) / end;
            }
        }
        if rate > 0.0 {
            timeline.cut(f64::from(plan.mesh.size()) / rate);
        }
    }
    timeline
}

#[cfg(test)]
mod tests;
