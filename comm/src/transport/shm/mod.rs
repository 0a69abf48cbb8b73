//! Shared memory between ranks of one host: each ordered pair of ranks has a ring buffer, and each rank a wake-up (a file
//! descriptor) that wakes it.
//!
//! Two ranks use it when they run on the same kernel (compared by boot id, not by name), one can pass the other a piece
//! of memory through a unix socket, and the other finds the agreed token in it. All others use TCP, for example ranks in
//! containers with separate networks. Which pairs share memory is normally known at the rendezvous
//! ([`crate::transport::site`]); the memory itself is set up together with the connection between the two ranks, when
//! that is first needed ([`share`]). The connection stays open beside the memory: when it ends, the peer is gone.
//!
//! What differs between systems is in `platform`: creating memory that has no name in the file system, so that nothing is
//! left behind however the ranks end; the socket; and the wake-up.

mod agreement;
mod handover;
mod host;
mod region;
mod ring;

pub(crate) use agreement::share;
pub(crate) use host::{RingPair, SharedMemory};

use crate::platform::wake_up;
pub(super) use ring::fence_before_recheck;
pub(super) use wake_up::WakeUp;

/// The name of a rank's socket.
type Name = [u8; 16];
/// Identifies the memory of one ring; random, so that nobody can guess it.
type Token = [u8; 32];

#[cfg(test)]
mod tests;
