//! Pushing everything else out of the caches.

use std::sync::{Mutex, PoisonError};

/// Memory that is walked through between two runs, so that the second finds its operands as far
/// away as they can be. It is kept for many measurements: new memory costs more than using it.
#[derive(Debug)]
pub struct Sweep {
    /// One for each rank.
    memory: Vec<Mutex<Vec<u64>>>,
    words: usize,
}

/// Words of a cache line.
const LINE: usize = 8;

/// Words that a core's own caches have no room for, and those that it shares have.
const BLOCK: usize = 1 << 18;

impl Sweep {
    /// For up to so many ranks that share a cache of so many bytes.
    pub fn new(ranks: u32, cache: u64) -> Self {
        // Several times what there is room for: caches do not give everything up for what comes once.
        let words = usize::try_from(cache / 8 * 3).unwrap_or(usize::MAX / 16);
        let memory = (0..ranks.max(1)).map(|_| Mutex::new(Vec::new())).collect();
        Self { memory, words }
    }

    /// Walks through the memory of one of so many ranks that do so at once.
    ///
    /// Every second line is changed: what a run then brings into the cache has to push out lines
    /// that must be written back, as it does in the middle of training. And every line is wanted twice, by
    /// and by: large caches keep what they have rather than what comes once and is gone.
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
