//! Company for ranks that exchange something: threads that want all cores for themselves.

use paceline_comm::affinity;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Threads that compute, one on every core, until it is dropped.
#[derive(Debug)]
pub struct Crowd {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Crowd {
    /// On so many cores.
    pub fn new(cores: u32) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let compute = |core: u32| {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                affinity::keep_to_share(core, cores);
                let mut sum = 1u64;
                while !over.load(Ordering::Relaxed) {
                    // Long against a look at a shared flag, short against a turn of the system.
                    (0..10_000u64)
                        .for_each(|k| sum = std::hint::black_box(sum.wrapping_mul(k | 1)));
                }
            })
        };
        let threads = (0..cores.max(1)).map(compute).collect();
        Self { over, threads }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It has nothing to say, and cannot fail.
            let _ = thread.join();
        }
    }
}
