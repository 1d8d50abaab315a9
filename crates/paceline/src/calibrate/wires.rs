//! Times exchanges between ranks that are threads here, over every transport.

use super::steady::Steady;
use super::{Request, Told};
use crate::failure::Failure;
use paceline_comm::process::{ProcessOptions, Wires, connect};
use paceline_comm::rendezvous::{Hub, HubOptions};
use paceline_comm::{Secret, Transport as Wire, affinity, thread as threads};
use paceline_exec::ExecError;
use paceline_exec::probe::{self, Before, Crowd, Lap, Sweep, Timing};
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, resolve};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::cluster::measured::{CollectiveTable, Exchange, Wire as Table};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

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
struct Case<'a> {
    collective: Option<Asked>,
    timing: Timing,
    /// What ranks come from.
    before: Before<'a>,
}

/// Under which conditions exchanges are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    /// One after the other.
    Warm,
    /// Each after work on other memory.
    Cold,
    /// One after the other, while every core also computes, in a world of more ranks than cores.
    Crowded,
}

impl Setting {
    const ALL: [Self; 3] = [Self::Warm, Self::Cold, Self::Crowded];

    /// Laps of so many bytes: as many as it takes until the next few would not change much.
    fn laps(self, bytes: usize, quick: bool) -> u32 {
        match (self, quick) {
            (Self::Warm, _) => {
                let budget = if quick { 8 << 20 } else { 16 << 20 };
                (budget / bytes).clamp(4, if quick { 40 } else { 64 }) as u32
            }
            // Pushing everything out of the caches takes longer than the exchange.
            (Self::Cold, false) => 5,
            // Turns come and go by chance: some laps wait for many, some for none. A large exchange waits
            // for many in one.
            (Self::Crowded, false) => {
                if bytes > 1 << 20 {
                    3
                } else {
                    10
                }
            }
            (Self::Cold | Self::Crowded, true) => 3,
        }
    }

    /// What counts of the laps' times. Rare long waits for a turn are a part of the whole; where
    /// nobody else is at work they are somebody else's doing.
    fn sum_up(self, mut times: Vec<f64>) -> Seconds {
        times.sort_unstable_by(f64::total_cmp);
        let time = match self {
            Self::Warm | Self::Cold => times.get(times.len() / 2).copied().unwrap_or(0.0),
            Self::Crowded => times.iter().sum::<f64>() / times.len().max(1) as f64,
        };
        // A clock that stands still is no time.
        Seconds(time.max(1e-9))
    }
}

/// What the ranks of a world have in common while they are timed.
#[derive(Clone, Copy)]
struct Stage {
    /// Whether messages are timed there and back.
    both_ways: bool,
    /// Ranks that take part.
    members: u32,
    /// Whether each rank has cores to itself, as training gives it.
    apart: bool,
}

/// What a rank saw of a case.
enum Seen {
    /// The time of a message.
    Time(Seconds),
    /// Every exchange.
    Laps(Vec<Lap>),
    /// Nothing: the case was none of its business.
    Nothing,
}

/// A collective as a plan asks for it, and the algorithm that this comes to.
#[derive(Clone, Copy)]
struct Asked {
    kind: CollectiveKind,
    algorithm: Algorithm,
    resolved: Algorithm,
}

