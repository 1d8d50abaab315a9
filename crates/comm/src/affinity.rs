//! Cores for ranks.
//!
//! A scheduler that does not know which processes talk to each other may leave two ranks on one core
//! for seconds while another idles, and each then waits for the other's turn. Launchers of MPI jobs
//! bind ranks to cores for this reason.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Keeps this thread, and those that it starts from now on, to its share of the cores it may use: the
/// one of rank `index` among the `ranks` of this host. Whether it did: ranks that are more than the
/// cores are left to the scheduler, which then does better, and so are ranks whose system refuses.
pub fn keep_to_share(index: u32, ranks: u32) -> bool {
    let Ok(allowed) = sched_getaffinity(None) else { return false };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
    let Some(share) = share(cores.len(), index, ranks) else { return false };
    let mut own = CpuSet::new();
    cores[share].iter().for_each(|core| own.set(*core));
    sched_setaffinity(None, &own).is_ok()
}

/// Which of so many cores are a rank's.
fn share(cores: usize, index: u32, ranks: u32) -> Option<std::ops::Range<usize>> {
    let (index, ranks) = (index as usize, ranks as usize);
    (index < ranks && ranks <= cores).then(|| cores * index / ranks..cores * (index + 1) / ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_equal_and_apart() {
        assert_eq!(share(2, 0, 2), Some(0..1));
        assert_eq!(share(2, 1, 2), Some(1..2));
        assert_eq!((0..3).filter_map(|i| share(8, i, 3)).collect::<Vec<_>>(), [0..2, 2..5, 5..8]);
        assert_eq!(share(2, 0, 3), None);
        assert_eq!(share(2, 2, 2), None);
        assert_eq!(share(0, 0, 0), None);
    }

    #[test]
    fn a_thread_keeps_to_its_share() {
        std::thread::spawn(|| {
            let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
            if keep_to_share(0, cores as u32) {
                assert_eq!(std::thread::available_parallelism().unwrap().get(), 1);
            }
        })
        .join()
        .unwrap();
    }
}
