//! Strategy search for a model on a cluster: finds the fastest strategies that fit, and proves it.
//!
//! The space is a tree: a mesh and a microbatch, sequence parallelism and recomputation, experts,
//! schedule, ZeRO stage, and in each layout stages, recomputed layers, offload, bucket size,
//! collective and overlap. Every node has a lower bound of the iteration time of all strategies
//! below it ([`bound`]), made of the prices by which the simulator itself times plans. The search
//! opens the node with the least bound, and simulates a strategy once its own bound is the least. It
//! ends when no bound is below the time of the last strategy asked for. Nodes whose memory cannot
//! fit are left out.
//!
//! Nodes are opened in rounds of a fixed number, so the result does not depend on the number of
//! threads.

mod bound;
mod form;
mod gathers;
mod memory;
mod pins;
mod replay;
mod space;
mod tree;
mod update;

pub use pins::{Choice, Pins};

use paceline_plan::lower::lower_on;
use paceline_plan::model::Model;
use paceline_plan::strategy::{Offload, Strategy};
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::cluster::Cluster;
use paceline_sim::{Fit, Options, simulate};
use space::Space;
use std::collections::{BTreeMap, BTreeSet};
use tree::{Bounded, Expander, Node, Point, layout, worker_key};

/// Input of a search.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The model.
    pub model: &'a Model,
    /// The cluster to run on.
    pub cluster: &'a Cluster,
    /// Number of devices to use.
    pub devices: u32,
    /// Settings common to all candidates: batch, sequence, dtypes.
    pub base: Strategy,
    /// Simulation options.
    pub options: Options,
    /// Admitted values of each axis.
    pub pins: Pins,
    /// Number of layouts to find.
    pub top: usize,
    /// True to rank strategies that do not fit like those that do.
    pub any_memory: bool,
}

/// A strategy and its simulation results.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The strategy.
    pub strategy: Strategy,
    /// Iteration time.
    pub iteration: Seconds,
    /// Memory of the rank with the largest arena.
    pub peak_bytes: Bytes,
    /// Memory that the fullest rank needs, and whether every rank fits.
    pub fit: Fit,
    /// Model FLOPs utilisation.
    pub mfu: f64,
    /// Tokens per second and device.
    pub tokens_per_s_per_device: f64,
    /// Compute time of the slowest rank.
    pub compute: Seconds,
    /// Communication that no compute hides, of the slowest rank.
    pub exposed: Seconds,
    /// Fraction of the iteration in which the slowest rank waits.
    pub bubble: f64,
}

/// Numbers of strategies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Strategies of the space.
    pub considered: u64,
    /// Strategies that a bound, of time or of memory, excluded.
    pub bounded: u64,
    /// Strategies that were simulated.
    pub simulated: u64,
    /// Nodes whose bounds were computed.
    pub nodes: u64,
}

/// Result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchResult {
    /// The best strategy of each of the best layouts that fit, fastest first.
    pub candidates: Vec<Candidate>,
    /// The strategy that needed least memory of those that did not fit, if none fits.
    pub closest: Option<Candidate>,
    /// Numbers of strategies.
    pub counts: Counts,
    /// Least time that a strategy that was not simulated may have, if the search was stopped.
    pub open: Option<Seconds>,
}

/// Number of strategies of a request's space.
pub fn count(request: &Request<'_>) -> u64 {
    Run::new(request).counts.considered
}

/// Returns true if a strategy is in a request's space, up to its leaves of summation and the store
/// of what it offloads.
pub fn contains(request: &Request<'_>, strategy: &Strategy) -> bool {
    let space = Space::new(request);
    let Point { mesh, experts, .. } = layout(strategy);
    let one_stage = strategy.pp == 1 && strategy.schedule.chunks() == 1;
    space.meshes().contains(&mesh)
        && space.experts(&mesh).contains(&experts)
        && space.sequence(&mesh).contains(&strategy.sp)
        && space.schedules(&mesh).contains(&strategy.schedule)
        && space.recomputes().contains(&strategy.recompute)
        && space.zero_stages(strategy).contains(&strategy.zero)
        && (one_stage || space.splits(strategy).contains(&strategy.split))
        && space.offloads(strategy).iter().any(|(offload, _)| *offload == strategy.offload)
        && space.settings(strategy).iter().any(|settings| {
            let Strategy { bucket, collective, overlap, .. } = *settings;
            (bucket, collective, overlap)
                == (strategy.bucket, strategy.collective, strategy.overlap)
        })
}

