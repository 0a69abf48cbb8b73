//! Memory use of this process, and memory that it may use, from `/proc` and its control groups.

use std::path::PathBuf;

use super::cgroup::limits;
use crate::platform::usable_memory::UsableMemory;

pub(crate) fn peak_rss_bytes() -> Option<u64> {
    bytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

pub(crate) fn reset_peak_rss() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

pub(crate) fn total_memory() -> Option<UsableMemory> {
    let limits = limits().into_iter().map(|limit| (limit.bytes, limit.file));
    least(machine("MemTotal:"), limits)
}

pub(crate) fn available_memory() -> Option<UsableMemory> {
    let limits = limits().into_iter().map(|limit| (limit.available, limit.file));
    least(machine("MemAvailable:"), limits)
}

fn machine(name: &str) -> Option<u64> {
    bytes(&std::fs::read_to_string("/proc/meminfo").ok()?, name)
}

/// Returns the least of the machine's memory and the limits, each with its file.
fn least(machine: Option<u64>, limits: impl Iterator<Item = (u64, PathBuf)>) -> Option<UsableMemory> {
    let machine = machine.map(|bytes| UsableMemory { bytes, limit: None });
    let limits = limits.map(|(bytes, file)| UsableMemory { bytes, limit: Some(file) });
    machine.into_iter().chain(limits).min_by_key(|memory| memory.bytes)
}

fn bytes(lines: &str, name: &str) -> Option<u64> {
    let line = lines.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_counts_and_is_named() {
        let limits = || [(300, PathBuf::from("/outer")), (200, "/inner".into())].into_iter();
        let memory = |bytes, limit: Option<&str>| UsableMemory { bytes, limit: limit.map(PathBuf::from) };
        assert_eq!(least(Some(1000), limits()), Some(memory(200, Some("/inner"))));
        assert_eq!(least(Some(200), limits()), Some(memory(200, None)));
        assert_eq!(least(None, limits()), Some(memory(200, Some("/inner"))));
        assert_eq!(least(None, std::iter::empty()), None);
    }

    #[test]
    fn the_kernels_line_is_read() {
        assert_eq!(bytes("Name:\tx\nVmHWM:\t   1520 kB\nVmRSS:\t 9 kB\n", "VmHWM:"), Some(1520 * 1024));
        assert_eq!(bytes("MemTotal:       16 kB\nMemFree: 9 kB\n", "MemTotal:"), Some(16 * 1024));
        assert_eq!(bytes("Name:\tx\n", "VmHWM:"), None);
        assert_eq!(bytes("VmHWM:\tmuch\n", "VmHWM:"), None);
    }
}
