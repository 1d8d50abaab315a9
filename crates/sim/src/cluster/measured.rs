//! What was measured on a machine, and how it answers for shapes that were not.
//!
//! `paceline calibrate` writes it into the cluster file. Where a table has a kernel or an exchange,
//! it replaces the model; the rest of the description still answers for everything else.
//!
//! **Between samples.** A sample says what one shape took. Another shape is costed by the time per
//! unit of work (an operation, or a byte) of its neighbours: an inverse-distance mean (Shepard, "A
//! two-dimensional interpolation function for irregularly-spaced data", 1968) over the logarithms
//! of the shape's sizes, of the logarithm of the cost. A shape beyond all samples has the cost per
//! unit of the nearest place on their boundary.
//!
//! **Caches.** Every kernel was timed twice: on operands that it had just touched, and on operands
//! that had left all caches. [`Measured::coldness`] says where between the two an operand lies, from
//! how much was touched since it was last used. That is measured too, by kernels that run after others
//! ([`Aged`]): what prefetching hides of a copy is not hidden from them.
//!
//! **Neighbours.** And twice again: with one rank at work, and with as many as there are cores.

use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, CollectiveKind};
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use serde::Serialize;

/// What was measured on one host.
///
/// A parsed table has at least one core, samples with positive finite times and work, and curves
/// that are not empty and grow in their first column.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Ranks of a host that can compute at once. More of them take turns.
    pub cores: u32,
    /// Threads that compute for each rank; where absent, the cores shared out among the ranks.
    pub threads: Option<u32>,
    /// How long a word took from one core to another and back while all this was measured.
    pub apart: Option<Seconds>,
    /// What an op of a program costs beside its work: finding it, dating it, finding its buffers.
    pub per_op: Seconds,
    /// The same of an exchange with other ranks.
    pub per_exchange: Seconds,
    /// What bringing one token of a microbatch takes.
    pub per_token: Seconds,
    /// The memory, as one core and as all cores at once see it.
    pub memory: Memory,
    /// Kernels by shape.
    pub kernels: Vec<KernelTable>,
    /// What the caches lose while ranks compute; where absent, `memory` answers.
    pub aging: Vec<Aged>,
    /// How much longer the slowest of ranks on all cores takes than the fastest for the same work, in parts of
    /// that.
    pub uneven: f64,
    /// Transports; the first is the one that answers.
    pub wires: Vec<Wire>,
}

/// How fast bytes are copied, by how many of them there are.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Memory {
    /// By bytes that are touched over and over.
    pub copies: Vec<CopyRate>,
}

/// The rate of copying one half of a working set onto the other, read and written bytes counted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CopyRate {
    /// Bytes of both halves.
    pub bytes: Bytes,
    /// One core alone.
    pub alone: BytesPerSec,
    /// Each of all cores at once.
    pub together: BytesPerSec,
}

/// What one kernel took on several shapes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelTable {
    /// As [`crate::compute::kernel`] names it.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Threads that computed for each rank.
    pub threads: u32,
    /// The samples.
    pub samples: Vec<Sample>,
}

/// What a kernel took on one shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// The sizes that the time depends on; as many in all samples of a table.
    pub shape: Vec<u64>,
    /// Operations or bytes, whichever the kernel is counted in.
    pub work: f64,
    /// The time with one rank at work.
    pub alone: Temperatures,
    /// The time with a rank on every core.
    pub together: Temperatures,
}

/// A kernel's time by where its operands were.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Temperatures {
    /// In the cache, as far as they fit.
    pub warm: Seconds,
    /// In memory.
    pub cold: Seconds,
}

/// What exchanges took over one transport.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Wire {
    /// Its name on the command line.
    pub transport: String,
    /// A message from one rank to another, from when both are ready.
    pub messages: Vec<Exchange>,
    /// Whole collectives.
    pub collectives: Vec<CollectiveTable>,
}

/// What one collective took among so many ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CollectiveTable {
    /// What it does.
    pub kind: CollectiveKind,
    /// By which algorithm.
    #[serde(serialize_with = "by_name")]
    pub algorithm: Algorithm,
    /// Among how many ranks.
    pub ranks: u32,
    /// By the bytes of the whole vector.
    pub times: Vec<Exchange>,
}

/// Bytes and what moving them took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Exchange {
    /// Bytes.
    pub bytes: Bytes,
    /// Time of one after the other, which finds in the caches what the last one touched.
    pub time: Seconds,
    /// The same between ranks that have worked on other memory since, if that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold: Option<Seconds>,
    /// The same as `time` while every core also computes and there are more ranks than cores, if that
    /// was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crowded: Option<Seconds>,
}

