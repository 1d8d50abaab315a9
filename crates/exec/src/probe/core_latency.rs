//! Communication latency between cores.
//!
//! Cores that share a cache pass a line to each other in tens of nanoseconds, others in hundreds. A
//! virtual machine's cores are threads of its host, which migrates them. Cores that share a cache
//! now may be on different sides of a processor a second later, and exchanges then take three times
//! as long.

use paceline_comm::affinity::{self, CoreSet};
use paceline_plan::units::Seconds;
use std::hint::spin_loop;
use std::sync::Barrier;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;

/// Round trips per batch. The fastest of `BATCHES` batches counts: no other work disturbed it.
const TRIPS: u32 = 100;
const BATCHES: usize = 5;

/// Flag passed back and forth, on a cache line of its own.
#[repr(align(128))]
struct Ball(AtomicU32);

const HERE: u32 = 0;
const THERE: u32 = 1;
const GONE: u32 = 2;

/// Measures the core round trip: the time of a cache line from one core to another and back. This
/// thread is pinned to `one` meanwhile, then again to all cores that it could use before. Returns
/// zero if no thread can be spawned.
pub fn round_trip(one: &CoreSet, other: &CoreSet) -> Seconds {
    let ball = Ball(AtomicU32::new(THERE));
    // Both threads are pinned before either keeps its core busy.
    let ready = Barrier::new(2);
    let answer = || {
        other.pin();
        ready.wait();
        loop {
            match ball.0.load(Acquire) {
                THERE => ball.0.store(HERE, Release),
                GONE => break,
                _ => spin_loop(),
            }
        }
    };
    let ask = || {
        ready.wait();
        let hand_over = || {
            while ball.0.load(Acquire) == THERE {
                spin_loop();
            }
        };
        // The other thread has started.
        hand_over();
        let batch = |_| {
            let began = Instant::now();
            for _ in 0..TRIPS {
                ball.0.store(THERE, Release);
                hand_over();
            }
            began.elapsed().as_secs_f64() / f64::from(TRIPS)
        };
        let best = (0..BATCHES).map(batch).fold(f64::MAX, f64::min);
        ball.0.store(GONE, Release);
        best
    };
    let all = CoreSet::of(0, 1);
    let best = std::thread::scope(|scope| {
        let other = std::thread::Builder::new().spawn_scoped(scope, answer);
        other.map_or(0.0, |_| {
            one.pin();
            ask()
        })
    });
    all.iter().for_each(|all| _ = all.pin());
    Seconds(best)
}

/// Round trip between the first and the last core that this thread may use; `None` if there is only
/// one, or if no thread can be spawned.
pub fn core_round_trip() -> Option<Seconds> {
    let cores = u32::try_from(affinity::cores()).unwrap_or(u32::MAX);
    let (first, last) = (CoreSet::of(0, cores)?, CoreSet::of(cores - 1, cores)?);
    (cores > 1).then(|| round_trip(&first, &last)).filter(|time| time.0 > 0.0)
}

/// Ratio of round trips that indicates migration; otherwise samples differ by a third.
const ELSEWHERE: f64 = 1.6;

/// Returns true if cores with round trip `now` have migrated since it was `then`.
pub fn cores_migrated(now: Seconds, then: Seconds) -> bool {
    now.0 > ELSEWHERE * then.0 || now.0 * ELSEWHERE < then.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_takes_a_while() {
        let before = affinity::cores();
        match core_round_trip() {
            Some(time) => assert!(before > 1 && time.0 > 0.0 && time.0 < 1.0, "{time:?}"),
            None => assert_eq!(before, 1),
        }
        assert_eq!(affinity::cores(), before, "this thread is left where it was");
    }

    #[test]
    fn looks_differ_a_little_where_cores_stay() {
        let usual = Seconds(5.1e-8);
        for (now, moved) in [(4.2e-8, false), (7e-8, false), (2.7e-8, true), (3e-7, true)] {
            assert_eq!(cores_migrated(Seconds(now), usual), moved, "{now}");
        }
    }
}
