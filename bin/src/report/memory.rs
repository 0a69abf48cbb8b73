//! How much memory this process has held.

/// The most memory that this process has held at once (its peak resident set), in bytes. Known on Linux only.
///
/// ```
/// # #[cfg(target_os = "linux")]
/// assert!(girandole::report::peak_rss_bytes() > Some(100_000));
/// ```
pub fn peak_rss_bytes() -> Option<u64> {
    from_status(&std::fs::read_to_string("/proc/self/status").ok()?)
}

/// Lets [`peak_rss_bytes`] begin anew from what the process holds now; false where the system cannot.
pub fn reset_peak_rss() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

fn from_status(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_is_read() {
        assert_eq!(from_status("Name:\tx\nVmHWM:\t   1520 kB\nVmRSS:\t 9 kB\n"), Some(1520 * 1024));
        assert_eq!(from_status("Name:\tx\n"), None);
        assert_eq!(from_status("VmHWM:\tmuch\n"), None);
    }
}
