//! Times exchanges over every transport, between ranks that are threads of this process.

use super::core_placement::PlacementMonitor;
use super::{Report, Request};
use crate::failure::Failure;
use paceline_comm::{LocalWorld, Transport as Wire, TransportKind, affinity};
use paceline_exec::ExecError;
use paceline_exec::probe::{self, BackgroundLoad, CacheFlush, CachePrep, Lap, Timing};
use paceline_plan::collective::{Algorithm, CollectiveKind, SummationOrder, resolve};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::cluster::measured::{CollectiveTable, ExchangeSample, TransportTable as Table};
use std::time::{Duration, Instant};

/// Measured transports, starting with the one that training uses.
pub(crate) const TRANSPORTS: [TransportKind; 3] =
    [TransportKind::Shm, TransportKind::Thread, TransportKind::Tcp];

const TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes of the timed messages and vectors.
const SIZES: [usize; 8] = [64, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];

/// Collectives that a run uses, and their possible algorithms.
const COLLECTIVES: [(CollectiveKind, &[Algorithm]); 4] = [
    (
        CollectiveKind::AllReduce,
        &[Algorithm::Auto, Algorithm::Ring, Algorithm::Direct, Algorithm::SharedMemory],
    ),
    (CollectiveKind::ReduceScatter, &[Algorithm::Auto, Algorithm::SharedMemory]),
    (CollectiveKind::AllGather, &[Algorithm::Auto, Algorithm::SharedMemory]),
    (CollectiveKind::Broadcast, &[Algorithm::Auto]),
];

/// One exchange to time on every rank of a world.
#[derive(Clone, Copy)]
struct Case<'a> {
    collective: Option<Asked>,
    timing: Timing,
    /// Cache state before each exchange.
    before: CachePrep<'a>,
}

/// Conditions under which exchanges are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    /// Back to back.
    Warm,
    /// Each after work on other memory.
    Cold,
    /// Back to back, with every core also computing, in a world of more ranks than cores.
    CpuOversubscribed,
}

impl Setting {
    const ALL: [Self; 3] = [Self::Warm, Self::Cold, Self::CpuOversubscribed];

    /// Number of laps for `bytes` bytes: enough that a few more would change little.
    fn laps(self, bytes: usize, quick: bool) -> u32 {
        match (self, quick) {
            (Self::Warm, _) => {
                let budget = if quick { 8 << 20 } else { 16 << 20 };
                (budget / bytes).clamp(4, if quick { 40 } else { 64 }) as u32
            }
            // Flushing the caches takes longer than the exchange.
            (Self::Cold, false) => 5,
            // Scheduling delays are random: some laps wait for many time slices, some for none. A
            // large exchange waits for many in one lap.
            (Self::CpuOversubscribed, false) => {
                if bytes > 1 << 20 {
                    3
                } else {
                    10
                }
            }
            (Self::Cold | Self::CpuOversubscribed, true) => 3,
        }
    }

    /// Summarises the lap times. With oversubscribed cores, rare long scheduling delays count, so
    /// it is the mean. Otherwise other processes cause them, so it is the median.
    fn sum_up(self, mut times: Vec<f64>) -> Seconds {
        times.sort_unstable_by(f64::total_cmp);
        let time = match self {
            Self::Warm | Self::Cold => times.get(times.len() / 2).copied().unwrap_or(0.0),
            Self::CpuOversubscribed => times.iter().sum::<f64>() / times.len().max(1) as f64,
        };
        // A coarse clock may report zero.
        Seconds(time.max(1e-9))
    }
}

/// Settings shared by the ranks of a timed world.
#[derive(Clone, Copy)]
struct WorldSetup {
    /// True if messages are timed as a round trip.
    both_ways: bool,
    /// Number of ranks that take part.
    members: u32,
    /// True if each rank is pinned to dedicated cores, as in training.
    dedicated_cores: bool,
}

/// A rank's measurement of a case.
enum Seen {
    /// The time of a message.
    Time(Seconds),
    /// The laps of every exchange.
    Laps(Vec<Lap>),
    /// Nothing: the rank did not take part in the case.
    Nothing,
}

/// A collective and the algorithm that is executed.
#[derive(Clone, Copy, PartialEq)]
struct Asked {
    kind: CollectiveKind,
    algorithm: Algorithm,
}