/// State of a running search.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Numbers so far.
    pub counts: Counts,
    /// Best strategy so far.
    pub best: Option<&'a Candidate>,
    /// Least time that is still possible.
    pub bound: Seconds,
}

/// Work that a search hands out; see [`Worker`].
#[derive(Clone, Debug)]
pub struct Task(Job);

#[derive(Clone, Debug)]
enum Job {
    /// Opens a node; children that take longer than the limit are not needed.
    Expand(Node, f64),
    Simulate(Box<Strategy>),
}

/// Result of a [`Task`].
#[derive(Debug)]
pub struct Answer(Reply);

#[derive(Debug)]
enum Reply {
    /// Children within the limit, and the number of all.
    Children(Vec<Bounded>, u64),
    Simulated {
        candidate: Option<Box<Candidate>>,
        further: Option<Bounded>,
    },
}

impl Task {
    /// Number that tasks with the same priced layers share: a worker that gets all of them prices
    /// them once.
    pub fn key(&self) -> u64 {
        match &self.0 {
            Job::Expand(node, _) => worker_key(node),
            Job::Simulate(_) => 0,
        }
    }

    /// Returns true if it takes long, and any worker can do it equally well.
    pub const fn is_long(&self) -> bool {
        matches!(self.0, Job::Simulate(_))
    }
}

/// Answers tasks. Every worker gives the same answer to the same task.
pub struct Worker<'a> {
    request: &'a Request<'a>,
    expander: Expander<'a>,
    fabric: paceline_plan::collective::Fabric,
}

impl<'a> Worker<'a> {
    /// Creates a worker for a request.
    pub fn new(request: &'a Request<'a>) -> Self {
        let fabric = request.cluster.fabric_with(&request.options.profile);
        Self { request, expander: Expander::new(request), fabric }
    }

    /// Answers a task.
    pub fn answer(&mut self, task: &Task) -> Answer {
        Answer(match &task.0 {
            Job::Expand(node, limit) => {
                let (children, count) = self.expander.expand(node, *limit);
                Reply::Children(children, count)
            }
            Job::Simulate(strategy) => {
                let explicit = self.expander.explicit(strategy);
                let candidate = explicit.and_then(|strategy| self.simulate(&strategy));
                let fits = candidate.as_ref().is_some_and(|c| c.fit.fits);
                let further = if fits { None } else { self.expander.further(strategy) };
                Reply::Simulated { candidate: candidate.map(Box::new), further }
            }
        })
    }

    /// Simulates a strategy; `None` if it cannot be planned or run.
    pub fn simulate(&self, strategy: &Strategy) -> Option<Candidate> {
        let Request { model, cluster, options, .. } = self.request;
        let plan = lower_on(model, strategy, &self.fabric).ok()?;
        let outcome = simulate(&plan, cluster, options).ok()?;
        let (seconds, bytes) = (outcome.iteration.0, outcome.fit.needed.0);
        tracing::debug!(target: "search", seconds, bytes, fits = outcome.fit.fits, "simulated");
        Some(Candidate {
            strategy: strategy.clone(),
            iteration: outcome.iteration,
            peak_bytes: outcome.peak_bytes,
            fit: outcome.fit,
            mfu: outcome.mfu,
            tokens_per_s_per_device: outcome.tokens_per_s_per_device,
            compute: outcome.compute,
            exposed: outcome.exposed_communication,
            bubble: outcome.bubble_fraction,
        })
    }
}

/// Number of nodes that a round opens.
const ROUND: usize = 256;
/// Number of nodes that a round opens out of their order, until enough was found.
const DIVES: usize = 4;
/// Bound of such a node relative to the least of all.
const PROMISING: f64 = 1.1;
/// Number of strategies that a round simulates.
const SIMULATIONS: usize = 8;

/// Searches on this thread.
pub fn search(request: &Request<'_>, progress: impl FnMut(&Progress<'_>) -> bool) -> SearchResult {
    let mut worker = Worker::new(request);
    let answer = |tasks: Vec<Task>| tasks.iter().map(|task| worker.answer(task)).collect();
    search_with(request, answer, progress)
}

