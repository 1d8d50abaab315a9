//! Network on which an exchange takes the time of a cost model, whatever else is in flight.

use super::calls::Calls;
use super::classes::Class;
use super::matching::{MatchedOps, Pair, Request, Wires, find};
use super::network::{Completion, Network, Posting};
use super::time_varying::{NetworkEpochs, SimDuration};
use super::workload::Workload;
use crate::error::SimError;
use crate::network::CostModel;
use paceline_plan::ids::{OpId, Rank};
use paceline_plan::units::Bytes;

/// Durations of the exchanges of all op matches.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClosedForm {
    times: Vec<Duration>,
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
        let mut timer = Timer { load, calls, epochs, known: None, times: Vec::new() };
        let matches = find(load, &mut timer)?;
        Ok((Self { times: timer.times }, matches))
    }

    /// Network on which the exchanges of `matches` op matches take no time.
    pub(super) fn instant(matches: usize) -> Self {
        Self { times: vec![Duration { whole: SimDuration::ZERO, handed: None }; matches] }
    }
}

impl Network for ClosedForm {
    fn post(&mut self, posting: Posting<'_>, at: f64, done: &mut Vec<Completion>) {
        let Posting { op_match, ops } = posting;
        let Duration { whole, handed } = &self.times[op_match as usize];
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
    /// Last message and its time: adjacent ones differ only in the microbatch, so this avoids
    /// nearly all lookups.
    known: Option<((Rank, Rank, Bytes), SimDuration)>,
    times: Vec<Duration>,
}

impl Timer<'_> {
    /// Time of a message of a class; an error names `op` if there is no path.
    fn message_time(
        &mut self,
        (class, op): (u32, OpId),
        (from, to, bytes): (Rank, Rank, Bytes),
    ) -> Result<SimDuration, SimError> {
        if let Some((known, time)) = &self.known
            && *known == (from, to, bytes)
        {
            return Ok(time.clone());
        }
        let costs = self.load.job(class).costs;
        let time = |network: &dyn CostModel| costs.message(network, from, to, bytes);
        let time =
            self.epochs.message(costs.device(from), costs.device(to), time).map_err(|source| {
                let number = self.load.classes.number(class, op);
                self.load.no_path(number, source)
            })?;
        self.known = Some(((from, to, bytes), time.clone()));
        Ok(time)
    }

    fn push(&mut self, whole: SimDuration) {
        self.times.push(Duration { whole, handed: None });
    }
}

impl Wires for Timer<'_> {
    fn message(&mut self, pair: &Pair<'_>, ops: &mut Vec<u32>) -> Result<(), SimError> {
        let (load, (class, from, send), (other, to, recv)) = (self.load, pair.send, pair.recv);
        let (costs, classes) = (load.job(class).costs, load.classes);
        let bytes = costs.bytes(classes.get(class).role, &send.view);
        let time = self.message_time((class, send.op), (from, to, bytes))?;
        ops.extend([classes.number(class, send.op), classes.number(other, recv.op)]);
        match costs.exchange_cost(classes.get(other).role, recv.op) {
            None => self.push(time),
            Some(moving) => {
                let stretch = costs.slowdown(other, recv.op);
                let handed = Some(time.map(|time| time * moving.cold_factor.min(stretch)));
                self.times.push(Duration { whole: time.map(|time| time * stretch), handed });
            }
        }
        Ok(())
    }

    fn collective(&mut self, _: Rank, members: &[(u32, OpId)]) -> Result<(), SimError> {
        let mut longest: Option<SimDuration> = None;
        for &(class, op) in members {
            let Some(call) = self.load.program(class).body.nodes[op.index()].op.call() else {
                continue;
            };
            let stretch = self.load.job(class).costs.slowdown(class, op);
            let time = self.calls.get(class, call).map(|time| time * stretch);
            longest = Some(match longest {
                Some(longest) => longest.max(time),
                None => time,
            });
        }
        self.push(longest.unwrap_or(SimDuration::ZERO));
        Ok(())
    }

    /// The server is always ready.
    fn request(&mut self, class: u32, op: OpId, request: Request) -> Result<(), SimError> {
        let Class { rank, role, .. } = self.load.classes.get(class);
        let load = self.load.job(class);
        let server = Rank(load.plan.mesh.size() + request.server);
        let bytes = load.costs.bytes(role, &request.view);
        let time = self.message_time((class, op), (rank, server, bytes))?;
        self.push(time);
        Ok(())
    }

    /// A service takes the time of all requests that it declares.
    fn serve(&mut self, class: u32, op: OpId, service: u32) -> Result<(), SimError> {
        let (load, role) = (self.load.job(class), self.load.classes.get(class).role);
        let time = self.epochs.duration(|network| load.costs.service(network, role, service));
        let number = self.load.classes.number(class, op);
        self.push(time.map_err(|source| self.load.no_path(number, source))?);
        Ok(())
    }

    fn never(&mut self) {
        self.push(SimDuration::ZERO);
    }
}
