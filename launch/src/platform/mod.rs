//! Operating system differences, behind functions with the same meaning on all systems.
//!
//! There are two implementations: `linux`, and `portable`, which macOS uses and which needs little beyond POSIX. With
//! `RUSTFLAGS="--cfg portable"` a build for Linux uses `portable`, too, so that it is tested
//! (`scripts/test-portable.sh`). Both have the same modules with the same functions.

#[cfg(all(target_os = "linux", not(portable)))]
mod linux;
#[cfg(not(all(target_os = "linux", not(portable))))]
mod portable;
mod signals;

#[cfg(all(target_os = "linux", not(portable)))]
use linux as system;
#[cfg(not(all(target_os = "linux", not(portable))))]
use portable as system;

/// How many processes of a job were killed, and how many others may be of it.
#[derive(Debug, Default)]
pub(crate) struct Killed {
    pub(crate) count: usize,
    pub(crate) undecided: usize,
}

pub(crate) use signals::{Mask, unblock, unblocked};
pub(crate) use system::exits::Exits;
pub(crate) use system::{guard, processes, program, socket, tie};
