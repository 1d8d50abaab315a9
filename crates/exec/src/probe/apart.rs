//! How far cores are from each other.
//!
//! Cores that share a cache hand a line to each other in a few tens of nanoseconds, others in hundreds. A virtual
//! machine's cores are threads of its host, which moves them: what shares a cache now may be on two sides of a
//! processor a second later, and exchanges then take three times as long.

use paceline_comm::affinity::{self, Share};
use paceline_plan::units::Seconds;
use std::hint::spin_loop;
use std::sync::Barrier;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Instant;

/// Round trips of a batch, and batches of which the fastest counts: nobody else was at work in it.
const TRIPS: u32 = 100;
const BATCHES: usize = 5;

/// What is handed to and fro, on a line of its own.
#[repr(align(128))]
struct Ball(AtomicU32);

const HERE: u32 = 0;
const THERE: u32 = 1;
const GONE: u32 = 2;

/// How long a word takes from one core to another and back. This thread is kept to the first meanwhile, and then to
/// all cores that it could use before. Nothing if the system has no thread to give.
pub fn round_trip(one: &Share, other: &Share) -> Seconds {
    let ball = Ball(AtomicU32::new(THERE));
    // Both are on their cores before either keeps one busy.
    let ready = Barrier::new(2);
    let answer = || {
        other.keep();
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
        // The other has come.
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
    let all = Share::of(0, 1);
    let best = std::thread::scope(|scope| {
        let other = std::thread::Builder::new().spawn_scoped(scope, answer);
        other.map_or(0.0, |_| {
            one.keep();
            ask()
        })
    });
    all.iter().for_each(|all| _ = all.keep());
    Seconds(best)
}

/// The round trip between the first and the last of the cores that this thread may use; none if there is but one, or no
/// thread to be had.
pub fn apart() -> Option<Seconds> {
    let cores = u32::try_from(affinity::cores()).unwrap_or(u32::MAX);
    let (first, last) = (Share::of(0, cores)?, Share::of(cores - 1, cores)?);
    (cores > 1).then(|| round_trip(&first, &last)).filter(|time| time.0 > 0.0)
}

/// Cores that are so many times as near or as far as they were are elsewhere: where they stay, looks differ by a third.
const ELSEWHERE: f64 = 1.6;

/// Whether cores that are so far apart now have been moved since they were so far apart then.
pub fn were_moved(now: Seconds, then: Seconds) -> bool {
    now.0 > ELSEWHERE * then.0 || now.0 * ELSEWHERE < then.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_takes_a_while() {
        let before = affinity::cores();
        match apart() {
            Some(time) => assert!(before > 1 && time.0 > 0.0 && time.0 < 1.0, "{time:?}"),
            None => assert_eq!(before, 1),
        }
        assert_eq!(affinity::cores(), before, "this thread is left where it was");
    }

    #[test]
    fn looks_differ_a_little_where_cores_stay() {
        let usual = Seconds(5.1e-8);
        for (now, moved) in [(4.2e-8, false), (7e-8, false), (2.7e-8, true), (3e-7, true)] {
            assert_eq!(were_moved(Seconds(now), usual), moved, "{now}");
        }
    }
}