/// What exchanges of so many bytes take after each of the things that ranks may come from; none if ranks
/// exchange nothing.
pub(super) fn aged(
    request: &Request,
    steady: &Steady<'_>,
    sizes: &[usize],
    before: &[Before<'_>],
) -> Result<Option<Vec<Vec<Seconds>>>, Failure> {
    let ranks = request.ranks.iter().copied().find(|&ranks| ranks > 1);
    let Some((ranks, &transport)) = ranks.zip(request.transports.first()) else { return Ok(None) };
    let (kind, algorithm) = (CollectiveKind::AllReduce, Algorithm::Auto);
    let Ok(resolved) = resolve(kind, algorithm, ranks, Order::Canonical) else { return Ok(None) };
    let clock = Instant::now();
    let case = |(channel, (&bytes, &before))| {
        let laps = Setting::Cold.laps(bytes, request.quick);
        let timing = Timing { bytes, laps, channel, patience: PATIENCE, clock };
        Case { collective: Some(Asked { kind, algorithm, resolved }), timing, before }
    };
    let all = sizes.iter().flat_map(|bytes| before.iter().map(move |before| (bytes, before)));
    let cases: Vec<Case<'_>> = (0..).step_by(2).zip(all).map(case).collect();
    let apart = transport != Transport::Thread && ranks <= request.all_cores();
    let stage = Stage { both_ways: false, members: ranks, apart };
    let mut times = Vec::with_capacity(cases.len());
    for some in cases.chunks(before.len().max(1)) {
        let seen = steady.measure(|| world(transport, ranks, some, stage))?;
        times.push(seen.into_iter().map(|laps| Setting::Cold.sum_up(laps)).collect());
    }
    Ok(Some(times))
}

/// Exchanges over every transport, and what they took in every round.
pub(super) struct Exchanges<'a> {
    request: &'a Request,
    steady: &'a Steady<'a>,
    series: Vec<Series<'a>>,
}

/// Exchanges of the same ranks in the same setting.
struct Series<'a> {
    transport: Transport,
    ranks: u32,
    setting: Setting,
    cases: Vec<Case<'a>>,
    /// Of each case, by round.
    times: Vec<Vec<f64>>,
}

impl<'a> Exchanges<'a> {
    pub(super) fn new(request: &'a Request, steady: &'a Steady<'a>, sweep: &'a Sweep) -> Self {
        let counts: Vec<u32> = request.ranks.iter().copied().filter(|&ranks| ranks > 1).collect();
        let mut series = Vec::new();
        for &transport in &request.transports {
            for (nth, &ranks) in counts.iter().enumerate() {
                for setting in Setting::ALL {
                    let before = match setting {
                        Setting::Cold => Before::Sweep(sweep),
                        Setting::Warm | Setting::Crowded => Before::Nothing,
                    };
                    let how = (setting, request.quick);
                    let cases = cases(transport, ranks, nth == 0, how, before);
                    let times = vec![Vec::new(); cases.len()];
                    series.push(Series { transport, ranks, setting, cases, times });
                }
            }
        }
        Self { request, steady, series }
    }

    /// Times every exchange once more, and again if the cores turn out to be usually elsewhere: all that was
    /// measured before is forgotten then.
    pub(super) fn round(&mut self, tell: Told<'_>) -> Result<(), Failure> {
        self.pass(tell)?;
        if self.steady.has_changed() {
            let times = self.series.iter_mut().flat_map(|series| &mut series.times);
            times.for_each(Vec::clear);
            self.pass(tell)?;
        }
        Ok(())
    }

    fn pass(&mut self, tell: Told<'_>) -> Result<(), Failure> {
        let (cores, steady) = (self.request.all_cores(), self.steady);
        let parts = self.series.len() as f64;
        for (nth, series) in self.series.iter_mut().enumerate() {
            let next = format!("{} between {} ranks", series.transport.name(), series.ranks);
            tell(nth as f64 / parts, &next)?;
            series.round(cores, steady)?;
        }
        Ok(())
    }

    /// A table for each transport.
    pub(super) fn tables(&self) -> Vec<Table> {
        let mut tables: Vec<Table> = Vec::new();
        for settings in self.series.chunks(Setting::ALL.len()) {
            let [warm, cold, crowded] = settings else { continue };
            let transport = warm.transport.name();
            if tables.last().is_none_or(|table| table.transport != transport) {
                let (messages, collectives) = (Vec::new(), Vec::new());
                tables.push(Table { transport: transport.into(), messages, collectives });
            }
            let Some(table) = tables.last_mut() else { continue };
            for (at, case) in warm.cases.iter().enumerate() {
                let exchange = Exchange {
                    bytes: Bytes(case.timing.bytes as u64),
                    time: warm.mean(at),
                    cold: Some(cold.mean(at)),
                    crowded: Some(crowded.mean(at)),
                };
                match case.collective {
                    None => table.messages.push(exchange),
                    Some(Asked { kind, resolved, .. }) => {
                        add(&mut table.collectives, (kind, resolved, warm.ranks), exchange);
                    }
                }
            }
        }
        tables
    }
}

