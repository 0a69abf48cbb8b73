//! Helpers shared by the tests of several commands.
#![allow(dead_code, unused_imports, reason = "not every test uses all of it")]

mod command;
#[cfg(target_os = "linux")]
mod culprit;
mod model;
mod port;
#[cfg(target_os = "linux")]
mod session;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Device, safetensors};

pub(crate) use port::free_port;

pub(crate) use command::{
    Folder, Girandole, clean, girandole, is_ignored, losses, losses_of, metrics, refuse_with, sorted,
    succeed, text, without_times,
};
#[cfg(target_os = "linux")]
pub(crate) use culprit::all_name_the_culprit;
pub(crate) use model::model;
#[cfg(target_os = "linux")]
pub(crate) use session::{Session, kill_and_resume};

/// Checks that every value is within a relative error of 1e-4.
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

/// Checks the weights in a file against PyTorch's: the sum, and the root of the sum of squares, of each tensor except
/// those that `but` excludes.
pub(crate) fn assert_norms(
    file: &Path,
    norms: &BTreeMap<String, [f64; 2]>,
    but: impl Fn(&str) -> bool,
    what: &str,
) {
    let weights = safetensors::load(file, &Device::Cpu).unwrap();
    assert_eq!(weights.keys().collect::<BTreeSet<_>>(), norms.keys().collect());
    for (name, expected) in norms.iter().filter(|(name, _)| !but(name)) {
        let wide = weights[name].to_dtype(DType::F64).unwrap();
        let sum = wide.sum_all().unwrap().to_scalar::<f64>().unwrap();
        let norm = wide.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt();
        // A sum of numbers of both signs is small, so its error is taken relative to the norm.
        let [gap, error] =
            [sum - expected[0], norm - expected[1]].map(|gap| gap.abs() / expected[1].max(1e-3));
        assert!(gap < 1e-3 && error < 1e-4, "{what}, {name}: {sum} and {norm}, PyTorch has {expected:?}");
    }
}
