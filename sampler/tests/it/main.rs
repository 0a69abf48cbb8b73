//! Tests of `sampler`'s public API, in one program, which builds faster than one for each file.
#![allow(clippy::unwrap_used)]

mod distributed;
mod invariants;
mod loader;
mod pytorch;
