//! What the tests of several commands share.
#![allow(dead_code, unused_imports, reason = "not every test uses all of it")]

mod command;
#[cfg(target_os = "linux")]
mod session;

pub(crate) use command::{
    Folder, Girandole, clean, girandole, is_ignored, losses, losses_of, metrics, refuse_with, sorted,
    succeed, text, without_times,
};
#[cfg(target_os = "linux")]
pub(crate) use session::{Session, kill_and_resume};

/// Every value within 1e-4, relative.
pub(crate) fn assert_close(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: how many");
    for (place, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs() / expected.abs().max(1e-3);
        assert!(
            error < 1e-4,
            "{what}, number {place}: got {got}, PyTorch has {expected}, relative error {error:.1e}"
        );
    }
}
