//! Naive reference of every collective, and the comparison with the real one.

use paceline_comm::steps::{CollectiveSpec, run_bytes};
use paceline_comm::{Tag, Transport};
use paceline_plan::collective::{
    Algorithm, CollectiveKind, Reduction, RingSet, SummationOrder, TorusShape, chunk_range, resolve,
};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::cell::OnceCell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::time::Duration;

pub(crate) const SIZES: [usize; 5] = [0, 1, 7, 1000, 65_539];
pub(crate) const TYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];
const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn everyone(ranks: u32) -> Vec<Rank> {
    (0..ranks).map(Rank).collect()
}

/// Every algorithm that exchanges messages, and some of their hierarchies.
pub(crate) fn algorithms(ranks: u32) -> Vec<Algorithm> {
    let messages = |algorithm: &Algorithm| *algorithm != Algorithm::SharedMemory;
    let mut all: Vec<Algorithm> = Algorithm::for_any_group().filter(messages).collect();
    all.push(Algorithm::Auto);
    all.extend([2, ranks].map(|servers| Algorithm::ParameterServer { servers }));
    all.push(Algorithm::MultiRing { rings: RingSet::new(3) });
    let pairs = [
        (Algorithm::Ring, Algorithm::HalvingDoubling),
        (Algorithm::ParameterServer { servers: 1 }, Algorithm::Ring),
        (Algorithm::HalvingDoubling, Algorithm::Partitioned),
        (Algorithm::MultiRing { rings: RingSet::new(2) }, Algorithm::Tree),
        (Algorithm::Tree, Algorithm::MultiRing { rings: RingSet::new(3) }),
        (Algorithm::Naive, Algorithm::Direct),
    ];
    for size in (2..ranks).filter(|size| ranks.is_multiple_of(*size)) {
        all.extend(pairs.map(|(inner, outer)| {
            Algorithm::hierarchical(inner, outer).expect("two levels").with_host(size)
        }));
        all.extend(TorusShape::new(&[size, ranks / size]).map(|shape| Algorithm::Torus { shape }));
    }
    all
}

/// Every legal collective of `ranks` ranks.
pub(crate) fn specs(ranks: u32, block: u64) -> Vec<CollectiveSpec> {
    let mut specs = Vec::new();
    let root = (ranks - 1).min(2);
    for kind in CollectiveKind::ALL {
        for algorithm in algorithms(ranks) {
            for order in [SummationOrder::Canonical, SummationOrder::Free] {
                for reduction in [Reduction::Sum, Reduction::Max] {
                    let worthwhile = kind.reduces()
                        || (reduction == Reduction::Sum && order == SummationOrder::Free);
                    if worthwhile && resolve(kind, algorithm, ranks, order).is_ok() {
                        let block = if kind == CollectiveKind::AllToAll { 1 } else { block };
                        specs.push(CollectiveSpec {
                            kind,
                            algorithm,
                            order,
                            reduction,
                            root,
                            block,
                        });
                    }
                }
            }
        }
    }
    specs
}

/// Runs every collective of every size and dtype on one rank and compares the result with the
/// reference. Returns a digest of all bits, the same on every transport.
///
/// Only every `thinning`-th collective is run, different ones for every size and number of ranks.
/// Large vectors use one dtype each, in turn, and are four times as rare. With 1, all collectives
/// run in all dtypes.
pub(crate) fn product(transport: &mut dyn Transport, thinning: usize) -> u64 {
    let (ranks, me) = (transport.world(), transport.rank());
    let members = everyone(ranks);
    let mut digest = DefaultHasher::new();
    let mut tag = Tag::new(3, 0);
    for size in SIZES {
        let known = Known::new(ranks, size);
        let large = size > 10_000 && thinning > 1;
        for (i, spec) in specs(ranks, if size == 1000 { 16 } else { 1 }).iter().enumerate() {
            let thinning = if large { 4 * thinning } else { thinning };
            if !(i + size + ranks as usize).is_multiple_of(thinning) {
                continue;
            }
            let has_output = spec.kind.has_output();
            for turn in if large { i % 3..i % 3 + 1 } else { 0..3 } {
                let naive = known.naive(spec.kind, TYPES[turn]);
                let mut data = naive.input(spec, me.0);
                let mut output = has_output.then(|| vec![0xff; data.len()]);
                let out = output.as_deref_mut();
                let vector = (naive.dtype, data.as_mut_slice());
                run_bytes(transport, spec, &members, tag, vector, out, TIMEOUT)
                    .unwrap_or_else(|error| panic!("{spec:?} at {me} of {ranks}: {error}"));
                let (range, wanted) = naive.outcome(spec, me.0);
                let found = &output.unwrap_or(data)[range];
                let Naive { n, dtype, .. } = naive;
                let same = found == wanted;
                assert!(same, "{spec:?}, {ranks} ranks, {n} {dtype} elements, at {me}");
                found.hash(&mut digest);
                tag = tag.next();
            }
        }
    }
    digest.finish()
}

