//! Measurements of a machine, and their interpolation to other shapes.
//!
//! `paceline calibrate` writes them into the cluster file. If a table has a kernel or an exchange,
//! it replaces the model; the rest of the description still covers everything else.
//!
//! **Interpolation.** A sample gives the time of one shape. The cost of another shape is its
//! neighbours' time per unit of work (an operation, or a byte). It is an inverse-distance mean
//! (Shepard, "A two-dimensional interpolation function for irregularly-spaced data", 1968) of the
//! logarithm of the cost, over the logarithms of the shape's sizes. A shape beyond all samples has
//! the cost per unit of the nearest point on their boundary.
//!
//! **Caches.** Every kernel was timed twice: with warm and with cold operands.
//! [`Measured::coldness`] places an operand between the two, by the bytes touched since its last
//! use. That relation is also measured, with kernels that run after others ([`CacheDecay`]):
//! prefetching hides part of a copy's cost, but not of theirs.
//!
//! **CPU load.** Both were measured with one rank, and with one rank on every core.

use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, CollectiveKind};
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use serde::Serialize;

/// Measurements of one host.
///
/// A parsed table has at least one core, samples with positive finite times and work, and curves
/// that are not empty and increase in their first column.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Number of ranks of a host that can compute at once. Additional ranks share the cores.
    pub cores: u32,
    /// Number of compute threads per rank; if absent, the cores divided by the ranks.
    pub threads: Option<u32>,
    /// Core round trip at the time of the measurements.
    pub core_round_trip: Option<Seconds>,
    /// Overhead per op in addition to its work: scheduling, time stamps, buffer lookup.
    pub op_overhead: Seconds,
    /// Overhead per exchange with other ranks.
    pub exchange_overhead: Seconds,
    /// Load time per token of a microbatch.
    pub load_time_per_token: Seconds,
    /// Memory bandwidth, for one core and for all cores at once.
    pub memory: Memory,
    /// Kernel times by shape.
    pub kernels: Vec<KernelTable>,
    /// Cache decay while ranks compute; if absent, `memory` is used.
    pub cache_decay: Vec<CacheDecay>,
    /// Rank skew on all cores: extra time of the slowest over the fastest rank for the same work,
    /// as a fraction of the latter.
    pub rank_skew: f64,
    /// Transports; the first one is used.
    pub transports: Vec<TransportTable>,
}

/// Copy bandwidth by size of the working set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// Copy bandwidth by repeatedly touched bytes.
    pub copy_bandwidth: Vec<CopyRate>,
}

/// Bandwidth of copying one half of a working set onto the other, reads plus writes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CopyRate {
    /// Bytes of both halves.
    pub bytes: Bytes,
    /// Bandwidth of one core alone.
    pub solo: BytesPerSec,
    /// Bandwidth per core with all cores active.
    pub all_cores: BytesPerSec,
}

/// Times of one kernel on several shapes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelTable {
    /// Name, as given by [`crate::compute::kernel`].
    pub name: String,
    /// Dtype of its elements.
    pub dtype: DType,
    /// Number of compute threads per rank.
    pub threads: u32,
    /// The samples.
    pub samples: Vec<Sample>,
}

/// Time of a kernel on one shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// Sizes that the time depends on; the same number in all samples of a table.
    pub shape: Vec<u64>,
    /// Operations or bytes, depending on the kernel.
    pub work: f64,
    /// Time with one rank active.
    pub solo: WarmCold,
    /// Time with a rank on every core.
    pub all_cores: WarmCold,
}

/// A kernel's time by location of its operands.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WarmCold {
    /// Operands in cache, as far as they fit.
    pub warm: Seconds,
    /// Operands in memory.
    pub cold: Seconds,
}

/// Exchange times over one transport.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TransportTable {
    /// Name on the command line.
    pub name: String,
    /// Time of a message between two ranks, from the moment both are ready.
    pub messages: Vec<ExchangeSample>,
    /// Times of whole collectives.
    pub collectives: Vec<CollectiveTable>,
}

/// Times of one collective among `ranks` ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CollectiveTable {
    /// Kind of collective.
    pub kind: CollectiveKind,
    /// The algorithm.
    #[serde(serialize_with = "by_name")]
    pub algorithm: Algorithm,
    /// Number of ranks.
    pub ranks: u32,
    /// Times by bytes of the whole vector.
    pub times: Vec<ExchangeSample>,
}

