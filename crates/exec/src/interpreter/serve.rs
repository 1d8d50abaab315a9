//! Asynchronous parameter server: the implementation of the one data-dependent op.
//!
//! Replicas push the gradients of a bucket and pull its weights, each at its own pace. Server 0
//! also grants iterations: before each iteration a replica requests a grant, and reports the loss
//! and norm of the last one. The run ends for a replica when no grant is left. It ends for a server
//! when that holds for all replicas and every push has been answered.

use crate::error::{ExecError, Fault};
use crate::memory::Memory;
use crate::progress::exchange::message;
use crate::run::control::{ControlTopic, send, try_recv};
use paceline_comm::{CommError, Progress, Receiving, Sending, Transport, Wait};
use paceline_kernels::arena::Access;
use paceline_plan::ids::{Rank, RoleId};
use paceline_plan::program::{Plan, Program, Service, View};
use paceline_plan::staleness::{Staleness, StalenessCounter};
use std::time::{Duration, Instant};

/// Statistics of pushes between two reports.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PushStats {
    losses: f64,
    norms: f64,
    /// Number of reports with a loss and a norm.
    reports: u32,
    missed: StalenessCounter,
}

impl PushStats {
    /// Mean loss and norm that replicas reported.
    pub(crate) fn means(&self) -> Option<[f64; 2]> {
        let mean = |sum: f64| sum / f64::from(self.reports);
        (self.reports > 0).then(|| [self.losses, self.norms].map(mean))
    }

    /// Staleness of the pushes so far; `None` if there were none.
    pub(crate) fn staleness(&self) -> Option<Staleness> {
        self.missed.staleness()
    }
}

/// Request of a replica for a grant to run an iteration.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GrantRequest {
    /// Loss and norm of its last iteration, if it has run one.
    pub(crate) saw: Option<[f32; 2]>,
    /// True if the run is to end.
    pub(crate) stop: bool,
}

impl GrantRequest {
    pub(crate) fn encode(self) -> [u8; 10] {
        let [loss, norm] = self.saw.unwrap_or_default().map(f32::to_le_bytes);
        let mut bytes = [0; 10];
        bytes[0] = u8::from(self.saw.is_some());
        bytes[1] = u8::from(self.stop);
        bytes[2..6].copy_from_slice(&loss);
        bytes[6..].copy_from_slice(&norm);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let [saw, stop, l0, l1, l2, l3, n0, n1, n2, n3] = *bytes.first_chunk::<10>()?;
        let values = [[l0, l1, l2, l3], [n0, n1, n2, n3]].map(f32::from_le_bytes);
        Some(Self { saw: (saw != 0).then_some(values), stop: stop != 0 })
    }
}

/// Response to a grant request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) granted: bool,
    /// If not granted, the total number of iterations of the servers' run.
    pub(crate) iterations: u32,
}

impl Grant {
    fn encode(self) -> [u8; 5] {
        let [a, b, c, d] = self.iterations.to_le_bytes();
        [u8::from(self.granted), a, b, c, d]
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let [granted, a, b, c, d] = *bytes.first_chunk::<5>()?;
        Some(Self { granted: granted != 0, iterations: u32::from_le_bytes([a, b, c, d]) })
    }
}

/// State of a server between requests.
#[derive(Debug)]
pub(crate) struct ServerState {
    rank: Rank,
    /// True on server 0, which issues the grants.
    deals: bool,
    peers: Vec<Peer>,
    parts: Vec<BucketShard>,
    microbatches: u64,
    staleness: Option<u32>,
    /// Iterations before this run.
    before: u32,
    /// Total number of grants, and number issued so far.
    leaves: u64,
    granted: u64,
    /// Requests per bucket that the runs of the op so far must serve.
    served: u64,
    pub(crate) seen: PushStats,
    pub(crate) whole: PushStats,
    moved_at: Instant,
}

/// Server's view of a replica.
#[derive(Clone, Copy, Debug)]
struct Peer {
    rank: Rank,
    /// Number of grant requests received from it.
    asked: u32,
    gone: bool,
}

/// Server's shard of a bucket.
#[derive(Debug)]
struct BucketShard {
    doing: Doing,
    /// Number of updates so far.
    version: u64,
    /// Per replica: pushes so far, the version of its weights, and the flag of a pending response.
    replicas: Vec<Replica>,
    /// Index of the replica that is polled first for the next push.
    next_replica: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Replica {
    pushes: u32,
    has: u64,
    owed: bool,
}

/// Current use of a shard's memory.
#[derive(Debug)]
enum Doing {
    Nothing,
    Receiving(usize, Receiving, Progress),
    Sending(Sending, Progress),
}

/// Applies a received push: takes the bucket's index and its number of updates so far.
pub(crate) type Apply<'a> = dyn FnMut(u32, u64) -> Result<(), Fault> + 'a;

impl ServerState {
    /// Server state of a plan that runs to iteration `iterations`, of which `before` are done;
    /// `None` for a role that is not a server.
    pub(crate) fn of(plan: &Plan, rank: Rank, before: u32, iterations: u32) -> Option<Self> {
        let program = plan.program(rank);
        let service = program.services.first()?;
        let members = plan.mesh.members(plan.group(service.group), rank);
        let peers: Vec<Peer> = members
            .into_iter()
            .filter(|peer| *peer != rank)
            .map(|rank| Peer { rank, asked: 0, gone: false })
            .collect();
        let parts = program.buckets.iter().map(|_| BucketShard::new(peers.len())).collect();
        let leaves = u64::from(iterations.saturating_sub(before)) * peers.len() as u64;
        Some(Self {
            rank,
            deals: plan.role(rank) == RoleId(plan.mesh.pp),
            peers,
            parts,
            microbatches: u64::from(plan.strategy.microbatches()),
            staleness: service.staleness,
            before,
            leaves,
            granted: 0,
            served: 0,
            seen: PushStats::default(),
            whole: PushStats::default(),
            moved_at: Instant::now(),
        })
    }

