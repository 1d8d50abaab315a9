//! Critical path of the iteration, from its end back to its start.
//!
//! The op that ends last started when it was released by the op before it on its lane, or by one of
//! its `after` list. For a matched op, this holds for the op of the match that was posted last.
//! Following these releases back yields steps that cover the iteration without a gap. Shortening
//! anything that is not among them does not shorten the iteration.

use crate::engine::{MatchedOps, Timeline};
use paceline_plan::ids::{OpId, RoleId};
use paceline_plan::program::Plan;
use paceline_plan::program::label::{Label, span_kind};
use paceline_plan::trace::SpanKind;
use paceline_plan::units::Seconds;
use serde::Serialize;
use std::collections::BTreeMap;

/// Chain of ops that determines the iteration time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CriticalPath {
    /// Steps from start to end: each starts bitwise exactly when the previous one ends, the first
    /// at 0. Ops that take no time are omitted.
    #[serde(skip)]
    pub steps: Vec<PathStep>,
    /// Time of the steps by kind, longest first; the sum is the iteration.
    pub parts: Vec<PathPart>,
}

/// Step of the critical path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathStep {
    /// Role and op of the step; `None` while nothing simulated is running.
    pub op: Option<(RoleId, OpId)>,
    /// Start of its time on the path.
    pub start: Seconds,
    /// Time at which the next step takes over.
    pub end: Seconds,
}

/// All steps of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathPart {
    /// `forward`, `all_reduce tp`, `send/recv pp`, …, or `idle`.
    pub name: String,
    /// Span kind of such ops in a trace; `Wait` for idle time.
    pub kind: SpanKind,
    /// Number of steps.
    pub count: u64,
    /// Total time.
    pub time: Seconds,
}

pub(super) fn critical_path(
    plan: &Plan,
    timeline: &Timeline,
    matches: &MatchedOps,
) -> CriticalPath {
    let steps = Walk::new(plan, timeline, matches).back();
    let parts = parts(plan, &steps);
    CriticalPath { steps, parts }
}

/// Sums steps by kind.
fn parts(plan: &Plan, steps: &[PathStep]) -> Vec<PathPart> {
    let mut sums: BTreeMap<Option<Label>, (SpanKind, u64, Seconds)> = BTreeMap::new();
    for step in steps {
        let of_op = |(role, op): (RoleId, OpId)| {
            let program = &plan.programs[role.index()];
            let op = &program.body.nodes[op.index()].op;
            let label = Label::of(plan, program, op)?.of_both_sides();
            Some((label, span_kind(plan, program, op)?))
        };
        let (label, kind) = step.op.and_then(of_op).unzip();
        let kind = kind.unwrap_or(SpanKind::Wait);
        let sum = sums.entry(label).or_insert((kind, 0, Seconds::ZERO));
        sum.1 += 1;
        sum.2 += step.end - step.start;
    }
    let part = |(label, (kind, count, time)): (Option<Label>, (SpanKind, u64, Seconds))| {
        let name = label.map_or_else(|| "idle".to_owned(), |label| label.words(&plan.mesh));
        PathPart { name, kind, count, time }
    };
    let mut parts: Vec<PathPart> = sums.into_iter().map(part).collect();
    parts.sort_by(|a, b| b.time.0.total_cmp(&a.time.0));
    parts
}

struct Walk<'a> {
    plan: &'a Plan,
    timeline: &'a Timeline,
    matches: &'a MatchedOps,
    /// Previous op on the lane of each op.
    before: Vec<Option<u32>>,
}

/// Op and the time at which it released its waiters.
#[derive(Clone, Copy)]
struct Release {
    op: u32,
    at: f64,
}

impl<'a> Walk<'a> {
    fn new(plan: &'a Plan, timeline: &'a Timeline, matches: &'a MatchedOps) -> Self {
        let mut before = Vec::new();
        let classes = timeline.classes();
        for class in 0..classes.len() as u32 {
            let program = &plan.programs[classes.get(class).role.index()];
            let first = before.len() as u32;
            let mut last: Vec<Option<u32>> = vec![None; program.lanes.len()];
            for (index, node) in program.body.nodes.iter().enumerate() {
                let number = first + index as u32;
                before.push(last[node.lane.index()].replace(number));
            }
        }
        Self { plan, timeline, matches, before }
    }