/// Number of bytes and the time to move them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExchangeSample {
    /// Bytes.
    pub bytes: Bytes,
    /// Time of back-to-back exchanges, with data still in the caches from the previous one.
    pub warm: Seconds,
    /// Time between ranks that have worked on other memory since, if measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold: Option<Seconds>,
    /// The same as `warm` under CPU oversubscription with every core computing, if measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_oversubscribed: Option<Seconds>,
}

/// Cache decay after a rank has touched `bytes` other bytes, as fractions of the refetch cost when
/// everything is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CacheDecay {
    /// Bytes touched by computing.
    pub bytes: Bytes,
    /// Fraction for a kernel's operands and its other state, with one rank active.
    pub solo: f64,
    /// The same with a rank on every core.
    pub all_cores: f64,
    /// Fraction for the path of an exchange: transport state and code.
    pub path: f64,
    /// Fraction for the data of an exchange of at most [`SMALL`](Self::SMALL) bytes.
    pub small_data: f64,
    /// Fraction for the data of an exchange of at least [`LARGE`](Self::LARGE) bytes.
    pub large_data: f64,
}

impl CacheDecay {
    /// Size of a vector that fits into a core's own cache.
    pub const SMALL: u64 = 128 << 10;
    /// Size of a vector that never fits.
    pub const LARGE: u64 = 4 << 20;

    /// Fraction for the data of an exchange of `bytes` bytes.
    pub fn data(&self, bytes: f64) -> f64 {
        let [small, large] = [Self::SMALL, Self::LARGE].map(|bytes| (bytes as f64).ln());
        let way = ((bytes.max(1.0).ln() - small) / (large - small)).clamp(0.0, 1.0);
        self.small_data + way * (self.large_data - self.small_data)
    }
}

/// Exchange time by cache state and CPU load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExchangeTimes {
    /// Time with everything it touches in cache.
    pub warm: Seconds,
    /// Additional time if its path (transport state and code) is cold.
    pub cold_path: Seconds,
    /// Additional time if its data is cold.
    pub cold: Seconds,
    /// Additional scheduling delay under CPU oversubscription with every core computing. If not
    /// measured, equal to `warm`, which corresponds to a fair share of the cores.
    pub sched_delay: Seconds,
}

fn by_name<S: serde::Serializer>(algorithm: &Algorithm, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&algorithm.to_string())
}

/// Number of active ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoreLoad {
    /// One rank.
    Solo,
    /// One rank on every core.
    AllCores,
}

impl Measured {
    /// Table of a kernel for a dtype and number of threads: the measured one with the most threads,
    /// but at most `threads`.
    pub fn kernel(&self, name: &str, dtype: DType, threads: u32) -> Option<&KernelTable> {
        let same = self.kernels.iter().filter(|t| t.name == name && t.dtype == dtype);
        same.filter(|t| t.threads <= threads.max(1)).max_by_key(|t| t.threads)
    }

    /// Evicted fraction (0 to 1) of an exchange's path or data, after each of `ranks` ranks has
    /// touched `distance` other bytes.
    ///
    /// In a shared cache, the bytes of other ranks count too; cache decay was measured with a rank
    /// on every core.
    pub fn evicted(&self, of: impl Fn(&CacheDecay) -> f64, distance: f64, ranks: f64) -> f64 {
        let others = (ranks / f64::from(self.cores.max(1))).max(1.0);
        let aged = self.decay_at(of, distance * others);
        aged.unwrap_or_else(|| self.memory.coldness(distance * others, CoreLoad::AllCores))
    }

    /// Coldness of a kernel's operand, from 0 (in the nearest cache) to 1 (in memory), by the bytes
    /// touched since its last use.
    pub fn coldness(&self, distance: f64, company: CoreLoad) -> f64 {
        let aged = match company {
            CoreLoad::Solo => self.decay_at(|aged| aged.solo, distance),
            CoreLoad::AllCores => self.decay_at(|aged| aged.all_cores, distance),
        };
        aged.unwrap_or_else(|| self.memory.coldness(distance, company))
    }

    /// Interpolates the cache decay at `distance`; `None` if it was not measured.
    fn decay_at(&self, of: impl Fn(&CacheDecay) -> f64, distance: f64) -> Option<f64> {
        let place = |aged: &CacheDecay| aged.bytes.as_f64();
        let after = self.cache_decay.partition_point(|aged| place(aged) < distance);
        let before = after.checked_sub(1).and_then(|before| self.cache_decay.get(before));
        match (before, self.cache_decay.get(after)) {
            (Some(from), Some(to)) => {
                let way = (distance / place(from)).ln() / (place(to) / place(from)).ln();
                Some(of(from) + way * (of(to) - of(from)))
            }
            (None, Some(first)) => Some(of(first) * distance / place(first)),
            (last, None) => last.map(&of),
        }
    }