/// What the caches have lost of something after a rank has touched so many other bytes, as parts of what has to
/// be fetched where nothing is left.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Aged {
    /// Bytes that were touched, computing.
    pub bytes: Bytes,
    /// Of a kernel's operands and of what else it needs, with one rank at work.
    pub alone: f64,
    /// The same with a rank on every core.
    pub together: f64,
    /// Of how an exchange is done: the wires, the code.
    pub wires: f64,
    /// Of the bytes of an exchange of [`SMALL`](Self::SMALL) or fewer.
    pub small: f64,
    /// Of the bytes of one of [`LARGE`](Self::LARGE) or more.
    pub large: f64,
}

impl Aged {
    /// A vector that a core's own cache has room for.
    pub const SMALL: u64 = 128 << 10;
    /// One that lies beyond it anyway.
    pub const LARGE: u64 = 4 << 20;

    /// Of the bytes of an exchange of so many.
    pub fn vectors(&self, bytes: f64) -> f64 {
        let [small, large] = [Self::SMALL, Self::LARGE].map(|bytes| (bytes as f64).ln());
        let way = ((bytes.max(1.0).ln() - small) / (large - small)).clamp(0.0, 1.0);
        self.small + way * (self.large - self.small)
    }
}

/// What an exchange takes, by what its ranks come from and what runs beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moved {
    /// Where the caches hold all that it touches.
    pub warm: Seconds,
    /// What comes on top where they hold nothing of how it is done: the wires, the code.
    pub unready: Seconds,
    /// What comes on top where they hold nothing of its bytes.
    pub cold: Seconds,
    /// What comes on top where every core also computes and there are more ranks than cores: waiting
    /// for turns. As long again, which is a fair share of the cores, where it was not measured.
    pub turns: Seconds,
}

fn by_name<S: serde::Serializer>(algorithm: &Algorithm, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&algorithm.to_string())
}

/// How many ranks are at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// One.
    Alone,
    /// One on every core.
    Together,
}

impl Measured {
    /// The table of a kernel on elements of a type, computed by so many threads: of those that were
    /// measured, the most that are no more.
    pub fn kernel(&self, name: &str, dtype: DType, threads: u32) -> Option<&KernelTable> {
        let same = self.kernels.iter().filter(|t| t.name == name && t.dtype == dtype);
        same.filter(|t| t.threads <= threads.max(1)).max_by_key(|t| t.threads)
    }

    /// The part, from 0 to 1, of what a cold exchange has to fetch that is to be fetched again after
    /// each of so many ranks has touched so many other bytes: of its wires or of its vectors.
    ///
    /// In a cache that several share, somebody else's bytes count as well; aging was measured with a rank
    /// on every core.
    pub fn lost(&self, of: impl Fn(&Aged) -> f64, distance: f64, ranks: f64) -> f64 {
        let others = (ranks / f64::from(self.cores.max(1))).max(1.0);
        let aged = self.aged(of, distance * others);
        aged.unwrap_or_else(|| self.memory.coldness(distance * others, Company::Together))
    }

    /// How cold a kernel's operand is, from 0 where it is as near as can be to 1 where it comes from memory, by
    /// the bytes that were touched since it was.
    pub fn coldness(&self, distance: f64, company: Company) -> f64 {
        let aged = match company {
            Company::Alone => self.aged(|aged| aged.alone, distance),
            Company::Together => self.aged(|aged| aged.together, distance),
        };
        aged.unwrap_or_else(|| self.memory.coldness(distance, company))
    }

    /// None if it was not measured.
    fn aged(&self, of: impl Fn(&Aged) -> f64, distance: f64) -> Option<f64> {
        let place = |aged: &Aged| aged.bytes.as_f64();
        let after = self.aging.partition_point(|aged| place(aged) < distance);
        let before = after.checked_sub(1).and_then(|before| self.aging.get(before));
        match (before, self.aging.get(after)) {
            (Some(from), Some(to)) => {
                let way = (distance / place(from)).ln() / (place(to) / place(from)).ln();
                Some(of(from) + way * (of(to) - of(from)))
            }
            (None, Some(first)) => Some(of(first) * distance / place(first)),
            (last, None) => last.map(&of),
        }
    }

    /// Threads that compute for each of so many ranks of a host.
    pub fn threads_of(&self, ranks: u64) -> u32 {
        let shared_out = || u64::from(self.cores) / ranks.max(1);
        self.threads.unwrap_or_else(|| u32::try_from(shared_out()).unwrap_or(1)).max(1)
    }

