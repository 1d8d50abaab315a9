//! Encoding of a message's purpose in a fixed number of bytes.
//!
//! Every field has a fixed offset in all messages, so that a head is written and read without a
//! branch on its length. Unused fields are zero.

use super::WireError;
use crate::steps::CollectiveSpec;
use crate::transport::Purpose;
use paceline_plan::collective::{
    Algorithm, ChunkOrder, CollectiveKind, DimAlgorithm, Grid, GridDimension, Level, Reduction,
    SummationOrder, TorusShape,
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

const DTYPES: [DType; 6] = [DType::F32, DType::Bf16, DType::F16, DType::Fp8, DType::U32, DType::U8];
const ORDERS: [SummationOrder; 2] = [SummationOrder::Canonical, SummationOrder::Free];
const CHUNK_ORDERS: [ChunkOrder; 2] = [ChunkOrder::Baseline, ChunkOrder::Themis];
const WAYS: [DimAlgorithm; 3] = [DimAlgorithm::Ring, DimAlgorithm::Direct, DimAlgorithm::Halving];
const REDUCTIONS: [Reduction; 2] = [Reduction::Sum, Reduction::Max];

/// Algorithms that are not a [`Level`].
const PER_DIMENSION: u8 = 253;
const AUTO: u8 = 254;
const HIERARCHICAL: u8 = 255;

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
    let mut level = |level, name: usize, parameters: usize| {
        let (number, values) = numbers(level);
        bytes[name] = number;
        for (i, value) in values.iter().enumerate() {
            put(bytes, parameters + 4 * i, value.to_le_bytes());
        }
    };
    let one = match algorithm {
        Algorithm::Auto => {
            bytes[ALGORITHM] = AUTO;
            return;
        }
        Algorithm::Hierarchical { inner, outer, host } => {
            level(inner, OUTER + 1, PARAMETERS);
            level(outer, OUTER, OUTER_PARAMETERS);
            bytes[ALGORITHM] = HIERARCHICAL;
            put(bytes, HOST, host.map_or(0, NonZeroU32::get).to_le_bytes());
            return;
        }
        Algorithm::PerDimension { chunks, order, grid } => {
            bytes[ALGORITHM] = PER_DIMENSION;
            bytes[OUTER] = index(&CHUNK_ORDERS, order);
            put(bytes, HOST, chunks.to_le_bytes());
            let dimensions = grid.iter().flat_map(Grid::dimensions);
            for (at, GridDimension { size, way, rate }) in places().zip(dimensions) {
                put(bytes, at, size.to_le_bytes());
                put(bytes, at + 4, rate.to_le_bytes());
                bytes[at + 8] = index(&WAYS, *way);
            }
            return;
        }
        Algorithm::InNetwork => Level::InNetwork,
        Algorithm::Ring => Level::Ring,
        Algorithm::MultiRing { rings } => Level::MultiRing { rings },
        Algorithm::HalvingDoubling => Level::HalvingDoubling,
        Algorithm::Tree => Level::Tree,
        Algorithm::Direct => Level::Direct,
        Algorithm::SharedMemory => Level::SharedMemory,
        Algorithm::ParameterServer { servers } => Level::ParameterServer { servers },
        Algorithm::Naive => Level::Naive,
        Algorithm::Overlapped => Level::Overlapped,
        Algorithm::Partitioned => Level::Partitioned,
        Algorithm::Torus { shape } => Level::Torus { shape },
    };
    level(one, ALGORITHM, PARAMETERS);
}

fn decode_algorithm(bytes: &[u8; BYTES]) -> Option<Algorithm> {
    let level = |name: usize, parameters: usize| {
        let mut values = [0; TorusShape::MAX_DIMENSIONS];
        for (i, value) in values.iter_mut().enumerate() {
            *value = u32::from_le_bytes(get(bytes, parameters + 4 * i));
        }
        from_numbers(bytes[name], &values)
    };
    match bytes[ALGORITHM] {
        AUTO => Some(Algorithm::Auto),
        HIERARCHICAL => {
            let (inner, outer) = (level(OUTER + 1, PARAMETERS)?, level(OUTER, OUTER_PARAMETERS)?);
            let host = NonZeroU32::new(u32::from_le_bytes(get(bytes, HOST)));
            Some(Algorithm::Hierarchical { inner, outer, host })
        }
        PER_DIMENSION => {
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
        }
        _ => level(ALGORITHM, PARAMETERS).map(Algorithm::from),
    }
}

/// Offsets of the dimensions of a grid.
fn places() -> impl Iterator<Item = usize> {
    (0..Grid::MAX_DIMENSIONS).map(|i| PARAMETERS + 9 * i)
}

/// Number and parameters of an algorithm.
fn numbers(level: Level) -> (u8, [u32; TorusShape::MAX_DIMENSIONS]) {
    let mut values = [0; TorusShape::MAX_DIMENSIONS];
    let number = match level {
        Level::Ring => 0,
        Level::HalvingDoubling => 1,
        Level::Tree => 2,
        Level::Direct => 3,
        Level::SharedMemory => 4,
        Level::Naive => 5,
        Level::Overlapped => 6,
        Level::Partitioned => 7,
        Level::MultiRing { rings } => {
            values[0] = rings;
            8
        }
        Level::ParameterServer { servers } => {
            values[0] = servers;
            9
        }
        Level::Torus { shape } => {
            values.iter_mut().zip(shape.sizes()).for_each(|(value, size)| *value = size);
            10
        }
        Level::InNetwork => 11,
    };
    (number, values)
}

fn from_numbers(number: u8, values: &[u32; TorusShape::MAX_DIMENSIONS]) -> Option<Level> {
    Some(match number {
        0 => Level::Ring,
        1 => Level::HalvingDoubling,
        2 => Level::Tree,
        3 => Level::Direct,
        4 => Level::SharedMemory,
        5 => Level::Naive,
        6 => Level::Overlapped,
        7 => Level::Partitioned,
        8 => Level::MultiRing { rings: values[0] },
        9 => Level::ParameterServer { servers: values[0] },
        10 => {
            let dimensions = values.iter().take_while(|size| **size > 0).count();
            Level::Torus { shape: TorusShape::new(&values[..dimensions])? }
        }
        11 => Level::InNetwork,
        _ => return None,
    })
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
