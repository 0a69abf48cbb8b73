//! What operating systems do differently, behind functions that mean the same on all of them.
//!
//! There are two ways: `linux`, and `portable`, which is what macOS takes and needs little beside POSIX.
//! `RUSTFLAGS="--cfg portable"` makes a build for Linux take the portable way, too, so that it is tested
//! (`scripts/test-portable.sh`). Both ways have the same modules, and these the same functions.

#[cfg(all(target_os = "linux", not(portable)))]
mod linux;
mod memory;
#[cfg(not(all(target_os = "linux", not(portable))))]
mod portable;

#[cfg(all(target_os = "linux", not(portable)))]
use linux as system;
#[cfg(not(all(target_os = "linux", not(portable))))]
use portable as system;

pub use memory::{available_memory_bytes, peak_rss_bytes, reset_peak_rss, total_memory_bytes};
pub(crate) use system::machine::{boot_id, network};
pub(crate) use system::{bell, local, shared, socket};