    /// Lets a transport answer, if it was measured.
    pub fn choose_wire(&mut self, transport: &str) -> bool {
        let at = self.wires.iter().position(|wire| wire.transport == transport);
        if let Some(at) = at {
            self.wires.swap(0, at);
        }
        at.is_some()
    }
}

impl Memory {
    /// How cold an operand is: 0 where it is as near as can be, 1 where it comes from memory, by
    /// the bytes that were touched since it was.
    pub fn coldness(&self, distance: f64, company: Company) -> f64 {
        let cost = |rate: &CopyRate| match company {
            Company::Alone => 1.0 / rate.alone.0,
            Company::Together => 1.0 / rate.together.0,
        };
        let points = self.copies.iter().map(|rate| (rate.bytes.as_f64(), cost(rate)));
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
    /// The time of a shape with so much work, warm and cold. None without samples of such shapes.
    pub fn time(&self, shape: &[u64], work: f64, company: Company) -> Option<Temperatures> {
        let samples = || self.samples.iter().filter(|sample| sample.shape.len() == shape.len());
        let log = |size: u64| (size.max(1) as f64).ln();
        // Beyond the samples, the nearest place among them answers.
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
            // The smallest distance between whole numbers keeps a sample's own place finite.
            let weight = (square + 1e-9).powi(-2);
            let Temperatures { warm: w, cold: c } = match company {
                Company::Alone => sample.alone,
                Company::Together => sample.together,
            };
            weights += weight;
            warm += weight * (w.0 / sample.work).ln();
            cold += weight * (c.0 / sample.work).ln();
        }
        let time = |sum: f64| Seconds((sum / weights).exp() * work);
        (weights > 0.0).then(|| Temperatures { warm: time(warm), cold: time(cold) })
    }
}

impl Wire {
    /// The time of a message.
    pub fn message(&self, bytes: Bytes) -> Option<Seconds> {
        exchange(&self.messages, bytes)
    }

    /// The time of a collective on a vector of so many bytes, if that one was measured among so
    /// many ranks.
    pub fn collective(
        &self,
        kind: CollectiveKind,
        algorithm: Algorithm,
        ranks: u32,
        bytes: Bytes,
    ) -> Option<Seconds> {
        exchange(self.times(kind, algorithm, ranks)?, bytes)
    }

    /// What a message takes under which conditions.
    pub fn moved_message(&self, bytes: Bytes) -> Option<Moved> {
        moved(&self.messages, bytes)
    }

    /// What a collective takes under which conditions, if that one was measured.
    pub fn moved_collective(
        &self,
        kind: CollectiveKind,
        algorithm: Algorithm,
        ranks: u32,
        bytes: Bytes,
    ) -> Option<Moved> {
        moved(self.times(kind, algorithm, ranks)?, bytes)
    }

    fn times(&self, kind: CollectiveKind, algorithm: Algorithm, ranks: u32) -> Option<&[Exchange]> {
        let same =
            |t: &&CollectiveTable| (t.kind, t.algorithm, t.ranks) == (kind, algorithm, ranks);
        self.collectives.iter().find(same).map(|table| table.times.as_slice())
    }
}

/// What an exchange takes under which conditions.
fn moved(times: &[Exchange], bytes: Bytes) -> Option<Moved> {
    let warm = exchange(times, bytes)?;
    let over = |of: fn(&Exchange) -> Option<Seconds>, bytes: Bytes| {
        let known = times.iter().filter_map(|e| Some(Exchange { time: of(e)?, ..*e }));
        let known: Vec<Exchange> = known.collect();
        let base = exchange(times, bytes).unwrap_or(Seconds::ZERO);
        exchange(&known, bytes).map(|time| (time - base).max(Seconds::ZERO))
    };
    let cold = |bytes| over(|e| e.cold, bytes).unwrap_or(Seconds::ZERO);
    let whole = cold(bytes);
    // The smallest hardly moves anything.
    let least = times.first().map_or(whole, |least| cold(least.bytes));
    let unready = Seconds(least.0.min(whole.0));
    let turns = over(|e| e.crowded, bytes).unwrap_or(warm);
    Some(Moved { warm, unready, cold: whole - unready, turns })
}

/// Time by bytes; beyond the largest, at its rate.
fn exchange(times: &[Exchange], bytes: Bytes) -> Option<Seconds> {
    let last = times.last()?;
    if bytes > last.bytes {
        return Some(last.time * (bytes.as_f64() / last.bytes.as_f64().max(1.0)));
    }
    let points: Vec<_> = times.iter().map(|e| (e.bytes.as_f64(), e.time.0)).collect();
    Some(Seconds(between(&points, bytes.as_f64().max(1.0))))
}

