//! Background load for timed exchanges: threads that keep all cores busy.

use paceline_comm::affinity;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Compute threads, one on every core, that run until this value is dropped.
#[derive(Debug)]
pub struct BackgroundLoad {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BackgroundLoad {
    /// Starts one thread on each of `cores` cores.
    pub fn new(cores: u32) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let compute = |core: u32| {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                affinity::pin_to_share(core, cores);
                let mut sum = 1u64;
                while !over.load(Ordering::Relaxed) {
                    // Long against reading a shared flag, short against a time slice.
                    (0..10_000u64)
                        .for_each(|k| sum = std::hint::black_box(sum.wrapping_mul(k | 1)));
                }
            })
        };
        let threads = (0..cores.max(1)).map(compute).collect();
        Self { over, threads }
    }
}

impl Drop for BackgroundLoad {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The thread returns nothing and cannot fail.
            let _ = thread.join();
        }
    }
}
