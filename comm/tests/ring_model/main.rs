//! The ring of shared memory under a model checker: every order in which the steps of a writer and a reader can come, and every
//! value that the memory model lets them see, which is more than an x86-64 processor does. `src/transport/shm/ring.rs` itself is compiled
//! here, on atomics that the checker watches.
//!
//! Few steps in which one end may be interrupted by the other keep it short; `GIRANDOLE_RING_MODEL=5` allows so many, and takes
//! minutes.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "all of it is test")]
#![allow(clippy::arc_with_non_send_sync, reason = "the checker's threads take turns on one")]

mod shm;

mod transport {
    pub(crate) mod links;
}
