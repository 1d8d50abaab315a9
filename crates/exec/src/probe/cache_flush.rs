//! Evicts everything else from the caches.

use std::sync::{Mutex, PoisonError};

/// Memory that is walked through between two runs, so that the second finds its operands evicted.
/// It is reused for many measurements: allocating memory costs more than using it.
#[derive(Debug)]
pub struct CacheFlush {
    /// One vector per rank.
    memory: Vec<Mutex<Vec<u64>>>,
    words: usize,
}

/// Number of `u64` words in a cache line.
const LINE: usize = 8;

/// Number of words that exceed a core's private caches but fit into the shared cache.
const BLOCK: usize = 1 << 18;

impl CacheFlush {
    /// Creates memory for up to `ranks` ranks that share a cache of `cache` bytes.
    pub fn new(ranks: u32, cache: u64) -> Self {
        // Three times the capacity: caches do not evict everything for data that is touched once.
        let words = usize::try_from(cache / 8 * 3).unwrap_or(usize::MAX / 16);
        let memory = (0..ranks.max(1)).map(|_| Mutex::new(Vec::new())).collect();
        Self { memory, words }
    }

    /// Walks through the memory of `rank`, one of `ranks` ranks that do so at once.
    ///
    /// Every second line is modified: a run then has to evict dirty lines, which must be written
    /// back, as in the middle of training. Every line is touched twice, some time apart: large
    /// caches retain what they have rather than lines that are touched once.
    pub(super) fn walk(&self, rank: u32, ranks: u32) {
        let Some(memory) = self.memory.get(rank as usize) else { return };
        let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
        let words = self.words / ranks.max(1) as usize;
        if memory.len() < words {
            memory.resize(words, 1);
        }
        let mut sum = 0u64;
        for block in memory[..words].chunks_mut(BLOCK) {
            for _ in 0..2 {
                for pair in block.chunks_exact_mut(2 * LINE) {
                    sum = sum.wrapping_add(pair[0]);
                    pair[LINE] = pair[LINE].wrapping_add(1);
                }
            }
        }
        std::hint::black_box(sum);
    }
}
