//! Resident memory of a process.

use crate::run::cgroup;
use std::fs;

/// Measurement of the growth in resident memory since its start.
#[derive(Debug)]
pub(crate) struct Resident {
    before: Option<u64>,
}

impl Resident {
    /// Starts measuring: memory that is resident now does not count.
    pub(crate) fn start() -> Self {
        // Resets the peak, so that planning does not count. Where the system does not allow this,
        // the peak is an upper bound.
        let _ = fs::write("/proc/self/clear_refs", "5");
        Self { before: status("VmRSS:") }
    }

    /// Peak growth of resident memory since the start; `None` where the system does not report it.
    /// `own` is the memory that this process shares with others: shared memory mapped beyond that
    /// belongs to them.
    pub(crate) fn grown(&self, own: u64) -> Option<u64> {
        let theirs = status("RssShmem:").unwrap_or(0).saturating_sub(own);
        Some(status("VmHWM:")?.saturating_sub(theirs).saturating_sub(self.before?))
    }

    /// Same, distributed over ranks in proportion to their planned memory: for ranks that are
    /// threads of one process only the sum can be measured.
    pub(crate) fn per_rank(&self, planned: &[u64]) -> Option<Vec<u64>> {
        let grown = self.grown(0)?;
        let total: u128 = planned.iter().map(|bytes| u128::from(*bytes)).sum();
        let share = |bytes: &u64| match total {
            0 => grown / planned.len().max(1) as u64,
            total => (u128::from(grown) * u128::from(*bytes) / total) as u64,
        };
        Some(planned.iter().map(share).collect())
    }
}

/// Memory that the system could give to this process now, within the limits of its container;
/// `None` where it is not reported.
pub fn available() -> Option<u64> {
    let machine = field("/proc/meminfo", "MemAvailable:");
    machine.into_iter().chain(cgroup::room()).min()
}

/// Field of `/proc/self/status`, in bytes.
fn status(name: &str) -> Option<u64> {
    field("/proc/self/status", name)
}

fn field(file: &str, field: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_touched_is_counted_and_shared_in_proportion() {
        let resident = Resident::start();
        let touched = vec![1u8; 64 << 20];
        let ranks = resident.per_rank(&[3, 1]).unwrap();
        assert!(std::hint::black_box(&touched).iter().all(|byte| *byte == 1));
        assert!(ranks[0] >= 40 << 20, "{ranks:?}");
        assert!(ranks[0].abs_diff(3 * ranks[1]) < 8, "{ranks:?}");
    }
}