    fn back(&self) -> Vec<PathStep> {
        let end = self.timeline.end().0;
        let mut steps = Vec::new();
        let ends = (0..self.before.len() as u32).map(|op| Release { op, at: self.end(op) });
        let mut next = ends.reduce(|last, other| if other.at > last.at { other } else { last });
        // A mean iteration may last longer than the one that is shown.
        let reached = next.map_or(0.0, |release| release.at);
        push(&mut steps, PathStep { op: None, start: Seconds(reached), end: Seconds(end) });
        // Each op is visited at most once for each of its matches.
        let mut left = self.before.len() + self.matches.joins() + 1;
        while let Some(release) = next.filter(|_| left > 0) {
            left -= 1;
            let (start, waiting) = self.start(release);
            let (class, op) = self.timeline.classes().op(release.op);
            let op = Some((self.timeline.classes().get(class).role, op));
            push(&mut steps, PathStep { op, start: Seconds(start), end: Seconds(release.at) });
            next = self.binding(&waiting, start);
            let reached = next.map_or(0.0, |release| release.at);
            push(&mut steps, PathStep { op: None, start: Seconds(reached), end: Seconds(start) });
        }
        steps.reverse();
        steps
    }

    /// Start of the work that ended with this release, and the ops of which the last to be ready
    /// determined that start.
    fn start(&self, release: Release) -> (f64, Vec<u32>) {
        let own = self.timeline.times(release.op).0;
        let (start, waiting) = match self.matches.of(release.op) {
            [] => (own, vec![release.op]),
            &[op_match] => (own, self.matches.ops(op_match).to_vec()),
            // Of several matches, the one that ended at the release.
            several => {
                let ended = |op_match: &&u32| self.op_match(**op_match).1 >= release.at;
                let op_match = several.iter().find(ended).unwrap_or(&several[0]);
                (self.op_match(*op_match).0, self.matches.ops(*op_match).to_vec())
            }
        };
        (start.min(release.at), waiting)
    }

    /// Start and end of an op match: the intersection of its ops' spans, because an op that
    /// represents several ranks spans several matches.
    fn op_match(&self, op_match: u32) -> (f64, f64) {
        let spans = self.matches.ops(op_match).iter().map(|&op| self.timeline.times(op));
        spans.fold((0.0, f64::INFINITY), |(start, end), (s, e)| (start.max(s), end.min(e)))
    }

    /// Returns the release that the last of `waiting` waited for; the first of several simultaneous
    /// ones.
    ///
    /// The flow network may report ranks of two roles that were matched with other ranks than each
    /// other. A release after the start then counts as one at the start.
    fn binding(&self, waiting: &[u32], start: f64) -> Option<Release> {
        let mut latest: Option<Release> = None;
        let mut consider = |op: u32, at: f64| {
            let at = at.min(start);
            if latest.is_none_or(|latest| at > latest.at) {
                latest = Some(Release { op, at });
            }
        };
        for &op in waiting {
            if let Some(before) = self.before[op as usize] {
                consider(before, self.lane_free(before));
            }
            let (class, id) = self.timeline.classes().op(op);
            let role = self.timeline.classes().get(class).role;
            let first = op - id.0;
            for after in self.plan.programs[role.index()].body.after(id) {
                let after = first + after.0;
                consider(after, self.end(after));
            }
        }
        latest
    }

    fn end(&self, op: u32) -> f64 {
        self.timeline.times(op).1
    }

    /// Time at which an op's lane continued: the end of its first match.
    fn lane_free(&self, op: u32) -> f64 {
        let matches = self.matches.of(op);
        if matches.len() < 2 {
            return self.end(op);
        }
        matches.iter().map(|&op_match| self.op_match(op_match).1).fold(f64::INFINITY, f64::min)
    }
}

