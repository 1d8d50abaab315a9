//! Core pinning for ranks.
//!
//! A scheduler that does not know the communication between processes may leave two ranks on one
//! core for seconds while another core is idle. Each rank then waits for the other's time slice.
//! MPI launchers pin ranks to cores for this reason.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Cores assigned to one rank of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreSet {
    cores: Vec<usize>,
}

impl CoreSet {
    /// Returns the share of rank `index` among the `ranks` of this host, from the cores this thread
    /// may use. Returns `None` if there are more ranks than cores: the OS scheduler then does
    /// better than pinning.
    pub fn of(index: u32, ranks: u32) -> Option<Self> {
        let cores = allowed();
        share(cores.len(), index, ranks).map(|share| Self { cores: cores[share].to_vec() })
    }

    /// Pins this thread, and threads it starts later, to these cores. Returns false if the system
    /// refuses.
    pub fn pin(&self) -> bool {
        pin_to(&self.cores)
    }

    /// Runs `make`, which creates helper threads, so that they are pinned to the other cores and
    /// this thread to the first. Threads start on their creator's cores, and a scheduler may leave
    /// them there for a while.
    pub fn pin_with_helpers<T>(&self, make: impl FnOnce() -> T) -> T {
        let (first, others) = self.cores.split_at(1);
        if !others.is_empty() {
            pin_to(others);
        }
        let made = make();
        if !others.is_empty() {
            pin_to(first);
        }
        made
    }
}

/// Pins this thread, and threads it starts later, to its share of the cores it may use. Returns
/// true on success.
pub fn pin_to_share(index: u32, ranks: u32) -> bool {
    CoreSet::of(index, ranks).is_some_and(|share| share.pin())
}

/// Number of cores this thread may use.
pub fn cores() -> usize {
    allowed().len().max(1)
}

/// Cores this thread may use; empty if the system does not report them.
fn allowed() -> Vec<usize> {
    let allowed = sched_getaffinity(None);
    (0..CpuSet::MAX_CPU)
        .filter(|core| allowed.as_ref().is_ok_and(|set| set.is_set(*core)))
        .collect()
}

fn pin_to(cores: &[usize]) -> bool {
    let mut own = CpuSet::new();
    cores.iter().for_each(|core| own.set(*core));
    sched_setaffinity(None, &own).is_ok()
}

/// Range of the `cores` that belongs to rank `index` of `ranks`.
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
            if pin_to_share(0, cores as u32) {
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
            let share = CoreSet::of(0, 1).unwrap();
            let helpers = share.pin_with_helpers(|| std::thread::spawn(count).join().unwrap());
            assert_eq!((count(), helpers), if all > 1 { (1, all - 1) } else { (1, 1) });
        })
        .join()
        .unwrap();
    }
}
