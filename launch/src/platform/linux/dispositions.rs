//! Signal dispositions of this process, read from `/proc/self/status`.

pub(crate) fn ignored() -> u64 {
    field("SigIgn:")
}

pub(crate) fn handled() -> u64 {
    field("SigCgt:")
}

/// Returns the mask in this field; 0 if the file cannot be read.
fn field(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let digits = status.lines().find_map(|line| line.strip_prefix(name));
    digits.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0)
}