/// Runs some collectives on a vector of megabytes and compares them with the reference; returns a
/// digest of all bits.
#[allow(dead_code, reason = "threads alone have no wires to fill")]
pub(crate) fn large(transport: &mut dyn Transport) -> u64 {
    let (ranks, me) = (transport.world(), transport.rank());
    let members = everyone(ranks);
    let known = Known::new(ranks, 700_003);
    let mut digest = DefaultHasher::new();
    let mut tag = Tag::new(5, 0);
    let algorithms = [
        Algorithm::Ring,
        Algorithm::HalvingDoubling,
        Algorithm::Overlapped,
        Algorithm::OneShot,
        Algorithm::Direct,
        Algorithm::Tree,
        Algorithm::ParameterServer { servers: 1 },
    ];
    for spec in specs(ranks, 1) {
        if spec.reduction == Reduction::Max || !algorithms.contains(&spec.algorithm) {
            continue;
        }
        let naive = known.naive(spec.kind, DType::F32);
        let mut data = naive.input(&spec, me.0);
        let has_output = spec.kind.has_output();
        let mut output = has_output.then(|| vec![0xff; data.len()]);
        let (vector, out) = ((naive.dtype, data.as_mut_slice()), output.as_deref_mut());
        run_bytes(transport, &spec, &members, tag, vector, out, TIMEOUT)
            .unwrap_or_else(|error| panic!("{spec:?} at {me} of {ranks}: {error}"));
        let (range, wanted) = naive.outcome(&spec, me.0);
        let found = &output.unwrap_or(data)[range];
        assert!(found == wanted, "{spec:?}, {ranks} ranks, at {me}");
        found.hash(&mut digest);
        tag = tag.next();
    }
    digest.finish()
}

/// A small integer, so that sums are exact in any order and in every dtype.
fn value(rank: u32, i: usize) -> f32 {
    ((rank as usize * 31 + i * 17) % 25) as f32 - 12.0
}

/// Appends a small integer in any dtype; a 16-bit float needs only its upper bits.
fn store(dtype: DType, value: f32, into: &mut Vec<u8>) {
    let bits = value.to_bits();
    match dtype {
        DType::F32 => into.extend(bits.to_ne_bytes()),
        DType::Bf16 => into.extend(((bits >> 16) as u16).to_ne_bytes()),
        DType::F16 => {
            let sign = (bits >> 16 & 0x8000) as u16;
            let half = match bits & 0x7fff_ffff {
                0 => 0,
                magnitude => ((magnitude - (112 << 23)) >> 13) as u16,
            };
            into.extend((sign | half).to_ne_bytes());
        }
        other => panic!("{other} is not tested"),
    }
}

/// Vectors of one size, each created on first use.
pub(crate) struct Known {
    ranks: u32,
    size: usize,
    made: [[OnceCell<Naive>; 3]; 2],
}

impl Known {
    pub(crate) fn new(ranks: u32, size: usize) -> Self {
        Self { ranks, size, made: Default::default() }
    }

    /// Reference vectors; an all_to_all has equal parts, large ones of a tenth of the size.
    pub(crate) fn naive(&self, kind: CollectiveKind, dtype: DType) -> &Naive {
        let all_to_all = kind == CollectiveKind::AllToAll;
        let part = if self.size > 10_000 { self.size / 10 } else { self.size };
        let n = if all_to_all { part * self.ranks as usize } else { self.size };
        let of_type = TYPES.iter().position(|other| *other == dtype).unwrap();
        let cell = &self.made[usize::from(all_to_all)][of_type];
        cell.get_or_init(|| Naive::new(self.ranks, n, dtype))
    }
}

