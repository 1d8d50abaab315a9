//! Cores for ranks.
//!
//! A scheduler that does not know which processes talk to each other may leave two ranks on one core
//! for seconds while another idles, and each then waits for the other's turn. Launchers of MPI jobs
//! bind ranks to cores for this reason.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores of one of the ranks of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    cores: Vec<usize>,
}

impl Share {
    /// The share of rank `index` among the `ranks` of this host, of the cores that this thread may use. Ranks
    /// that are more than the cores have none: they are left to the scheduler, which then does better.
    pub fn of(index: u32, ranks: u32) -> Option<Self> {
        let cores = allowed();
        share(cores.len(), index, ranks).map(|share| Self { cores: cores[share].to_vec() })
    }

    /// Keeps this thread, and those that it starts from now on, to these cores. Whether it did: a system may
    /// refuse.
    pub fn keep(&self) -> bool {
        keep_to(&self.cores)
    }

    /// Makes something with threads that are to work beside this one, which keeps to the first core while they
    /// keep to the others. Threads begin where they were made, and a scheduler may leave them there for a while.
    pub fn keep_beside<T>(&self, make: impl FnOnce() -> T) -> T {
        let (first, others) = self.cores.split_at(1);
        if !others.is_empty() {
            keep_to(others);
        }
        let made = make();
        if !others.is_empty() {
            keep_to(first);
        }
        made
    }
}

/// Keeps this thread, and those that it starts from now on, to its share of the cores it may use. Whether it
/// did.
pub fn keep_to_share(index: u32, ranks: u32) -> bool {
    Share::of(index, ranks).is_some_and(|share| share.keep())
}

/// How many cores this thread may use.
pub fn cores() -> usize {
    allowed().len().max(1)
}

/// None if the system does not tell.
fn allowed() -> Vec<usize> {
    let allowed = sched_getaffinity(None);
    (0..CpuSet::MAX_CPU)
        .filter(|core| allowed.as_ref().is_ok_and(|set| set.is_set(*core)))
        .collect()
}

fn keep_to(cores: &[usize]) -> bool {
    let mut own = CpuSet::new();
    cores.iter().for_each(|core| own.set(*core));
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

    #[test]
    fn helpers_are_kept_beside_their_caller() {
        let count = || std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let all = count();
        std::thread::spawn(move || {
            let share = Share::of(0, 1).unwrap();
            let helpers = share.keep_beside(|| std::thread::spawn(count).join().unwrap());
            assert_eq!((count(), helpers), if all > 1 { (1, all - 1) } else { (1, 1) });
        })
        .join()
        .unwrap();
    }
}