/// Searches with tasks answered by `answer`, in order, on any number of threads. Calls `progress`
/// after each round, and stops early with partial results if it returns false.
pub fn search_with(
    request: &Request<'_>,
    mut answer: impl FnMut(Vec<Task>) -> Vec<Answer>,
    mut progress: impl FnMut(&Progress<'_>) -> bool,
) -> SearchResult {
    let mut run = Run::new(request);
    let mut stopped = false;
    while let Some(tasks) = run.round() {
        let answers = answer(tasks.iter().map(|(_, task)| task.clone()).collect());
        for ((_, task), answer) in tasks.into_iter().zip(answers) {
            run.merge(task, answer);
        }
        let bound = Seconds(run.least().unwrap_or(f64::INFINITY));
        let best = run.found.values().min_by(|a, b| compare(a, b));
        if !progress(&Progress { counts: run.counts, best, bound }) {
            stopped = true;
            break;
        }
    }
    run.finish(stopped)
}

/// Order of candidates: time, then memory, then the strategy.
fn compare(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    let by_time = a.iteration.0.total_cmp(&b.iteration.0);
    let by_memory = a.fit.needed.cmp(&b.fit.needed);
    let place = |c: &Candidate| layout(&c.strategy);
    by_time.then(by_memory).then_with(|| place(a).cmp(&place(b)))
}

/// Queue, incumbents and counts.
struct Run<'a> {
    request: &'a Request<'a>,
    /// Bounds, as bits of non-negative numbers, and indices of nodes.
    queue: BTreeSet<(u64, u64)>,
    nodes: BTreeMap<u64, Node>,
    /// The same nodes by their height above the leaves, then as in the queue.
    heights: BTreeSet<(u8, u64, u64)>,
    next: u64,
    /// Best candidate of each layout.
    found: BTreeMap<Point, Candidate>,
    /// Layouts with a candidate that fits without offload.
    roomy: BTreeSet<Point>,
    closest: Option<Candidate>,
    counts: Counts,
}

impl<'a> Run<'a> {
    fn new(request: &'a Request<'a>) -> Self {
        let space = Space::new(request);
        let roots = Expander::new(request);
        let mut run = Self {
            request,
            queue: BTreeSet::new(),
            nodes: BTreeMap::new(),
            heights: BTreeSet::new(),
            next: 0,
            found: BTreeMap::new(),
            roomy: BTreeSet::new(),
            closest: None,
            counts: Counts::default(),
        };
        let mut known: BTreeMap<(u32, u32, u32, bool), u64> = BTreeMap::new();
        for mesh in space.meshes() {
            for experts in space.experts(&mesh) {
                // The choices below depend on no more than these.
                let strategy = Strategy { ep: experts.0, etp: experts.1, ..space.strategy(&mesh) };
                let sets = strategy.mesh();
                let key = (mesh.pp, strategy.microbatches(), sets.replicas(), sets.edp() > 1);
                let per_sequence = match known.get(&key) {
                    Some(&count) => count,
                    None => {
                        let sequences = space.sequence(&mesh).len() as u64;
                        let count = space.count(&mesh, experts) / sequences.max(1);
                        if sequences > 0 {
                            known.insert(key, count);
                        }
                        count
                    }
                };
                run.counts.considered += per_sequence * space.sequence(&mesh).len() as u64;
            }
            run.counts.nodes += 1;
            run.push((roots.root(&mesh), Node::Mesh(mesh)));
        }
        run
    }

    fn push(&mut self, (bound, node): Bounded) {
        let bits = bound.max(0.0).to_bits();
        self.queue.insert((bits, self.next));
        self.heights.insert((node.height(), bits, self.next));
        self.nodes.insert(self.next, node);
        self.next += 1;
    }

    fn least(&self) -> Option<f64> {
        self.queue.first().map(|&(bound, _)| f64::from_bits(bound))
    }

    /// The node next to the leaves of those that promise nearly as much as the best.
    fn deepest(&self) -> Option<(u64, u64)> {
        let most = (self.least()? * PROMISING).to_bits();
        (0..=Node::HEIGHT).find_map(|height| {
            let level = (height, 0, 0)..=(height, most, u64::MAX);
            self.heights.range(level).next().map(|&(_, bits, index)| (bits, index))
        })
    }

