//! Fuzz targets for messages from other launchers, as functions of bytes: for `fuzz/` and for the test that runs its
//! seeds. Each panics on a violated invariant. Only compiled for tests and fuzzing.
#![allow(missing_docs, clippy::missing_errors_doc, clippy::unwrap_used)]

pub use crate::nodes::fuzz_coordinator as coordinator;

#[cfg(test)]
#[path = "../../comm/src/fuzz/seeds.rs"]
mod seeds;

#[cfg(test)]
mod tests {
    use super::seeds::{Target, every_change, every_seed};

    const TARGETS: [Target; 1] = [("coordinator", super::coordinator)];

    #[test]
    fn every_seed_passes() {
        every_seed(&TARGETS);
    }

    #[test]
    fn every_change_of_a_seed_passes() {
        every_change(&TARGETS);
    }
}
