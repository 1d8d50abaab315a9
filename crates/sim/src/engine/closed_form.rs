//! Network on which an exchange takes the time of a cost model, whatever else is in flight.

use super::calls::Calls;
use super::classes::Class;
use super::matching::{MatchedOps, Pair, Request, Wires, find};
use super::network::{Completion, Network, Posting};
use super::time_varying::{NetworkEpochs, SimDuration};
use super::workload::Workload;
use crate::error::SimError;
use crate::network::CostModel;
use paceline_plan::ids::{CallId, OpId, Rank};
use paceline_plan::units::Bytes;

/// Durations of the exchanges of all op matches.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClosedForm {
    /// By op match, index into `all`.
    times: Vec<u32>,
    /// Distinct durations.
    all: Vec<Duration>,
}

/// Duration of an exchange.
#[derive(Clone, Debug)]
struct Duration {
    whole: SimDuration,
    /// Duration for the first op if it ends before the others: inside a host the sender copies the
    /// message and need not wait until the receiver has been scheduled.
    handed: Option<SimDuration>,
}

impl ClosedForm {
    /// Finds all op matches of a workload of one job, and times their exchanges.
    pub(super) fn of(
        load: &Workload<'_>,
        calls: &Calls,
        epochs: &NetworkEpochs<'_>,
    ) -> Result<(Self, MatchedOps), SimError> {
        let found = Self::default();
        let mut timer = Timer { load, calls, epochs, message: None, local: (0, Vec::new()), found };
        let matches = find(load, &mut timer)?;
        Ok((timer.found, matches))
    }

    /// Network on which the exchanges of `matches` op matches take no time.
    pub(super) fn instant(matches: usize) -> Self {
        Self { times: vec![0; matches], all: vec![Duration::ZERO] }
    }

    /// Adds a duration and returns its index.
    fn add(&mut self, whole: SimDuration, handed: Option<SimDuration>) -> u32 {
        self.all.push(Duration { whole, handed });
        self.all.len() as u32 - 1
    }
}

impl Duration {
    const ZERO: Self = Self { whole: SimDuration::ZERO, handed: None };
}

impl Network for ClosedForm {
    const SHARES_LINKS: bool = false;

    fn post(&mut self, posting: Posting<'_>, at: f64, done: &mut Vec<Completion>) {
        let Posting { op_match, ops } = posting;
        let Duration { whole, handed } = &self.all[self.times[op_match as usize] as usize];
        let end = whole.end(at);
        let mut first = handed.as_ref().map(|handed| handed.end(at));
        done.extend(ops.iter().map(|&op| {
            let at = first.take().unwrap_or(end);
            Completion { op_match, op, at }
        }));
    }

    fn next(&mut self, _: f64) -> Option<Completion> {
        None
    }
}

/// Times exchanges as they are matched.
struct Timer<'a> {
    load: &'a Workload<'a>,
    calls: &'a Calls,
    epochs: &'a NetworkEpochs<'a>,
    /// Last message and the index of its time: adjacent ones differ only in the microbatch, so this
    /// avoids nearly all lookups.
    message: Option<((Rank, Rank, Bytes), u32)>,
    /// Class whose calls are being timed, and the index of the time of each, or [`NONE`].
    local: (u32, Vec<u32>),
    found: ClosedForm,
}

/// No time yet.
const NONE: u32 = u32::MAX;

impl Timer<'_> {
    /// Index of the time of a message of a class; an error names `op` if there is no path.
    fn message_time(
        &mut self,
        (class, op): (u32, OpId),
        (from, to, bytes): (Rank, Rank, Bytes),
    ) -> Result<u32, SimError> {
        if let Some((known, time)) = self.message
            && known == (from, to, bytes)
        {
            return Ok(time);
        }
        let costs = self.load.job(class).costs;
        let time = |network: &dyn CostModel| costs.message(network, from, to, bytes);
        let time = self.epochs.message(costs.device(from), costs.device(to), time);
        let number = self.load.classes.number(class, op);
        let time = time.map_err(|source| self.load.no_path(number, source))?;
        let time = self.found.add(time, None);
        self.message = Some(((from, to, bytes), time));
        Ok(time)
    }

    /// Index of the time of a class's call, which takes `stretch` times as long as alone.
    fn call_time(&mut self, class: u32, call: CallId, stretch: f64) -> u32 {
        let alone = self.calls.get(class, call);
        if stretch != 1.0 {
            return self.found.add(alone.map(|time| time * stretch), None);
        }
        if self.local.0 != class || self.local.1.is_empty() {
            self.local = (class, vec![NONE; self.load.program(class).calls.len()]);
        }
        let known = &mut self.local.1[call.index()];
        if *known == NONE {
            *known = self.found.add(alone.clone(), None);
        }
        *known
    }

    fn push(&mut self, whole: SimDuration) {
        let time = self.found.add(whole, None);
        self.found.times.push(time);
    }
}

impl Wires for Timer<'_> {
    fn message(&mut self, pair: &Pair<'_>, ops: &mut Vec<u32>) -> Result<(), SimError> {
        let (load, (class, from, send), (other, to, recv)) = (self.load, pair.send, pair.recv);
        let (costs, classes) = (load.job(class).costs, load.classes);
        let bytes = costs.bytes(classes.get(class).role, &send.view);
        let mut time = self.message_time((class, send.op), (from, to, bytes))?;
        ops.extend([classes.number(class, send.op), classes.number(other, recv.op)]);
        if let Some(moving) = costs.exchange_cost(classes.get(other).role, recv.op) {
            let (alone, stretch) =
                (self.found.all[time as usize].whole.clone(), costs.slowdown(other, recv.op));
            let handed = alone.map(|time| time * moving.cold_factor.min(stretch));
            time = self.found.add(alone.map(|time| time * stretch), Some(handed));
        }
        self.found.times.push(time);
        Ok(())
    }

    fn collective(&mut self, _: Rank, members: &[(u32, OpId)]) -> Result<(), SimError> {
        let mut longest: Option<u32> = None;
        for &(class, op) in members {
            let Some(call) = self.load.program(class).body.nodes[op.index()].op.call() else {
                continue;
            };
            let stretch = self.load.job(class).costs.slowdown(class, op);
            let time = self.call_time(class, call, stretch);
            longest = Some(match longest {
                Some(longest) => {
                    let whole = |index: u32| self.found.all[index as usize].whole.clone();
                    let longer = whole(longest).max(whole(time));
                    self.found.add(longer, None)
                }
                None => time,
            });
        }
        match longest {
            Some(time) => self.found.times.push(time),
            None => self.push(SimDuration::ZERO),
        }
        Ok(())
    }

    fn request(&mut self, op: OpId, request: &Request) -> Result<(), SimError> {
        let class = request.class;
        let Class { rank, role, .. } = self.load.classes.get(class);
        let load = self.load.job(class);
        let server = Rank(load.plan.mesh.size() + request.server);
        let bytes = load.costs.bytes(role, &request.view);
        let time = self.message_time((class, op), (rank, server, bytes))?;
        self.found.times.push(time);
        Ok(())
    }

    fn never(&mut self) {
        self.push(SimDuration::ZERO);
    }
}