impl Series<'_> {
    /// Times a few cases at once: few enough for the machine to stay as it is.
    fn round(&mut self, cores: u32, steady: &Steady<'_>) -> Result<(), Failure> {
        let Self { transport, ranks, setting, .. } = *self;
        let crowded = setting == Setting::Crowded;
        // Ranks wait in another way where there are more of them than cores.
        let of = if crowded { ranks.max(cores.saturating_add(1)) } else { ranks };
        let apart = transport != Transport::Thread && of <= cores;
        let stage = Stage { both_ways: setting == Setting::Warm, members: ranks, apart };
        for (cases, times) in self.cases.chunks(AT_ONCE).zip(self.times.chunks_mut(AT_ONCE)) {
            let seen = steady.measure(|| {
                let _crowd = crowded.then(|| Crowd::new(cores));
                world(transport, of, cases, stage)
            })?;
            for (times, laps) in times.iter_mut().zip(seen) {
                times.push(setting.sum_up(laps).0);
            }
        }
        Ok(())
    }

    /// What a case took, on average over the rounds.
    fn mean(&self, case: usize) -> Seconds {
        let times = &self.times[case];
        Seconds(times.iter().sum::<f64>() / times.len().max(1) as f64)
    }
}

/// Cases that are timed in one world, as many as there are sizes.
const AT_ONCE: usize = SIZES.len();

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

fn cases<'a>(
    transport: Transport,
    ranks: u32,
    messages: bool,
    (setting, quick): (Setting, bool),
    before: Before<'a>,
) -> Vec<Case<'a>> {
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
    let clock = Instant::now();
    let sizes = || SIZES.into_iter().filter(|&bytes| !quick || bytes <= 4 << 20);
    let all = kinds.into_iter().flat_map(|kind| sizes().map(move |bytes| (kind, bytes)));
    // Each has two channels of its own.
    (0..)
        .step_by(2)
        .zip(all)
        .map(|(channel, (collective, bytes))| {
            let laps = setting.laps(bytes, quick);
            let timing = Timing { bytes, laps, channel, patience: PATIENCE, clock };
            Case { collective, timing, before }
        })
        .collect()
}

