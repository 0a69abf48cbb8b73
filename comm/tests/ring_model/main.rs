//! Model check of the shared-memory ring: every order in which the steps of a writer and a reader can run, and every
//! value that the memory model allows them to read, which is more than an x86-64 processor does.
//! `src/transport/shm/ring.rs` itself is compiled here, with atomics that the checker watches.
//!
//! A low number of preemptions keeps the run short; `GIRANDOLE_RING_MODEL=5` allows that many, and takes minutes.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "all of it is test")]
#![allow(clippy::arc_with_non_send_sync, reason = "the checker's threads take turns on one")]

mod shm;

mod transport {
    pub(crate) mod links;
}