/// A curve at a place, straight between its points in the logarithms of both; level beyond them.
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

    fn seconds(warm: f64, cold: f64) -> Temperatures {
        Temperatures { warm: Seconds(warm), cold: Seconds(cold) }
    }

    /// A machine of two cores whose products run at 1 GFLOP/s, half of that from memory.
    pub(crate) fn two_cores() -> Measured {
        let sample = |shape: [u64; 3]| {
            let work = 2.0 * shape.iter().product::<u64>() as f64;
            let (warm, cold) = (work * 1e-9, work * 2e-9);
            let (alone, together) = (seconds(warm, cold), seconds(warm, 2.0 * cold));
            Sample { shape: shape.to_vec(), work, alone, together }
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
            alone: BytesPerSec(alone),
            together: BytesPerSec(together),
        };
        let exchanges = |latency: f64| {
            [64, 4096, 1 << 20]
                .map(|bytes| {
                    let time = Seconds(latency + bytes as f64 * 1e-9);
                    let cold = Some(time + Seconds(3e-5 + bytes as f64 * 2e-9));
                    Exchange { bytes: Bytes(bytes), time, cold, crowded: Some(time * 10.0) }
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
            apart: None,
            per_op: Seconds(5e-7),
            per_exchange: Seconds(1e-6),
            per_token: Seconds(2e-8),
            memory: Memory {
                copies: vec![
                    rate(1 << 16, 64e9, 64e9),
                    rate(1 << 20, 32e9, 32e9),
                    rate(1 << 26, 8e9, 4e9),
                ],
            },
            kernels: vec![products],
            aging: Vec::new(),
            uneven: 0.0,
            wires: vec![
                Wire {
                    transport: "thread".into(),
                    messages: exchanges(1e-5),
                    collectives: vec![all_reduce],
                },
                Wire {
                    transport: "tcp".into(),
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
            let time = table.time(&sample.shape, sample.work, Company::Together).unwrap();
            assert!((time.cold.0 / sample.together.cold.0 - 1.0).abs() < 1e-6);
        }
        assert_eq!(machine.kernel("linear.forward", DType::Bf16, 1), None);
        assert_eq!(table.time(&[1, 2], 4.0, Company::Alone), None);
    }

    #[test]
    fn beyond_the_samples_the_nearest_cost_holds() {
        let machine = two_cores();
        let table = machine.kernel("linear.forward", DType::F32, 0).unwrap();
        for shape in [[1, 1, 1], [u64::MAX, 1, u64::MAX], [0, 0, 0], [4096, 4096, 4096]] {
            let time = table.time(&shape, 1e6, Company::Alone).unwrap();
            assert!((time.warm.0 - 1e-3).abs() < 1e-9, "{shape:?}: {time:?}");
        }
    }

    #[test]
    fn coldness_follows_the_copies() {
        let memory = two_cores().memory;
        assert_eq!(memory.coldness(0.0, Company::Alone), 0.0);
        assert_eq!(memory.coldness(1e12, Company::Alone), 1.0);
        let middle = memory.coldness((1 << 20) as f64, Company::Alone);
        assert!((middle - 1.0 / 7.0).abs() < 1e-9, "{middle}");
        let flat = Memory { copies: vec![memory.copies[0]] };
        assert_eq!(flat.coldness(1e9, Company::Together), 0.0);
    }

    #[test]
    fn caches_lose_by_what_all_ranks_touch() {
        let machine = two_cores();
        let lost = |bytes: f64, ranks| machine.lost(|aged| aged.small, bytes, ranks);
        assert_eq!(lost(0.0, 2.0), 0.0);
        let some = lost((1 << 20) as f64, 2.0);
        assert_eq!(some, machine.memory.coldness((1 << 20) as f64, Company::Together));
        assert!(some > 0.0 && lost((1 << 20) as f64, 4.0) > some);
        assert_eq!(lost((1 << 20) as f64, 1.0), some, "a core may stay empty");
        assert_eq!(lost(f64::INFINITY, 1.0), 1.0);
    }

    #[test]
    fn caches_lose_by_and_by() {
        let aged = |bytes, wires, vectors| {
            let (alone, together, small, large) = (0.5 * vectors, vectors, vectors, 0.0);
            Aged { bytes: Bytes(bytes), alone, together, wires, small, large }
        };
        let aging = vec![aged(1 << 10, 0.2, 0.1), aged(1 << 20, 1.0, 0.5)];
        let machine = Measured { aging, ..two_cores() };
        let vectors = |bytes: u64| machine.lost(|aged| aged.vectors(64.0), bytes as f64, 2.0);
        assert_eq!([0, 1 << 9, 1 << 10, 1 << 20, 1 << 30].map(vectors), [0.0, 0.05, 0.1, 0.5, 0.5]);
        assert!((vectors(1 << 15) - 0.3).abs() < 1e-12, "{}", vectors(1 << 15));
        assert_eq!(machine.lost(|aged| aged.wires, 1024.0, 2.0), 0.2);
        assert_eq!(machine.lost(|aged| aged.small, 512.0, 4.0), 0.1, "ranks that take turns");
        let half = ((Aged::SMALL * Aged::LARGE) as f64).sqrt();
        assert!((machine.aging[1].vectors(half) - 0.25).abs() < 1e-12);
        assert_eq!(machine.coldness(1024.0, Company::Together), 0.1);
        assert_eq!(machine.coldness(1024.0, Company::Alone), 0.05);
    }

    #[test]
    fn the_chosen_wire_answers() {
        let mut machine = two_cores();
        assert!(machine.choose_wire("tcp") && !machine.choose_wire("mpi"));
        assert_eq!(machine.wires[0].transport, "tcp");
        let wire = &machine.wires[1];
        let (kind, two) = (CollectiveKind::AllReduce, Algorithm::HalvingDoubling);
        assert_eq!(wire.collective(kind, Algorithm::Ring, 2, Bytes(64)), None);
        assert_eq!(wire.collective(kind, two, 4, Bytes(64)), None);
        let large = wire.collective(kind, two, 2, Bytes(2 << 20)).unwrap();
        assert!((large.0 - 2.0 * (2e-5 + (1 << 20) as f64 * 1e-9)).abs() < 1e-9);
    }

    #[test]
    fn what_comes_on_top_of_an_exchange_is_told_apart() {
        let machine = two_cores();
        let wire = &machine.wires[0];
        let large = Bytes(1 << 20);
        let Moved { warm, unready, cold, turns } = wire.moved_message(large).unwrap();
        assert_eq!(warm, wire.message(large).unwrap());
        assert!((unready.0 - 3e-5).abs() < 1e-6, "{unready:?}");
        assert!((cold.0 / (2e-9 * large.as_f64()) - 1.0).abs() < 1e-3, "{cold:?}");
        assert!((turns.0 / warm.0 - 9.0).abs() < 1e-9);
        // An older file knows of none of it.
        let old = |e: &Exchange| Exchange { cold: None, crowded: None, ..*e };
        let old: Vec<Exchange> = wire.messages.iter().map(old).collect();
        let plain = moved(&old, large).unwrap();
        assert_eq!((plain.unready, plain.cold), (Seconds::ZERO, Seconds::ZERO));
        assert_eq!((plain.warm, plain.turns), (warm, warm));
        assert_eq!(moved(&[], large), None);
    }

    proptest! {
        /// An interpolated cost lies between the least and the largest of the samples.
        #[test]
        fn costs_stay_among_those_measured(
            costs in proptest::collection::vec((1u64..4096, 1u64..4096, 1e-12..1e-6f64), 1..12),
            shape in (1u64..1 << 40, 1u64..1 << 40),
        ) {
            let samples = costs.iter().map(|&(a, b, cost)| {
                let (work, time) = (1e3, seconds(cost * 1e3, cost * 2e3));
                Sample { shape: vec![a, b], work, alone: time, together: time }
            });
            let table =
                KernelTable { name: "x".into(), dtype: DType::F32, threads: 1, samples: samples.collect() };
            let time = table.time(&[shape.0, shape.1], 1.0, Company::Alone).unwrap().warm.0;
            let least = costs.iter().map(|c| c.2).fold(f64::MAX, f64::min);
            let most = costs.iter().map(|c| c.2).fold(0.0, f64::max);
            prop_assert!(time >= least * 0.999_999 && time <= most * 1.000_001);
        }

        /// More bytes never take less time where the samples say so.
        #[test]
        fn larger_messages_take_longer(a in 0u64..1 << 40, b in 0u64..1 << 40) {
            let wire = &two_cores().wires[0];
            let time = |bytes: u64| wire.message(Bytes(bytes)).unwrap().0;
            prop_assert!(time(a.min(b)) <= time(a.max(b)));
        }
    }
}
