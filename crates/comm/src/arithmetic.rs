//! Reductions of vectors of any float type, in messages and in memory.
//!
//! Every combination of two elements is computed in f32 and rounded once to the stored dtype, to
//! nearest, ties to even. A canonical sum therefore has the same bits in every dtype, no matter if
//! its partial sums are combined in one place or travel between ranks.
//!
//! The loops work on unaligned bytes and are compiled for each instruction set; `pulp` selects the
//! widest one available. No result depends on that choice: elements never mix.

use paceline_kernels::{Bf16, Element, F16};
use paceline_plan::collective::{Reduction, canonical_fold};
use paceline_plan::dtype::DType;

/// Returns true if vectors of this dtype can be reduced.
pub(crate) const fn reducible(dtype: DType) -> bool {
    match dtype {
        DType::F32 | DType::Bf16 | DType::F16 => true,
        DType::Fp8 | DType::Nvfp4 | DType::Mxfp4 | DType::U32 | DType::U8 => false,
    }
}

/// Reduces `from` into `into` by element. Dtypes that are not [`reducible`] stay unchanged.
pub(crate) fn reduce_into(dtype: DType, reduction: Reduction, into: &mut [u8], from: &[u8]) {
    debug_assert_eq!(into.len(), from.len());
    pulp::Arch::new().dispatch(Work { dtype, reduction, lanes: Loop::InPlace { into, from } });
}

/// Writes the reduction of `a` and `b` to `into`.
fn reduce_to(dtype: DType, reduction: Reduction, into: &mut [u8], (a, b): (&[u8], &[u8])) {
    debug_assert!(into.len() == a.len() && into.len() == b.len());
    pulp::Arch::new().dispatch(Work { dtype, reduction, lanes: Loop::OutOfPlace { into, a, b } });
}

/// Contributions of all members but one, in member order, and that member's position. They are
/// read-only: they may be stored in the memory of other ranks.
pub(crate) struct Contributions<'a> {
    /// Contributions of the other members.
    pub(crate) others: &'a [&'a [u8]],
    /// Number of contributions that precede the reducing member.
    pub(crate) before: usize,
}

/// A node of the canonical tree.
#[derive(Clone, Copy)]
enum Node {
    /// The reducing member's own data, or a partial sum that includes it.
    Own,
    /// An unchanged contribution.
    Other(usize),
    /// A partial sum of others only.
    Sum(usize),
}

/// Partial sums of a tile; buffers are reused from tile to tile, and from one reduction to the next.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    tiles: Vec<Vec<u8>>,
    free: Vec<usize>,
    /// Sum that all members take.
    whole: Vec<u8>,
}

/// Bytes reduced at a time, so that every partial sum stays in the L1 cache.
const TILE: usize = 8192;

impl Contributions<'_> {
    /// Reduces all contributions, in canonical order, into `own`, which has the same length.
    pub(crate) fn fold_into(
        &self,
        dtype: DType,
        reduction: Reduction,
        own: &mut [u8],
        sums: &mut Sums,
    ) {
        for (i, own) in own.chunks_mut(TILE).enumerate() {
            let tile = i * TILE..i * TILE + own.len();
            let other = |i: usize| &self.others[i][tile.clone()];
            fold_tile(dtype, reduction, own, self.before, self.others.len(), other, sums);
        }
    }
}

/// Reduces one tile of all contributions into `own`, the member that follows `before` others.
fn fold_tile<'o>(
    dtype: DType,
    reduction: Reduction,
    own: &mut [u8],
    before: usize,
    others: usize,
    other: impl Fn(usize) -> &'o [u8],
    sums: &mut Sums,
) {
    let Sums { tiles, free, whole: _ } = sums;
    free.clear();
    free.extend(0..tiles.len());
    let members =
        (0..before).map(Node::Other).chain([Node::Own]).chain((before..others).map(Node::Other));
    // Both reductions commute, so the member's own operand, if present, takes the result. The final
    // result therefore ends up there.
    canonical_fold(members, |a, b| match (a, b) {
        (Node::Own, Node::Other(i)) | (Node::Other(i), Node::Own) => {
            reduce_into(dtype, reduction, own, other(i));
            Node::Own
        }
        (Node::Own, Node::Sum(i)) | (Node::Sum(i), Node::Own) => {
            reduce_into(dtype, reduction, own, &tiles[i]);
            free.push(i);
            Node::Own
        }
        (Node::Other(a), Node::Other(b)) => {
            let sum = free.pop().unwrap_or_else(|| {
                tiles.push(Vec::with_capacity(TILE));
                tiles.len() - 1
            });
            tiles[sum].resize(own.len(), 0);
            reduce_to(dtype, reduction, &mut tiles[sum], (other(a), other(b)));
            Node::Sum(sum)
        }
        (Node::Sum(sum), Node::Other(i)) | (Node::Other(i), Node::Sum(sum)) => {
            reduce_into(dtype, reduction, &mut tiles[sum], other(i));
            Node::Sum(sum)
        }
        (Node::Sum(a), Node::Sum(b)) => {
            if let Ok([into, from]) = tiles.get_disjoint_mut([a, b]) {
                reduce_into(dtype, reduction, into, from);
            }
            free.push(b);
            Node::Sum(a)
        }
        (Node::Own, Node::Own) => Node::Own,
    });
}

