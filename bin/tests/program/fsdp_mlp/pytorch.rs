//! Losses and weights equal PyTorch FSDP2's, from the seed alone, on 1 to 4 ranks and with each sharding.

use std::collections::BTreeMap;

use candle_core::{DType, Device, safetensors};
use serde::Deserialize;

use crate::common::{Folder, assert_close, losses};
use crate::fsdp_mlp::FSDP;

#[derive(Deserialize)]
struct Golden {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    world_size: usize,
    seed: u64,
    features: usize,
    hidden: usize,
    batch_size: usize,
    lr: f64,
    steps: usize,
    /// Types of the layers' computation and of gradient reduction; `None` means f32.
    param: Option<String>,
    reduce: Option<String>,
    losses: Vec<f32>,
    /// The sum and the root of the sum of squares of each parameter.
    norms: BTreeMap<String, (f64, f64)>,
}

/// Runs it and returns the losses; the final weights are in the folder.
fn train(run: &Run, folder: &Folder, sharding: &[&str], steps: usize) -> Vec<f32> {
    let dtype = |name: &Option<String>| match name.as_deref() {
        Some("float16") => "f16",
        Some("bfloat16") => "bf16",
        _ => "f32",
    };
    let options = [
        ("--world-size", run.world_size.to_string()),
        ("--seed", run.seed.to_string()),
        ("--features", run.features.to_string()),
        ("--hidden", run.hidden.to_string()),
        ("--batch-size", run.batch_size.to_string()),
        ("--lr", run.lr.to_string()),
        ("--steps", steps.to_string()),
        ("--metrics", folder.argument("m.jsonl")),
        ("--save", folder.argument("w.safetensors")),
    ];
    let arguments = options.iter().flat_map(|(option, value)| [*option, value.as_str()]);
    let dtypes = ["--param-dtype", dtype(&run.param), "--reduce-dtype", dtype(&run.reduce)];
    FSDP.succeed(&arguments.chain(dtypes).chain(sharding.iter().copied()).collect::<Vec<&str>>());
    losses(&folder.path("m.jsonl"))
}

fn compare(run: &Run, sharding: &[&str], steps: usize) {
    let folder = Folder::new();
    let losses = train(run, &folder, sharding, steps);
    let what = format!("seed {}, {} ranks, {sharding:?}", run.seed, run.world_size);
    assert_close(&losses, &run.losses[..steps], &what);
    if steps < run.steps {
        return;
    }
    let weights = safetensors::load(folder.path("w.safetensors"), &Device::Cpu).unwrap();
    assert_eq!(weights.len(), run.norms.len(), "{what}");
    for (name, (_, norm)) in &run.norms {
        let squares = weights[name].to_dtype(DType::F64).unwrap().sqr().unwrap().sum_all().unwrap();
        let got = squares.to_scalar::<f64>().unwrap().sqrt();
        assert!((got - norm).abs() < 1e-3 * norm, "{what}, {name}: {got}, PyTorch has {norm}");
    }
}

#[test]
fn a_hundred_steps_are_fsdp2s() {
    let golden: Golden = serde_json::from_str(include_str!("../../fixtures/fsdp_mlp.json")).unwrap();
    for run in &golden.runs {
        compare(run, &[], run.steps);
        let others: &[&[&str]] = match run.world_size {
            3 => &[&["--sharding", "shard-grad-op"], &["--sharding", "no-shard"]],
            4 => &[&["--sharding", "hybrid-shard", "--shard-ranks", "2"]],
            _ => &[],
        };
        others.iter().for_each(|sharding| compare(run, sharding, run.steps));
    }
}

/// The handbook's own size, for as many steps as a test has time for.
#[test]
fn the_documents_model_begins_as_fsdp2s() {
    let golden: Golden = serde_json::from_str(include_str!("../../fixtures/fsdp_mlp_document.json")).unwrap();
    compare(&golden.runs[0], &[], 4);
}

/// Layers in 16 bits sometimes round differently from PyTorch: losses must agree as closely as these types allow.
#[test]
fn losses_of_16_bits_are_those_of_the_mixed_precision_policy() {
    let golden: Golden = serde_json::from_str(include_str!("../../fixtures/fsdp_mlp_half.json")).unwrap();
    assert_eq!(golden.runs.len(), 32);
    for run in &golden.runs {
        let (param, reduce) = (run.param.as_deref().unwrap(), run.reduce.as_deref().unwrap());
        let bound = if param == "float16" { 2e-4 } else { 1e-3 };
        let got = train(run, &Folder::new(), &[], run.steps);
        assert_eq!(got.len(), run.losses.len());
        for (step, (got, expected)) in got.iter().zip(&run.losses).enumerate() {
            let error = (got - expected).abs() / expected;
            let what = format!("{} features, {} ranks, {param}, {reduce}", run.features, run.world_size);
            assert!(error < bound, "{what}, step {step}: got {got}, PyTorch has {expected}");
        }
    }
}

#[test]
fn buffers_have_a_dtype_that_a_model_without_them_does_not_see() {
    let losses = ["f32", "f16", "bf16"].map(|dtype| {
        let folder = Folder::new();
        let lines = folder.argument("m.jsonl");
        let size =
            ["--features", "8", "--hidden", "9", "--batch-size", "2", "--steps", "3", "--world-size", "2"];
        FSDP.succeed(&[&size[..], &["--buffer-dtype", dtype, "--metrics", &lines]].concat());
        losses(lines.as_ref())
    });
    assert!(losses[0].len() == 3 && losses.iter().all(|other| *other == losses[0]), "{losses:?}");
}
