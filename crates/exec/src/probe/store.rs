//! Bandwidth of the offload store.

use crate::memory::store::{OffloadStore, StoreError};
use paceline_plan::strategy;
use paceline_plan::units::BytesPerSec;
use std::path::Path;
use std::time::Instant;

/// Bytes per transfer: about one layer's share of a tensor class.
const PIECE: usize = 1 << 20;

/// Bandwidth of writing to and reading from a store, in `folder` if it needs one.
///
/// Writes `bytes` bytes and reads them back, piece by piece, as a run does: the page cache has the
/// same effect as there. The first round allocates; the median of three others counts.
pub fn store(
    kind: strategy::Store,
    folder: &Path,
    bytes: usize,
) -> Result<BytesPerSec, StoreError> {
    let pieces = bytes.div_ceil(PIECE).max(1);
    let store = OffloadStore::open(0, (pieces * PIECE) as u64, kind, folder)?;
    let mut own: Vec<u8> = (0..pieces * PIECE).map(|i| i as u8).collect();
    let mut round = || {
        let began = Instant::now();
        for (at, piece) in own.chunks_exact(PIECE).enumerate() {
            store.write((at * PIECE) as u64, piece)?;
        }
        for (at, piece) in own.chunks_exact_mut(PIECE).enumerate() {
            store.read((at * PIECE) as u64, piece)?;
        }
        Ok::<_, StoreError>(began.elapsed().as_secs_f64())
    };
    round()?;
    let mut times = [round()?, round()?, round()?];
    times.sort_unstable_by(f64::total_cmp);
    Ok(BytesPerSec(2.0 * (pieces * PIECE) as f64 / times[1].max(1e-9)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_stores_have_a_rate_and_an_unwritable_folder_is_named() {
        let folder = std::env::temp_dir();
        for kind in [strategy::Store::Host, strategy::Store::Disk] {
            let rate = store(kind, &folder, 3 << 20).unwrap();
            assert!(rate.0.is_finite() && rate.0 > 1e6, "{kind:?}: {rate:?}");
        }
        let nowhere = Path::new("/proc/no such folder");
        let error = store(strategy::Store::Disk, nowhere, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("no such folder"), "{error}");
    }
}
