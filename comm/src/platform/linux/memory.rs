//! Memory use of this process, and memory of the machine, from `/proc`.

pub(crate) fn peak_rss_bytes() -> Option<u64> {
    bytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

pub(crate) fn reset_peak_rss() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

pub(crate) fn total_memory_bytes() -> Option<u64> {
    bytes(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

pub(crate) fn available_memory_bytes() -> Option<u64> {
    bytes(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
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
    fn the_kernels_line_is_read() {
        assert_eq!(bytes("Name:\tx\nVmHWM:\t   1520 kB\nVmRSS:\t 9 kB\n", "VmHWM:"), Some(1520 * 1024));
        assert_eq!(bytes("MemTotal:       16 kB\nMemFree: 9 kB\n", "MemTotal:"), Some(16 * 1024));
        assert_eq!(bytes("Name:\tx\n", "VmHWM:"), None);
        assert_eq!(bytes("VmHWM:\tmuch\n", "VmHWM:"), None);
    }
}