    /// Returns true if there is anything left to serve.
    pub(crate) fn is_open(&self) -> bool {
        !self.is_over()
    }

    /// Number of times every replica has been served on average, rounded down, over all runs.
    pub(crate) fn iterations(&self) -> u32 {
        let least = self.parts.iter().map(|part| part.version).min().unwrap_or(0);
        self.before + (least / self.peers.len().max(1) as u64) as u32
    }

    /// Serves one iteration of requests of every bucket from all replicas, or until all left.
    pub(crate) fn serve(
        &mut self,
        transport: &mut dyn Transport,
        memory: &Memory<'_>,
        program: &Program,
        service: &Service,
        exchange_timeout: Duration,
        apply: &mut Apply<'_>,
    ) -> Result<(), ExecError> {
        self.served += u64::from(service.requests) * self.peers.len() as u64;
        self.moved_at = Instant::now();
        loop {
            let mut moved =
                self.receive_requests(transport).map_err(|source| self.control(source))?;
            for bucket in 0..self.parts.len() {
                moved |= self
                    .advance(transport, memory, program, bucket, apply)
                    .map_err(|source| self.failed(program, bucket, source))?;
            }
            // The server that issues grants also waits for the reports of as many iterations.
            let told = !self.deals || u64::from(self.whole.reports) >= self.served;
            let enough = told && self.parts.iter().all(|part| part.version >= self.served);
            // The last requests are served until the replicas leave.
            if self.is_over() || enough && self.served < self.leaves {
                return Ok(());
            }
            if moved {
                self.moved_at = Instant::now();
                continue;
            }
            let waited = self.moved_at.elapsed();
            if waited >= exchange_timeout {
                return Err(self.silent(waited));
            }
            transport
                .wait(Wait::Spin, exchange_timeout - waited)
                .map_err(|source| self.control(source))?;
        }
    }

    fn is_over(&self) -> bool {
        let idle = |part: &BucketShard| {
            matches!(part.doing, Doing::Nothing) && part.replicas.iter().all(|r| !r.owed)
        };
        self.peers.iter().all(|peer| peer.gone) && self.parts.iter().all(idle)
    }

    /// Receives grant requests, and notices that replicas leave.
    fn receive_requests(&mut self, transport: &mut dyn Transport) -> Result<bool, CommError> {
        let mut moved = false;
        for at in 0..self.peers.len() {
            let Peer { rank, asked, gone } = self.peers[at];
            if gone {
                continue;
            }
            let about = (ControlTopic::Grant, asked);
            let Some(question) = try_recv(transport, rank, about, GrantRequest::decode)? else {
                continue;
            };
            moved = true;
            self.peers[at].asked += 1;
            if !self.deals {
                // A replica contacts the other servers only when it leaves.
                self.peers[at].gone = true;
                continue;
            }
            let reason = "malformed grant request";
            let question = question.ok_or(CommError::Failed { rank, reason: reason.into() })?;
            if let Some([loss, norm]) = question.saw {
                for seen in [&mut self.seen, &mut self.whole] {
                    seen.losses += f64::from(loss);
                    seen.norms += f64::from(norm);
                    seen.reports += 1;
                }
            }
            if question.stop {
                self.leaves = self.granted;
            }
            let granted = self.granted < self.leaves;
            self.granted += u64::from(granted);
            self.peers[at].gone = !granted;
            let iterations = self.before + (self.leaves / self.peers.len().max(1) as u64) as u32;
            send(transport, rank, about, &Grant { granted, iterations }.encode())?;
        }
        Ok(moved)
    }

