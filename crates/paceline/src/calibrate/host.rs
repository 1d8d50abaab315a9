//! Hardware properties that the operating system reports.

use std::fs;

/// The processor's name.
pub(super) fn processor() -> String {
    let known = fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned()).filter(|name| !name.is_empty())
    });
    known.unwrap_or_else(|| "CPU core".into())
}

/// Bytes of memory.
pub(super) fn memory() -> u64 {
    let known = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    known.unwrap_or(8 << 30)
}

/// Bytes of the largest cache.
pub(super) fn cache() -> u64 {
    let size = |index: u32| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        let text = fs::read_to_string(path).ok()?;
        text.trim().strip_suffix('K')?.parse::<u64>().ok()?.checked_mul(1024)
    };
    (0..5).filter_map(size).max().unwrap_or(32 << 20).clamp(1 << 20, 1 << 30)
}
