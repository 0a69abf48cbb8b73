//! Memory use of this process, and memory of the machine.
#![allow(unsafe_code, reason = "the system's C functions have no safe form")]

use std::mem::MaybeUninit;

use super::apple::PEAK_UNIT;
use crate::platform::usable_memory::UsableMemory;

pub(crate) fn peak_rss_bytes() -> Option<u64> {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: there is room for what the system writes.
    let status = unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    // SAFETY: the system has written it.
    let peak = (status == 0).then(|| unsafe { usage.assume_init() }.ru_maxrss)?;
    u64::try_from(peak).ok()?.checked_mul(PEAK_UNIT)
}

/// Always false: the peak cannot be reset.
pub(crate) fn reset_peak_rss() -> bool {
    false
}

/// Always None: not reported here.
pub(crate) fn available_memory() -> Option<UsableMemory> {
    None
}

pub(crate) fn total_memory() -> Option<UsableMemory> {
    let [pages, size] = [libc::_SC_PHYS_PAGES, libc::_SC_PAGESIZE].map(|name| {
        // SAFETY: `sysconf` accepts any name.
        let value = unsafe { libc::sysconf(name) };
        u64::try_from(value).ok()
    });
    let bytes = pages?.checked_mul(size?)?;
    Some(UsableMemory { bytes, limit: None })
}