/// Reduces the contributions of all members, of equal length, in canonical order, and writes the
/// result to all of them. Every byte is read once and written once.
pub(crate) fn reduce_everywhere(
    dtype: DType,
    reduction: Reduction,
    members: &mut [&mut [u8]],
    sums: &mut Sums,
) {
    let bytes = members.first().map_or(0, |member| member.len());
    debug_assert!(members.iter().all(|member| member.len() == bytes));
    if let [a, b] = members {
        return reduce_both(dtype, reduction, a, b);
    }
    let mut sum = std::mem::take(&mut sums.whole);
    for start in (0..bytes).step_by(TILE) {
        let tile = start..bytes.min(start + TILE);
        let part = |member: usize| &members[member][tile.clone()];
        let count = members.len();
        sum.clear();
        sum.extend_from_slice(part(0));
        fold_tile(dtype, reduction, &mut sum, 0, count - 1, |i| part(i + 1), sums);
        members.iter_mut().for_each(|member| member[tile.clone()].copy_from_slice(&sum));
    }
    sums.whole = sum;
}

/// Like [`reduce_everywhere`] for two members, for which order does not matter. Each tile is copied
/// while it is still in the L1 cache.
fn reduce_both(dtype: DType, reduction: Reduction, a: &mut [u8], b: &mut [u8]) {
    for (a, b) in a.chunks_mut(TILE).zip(b.chunks_mut(TILE)) {
        reduce_into(dtype, reduction, a, b);
        b.copy_from_slice(a);
    }
}

/// Loop compiled for each instruction set.
struct Work<'a> {
    dtype: DType,
    reduction: Reduction,
    lanes: Loop<'a>,
}

impl pulp::WithSimd for Work<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        each_type(self.dtype, self.reduction, self.lanes);
    }
}

/// Loop over elements, before dtype and reduction are known.
enum Loop<'a> {
    InPlace { into: &'a mut [u8], from: &'a [u8] },
    OutOfPlace { into: &'a mut [u8], a: &'a [u8], b: &'a [u8] },
}

#[inline(always)]
fn each_type(dtype: DType, reduction: Reduction, work: Loop<'_>) {
    let f32_from = |bytes: [u8; 4]| f32::from_ne_bytes(bytes);
    let f32_into = |value: f32| value.to_ne_bytes();
    let bf16_from = |bytes: [u8; 2]| Bf16::from_ne_bytes(bytes).widen();
    let bf16_into = |value: f32| Bf16::narrow(value).to_ne_bytes();
    let f16_from = |bytes: [u8; 2]| F16::from_ne_bytes(bytes).widen();
    let f16_into = |value: f32| F16::narrow(value).to_ne_bytes();
    let sum = |a: f32, b: f32| a + b;
    match (dtype, reduction) {
        (DType::F32, Reduction::Sum) => work.run(f32_from, f32_into, sum),
        (DType::F32, Reduction::Max) => work.run(f32_from, f32_into, maximum),
        (DType::Bf16, Reduction::Sum) => work.run(bf16_from, bf16_into, sum),
        (DType::Bf16, Reduction::Max) => work.run(bf16_from, bf16_into, maximum),
        (DType::F16, Reduction::Sum) => work.run(f16_from, f16_into, sum),
        (DType::F16, Reduction::Max) => work.run(f16_from, f16_into, maximum),
        (DType::Fp8 | DType::Nvfp4 | DType::Mxfp4 | DType::U32 | DType::U8, _) => {}
    }
}

impl Loop<'_> {
    #[inline(always)]
    fn run<const N: usize>(
        self,
        load: impl Fn([u8; N]) -> f32,
        store: impl Fn(f32) -> [u8; N],
        combine: impl Fn(f32, f32) -> f32,
    ) {
        match self {
            Self::InPlace { into, from } => {
                let (into, from) = (into.as_chunks_mut::<N>().0, from.as_chunks::<N>().0);
                for (a, b) in into.iter_mut().zip(from) {
                    *a = store(combine(load(*a), load(*b)));
                }
            }
            Self::OutOfPlace { into, a, b } => {
                let into = into.as_chunks_mut::<N>().0;
                let (a, b) = (a.as_chunks::<N>().0, b.as_chunks::<N>().0);
                for ((into, a), b) in into.iter_mut().zip(a).zip(b) {
                    *into = store(combine(load(*a), load(*b)));
                }
            }
        }
    }
}