fn push(steps: &mut Vec<PathStep>, step: PathStep) {
    if step.start.0 < step.end.0 {
        steps.push(step);
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases::{blocks_only, close, cluster, ideal, mini, run, strategy};
    use super::*;
    use crate::cluster::preset;
    use crate::{NetworkKind, Options, simulate};
    use paceline_plan::lower::lower;
    use paceline_plan::strategy::{Strategy, Sync, Zero};
    use proptest::prelude::*;

    fn time(path: &CriticalPath, name: &str) -> f64 {
        path.parts.iter().filter(|part| part.name == name).map(|part| part.time.0).sum()
    }

    /// Asserts that the steps cover the iteration without gaps, bitwise.
    #[track_caller]
    fn covers(path: &CriticalPath, iteration: Seconds) {
        let mut reached = Seconds::ZERO;
        for step in &path.steps {
            assert_eq!(step.start, reached);
            assert!(step.end.0 > step.start.0);
            reached = step.end;
        }
        assert_eq!(reached, iteration);
        close(path.parts.iter().map(|part| part.time.0).sum(), iteration.0);
    }

    /// One microbatch through four stages: all compute of every stage, and three messages in each
    /// direction.
    #[test]
    fn a_single_microbatch_is_its_own_path() {
        let plan = blocks_only(&strategy(4, 1));
        let (outcome, details) = run(&plan, &cluster(4, 1e9, 1e-3));
        let path = &details.critical_path;
        covers(path, outcome.iteration);
        let compute: f64 = outcome.roles.iter().map(|role| role.compute.0).sum();
        close(time(path, "forward") + time(path, "backward"), compute);
        let model = mini();
        let message = 1e-3 + (model.seq * model.d_model * 4) as f64 / 1e9;
        close(time(path, "send/recv pp"), 6.0 * message);
        let messages = path.parts.iter().find(|part| part.name == "send/recv pp").unwrap();
        assert_eq!(messages.count, 6);
        assert_eq!(time(path, "idle"), 0.0);
    }

    /// p stages and m microbatches take m + p − 1 forward and backward passes; all are on the
    /// critical path if nothing else has a cost.
    #[test]
    fn a_pipeline_waits_for_its_bubble_on_other_ranks() {
        let plan = blocks_only(&strategy(4, 8));
        let (outcome, details) = run(&plan, &ideal(4));
        let path = &details.critical_path;
        covers(path, outcome.iteration);
        close(time(path, "forward") + time(path, "backward"), outcome.iteration.0);
        // A rank computes for m passes; the rest of the path runs over other ranks.
        close(outcome.iteration.0 / outcome.compute.0, 11.0 / 8.0);
        let roles: std::collections::BTreeSet<_> =
            path.steps.iter().filter_map(|step| step.op).map(|(role, _)| role).collect();
        assert_eq!(roles.len(), 4, "first and last passes lead through all stages");
    }

    #[test]
    fn a_slow_network_shows_as_what_it_is_used_for() {
        let slow = cluster(4, 1e5, 0.0);
        let replicas = Strategy { dp: 4, global_batch: 4, ..strategy(1, 1) };
        let (outcome, details) = run(&lower(&mini(), &replicas).unwrap(), &slow);
        let path = &details.critical_path;
        covers(path, outcome.iteration);
        assert_eq!(path.parts[0].name, "all_reduce dp");
        assert!(path.parts[0].time.0 > 0.9 * outcome.iteration.0, "{:?}", path.parts);
        assert!(path.parts[0].time.0 <= outcome.communication.0);

        let tensors = Strategy { tp: 4, ..strategy(1, 4) };
        let (_, details) = run(&lower(&mini(), &tensors).unwrap(), &slow);
        assert_eq!(details.critical_path.parts[0].name, "all_reduce tp");
    }

    /// With one server, all gradients arrive and all weights leave through its one link.
    #[test]
    fn a_server_is_waited_for_message_by_message() {
        let served = Strategy {
            dp: 3,
            leaves: 3,
            global_batch: 3,
            sync: Sync::Servers(1),
            ..strategy(1, 3)
        };
        let (outcome, details) = run(&lower(&mini(), &served).unwrap(), &cluster(4, 1e6, 0.0));
        let path = &details.critical_path;
        covers(path, outcome.iteration);
        let messages = time(path, "send/recv servers");
        assert!(messages > 0.9 * outcome.iteration.0, "{:?}", path.parts);
    }

    /// Ops that share links take longer than alone, and the path shows it.
    #[test]
    fn the_flow_network_has_a_path_too() {
        let options = Options { network: NetworkKind::Flow, details: true, ..Options::default() };
        for (tp, pp, dp) in [(2, 2, 2), (1, 4, 2), (1, 1, 8)] {
            let layout = Strategy { tp, dp, leaves: dp, ..strategy(pp, 4 * u64::from(dp)) };
            let plan = lower(&mini(), &layout).unwrap();
            let cluster = preset::holding("dgx-a100", plan.mesh.world().into()).unwrap();
            let outcome = simulate(&plan, &cluster, &options).unwrap();
            let path = &outcome.details.as_ref().unwrap().critical_path;
            covers(path, outcome.iteration);
            let idle = time(path, "idle");
            assert!(idle < 0.01 * outcome.iteration.0, "tp {tp} pp {pp} dp {dp}: {:?}", path.parts);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn the_path_covers_the_iteration_in_any_layout(
            tp in prop_oneof![Just(1u32), Just(2)],
            pp in prop_oneof![Just(1u32), Just(2), Just(4)],
            dp in prop_oneof![Just(1u32), Just(2), Just(3)],
            stage in 0u8..4,
            microbatches in 1u64..6,
            overlap: bool,
            servers in 0u32..3,
        ) {
            let zero = Zero::from_stage(if servers > 0 { 0 } else { stage }).unwrap();
            let sync = if servers > 0 { Sync::Servers(servers) } else { Sync::AllReduce };
            let global_batch = microbatches * u64::from(dp);
            let layout = strategy(pp, global_batch);
            let layout = Strategy { tp, dp, leaves: dp, zero, overlap, sync, ..layout };
            let Ok(plan) = lower(&mini(), &layout) else { return Ok(()) };
            let cluster = preset::holding("dgx-a100", plan.mesh.world().into()).unwrap();
            let (outcome, details) = run(&plan, &cluster);
            covers(&details.critical_path, outcome.iteration);
            prop_assert_eq!(time(&details.critical_path, "idle"), 0.0);
        }
    }
}