/// Times an all-reduce of each size after each cache preparation; `None` if ranks exchange nothing.
pub(super) fn cache_decay(
    request: &Request,
    steady: &PlacementMonitor<'_>,
    sizes: &[usize],
    before: &[CachePrep<'_>],
) -> Result<Option<Vec<Vec<Seconds>>>, Failure> {
    let ranks = request.ranks.iter().copied().find(|&ranks| ranks > 1);
    let Some((ranks, &transport)) = ranks.zip(request.transports.first()) else { return Ok(None) };
    // As training does it.
    let kind = CollectiveKind::AllReduce;
    let asked = match transport {
        TransportKind::Shm => Algorithm::SharedMemory,
        TransportKind::Auto | TransportKind::Thread | TransportKind::Tcp | TransportKind::Mpi => {
            Algorithm::Auto
        }
    };
    let Ok(algorithm) = resolve(kind, asked, ranks, SummationOrder::Canonical) else {
        return Ok(None);
    };
    let clock = Instant::now();
    let case = |(channel, (&bytes, &before))| {
        let laps = Setting::Cold.laps(bytes, request.quick);
        let timing = Timing { bytes, laps, channel, timeout: TIMEOUT, clock };
        Case { collective: Some(Asked { kind, algorithm }), timing, before }
    };
    let all = sizes.iter().flat_map(|bytes| before.iter().map(move |before| (bytes, before)));
    let cases: Vec<Case<'_>> = (0..).step_by(2).zip(all).map(case).collect();
    let dedicated_cores = transport != TransportKind::Thread && ranks <= request.all_cores();
    let stage = WorldSetup { both_ways: false, members: ranks, dedicated_cores };
    let mut times = Vec::with_capacity(cases.len());
    for some in cases.chunks(before.len().max(1)) {
        let seen = steady.measure(|| world(transport, ranks, some, stage))?;
        times.push(seen.into_iter().map(|laps| Setting::Cold.sum_up(laps)).collect());
    }
    Ok(Some(times))
}

/// Exchanges over every transport, and their times in every round.
pub(super) struct ExchangeSuite<'a> {
    request: &'a Request,
    steady: &'a PlacementMonitor<'a>,
    series: Vec<Series<'a>>,
}

/// Exchanges of the same ranks in the same setting.
struct Series<'a> {
    transport: TransportKind,
    ranks: u32,
    setting: Setting,
    cases: Vec<Case<'a>>,
    /// Seconds of each case, by round.
    times: Vec<Vec<f64>>,
}