/// Larger of two numbers: NaN if either is NaN, and +0 above −0, so the result does not depend on
/// operand order.
#[inline(always)]
fn maximum(a: f32, b: f32) -> f32 {
    if a > b {
        a
    } else if b > a {
        b
    } else if a == b {
        // Equal numbers have equal bits, except zeros, for which the AND gives +0.
        f32::from_bits(a.to_bits() & b.to_bits())
    } else {
        f32::NAN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

    fn store(dtype: DType, value: f32) -> Vec<u8> {
        match dtype {
            DType::Bf16 => Bf16::narrow(value).to_ne_bytes().to_vec(),
            DType::F16 => F16::narrow(value).to_ne_bytes().to_vec(),
            _ => value.to_ne_bytes().to_vec(),
        }
    }

    fn load(dtype: DType, bytes: &[u8]) -> f32 {
        match (dtype, bytes) {
            (DType::Bf16, &[a, b]) => Bf16::from_ne_bytes([a, b]).widen(),
            (DType::F16, &[a, b]) => F16::from_ne_bytes([a, b]).widen(),
            (_, &[a, b, c, d]) => f32::from_ne_bytes([a, b, c, d]),
            _ => panic!("{dtype} has another size than {}", bytes.len()),
        }
    }

    #[test]
    fn maximum_commutes_and_keeps_nan() {
        let values = [0.0, -0.0, 1.5, -1.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN];
        for a in values {
            for b in values {
                assert_eq!(maximum(a, b).to_bits(), maximum(b, a).to_bits(), "{a} {b}");
            }
            assert!(maximum(a, f32::NAN).is_nan());
        }
        assert_eq!(maximum(-0.0, 0.0).to_bits(), 0.0f32.to_bits());
        assert_eq!(maximum(-3.0, -2.0), -2.0);
    }

    #[test]
    fn long_vectors_are_reduced_as_single_elements_are() {
        for dtype in TYPES {
            let vector = |seed: u32| -> Vec<u8> {
                let value = |i: u32| (i.wrapping_mul(seed) % 9973) as f32 * 0.37 - 1500.0;
                (0..1001).flat_map(|i| store(dtype, value(i))).collect()
            };
            let (a, b) = (vector(7919), vector(104_729));
            let size = dtype.size() as usize;
            for reduction in [Reduction::Sum, Reduction::Max] {
                let mut long = a.clone();
                reduce_into(dtype, reduction, &mut long, &b);
                for (i, found) in long.chunks(size).enumerate() {
                    let at = i * size..(i + 1) * size;
                    let (a, b) = (load(dtype, &a[at.clone()]), load(dtype, &b[at]));
                    let wanted = match reduction {
                        Reduction::Sum => store(dtype, a + b),
                        Reduction::Max => store(dtype, a.max(b)),
                    };
                    assert_eq!(found, wanted, "{dtype} {reduction} {i}");
                }
            }
        }
    }

    #[test]
    fn all_members_get_the_canonical_sum() {
        let value =
            |rank: usize, i: usize| ((rank * 7919 + i * 104_729) % 1000) as f32 * 0.1 + 1e-3;
        let elements = 5000;
        for dtype in TYPES {
            let size = dtype.size() as usize;
            let rounded = |a, b| load(dtype, &store(dtype, a + b));
            for ranks in 1..=9 {
                let part = |r| (0..elements).flat_map(move |i| store(dtype, value(r, i))).collect();
                let parts: Vec<Vec<u8>> = (0..ranks).map(part).collect();
                let wanted: Vec<u8> = (0..elements * size)
                    .step_by(size)
                    .flat_map(|i| {
                        let part = |r: usize| load(dtype, &parts[r][i..i + size]);
                        let sum = canonical_fold((0..ranks).map(part), rounded);
                        store(dtype, sum.unwrap())
                    })
                    .collect();
                let mut found = parts.clone();
                let mut members: Vec<_> = found.iter_mut().map(Vec::as_mut_slice).collect();
                reduce_everywhere(dtype, Reduction::Sum, &mut members, &mut Sums::default());
                for found in &found {
                    assert_eq!(*found, wanted, "{dtype}, {ranks} ranks");
                }
            }
        }
    }

    #[test]
    fn folds_follow_the_canonical_tree_wherever_the_own_part_stands() {
        let value =
            |rank: usize, i: usize| ((rank * 7919 + i * 104_729) % 1000) as f32 * 0.1 + 1e-3;
        let elements = 5000;
        for dtype in TYPES {
            let size = dtype.size() as usize;
            for ranks in 1..=9 {
                let part = |r| (0..elements).flat_map(move |i| store(dtype, value(r, i))).collect();
                let parts: Vec<Vec<u8>> = (0..ranks).map(part).collect();
                let wanted: Vec<u8> = (0..elements * size)
                    .step_by(size)
                    .flat_map(|i| {
                        let parts = parts.iter().map(|part| load(dtype, &part[i..i + size]));
                        let rounded = |a, b| load(dtype, &store(dtype, a + b));
                        store(dtype, canonical_fold(parts, rounded).unwrap())
                    })
                    .collect();
                for own in 0..ranks {
                    let mut result = parts[own].clone();
                    let others: Vec<&[u8]> = (0..ranks)
                        .filter(|rank| *rank != own)
                        .map(|rank| parts[rank].as_slice())
                        .collect();
                    let all = Contributions { others: &others, before: own };
                    all.fold_into(dtype, Reduction::Sum, &mut result, &mut Sums::default());
                    assert_eq!(result, wanted, "{dtype}, {own} of {ranks}");
                }
            }
        }
    }
}
