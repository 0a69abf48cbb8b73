//! Two builds of the program give the same losses and weights in the documents' experiments.
//!
//! By default the second program is the first one again, and all results must be bitwise equal. `GIRANDOLE_OTHER` is
//! the path of a build for another processor, which the kernel runs under qemu; then losses may differ by 1e-6. Used
//! by `scripts/test-aarch64.sh --documents`.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use candle_core::{DType, Device, Tensor, safetensors};

use crate::common::{Folder, clean, losses_of, metrics, sorted, succeed};

/// Training commands, with sizes that an emulated processor can handle.
const TRAINING: [(&str, &[&str]); 9] = [
    ("ddp-linear", &[]),
    ("ddp-trainer", &[]),
    ("ddp-transformer", &["--epochs", "2"]),
    ("pipeline-transformer", &["--epochs", "2"]),
    ("ddp-mlp", &["--epochs", "2"]),
    ("cifar10", &["--samples", "80", "--test-samples", "20", "--epochs", "1"]),
    (
        "fsdp-mlp",
        &["--features", "48", "--hidden", "96", "--batch-size", "4", "--param-dtype", "f32", "--steps", "10"],
    ),
    ("tensor-parallel-mlp", &["--hidden-size", "32", "--samples", "64", "--batch-size", "8"]),
    (
        "tensor-parallel-transformer",
        &["--d-model", "32", "--d-ff", "64", "--vocab-size", "64", "--length", "17", "--samples", "24"],
    ),
];

/// Commands that only print.
const PRINTING: [(&str, &[&str]); 2] = [("sampler", &[]), ("process-groups", &[])];

fn other() -> Option<PathBuf> {
    std::env::var_os("GIRANDOLE_OTHER").map(PathBuf::from)
}

fn programs() -> [Command; 2] {
    let own = PathBuf::from(env!("CARGO_BIN_EXE_girandole"));
    [own.clone(), other().unwrap_or(own)].map(|program| {
        let mut command = Command::new(program);
        clean(&mut command);
        command
    })
}

/// Returns the losses of all runs of a command.
fn all_losses(path: &str) -> Vec<f32> {
    let lines = metrics(path.as_ref());
    let runs: BTreeSet<Option<&str>> = lines.iter().map(|line| line["run"].as_str()).collect();
    runs.into_iter().flat_map(|run| losses_of(&lines, run)).collect()
}

/// Returns the largest difference between two tensors, and the number of elements that differ.
fn difference(a: &Tensor, b: &Tensor) -> (f64, usize) {
    let values = |tensor: &Tensor| {
        tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap()
    };
    let gaps = values(a).into_iter().zip(values(b)).map(|(a, b)| (a - b).abs());
    gaps.fold((0.0, 0), |(worst, count), gap| (gap.max(worst), count + usize::from(gap > 0.0)))
}

#[test]
fn both_learn_the_same() {
    for (name, arguments) in TRAINING {
        let [(losses, weights), (others, other_weights)] = programs().map(|mut program| {
            let folder = Folder::new();
            let (rows, weights) = (folder.argument("m.jsonl"), folder.argument("w.safetensors"));
            succeed(program.arg(name).args(arguments).args(["--metrics", &rows, "--save", &weights]));
            (all_losses(&rows), safetensors::load(&weights, &Device::Cpu).unwrap())
        });
        assert!(losses.len() > 1 && losses.len() == others.len(), "{name}");
        let gaps = losses.iter().zip(&others).map(|(a, b)| f64::from((a - b).abs() / a.abs().max(1.0)));
        let differing = gaps.clone().filter(|gap| *gap > 0.0).count();
        let worst = gaps.fold(0.0, f64::max);
        assert!(weights.keys().all(|name| other_weights.contains_key(name)), "{name}");
        let (mut furthest, mut places): (f64, usize) = (0.0, 0);
        for (tensor, value) in &weights {
            let (gap, count) = difference(value, &other_weights[tensor]);
            (furthest, places) = (furthest.max(gap), places + count);
        }
        let all: usize = weights.values().map(Tensor::elem_count).sum();
        println!(
            "{name}: {differing} of {} losses differ, by {worst:.1e} at most; {places} of {all} weights, by {furthest:.1e}",
            losses.len()
        );
        match other() {
            None => assert_eq!((differing, places), (0, 0), "{name}"),
            Some(_) => assert!(worst <= 1e-6, "{name}: a loss differs by {worst:.1e}"),
        }
    }
}

#[test]
fn both_print_the_same() {
    for (name, arguments) in PRINTING {
        let [own, other] = programs().map(|mut program| sorted(&succeed(program.arg(name).args(arguments))));
        assert!(!own.is_empty() && own == other, "{name}: {own:?} and {other:?}");
    }
}