/// Vectors of one size and dtype: every rank's input, and its reductions.
pub(crate) struct Naive {
    ranks: u32,
    pub(crate) n: usize,
    pub(crate) dtype: DType,
    /// Inputs by rank.
    vectors: Vec<Vec<u8>>,
    sum: Vec<u8>,
    max: Vec<u8>,
}

impl Naive {
    pub(crate) fn new(ranks: u32, n: usize, dtype: DType) -> Self {
        let vector = |value: &dyn Fn(usize) -> f32| {
            let mut bytes = Vec::with_capacity(n * dtype.size() as usize);
            (0..n).for_each(|i| store(dtype, value(i), &mut bytes));
            bytes
        };
        let all = |i| (0..ranks).map(move |rank| value(rank, i));
        Self {
            ranks,
            n,
            dtype,
            vectors: (0..ranks).map(|rank| vector(&|i| value(rank, i))).collect(),
            sum: vector(&|i| all(i).sum()),
            max: vector(&|i| all(i).fold(f32::NEG_INFINITY, f32::max)),
        }
    }

    fn bytes(&self, elements: Range<u64>) -> Range<usize> {
        let size = self.dtype.size();
        (elements.start * size) as usize..(elements.end * size) as usize
    }

    fn part(&self, spec: &CollectiveSpec, index: u32) -> Range<usize> {
        self.bytes(chunk_range(self.n as u64, self.ranks, index, spec.block))
    }

    /// Input of rank `me`; NaN for elements without a defined value.
    pub(crate) fn input(&self, spec: &CollectiveSpec, me: u32) -> Vec<u8> {
        let whole = &self.vectors[me as usize];
        let valid = match spec.kind {
            CollectiveKind::AllGather | CollectiveKind::Gather => self.part(spec, me),
            CollectiveKind::Broadcast | CollectiveKind::Scatter if me != spec.root => 0..0,
            _ => 0..whole.len(),
        };
        let mut input = vec![0xff; whole.len()];
        input[valid.clone()].copy_from_slice(&whole[valid]);
        input
    }

    /// Expected result of rank `me`, and its byte range.
    pub(crate) fn outcome(&self, spec: &CollectiveSpec, me: u32) -> (Range<usize>, Vec<u8>) {
        let all = self.bytes(0..self.n as u64);
        let reduced = match spec.reduction {
            Reduction::Sum => &self.sum,
            Reduction::Max => &self.max,
        };
        let at_root = if me == spec.root { all.clone() } else { 0..0 };
        let gathered = || -> Vec<u8> {
            let parts = (0..).zip(&self.vectors);
            parts.flat_map(|(rank, vector)| &vector[self.part(spec, rank)]).copied().collect()
        };
        match spec.kind {
            CollectiveKind::AllReduce => (all, reduced.clone()),
            CollectiveKind::ReduceScatter => {
                let part = self.part(spec, me);
                (part.clone(), reduced[part].to_vec())
            }
            CollectiveKind::Reduce => (at_root.clone(), reduced[at_root].to_vec()),
            CollectiveKind::AllGather => (all, gathered()),
            CollectiveKind::Gather => (at_root.clone(), gathered()[at_root].to_vec()),
            CollectiveKind::Broadcast => (all, self.vectors[spec.root as usize].clone()),
            CollectiveKind::Scatter => {
                let part = self.part(spec, me);
                (part.clone(), self.vectors[spec.root as usize][part].to_vec())
            }
            CollectiveKind::SendRecv => {
                (all, self.vectors[((me + self.ranks - 1) % self.ranks) as usize].clone())
            }
            CollectiveKind::Barrier => (all, self.vectors[me as usize].clone()),
            CollectiveKind::AllToAll => {
                let part = self.part(spec, me);
                let parts = self.vectors.iter().flat_map(|vector| &vector[part.clone()]);
                (all, parts.copied().collect())
            }
        }
    }
}
