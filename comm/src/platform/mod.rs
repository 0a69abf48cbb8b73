//! Differences between operating systems, behind functions that mean the same on all of them.
//!
//! There are two implementations: `linux`, and `portable`, which is used on macOS and needs little beyond POSIX.
//! `RUSTFLAGS="--cfg portable"` makes a build for Linux use `portable` as well, so that it is tested
//! (`scripts/test-portable.sh`). Both have the same modules with the same functions.

#[cfg(all(target_os = "linux", not(portable)))]
mod linux;
mod memory;
#[cfg(not(all(target_os = "linux", not(portable))))]
mod portable;
pub(crate) mod send_queue;
mod usable_memory;

#[cfg(all(target_os = "linux", not(portable)))]
use linux as system;
#[cfg(not(all(target_os = "linux", not(portable))))]
use portable as system;

pub use memory::{available_memory, peak_rss_bytes, reset_peak_rss, total_memory};
pub(crate) use system::machine::{boot_id, network};
pub(crate) use system::ready_set::ReadySet;
pub(crate) use system::tcp_info::send_queue;
pub(crate) use system::{local, shared, socket, wake_up};
pub use usable_memory::UsableMemory;

/// Returns the host name of this machine.
///
/// ```
/// assert!(!comm::internal::host_name().is_empty());
/// ```
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