/// Runs every case on a world of so many ranks: what its laps took.
fn world(
    transport: Transport,
    ranks: u32,
    cases: &[Case<'_>],
    stage: Stage,
) -> Result<Vec<Vec<f64>>, Failure> {
    let wires = match transport {
        Transport::Thread => {
            let own = threads::world(ranks).into_iter();
            return run(own.map(|wire| move || Ok(wire)).collect(), cases, stage);
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
    let times = run((0..ranks).map(join).collect(), cases, stage)?;
    hub.join()?;
    Ok(times)
}

/// Runs the cases on a thread for each rank, which makes its own end of the wires.
fn run<W, M>(ends: Vec<M>, cases: &[Case<'_>], stage: Stage) -> Result<Vec<Vec<f64>>, Failure>
where
    W: Wire,
    M: FnOnce() -> Result<W, Failure> + Send,
{
    let ranks = u32::try_from(ends.len()).unwrap_or(u32::MAX);
    let attempt = |rank: u32, end: M| {
        if stage.apart {
            affinity::keep_to_share(rank, ranks);
        }
        let mut wire = end()?;
        let seen: Result<Vec<Seen>, ExecError> =
            cases.iter().map(|case| see(&mut wire, case, stage)).collect();
        seen.map_err(Failure::from)
    };
    let ended: Vec<_> = std::thread::scope(|scope| {
        let attempt = &attempt;
        let threads: Vec<_> =
            (0..).zip(ends).map(|(rank, end)| scope.spawn(move || attempt(rank, end))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let mut seen = Vec::new();
    for (rank, end) in ended.into_iter().enumerate() {
        let broke = || Failure::Run(anyhow::anyhow!("rank {rank} broke while it was timed"));
        seen.push(end.map_err(|_| broke())??);
    }
    let of_case = |at: usize| {
        let of_ranks: Vec<&Seen> = seen.iter().filter_map(|cases| cases.get(at)).collect();
        times(&cases[at], &of_ranks)
    };
    Ok((0..cases.len()).map(of_case).collect())
}

/// Takes part in a case.
fn see(wire: &mut dyn Wire, case: &Case<'_>, stage: Stage) -> Result<Seen, ExecError> {
    let (before, members) = (case.before, stage.members);
    match case.collective {
        None if wire.rank().0 > 1 => Ok(Seen::Nothing),
        None if stage.both_ways => probe::message(wire, &case.timing).map(Seen::Time),
        None => probe::delivery(wire, &case.timing, before).map(Seen::Laps),
        Some(_) if wire.rank().0 >= members => Ok(Seen::Nothing),
        Some(Asked { kind, algorithm, .. }) => {
            probe::collective(wire, kind, algorithm, members, &case.timing, before).map(Seen::Laps)
        }
    }
}

/// The time of every lap: what the ranks spent on it on average, from when all of them were there.
/// Who sends a message need not wait until somebody is there to take it.
fn times(case: &Case<'_>, seen: &[&Seen]) -> Vec<f64> {
    let mut laps: Vec<&[Lap]> = Vec::new();
    for seen in seen {
        match seen {
            Seen::Time(time) => return vec![time.0],
            Seen::Laps(own) => laps.push(own),
            Seen::Nothing => {}
        }
    }
    let count = laps.iter().map(|own| own.len()).min().unwrap_or(0);
    let lap = |number: usize| {
        let of_ranks = || laps.iter().map(|own| own[number]);
        let all_there = match case.collective {
            Some(_) => of_ranks().map(|lap| lap.came).fold(f64::MIN, f64::max),
            None => f64::MIN,
        };
        of_ranks().map(|lap| lap.spent_after(all_there)).sum::<f64>() / laps.len().max(1) as f64
    };
    (0..count).map(lap).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transport_carries_every_case() {
        let sweep = Sweep::new(2, 1 << 20);
        for transport in Transport::ALL {
            for setting in Setting::ALL {
                let before = Before::Sweep(&sweep);
                let mut cases = cases(transport, 2, true, (setting, true), before);
                cases.iter_mut().for_each(|case| {
                    (case.timing.laps, case.timing.bytes) = (1, case.timing.bytes.min(1 << 16));
                });
                let both_ways = setting == Setting::Warm;
                let stage = Stage { both_ways, members: 2, apart: false };
                let times = world(transport, 3, &cases, stage).unwrap();
                assert_eq!(times.len(), cases.len());
                let all = times.iter().flatten();
                assert!(all.into_iter().all(|&time| time > 0.0), "{transport:?} {setting:?}");
            }
        }
    }

    #[test]
    fn an_exchange_begins_when_the_last_rank_is_there() {
        let timing =
            Timing { bytes: 64, laps: 1, channel: 0, patience: PATIENCE, clock: Instant::now() };
        let (kind, algorithm) = (CollectiveKind::AllReduce, Algorithm::Ring);
        let asked = Asked { kind, algorithm, resolved: algorithm };
        let first = Seen::Laps(vec![Lap { came: 1.0, waited: Some((1.5, 4.0)), left: 6.0 }]);
        let last = Seen::Laps(vec![Lap { came: 3.0, waited: None, left: 7.0 }]);
        let seen = [&first, &last, &Seen::Nothing];
        let before = Before::Nothing;
        let collective = Case { collective: Some(asked), timing, before };
        assert_eq!(times(&collective, &seen), [(2.0 + 4.0) / 2.0]);
        let message = Case { collective: None, timing, before };
        assert_eq!(times(&message, &seen), [(2.5 + 4.0) / 2.0]);
        assert_eq!(Setting::Crowded.sum_up(vec![1.0, 1.0, 7.0]), Seconds(3.0));
        assert_eq!(Setting::Cold.sum_up(vec![1.0, 1.0, 7.0]), Seconds(1.0));
    }
}