    /// Number of compute threads per rank with `ranks` ranks on a host.
    pub fn threads_of(&self, ranks: u64) -> u32 {
        let shared_out = || u64::from(self.cores) / ranks.max(1);
        self.threads.unwrap_or_else(|| u32::try_from(shared_out()).unwrap_or(1)).max(1)
    }

    /// Selects a transport; returns false if it was not measured.
    pub fn select_transport(&mut self, transport: &str) -> bool {
        let at = self.transports.iter().position(|wire| wire.name == transport);
        if let Some(at) = at {
            self.transports.swap(0, at);
        }
        at.is_some()
    }
}

impl Memory {
    /// Coldness of an operand, from 0 (in the nearest cache) to 1 (in memory), by the bytes touched
    /// since its last use.
    pub fn coldness(&self, distance: f64, company: CoreLoad) -> f64 {
        let cost = |rate: &CopyRate| match company {
            CoreLoad::Solo => 1.0 / rate.solo.0,
            CoreLoad::AllCores => 1.0 / rate.all_cores.0,
        };
        let points = self.copy_bandwidth.iter().map(|rate| (rate.bytes.as_f64(), cost(rate)));
        let points: Vec<(f64, f64)> = points.collect();
        let costs = || points.iter().map(|&(_, cost)| cost);
        let (least, most) = (costs().fold(f64::MAX, f64::min), costs().fold(0.0, f64::max));
        if most <= least {
            return 0.0;
        }
        ((between(&points, distance.max(1.0)) - least) / (most - least)).clamp(0.0, 1.0)
    }
}

impl KernelTable {
    /// Warm and cold time of a shape with this work; `None` without samples of such shapes.
    pub fn time(&self, shape: &[u64], work: f64, company: CoreLoad) -> Option<WarmCold> {
        let samples = || self.samples.iter().filter(|sample| sample.shape.len() == shape.len());
        let log = |size: u64| (size.max(1) as f64).ln();
        // Beyond the samples, the nearest point among them is used.
        let place: Vec<f64> = (0..shape.len())
            .map(|axis| {
                let sizes = samples().map(|sample| log(sample.shape[axis]));
                let (least, most) =
                    sizes.fold((f64::MAX, f64::MIN), |(l, m), size| (l.min(size), m.max(size)));
                log(shape[axis]).clamp(least.min(most), most.max(least))
            })
            .collect();
        let (mut weights, mut warm, mut cold) = (0.0, 0.0, 0.0);
        for sample in samples() {
            let apart = sample.shape.iter().zip(&place);
            let square: f64 = apart.map(|(&size, at)| (log(size) - at).powi(2)).sum();
            // A tiny minimum distance keeps the weight of a sample's own shape finite.
            let weight = (square + 1e-9).powi(-2);
            let WarmCold { warm: w, cold: c } = match company {
                CoreLoad::Solo => sample.solo,
                CoreLoad::AllCores => sample.all_cores,
            };
            weights += weight;
            warm += weight * (w.0 / sample.work).ln();
            cold += weight * (c.0 / sample.work).ln();
        }
        let time = |sum: f64| Seconds((sum / weights).exp() * work);
        (weights > 0.0).then(|| WarmCold { warm: time(warm), cold: time(cold) })
    }
}

impl TransportTable {
    /// Time of a message.
    pub fn message(&self, bytes: Bytes) -> Option<Seconds> {
        exchange(&self.messages, bytes)
    }

    /// Time of a collective on a vector of `bytes` bytes among `ranks` ranks, if measured.
    pub fn collective(
        &self,
        kind: CollectiveKind,
        algorithm: Algorithm,
        ranks: u32,
        bytes: Bytes,
    ) -> Option<Seconds> {
        exchange(self.times(kind, algorithm, ranks)?, bytes)
    }

    /// Times of a message by condition.
    pub fn message_times(&self, bytes: Bytes) -> Option<ExchangeTimes> {
        exchange_times(&self.messages, bytes)
    }

