//! Times exchanges between ranks that are threads here, over every transport.

use super::{Request, Told};
use crate::failure::Failure;
use paceline_comm::process::{ProcessOptions, Wires, connect};
use paceline_comm::rendezvous::{Hub, HubOptions};
use paceline_comm::{Secret, Transport as Wire, thread as threads};
use paceline_exec::ExecError;
use paceline_exec::probe::{self, Timing};
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, resolve};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::cluster::measured::{CollectiveTable, Exchange, Wire as Table};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

/// What carries messages between ranks of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// Between threads of one process.
    Thread,
    /// Through memory that processes share.
    Shm,
    /// Through sockets of this host.
    Tcp,
}

impl Transport {
    /// All of them, the one that training uses first.
    pub(crate) const ALL: [Self; 3] = [Self::Shm, Self::Thread, Self::Tcp];

    /// The word of the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Thread => "thread",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes of messages and vectors.
const SIZES: [usize; 8] = [64, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];

/// What moves in a run, and by which algorithms it may move.
const COLLECTIVES: [(CollectiveKind, &[Algorithm]); 4] = [
    (
        CollectiveKind::AllReduce,
        &[Algorithm::Auto, Algorithm::Ring, Algorithm::Direct, Algorithm::ReadReduce],
    ),
    (CollectiveKind::ReduceScatter, &[Algorithm::Auto]),
    (CollectiveKind::AllGather, &[Algorithm::Auto]),
    (CollectiveKind::Broadcast, &[Algorithm::Auto]),
];

/// One exchange to time on every rank of a world.
#[derive(Clone, Copy)]
struct Case {
    collective: Option<Asked>,
    timing: Timing,
}

/// A collective as a plan asks for it, and the algorithm that this comes to.
#[derive(Clone, Copy)]
struct Asked {
    kind: CollectiveKind,
    algorithm: Algorithm,
    resolved: Algorithm,
}

/// A table for each transport.
pub(super) fn wires(request: &Request, tell: Told<'_>) -> Result<Vec<Table>, Failure> {
    let counts: Vec<u32> = request.ranks.iter().copied().filter(|&ranks| ranks > 1).collect();
    let parts = (request.transports.len() * counts.len()).max(1) as f64;
    let mut tables = Vec::new();
    if counts.is_empty() {
        return Ok(tables);
    }
    for (at, &transport) in request.transports.iter().enumerate() {
        let mut table =
            Table { transport: transport.name().into(), messages: vec![], collectives: vec![] };
        for (nth, &ranks) in counts.iter().enumerate() {
            let name = transport.name();
            let done = (at * counts.len() + nth) as f64 / parts;
            tell(done, &format!("{name} between {ranks} ranks"))?;
            let cases = cases(transport, ranks, nth == 0, request.quick);
            let times = world(transport, ranks, &cases)?;
            for (case, time) in cases.iter().zip(times) {
                // A clock that stands still is no time.
                let time = Seconds(time.0.max(1e-9));
                let exchange = Exchange { bytes: Bytes(case.timing.bytes as u64), time };
                match case.collective {
                    None => table.messages.push(exchange),
                    Some(Asked { kind, resolved, .. }) => {
                        add(&mut table.collectives, (kind, resolved, ranks), exchange);
                    }
                }
            }
        }
        tables.push(table);
    }
    Ok(tables)
}

fn add(
    tables: &mut Vec<CollectiveTable>,
    (kind, algorithm, ranks): (CollectiveKind, Algorithm, u32),
    exchange: Exchange,
) {
    let same =
        |t: &&mut CollectiveTable| (t.kind, t.algorithm, t.ranks) == (kind, algorithm, ranks);
    match tables.iter_mut().find(same) {
        Some(table) => table.times.push(exchange),
        None => tables.push(CollectiveTable { kind, algorithm, ranks, times: vec![exchange] }),
    }
}

fn cases(transport: Transport, ranks: u32, messages: bool, quick: bool) -> Vec<Case> {
    let mut kinds: Vec<Option<Asked>> = Vec::new();
    kinds.extend(messages.then_some(None));
    for (kind, algorithms) in COLLECTIVES {
        for &algorithm in algorithms {
            // What cannot keep the order of summation does not train by default.
            if algorithm == Algorithm::ReadReduce && transport != Transport::Shm {
                continue;
            }
            let Ok(resolved) = resolve(kind, algorithm, ranks, Order::Canonical) else { continue };
            // What nobody asks for stands first: it may be done faster than by its steps.
            let known = |asked: &&Asked| (asked.kind, asked.resolved) == (kind, resolved);
            if kinds.iter().flatten().find(known).is_none() {
                kinds.push(Some(Asked { kind, algorithm, resolved }));
            }
        }
    }
    let budget = if quick { 8 << 20 } else { 48 << 20 };
    let case = |collective, bytes: usize| {
        let laps = (budget / bytes).clamp(5, if quick { 40 } else { 200 }) as u32;
        let timing = Timing { bytes, laps, channel: 0, patience: PATIENCE };
        Case { collective, timing }
    };
    let sizes = || SIZES.into_iter().filter(|&bytes| !quick || bytes <= 4 << 20);
    let all = kinds.into_iter().flat_map(|kind| sizes().map(move |bytes| (kind, bytes)));
    // Each has two channels of its own.
    (0..)
        .step_by(2)
        .zip(all)
        .map(|(channel, (kind, bytes))| {
            let Case { collective, timing } = case(kind, bytes);
            Case { collective, timing: Timing { channel, ..timing } }
        })
        .collect()
}

/// Runs every case on a world of so many ranks; the times are those of rank 0.
fn world(transport: Transport, ranks: u32, cases: &[Case]) -> Result<Vec<Seconds>, Failure> {
    let wires = match transport {
        Transport::Thread => {
            let own = threads::world(ranks).into_iter();
            return run(own.map(|wire| move || Ok(wire)).collect(), cases);
        }
        Transport::Shm => Wires::SharedMemory,
        Transport::Tcp => Wires::Tcp,
    };
    let secret = Secret::random()?;
    let hub = Hub::start(HubOptions {
        listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
        secret: secret.clone(),
        world: ranks,
        in_rank: None,
        join: PATIENCE,
        detection: PATIENCE,
    })?;
    let address = hub.address();
    let join = |rank: u32| {
        let mut options = ProcessOptions::new(Rank(rank), ranks, address, secret.clone());
        (options.hub_in_rank_0, options.wires) = (false, wires);
        move || Ok(connect(&options)?)
    };
    let times = run((0..ranks).map(join).collect(), cases)?;
    hub.join()?;
    Ok(times)
}

/// Runs the cases on a thread for each rank, which makes its own end of the wires.
fn run<W, M>(ends: Vec<M>, cases: &[Case]) -> Result<Vec<Seconds>, Failure>
where
    W: Wire,
    M: FnOnce() -> Result<W, Failure> + Send,
{
    let attempt = |end: M| {
        let mut wire = end()?;
        let times: Result<Vec<Seconds>, ExecError> = (cases.iter())
            .map(|case| match case.collective {
                None if wire.rank().0 > 1 => Ok(Seconds::ZERO),
                None => probe::message(&mut wire, &case.timing),
                Some(Asked { kind, algorithm, .. }) => {
                    let ranks = wire.world();
                    probe::collective(&mut wire, kind, algorithm, ranks, &case.timing)
                }
            })
            .collect();
        times.map_err(Failure::from)
    };
    let ended: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            ends.into_iter().map(|end| scope.spawn(move || attempt(end))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let mut first = Vec::new();
    for (rank, end) in ended.into_iter().enumerate() {
        let broke = || Failure::Run(anyhow::anyhow!("rank {rank} broke while it was timed"));
        let times = end.map_err(|_| broke())??;
        if rank == 0 {
            first = times;
        }
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transport_carries_every_case() {
        for transport in Transport::ALL {
            let mut cases = cases(transport, 2, true, true);
            cases.iter_mut().for_each(|case| {
                (case.timing.laps, case.timing.bytes) = (1, case.timing.bytes.min(1 << 16));
            });
            let times = world(transport, 2, &cases).unwrap();
            assert_eq!(times.len(), cases.len());
            assert!(times.iter().all(|time| time.0 > 0.0), "{transport:?}");
        }
    }
}