    /// Time that a strategy must beat to be listed.
    fn limit(&self) -> f64 {
        let mut times: Vec<f64> = self.found.values().map(|c| c.iteration.0).collect();
        times.sort_by(f64::total_cmp);
        times.get(self.request.top.max(1) - 1).copied().unwrap_or(f64::INFINITY)
    }

    /// Tasks of the next round; `None` at the end.
    fn round(&mut self) -> Option<Vec<(u64, Task)>> {
        let limit = self.limit();
        let (mut tasks, mut simulations) = (Vec::new(), 0);
        // Until enough was found, a few nodes next to the leaves are opened in every round.
        while self.found.len() < self.request.top && tasks.len() < DIVES {
            let Some((bits, index)) = self.deepest() else { break };
            tasks.extend(self.open((bits, index), limit, &mut simulations));
        }
        while tasks.len() < ROUND && simulations < SIMULATIONS {
            let Some(&(bits, index)) = self.queue.first() else { break };
            if f64::from_bits(bits) > limit {
                break;
            }
            tasks.extend(self.open((bits, index), limit, &mut simulations));
        }
        (!tasks.is_empty()).then_some(tasks)
    }

    /// Takes a node from the queue; returns the task that opens it, unless it need not be opened.
    fn open(
        &mut self,
        (bits, index): (u64, u64),
        limit: f64,
        simulations: &mut usize,
    ) -> Option<(u64, Task)> {
        self.queue.remove(&(bits, index));
        let node = self.nodes.remove(&index)?;
        self.heights.remove(&(node.height(), bits, index));
        let Node::Leaf(strategy, replayed) = node else {
            return Some((index, Task(Job::Expand(node, limit))));
        };
        let place = layout(&strategy);
        let known = self.found.get(&place);
        let beaten = known.is_some_and(|best| best.iteration.0 <= f64::from_bits(bits));
        // Offload takes time, and buys nothing where there is room.
        let needless = strategy.offload != Offload::None && self.roomy.contains(&place);
        if beaten || needless {
            return None;
        }
        *simulations += usize::from(replayed);
        let job = match replayed {
            true => Job::Simulate(strategy),
            false => Job::Expand(Node::Leaf(strategy, false), limit),
        };
        Some((index, Task(job)))
    }

    fn merge(&mut self, task: Task, answer: Answer) {
        match (task.0, answer.0) {
            (_, Reply::Children(children, count)) => {
                self.counts.nodes += count;
                children.into_iter().for_each(|child| self.push(child));
            }
            (Job::Simulate(strategy), Reply::Simulated { candidate, further }) => {
                self.counts.simulated += 1;
                if let Some(candidate) = candidate {
                    self.add(&strategy, *candidate);
                }
                self.counts.nodes += further.iter().len() as u64;
                further.into_iter().for_each(|child| self.push(child));
            }
            (Job::Expand(..), Reply::Simulated { .. }) => {}
        }
    }

    fn add(&mut self, strategy: &Strategy, candidate: Candidate) {
        if !candidate.fit.fits && !self.request.any_memory {
            let needs = |c: &Candidate| c.fit.needed;
            if self.closest.as_ref().is_none_or(|known| needs(&candidate) < needs(known)) {
                self.closest = Some(candidate);
            }
            return;
        }
        let place = layout(strategy);
        if strategy.offload == Offload::None {
            self.roomy.insert(place);
        }
        match self.found.get(&place) {
            Some(known) if compare(known, &candidate).is_le() => {}
            Some(_) | None => {
                self.found.insert(place, candidate);
            }
        }
    }

    fn finish(mut self, stopped: bool) -> SearchResult {
        let limit = self.limit();
        let open = self.least().filter(|&bound| stopped && bound <= limit).map(Seconds);
        self.counts.bounded = self.counts.considered.saturating_sub(self.counts.simulated);
        let mut candidates: Vec<Candidate> = self.found.into_values().collect();
        candidates.sort_by(compare);
        candidates.truncate(self.request.top.max(1));
        let closest = self.closest.filter(|_| candidates.is_empty());
        SearchResult { candidates, closest, counts: self.counts, open }
    }
}

#[cfg(test)]
mod tests;