    /// Advances a bucket without waiting. Returns true if it moved.
    fn advance(
        &mut self,
        transport: &mut dyn Transport,
        memory: &Memory<'_>,
        program: &Program,
        bucket: usize,
        apply: &mut Apply<'_>,
    ) -> Result<bool, Fault> {
        let slowest = self.slowest(bucket);
        let channel = bucket as u16;
        let number = |pushes: u32| u64::from(self.before + pushes) * self.microbatches;
        let part = &mut self.parts[bucket];
        let decl = &program.buckets[bucket];
        let of = |view: View| (memory.span(view, 0), memory.dtype(view.buffer));
        let nothing = Progress::Pending { on: self.rank, step: usize::MAX, moved: 0 };
        match &mut part.doing {
            Doing::Nothing => {
                let may = |r: &Replica| match (self.staleness, slowest) {
                    (Some(bound), Some(slowest)) => r.pushes <= slowest.saturating_add(bound),
                    (None, _) | (_, None) => true,
                };
                if let Some(at) = part.replicas.iter().position(|r| r.owed && may(r)) {
                    let tag = message(channel, number(part.replicas[at].pushes - 1));
                    let state = Sending::start(self.peers[at].rank, tag);
                    part.doing = Doing::Sending(state, nothing);
                    let replica = &mut part.replicas[at];
                    (replica.has, replica.owed) = (part.version, false);
                    let ahead = slowest.map_or(0, |slowest| replica.pushes.saturating_sub(slowest));
                    for seen in [&mut self.seen, &mut self.whole] {
                        seen.missed.note_ahead(ahead);
                    }
                    return Ok(true);
                }
                let count = self.peers.len();
                for at in (part.next_replica..part.next_replica + count).map(|at| at % count) {
                    if part.replicas[at].owed || self.peers[at].gone {
                        continue;
                    }
                    let tag = message(channel, number(part.replicas[at].pushes));
                    let mut state = Receiving::start(self.peers[at].rank, tag);
                    let (span, dtype) = of(decl.grads);
                    let views = memory.views(&[(span, Access::Write)])?;
                    let progress = state.progress_bytes(transport, dtype, views.take_bytes(0))?;
                    // A push that has begun to arrive owns the memory until it is complete.
                    if !matches!(progress, Progress::Pending { moved: 0, .. }) {
                        part.doing = Doing::Receiving(at, state, nothing);
                        part.next_replica = at + 1;
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            Doing::Receiving(at, state, before) => {
                let (at, (span, dtype)) = (*at, of(decl.grads));
                let progress = {
                    let views = memory.views(&[(span, Access::Write)])?;
                    state.progress_bytes(transport, dtype, views.take_bytes(0))?
                };
                if progress != Progress::Done {
                    return Ok(std::mem::replace(before, progress) != progress);
                }
                part.doing = Doing::Nothing;
                apply(bucket as u32, part.version)?;
                let replica = &mut part.replicas[at];
                let stale = part.version - replica.has;
                part.version += 1;
                replica.pushes += 1;
                replica.owed = true;
                for seen in [&mut self.seen, &mut self.whole] {
                    seen.missed.count(stale);
                }
                Ok(true)
            }
            Doing::Sending(state, before) => {
                let (span, dtype) = of(decl.params);
                let views = memory.views(&[(span, Access::Read)])?;
                let progress = state.progress_bytes(transport, dtype, views.bytes(0))?;
                if progress != Progress::Done {
                    return Ok(std::mem::replace(before, progress) != progress);
                }
                part.doing = Doing::Nothing;
                Ok(true)
            }
        }
    }

    /// Lowest number of pushes of a bucket by a replica that has not left.
    fn slowest(&self, bucket: usize) -> Option<u32> {
        let replicas = self.peers.iter().zip(&self.parts[bucket].replicas);
        replicas.filter(|(peer, _)| !peer.gone).map(|(_, replica)| replica.pushes).min()
    }

    fn control(&self, source: CommError) -> ExecError {
        ExecError::Control { rank: self.rank, doing: "serving replicas", source }
    }

    fn failed(&self, program: &Program, bucket: usize, source: Fault) -> ExecError {
        let op = format!("serve {}", program.buckets[bucket].name);
        ExecError::Op { rank: self.rank, iteration: self.iterations() + 1, op, source }
    }

    /// Timeout error that names the replica with the fewest pushes among those that have not left.
    fn silent(&self, waited: Duration) -> ExecError {
        let behind = self.peers.iter().enumerate().filter(|(_, peer)| !peer.gone);
        let pushes = |at: usize| self.parts.iter().map(|part| part.replicas[at].pushes).min();
        let peer =
            behind.min_by_key(|(at, _)| pushes(*at)).map_or(self.rank, |(_, peer)| peer.rank);
        let (rank, iteration) = (self.rank, self.iterations() + 1);
        ExecError::Silent { rank, iteration, op: "serve".into(), peer, waited }
    }
}

impl BucketShard {
    fn new(replicas: usize) -> Self {
        Self {
            doing: Doing::Nothing,
            version: 0,
            replicas: vec![Replica::default(); replicas],
            next_replica: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_and_leaves_arrive_as_they_were_sent() {
        for question in [
            GrantRequest { saw: None, stop: true },
            GrantRequest { saw: Some([1.5, f32::INFINITY]), stop: false },
        ] {
            let read = GrantRequest::decode(&question.encode()).unwrap();
            assert_eq!((read.saw, read.stop), (question.saw, question.stop));
        }
        let leave = Grant { granted: true, iterations: 0x0102_0304 };
        assert_eq!(Grant::decode(&leave.encode()), Some(leave));
        assert!(GrantRequest::decode(&[1, 2]).is_none() && Grant::decode(&[]).is_none());
    }
}