    /// Times of a collective by condition, if measured.
    pub fn collective_times(
        &self,
        kind: CollectiveKind,
        algorithm: Algorithm,
        ranks: u32,
        bytes: Bytes,
    ) -> Option<ExchangeTimes> {
        exchange_times(self.times(kind, algorithm, ranks)?, bytes)
    }

    fn times(
        &self,
        kind: CollectiveKind,
        algorithm: Algorithm,
        ranks: u32,
    ) -> Option<&[ExchangeSample]> {
        let same =
            |t: &&CollectiveTable| (t.kind, t.algorithm, t.ranks) == (kind, algorithm, ranks);
        self.collectives.iter().find(same).map(|table| table.times.as_slice())
    }
}

/// Times of an exchange by condition.
fn exchange_times(times: &[ExchangeSample], bytes: Bytes) -> Option<ExchangeTimes> {
    let warm = exchange(times, bytes)?;
    let over = |of: fn(&ExchangeSample) -> Option<Seconds>, bytes: Bytes| {
        let known = times.iter().filter_map(|e| Some(ExchangeSample { warm: of(e)?, ..*e }));
        let known: Vec<ExchangeSample> = known.collect();
        let base = exchange(times, bytes).unwrap_or(Seconds::ZERO);
        exchange(&known, bytes).map(|time| (time - base).max(Seconds::ZERO))
    };
    let cold = |bytes| over(|e| e.cold, bytes).unwrap_or(Seconds::ZERO);
    let whole = cold(bytes);
    // The smallest exchange moves hardly any data.
    let least = times.first().map_or(whole, |least| cold(least.bytes));
    let unready = Seconds(least.0.min(whole.0));
    let turns = over(|e| e.cpu_oversubscribed, bytes).unwrap_or(warm);
    Some(ExchangeTimes { warm, cold_path: unready, cold: whole - unready, sched_delay: turns })
}

/// Time by bytes; beyond the largest sample, at its rate.
fn exchange(times: &[ExchangeSample], bytes: Bytes) -> Option<Seconds> {
    let last = times.last()?;
    if bytes > last.bytes {
        return Some(last.warm * (bytes.as_f64() / last.bytes.as_f64().max(1.0)));
    }
    let points: Vec<_> = times.iter().map(|e| (e.bytes.as_f64(), e.warm.0)).collect();
    Some(Seconds(between(&points, bytes.as_f64().max(1.0))))
}