impl<'a> ExchangeSuite<'a> {
    pub(super) fn new(
        request: &'a Request,
        steady: &'a PlacementMonitor<'a>,
        sweep: &'a CacheFlush,
    ) -> Self {
        let counts: Vec<u32> = request.ranks.iter().copied().filter(|&ranks| ranks > 1).collect();
        let mut series = Vec::new();
        for &transport in &request.transports {
            for (nth, &ranks) in counts.iter().enumerate() {
                for setting in Setting::ALL {
                    let before = match setting {
                        Setting::Cold => CachePrep::Flush(sweep),
                        Setting::Warm | Setting::CpuOversubscribed => CachePrep::Warm,
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

    /// Times every exchange once more. If the usual core placement has changed, discards all
    /// earlier times and measures again.
    pub(super) fn round(&mut self, tell: Report<'_>) -> Result<(), Failure> {
        self.pass(tell)?;
        if self.steady.has_changed() {
            let times = self.series.iter_mut().flat_map(|series| &mut series.times);
            times.for_each(Vec::clear);
            self.pass(tell)?;
        }
        Ok(())
    }

    fn pass(&mut self, tell: Report<'_>) -> Result<(), Failure> {
        let (cores, steady) = (self.request.all_cores(), self.steady);
        let parts = self.series.len() as f64;
        for (nth, series) in self.series.iter_mut().enumerate() {
            let next = format!("{} between {} ranks", series.transport.name(), series.ranks);
            tell(nth as f64 / parts, &next)?;
            series.round(cores, steady)?;
        }
        Ok(())
    }

    /// One table per transport.
    pub(super) fn tables(&self) -> Vec<Table> {
        let mut tables: Vec<Table> = Vec::new();
        for settings in self.series.chunks(Setting::ALL.len()) {
            let [warm, cold, oversubscribed] = settings else { continue };
            let transport = warm.transport.name();
            if tables.last().is_none_or(|table| table.name != transport) {
                let (messages, collectives) = (Vec::new(), Vec::new());
                tables.push(Table { name: transport.into(), messages, collectives });
            }
            let Some(table) = tables.last_mut() else { continue };
            for (at, case) in warm.cases.iter().enumerate() {
                let exchange = ExchangeSample {
                    bytes: Bytes(case.timing.bytes as u64),
                    warm: warm.mean(at),
                    cold: Some(cold.mean(at)),
                    cpu_oversubscribed: Some(oversubscribed.mean(at)),
                };
                match case.collective {
                    None => table.messages.push(exchange),
                    Some(Asked { kind, algorithm }) => {
                        add(&mut table.collectives, (kind, algorithm, warm.ranks), exchange);
                    }
                }
            }
        }
        tables
    }
}

impl Series<'_> {
    /// Times the cases in batches small enough that the core placement stays the same.
    fn round(&mut self, cores: u32, steady: &PlacementMonitor<'_>) -> Result<(), Failure> {
        let Self { transport, ranks, setting, .. } = *self;
        let oversubscribed = setting == Setting::CpuOversubscribed;
        // With more ranks than cores, ranks use another wait policy.
        let of = if oversubscribed { ranks.max(cores.saturating_add(1)) } else { ranks };
        let dedicated_cores = transport != TransportKind::Thread && of <= cores;
        let stage =
            WorldSetup { both_ways: setting == Setting::Warm, members: ranks, dedicated_cores };
        for (cases, times) in self.cases.chunks(AT_ONCE).zip(self.times.chunks_mut(AT_ONCE)) {
            let seen = steady.measure(|| {
                let _crowd = oversubscribed.then(|| BackgroundLoad::new(cores));
                world(transport, of, cases, stage)
            })?;
            for (times, laps) in times.iter_mut().zip(seen) {
                times.push(setting.sum_up(laps).0);
            }
        }
        Ok(())
    }

    /// Mean time of a case over the rounds.
    fn mean(&self, case: usize) -> Seconds {
        let times = &self.times[case];
        Seconds(times.iter().sum::<f64>() / times.len().max(1) as f64)
    }
}

/// Number of cases timed in one world, equal to the number of sizes.
const AT_ONCE: usize = SIZES.len();

fn add(
    tables: &mut Vec<CollectiveTable>,
    (kind, algorithm, ranks): (CollectiveKind, Algorithm, u32),
    exchange: ExchangeSample,
) {
    let same =
        |t: &&mut CollectiveTable| (t.kind, t.algorithm, t.ranks) == (kind, algorithm, ranks);
    match tables.iter_mut().find(same) {
        Some(table) => table.times.push(exchange),
        None => tables.push(CollectiveTable { kind, algorithm, ranks, times: vec![exchange] }),
    }
}

fn cases<'a>(
    transport: TransportKind,
    ranks: u32,
    messages: bool,
    (setting, quick): (Setting, bool),
    before: CachePrep<'a>,
) -> Vec<Case<'a>> {
    let mut kinds: Vec<Option<Asked>> = Vec::new();
    kinds.extend(messages.then_some(None));
    for (kind, algorithms) in COLLECTIVES {
        for &algorithm in algorithms {
            // Default training uses neither shared-memory without shm nor non-canonical sums.
            if algorithm == Algorithm::SharedMemory && transport != TransportKind::Shm {
                continue;
            }
            let Ok(resolved) = resolve(kind, algorithm, ranks, SummationOrder::Canonical) else {
                continue;
            };
            let asked = Some(Asked { kind, algorithm: resolved });
            if !kinds.contains(&asked) {
                kinds.push(asked);
            }
        }
    }
    let clock = Instant::now();
    let sizes = || SIZES.into_iter().filter(|&bytes| !quick || bytes <= 4 << 20);
    let all = kinds.into_iter().flat_map(|kind| sizes().map(move |bytes| (kind, bytes)));
    // Each case uses two channels.
    (0..)
        .step_by(2)
        .zip(all)
        .map(|(channel, (collective, bytes))| {
            let laps = setting.laps(bytes, quick);
            let timing = Timing { bytes, laps, channel, timeout: TIMEOUT, clock };
            Case { collective, timing, before }
        })
        .collect()
}

/// Runs every case on a world of `ranks` ranks; returns the lap times per case.
fn world(
    transport: TransportKind,
    ranks: u32,
    cases: &[Case<'_>],
    stage: WorldSetup,
) -> Result<Vec<Vec<f64>>, Failure> {
    let joined = LocalWorld::new(transport, ranks, TIMEOUT)?;
    let times = run(&joined, ranks, cases, stage)?;
    joined.join()?;
    Ok(times)
}

/// Runs the cases on one thread per rank; each thread creates its own transport.
fn run(
    world: &LocalWorld,
    ranks: u32,
    cases: &[Case<'_>],
    stage: WorldSetup,
) -> Result<Vec<Vec<f64>>, Failure> {
    let attempt = |rank: u32| {
        if stage.dedicated_cores {
            affinity::pin_to_share(rank, ranks);
        }
        let mut wire = world.connect(Rank(rank))?;
        let seen: Result<Vec<Seen>, ExecError> =
            cases.iter().map(|case| time_case(&mut *wire, case, stage)).collect();
        seen.map_err(Failure::from)
    };
    let ended: Vec<_> = std::thread::scope(|scope| {
        let attempt = &attempt;
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || attempt(rank))).collect();
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

/// Runs this rank's part of a case.
fn time_case(wire: &mut dyn Wire, case: &Case<'_>, stage: WorldSetup) -> Result<Seen, ExecError> {
    let (before, members) = (case.before, stage.members);
    match case.collective {
        None if wire.rank().0 > 1 => Ok(Seen::Nothing),
        None if stage.both_ways => probe::message(wire, &case.timing).map(Seen::Time),
        None => probe::delivery(wire, &case.timing, before).map(Seen::Laps),
        Some(_) if wire.rank().0 >= members => Ok(Seen::Nothing),
        Some(Asked { kind, algorithm }) => {
            probe::collective(wire, kind, algorithm, members, &case.timing, before).map(Seen::Laps)
        }
    }
}

/// The time of every lap: the ranks' mean time in it since the last rank arrived. For a message,
/// arrival is ignored: the sender need not wait for the receiver.
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
            Some(_) => of_ranks().map(|lap| lap.arrived).fold(f64::MIN, f64::max),
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
        let sweep = CacheFlush::new(2, 1 << 20);
        for transport in TRANSPORTS {
            for setting in Setting::ALL {
                let before = CachePrep::Flush(&sweep);
                let mut cases = cases(transport, 2, true, (setting, true), before);
                cases.iter_mut().for_each(|case| {
                    (case.timing.laps, case.timing.bytes) = (1, case.timing.bytes.min(1 << 16));
                });
                let both_ways = setting == Setting::Warm;
                let stage = WorldSetup { both_ways, members: 2, dedicated_cores: false };
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
            Timing { bytes: 64, laps: 1, channel: 0, timeout: TIMEOUT, clock: Instant::now() };
        let (kind, algorithm) = (CollectiveKind::AllReduce, Algorithm::Ring);
        let asked = Asked { kind, algorithm };
        let first = Seen::Laps(vec![Lap { arrived: 1.0, wait: Some((1.5, 4.0)), finished: 6.0 }]);
        let last = Seen::Laps(vec![Lap { arrived: 3.0, wait: None, finished: 7.0 }]);
        let seen = [&first, &last, &Seen::Nothing];
        let before = CachePrep::Warm;
        let collective = Case { collective: Some(asked), timing, before };
        assert_eq!(times(&collective, &seen), [(2.0 + 4.0) / 2.0]);
        let message = Case { collective: None, timing, before };
        assert_eq!(times(&message, &seen), [(2.5 + 4.0) / 2.0]);
        assert_eq!(Setting::CpuOversubscribed.sum_up(vec![1.0, 1.0, 7.0]), Seconds(3.0));
        assert_eq!(Setting::Cold.sum_up(vec![1.0, 1.0, 7.0]), Seconds(1.0));
    }
}
