//! Encoding of a message's purpose in a fixed number of bytes.
//!
//! Every field has a fixed offset in all messages, so that a head is written and read without a
//! branch on its length. Unused fields are zero.

use super::WireError;
use crate::steps::CollectiveSpec;
use crate::transport::Purpose;
use paceline_plan::collective::{
    Algorithm, ChunkOrder, CollectiveKind, DimAlgorithm, Grid, GridDimension, Packed, Reduction,
    SummationOrder, Words, hierarchical, per_dimension,
};
use paceline_plan::dtype::DType;
use std::num::NonZeroU32;

/// Bytes of an encoded purpose.
pub(super) const BYTES: usize = 96;

const KIND: usize = 0;
const COLLECTIVE: usize = 1;
const ORDER: usize = 2;
const REDUCTION: usize = 3;
const DTYPE: usize = 4;
const ALGORITHM: usize = 5;
const OUTER: usize = 6;
const ROOT: usize = 8;
const RANKS: usize = 12;
const BLOCK: usize = 16;
const ELEMENTS: usize = 24;
const HOST: usize = 32;
const PARAMETERS: usize = 40;
const OUTER_PARAMETERS: usize = 64;

/// Kinds of purposes. None is 0, so that all-zero bytes are invalid.
const OF_COLLECTIVE: u8 = 1;
const OF_MESSAGE: u8 = 2;
const OF_BARRIER: u8 = 3;

const DTYPES: [DType; 8] = [
    DType::F32,
    DType::Bf16,
    DType::F16,
    DType::Fp8,
    DType::U32,
    DType::U8,
    DType::Nvfp4,
    DType::Mxfp4,
];
const ORDERS: [SummationOrder; 2] = [SummationOrder::Canonical, SummationOrder::Free];
const CHUNK_ORDERS: [ChunkOrder; 2] = [ChunkOrder::Baseline, ChunkOrder::Themis];
const WAYS: [DimAlgorithm; 3] = [DimAlgorithm::Ring, DimAlgorithm::Direct, DimAlgorithm::Halving];
const REDUCTIONS: [Reduction; 2] = [Reduction::Sum, Reduction::Max];

pub(super) fn encode(purpose: &Purpose, bytes: &mut [u8; BYTES]) {
    match *purpose {
        Purpose::Collective { spec, ranks, elements, dtype } => {
            let CollectiveSpec { kind, algorithm, order, reduction, root, block } = spec;
            bytes[KIND] = OF_COLLECTIVE;
            bytes[COLLECTIVE] = index(&CollectiveKind::ALL, kind);
            bytes[ORDER] = index(&ORDERS, order);
            bytes[REDUCTION] = index(&REDUCTIONS, reduction);
            bytes[DTYPE] = index(&DTYPES, dtype);
            put(bytes, ROOT, root.to_le_bytes());
            put(bytes, RANKS, ranks.to_le_bytes());
            put(bytes, BLOCK, block.to_le_bytes());
            put(bytes, ELEMENTS, elements.to_le_bytes());
            encode_algorithm(algorithm, bytes);
        }
        Purpose::PointToPoint { elements, dtype } => {
            bytes[KIND] = OF_MESSAGE;
            bytes[DTYPE] = index(&DTYPES, dtype);
            put(bytes, ELEMENTS, elements.to_le_bytes());
        }
        Purpose::Barrier { ranks } => {
            bytes[KIND] = OF_BARRIER;
            put(bytes, RANKS, ranks.to_le_bytes());
        }
    }
}

pub(super) fn decode(bytes: &[u8; BYTES]) -> Result<Purpose, WireError> {
    let field = |what| WireError::Field { what };
    let elements = u64::from_le_bytes(get(bytes, ELEMENTS));
    let ranks = u32::from_le_bytes(get(bytes, RANKS));
    let dtype = DTYPES.get(bytes[DTYPE] as usize).copied().ok_or(field("dtype"));
    match bytes[KIND] {
        OF_COLLECTIVE => {
            let spec = CollectiveSpec {
                kind: *CollectiveKind::ALL
                    .get(bytes[COLLECTIVE] as usize)
                    .ok_or(field("collective"))?,
                algorithm: decode_algorithm(bytes).ok_or(field("algorithm"))?,
                order: *ORDERS.get(bytes[ORDER] as usize).ok_or(field("order"))?,
                reduction: *REDUCTIONS.get(bytes[REDUCTION] as usize).ok_or(field("reduction"))?,
                root: u32::from_le_bytes(get(bytes, ROOT)),
                block: u64::from_le_bytes(get(bytes, BLOCK)),
            };
            Ok(Purpose::Collective { spec, ranks, elements, dtype: dtype? })
        }
        OF_MESSAGE => Ok(Purpose::PointToPoint { elements, dtype: dtype? }),
        OF_BARRIER => Ok(Purpose::Barrier { ranks }),
        _ => Err(field("purpose")),
    }
}