/// Log-log linear interpolation of a curve; constant beyond its points.
fn between(points: &[(f64, f64)], at: f64) -> f64 {
    let after = points.partition_point(|&(x, _)| x < at);
    match (after.checked_sub(1).and_then(|before| points.get(before)), points.get(after)) {
        (Some(&(x0, y0)), Some(&(x1, y1))) if x1 > x0 => {
            let share = (at / x0).ln() / (x1 / x0).ln();
            (y0.ln() + share * (y1 / y0).ln()).exp()
        }
        (_, Some(&(_, y))) | (Some(&(_, y)), None) => y,
        (None, None) => 0.0,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seconds(warm: f64, cold: f64) -> WarmCold {
        WarmCold { warm: Seconds(warm), cold: Seconds(cold) }
    }

    /// A machine of two cores whose GEMMs run at 1 GFLOP/s, half of that from memory.
    pub(crate) fn two_cores() -> Measured {
        let sample = |shape: [u64; 3]| {
            let work = 2.0 * shape.iter().product::<u64>() as f64;
            let (warm, cold) = (work * 1e-9, work * 2e-9);
            let (alone, together) = (seconds(warm, cold), seconds(warm, 2.0 * cold));
            Sample { shape: shape.to_vec(), work, solo: alone, all_cores: together }
        };
        let products = KernelTable {
            name: "linear.forward".into(),
            dtype: DType::F32,
            threads: 1,
            samples: [[32, 64, 64], [32, 64, 256], [256, 64, 64], [256, 256, 256]]
                .map(sample)
                .to_vec(),
        };
        let rate = |bytes, alone, together| CopyRate {
            bytes: Bytes(bytes),
            solo: BytesPerSec(alone),
            all_cores: BytesPerSec(together),
        };
        let exchanges = |latency: f64| {
            [64, 4096, 1 << 20]
                .map(|bytes| {
                    let time = Seconds(latency + bytes as f64 * 1e-9);
                    let cold = Some(time + Seconds(3e-5 + bytes as f64 * 2e-9));
                    ExchangeSample {
                        bytes: Bytes(bytes),
                        warm: time,
                        cold,
                        cpu_oversubscribed: Some(time * 10.0),
                    }
                })
                .to_vec()
        };
        let all_reduce = CollectiveTable {
            kind: CollectiveKind::AllReduce,
            algorithm: Algorithm::HalvingDoubling,
            ranks: 2,
            times: exchanges(2e-5),
        };
        Measured {
            cores: 2,
            threads: None,
            core_round_trip: None,
            op_overhead: Seconds(5e-7),
            exchange_overhead: Seconds(1e-6),
            load_time_per_token: Seconds(2e-8),
            memory: Memory {
                copy_bandwidth: vec![
                    rate(1 << 16, 64e9, 64e9),
                    rate(1 << 20, 32e9, 32e9),
                    rate(1 << 26, 8e9, 4e9),
                ],
            },
            kernels: vec![products],
            cache_decay: Vec::new(),
            rank_skew: 0.0,
            transports: vec![
                TransportTable {
                    name: "thread".into(),
                    messages: exchanges(1e-5),
                    collectives: vec![all_reduce],
                },
                TransportTable {
                    name: "tcp".into(),
                    messages: exchanges(1e-4),
                    collectives: Vec::new(),
                },
            ],
        }
    }

    #[test]
    fn a_sampled_shape_takes_what_it_took() {
        let machine = two_cores();
        let table = machine.kernel("linear.forward", DType::F32, 9).unwrap();
        for sample in &table.samples {
            let time = table.time(&sample.shape, sample.work, CoreLoad::AllCores).unwrap();
            assert!((time.cold.0 / sample.all_cores.cold.0 - 1.0).abs() < 1e-6);
        }
        assert_eq!(machine.kernel("linear.forward", DType::Bf16, 1), None);
        assert_eq!(table.time(&[1, 2], 4.0, CoreLoad::Solo), None);
    }

    #[test]
    fn beyond_the_samples_the_nearest_cost_holds() {
        let machine = two_cores();
        let table = machine.kernel("linear.forward", DType::F32, 0).unwrap();
        for shape in [[1, 1, 1], [u64::MAX, 1, u64::MAX], [0, 0, 0], [4096, 4096, 4096]] {
            let time = table.time(&shape, 1e6, CoreLoad::Solo).unwrap();
            assert!((time.warm.0 - 1e-3).abs() < 1e-9, "{shape:?}: {time:?}");
        }
    }

    #[test]
    fn coldness_follows_the_copies() {
        let memory = two_cores().memory;
        assert_eq!(memory.coldness(0.0, CoreLoad::Solo), 0.0);
        assert_eq!(memory.coldness(1e12, CoreLoad::Solo), 1.0);
        let middle = memory.coldness((1 << 20) as f64, CoreLoad::Solo);
        assert!((middle - 1.0 / 7.0).abs() < 1e-9, "{middle}");
        let flat = Memory { copy_bandwidth: vec![memory.copy_bandwidth[0]] };
        assert_eq!(flat.coldness(1e9, CoreLoad::AllCores), 0.0);
    }

    #[test]
    fn caches_lose_by_what_all_ranks_touch() {
        let machine = two_cores();
        let lost = |bytes: f64, ranks| machine.evicted(|aged| aged.small_data, bytes, ranks);
        assert_eq!(lost(0.0, 2.0), 0.0);
        let some = lost((1 << 20) as f64, 2.0);
        assert_eq!(some, machine.memory.coldness((1 << 20) as f64, CoreLoad::AllCores));
        assert!(some > 0.0 && lost((1 << 20) as f64, 4.0) > some);
        assert_eq!(lost((1 << 20) as f64, 1.0), some, "a core may stay empty");
        assert_eq!(lost(f64::INFINITY, 1.0), 1.0);
    }

    #[test]
    fn caches_lose_by_and_by() {
        let aged = |bytes, wires, vectors| {
            let (alone, together, small, large) = (0.5 * vectors, vectors, vectors, 0.0);
            CacheDecay {
                bytes: Bytes(bytes),
                solo: alone,
                all_cores: together,
                path: wires,
                small_data: small,
                large_data: large,
            }
        };
        let aging = vec![aged(1 << 10, 0.2, 0.1), aged(1 << 20, 1.0, 0.5)];
        let machine = Measured { cache_decay: aging, ..two_cores() };
        let vectors = |bytes: u64| machine.evicted(|aged| aged.data(64.0), bytes as f64, 2.0);
        assert_eq!([0, 1 << 9, 1 << 10, 1 << 20, 1 << 30].map(vectors), [0.0, 0.05, 0.1, 0.5, 0.5]);
        assert!((vectors(1 << 15) - 0.3).abs() < 1e-12, "{}", vectors(1 << 15));
        assert_eq!(machine.evicted(|aged| aged.path, 1024.0, 2.0), 0.2);
        assert_eq!(
            machine.evicted(|aged| aged.small_data, 512.0, 4.0),
            0.1,
            "ranks that take turns"
        );
        let half = ((CacheDecay::SMALL * CacheDecay::LARGE) as f64).sqrt();
        assert!((machine.cache_decay[1].data(half) - 0.25).abs() < 1e-12);
        assert_eq!(machine.coldness(1024.0, CoreLoad::AllCores), 0.1);
        assert_eq!(machine.coldness(1024.0, CoreLoad::Solo), 0.05);
    }

    #[test]
    fn the_chosen_wire_answers() {
        let mut machine = two_cores();
        assert!(machine.select_transport("tcp") && !machine.select_transport("mpi"));
        assert_eq!(machine.transports[0].name, "tcp");
        let wire = &machine.transports[1];
        let (kind, two) = (CollectiveKind::AllReduce, Algorithm::HalvingDoubling);
        assert_eq!(wire.collective(kind, Algorithm::Ring, 2, Bytes(64)), None);
        assert_eq!(wire.collective(kind, two, 4, Bytes(64)), None);
        let large = wire.collective(kind, two, 2, Bytes(2 << 20)).unwrap();
        assert!((large.0 - 2.0 * (2e-5 + (1 << 20) as f64 * 1e-9)).abs() < 1e-9);
    }

    #[test]
    fn what_comes_on_top_of_an_exchange_is_told_apart() {
        let machine = two_cores();
        let wire = &machine.transports[0];
        let large = Bytes(1 << 20);
        let ExchangeTimes { warm, cold_path: unready, cold, sched_delay: turns } =
            wire.message_times(large).unwrap();
        assert_eq!(warm, wire.message(large).unwrap());
        assert!((unready.0 - 3e-5).abs() < 1e-6, "{unready:?}");
        assert!((cold.0 / (2e-9 * large.as_f64()) - 1.0).abs() < 1e-3, "{cold:?}");
        assert!((turns.0 / warm.0 - 9.0).abs() < 1e-9);
        // An older file has neither value.
        let old =
            |e: &ExchangeSample| ExchangeSample { cold: None, cpu_oversubscribed: None, ..*e };
        let old: Vec<ExchangeSample> = wire.messages.iter().map(old).collect();
        let plain = exchange_times(&old, large).unwrap();
        assert_eq!((plain.cold_path, plain.cold), (Seconds::ZERO, Seconds::ZERO));
        assert_eq!((plain.warm, plain.sched_delay), (warm, warm));
        assert_eq!(exchange_times(&[], large), None);
    }

    proptest! {
        /// An interpolated cost is between the smallest and the largest of the samples.
        #[test]
        fn costs_stay_among_those_measured(
            costs in proptest::collection::vec((1u64..4096, 1u64..4096, 1e-12..1e-6f64), 1..12),
            shape in (1u64..1 << 40, 1u64..1 << 40),
        ) {
            let samples = costs.iter().map(|&(a, b, cost)| {
                let (work, time) = (1e3, seconds(cost * 1e3, cost * 2e3));
                Sample { shape: vec![a, b], work, solo: time, all_cores: time }
            });
            let table =
                KernelTable { name: "x".into(), dtype: DType::F32, threads: 1, samples: samples.collect() };
            let time = table.time(&[shape.0, shape.1], 1.0, CoreLoad::Solo).unwrap().warm.0;
            let least = costs.iter().map(|c| c.2).fold(f64::MAX, f64::min);
            let most = costs.iter().map(|c| c.2).fold(0.0, f64::max);
            prop_assert!(time >= least * 0.999_999 && time <= most * 1.000_001);
        }

        /// More bytes never take less time if the samples are monotonic.
        #[test]
        fn larger_messages_take_longer(a in 0u64..1 << 40, b in 0u64..1 << 40) {
            let wire = &two_cores().transports[0];
            let time = |bytes: u64| wire.message(Bytes(bytes)).unwrap().0;
            prop_assert!(time(a.min(b)) <= time(a.max(b)));
        }
    }
}
