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
            let distances = sample.shape.iter().zip(&place);
            let square: f64 = distances.map(|(&size, at)| (log(size) - at).powi(2)).sum();
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
pub(crate) mod tests;