fn encode_algorithm(algorithm: Algorithm, bytes: &mut [u8; BYTES]) {
    let mut put_packed = |packed: Packed, number: usize, parameters: usize| {
        bytes[number] = packed.number();
        for (i, value) in packed.parameter().iter().enumerate() {
            put(bytes, parameters + 4 * i, value.to_le_bytes());
        }
    };
    match algorithm {
        Algorithm::Hierarchical { inner, outer, host } => {
            put_packed(inner, OUTER + 1, PARAMETERS);
            put_packed(outer, OUTER, OUTER_PARAMETERS);
            bytes[ALGORITHM] = algorithm.def().number;
            put(bytes, HOST, host.map_or(0, NonZeroU32::get).to_le_bytes());
        }
        Algorithm::PerDimension { chunks, order, grid } => {
            bytes[ALGORITHM] = algorithm.def().number;
            bytes[OUTER] = index(&CHUNK_ORDERS, order);
            put(bytes, HOST, chunks.to_le_bytes());
            let dimensions = grid.iter().flat_map(Grid::dimensions);
            for (at, GridDimension { size, way, rate }) in places().zip(dimensions) {
                put(bytes, at, size.to_le_bytes());
                put(bytes, at + 4, rate.to_le_bytes());
                bytes[at + 8] = index(&WAYS, *way);
            }
        }
        flat => match flat.pack() {
            Some(packed) => put_packed(packed, ALGORITHM, PARAMETERS),
            None => bytes[ALGORITHM] = flat.def().number,
        },
    }
}

fn decode_algorithm(bytes: &[u8; BYTES]) -> Option<Algorithm> {
    let packed = |number: usize, parameters: usize| {
        let mut values = Words::default();
        for (i, value) in values.iter_mut().enumerate() {
            *value = u32::from_le_bytes(get(bytes, parameters + 4 * i));
        }
        Packed::new(bytes[number], values)
    };
    let number = bytes[ALGORITHM];
    if number == Algorithm::Auto.def().number {
        Some(Algorithm::Auto)
    } else if number == hierarchical::NUMBER {
        let (inner, outer) = (packed(OUTER + 1, PARAMETERS)?, packed(OUTER, OUTER_PARAMETERS)?);
        let host = NonZeroU32::new(u32::from_le_bytes(get(bytes, HOST)));
        Some(Algorithm::Hierarchical { inner, outer, host })
    } else if number == per_dimension::NUMBER {
        let order = *CHUNK_ORDERS.get(usize::from(bytes[OUTER]))?;
        let chunks = u32::from_le_bytes(get(bytes, HOST));
        let mut dimensions = Vec::new();
        for at in places() {
            let size = u32::from_le_bytes(get(bytes, at));
            if size == 0 {
                break;
            }
            let rate = u32::from_le_bytes(get(bytes, at + 4));
            let way = *WAYS.get(usize::from(bytes[at + 8]))?;
            dimensions.push(GridDimension { size, way, rate });
        }
        let grid = match dimensions.as_slice() {
            [] => None,
            dimensions => Some(Grid::new(dimensions)?),
        };
        Some(Algorithm::PerDimension { chunks, order, grid })
    } else {
        packed(ALGORITHM, PARAMETERS).map(Packed::algorithm)
    }
}

/// Offsets of the dimensions of a grid.
fn places() -> impl Iterator<Item = usize> {
    (0..Grid::MAX_DIMENSIONS).map(|i| PARAMETERS + 9 * i)
}

fn index<T: PartialEq>(all: &[T], one: T) -> u8 {
    all.iter().position(|other| *other == one).map_or(u8::MAX, |i| i as u8)
}

fn put<const N: usize>(bytes: &mut [u8; BYTES], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

fn get<const N: usize>(bytes: &[u8; BYTES], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[at..at + N]);
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_survives() {
        for text in [
            "auto",
            "ring",
            "multi-ring:4",
            "halving-doubling",
            "tree",
            "direct",
            "shared-memory",
            "ps",
            "ps:4",
            "naive",
            "overlapped",
            "one-shot",
            "partitioned",
            "torus:8",
            "torus:4x4x2x3x2x5",
            "hierarchical:ps:ring",
            "in-network",
            "per-dimension:4",
            "themis:16/8hx16r@240000x23000",
            "per-dimension/2rx3dx4rx5r",
            "hierarchical:direct:in-network/4",
            "hierarchical:torus:2x2:ps:3/4",
            "hierarchical:shared-memory:torus:5x7x9x1x2x3/8",
        ] {
            let algorithm: Algorithm = text.parse().unwrap();
            let spec = CollectiveSpec {
                kind: CollectiveKind::AllReduce,
                algorithm,
                order: SummationOrder::Canonical,
                reduction: Reduction::Sum,
                root: u32::MAX,
                block: u64::MAX,
            };
            let (ranks, elements, dtype) = (7, u64::MAX - 1, DType::F16);
            let purpose = Purpose::Collective { spec, ranks, elements, dtype };
            let mut bytes = [0; BYTES];
            encode(&purpose, &mut bytes);
            assert_eq!(decode(&bytes), Ok(purpose), "{text}");
        }
    }
}
