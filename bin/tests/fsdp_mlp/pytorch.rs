//! Losses and weights equal PyTorch FSDP2's, from the seed alone, on 1 to 4 ranks and with each sharding.

use std::collections::BTreeMap;

use candle_core::{DType, Device, safetensors};
use serde::Deserialize;

use crate::FSDP;
use crate::common::{Folder, assert_close, losses};

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
    losses: Vec<f32>,
    /// The sum and the root of the sum of squares of each parameter.
    norms: BTreeMap<String, (f64, f64)>,
}

fn compare(run: &Run, sharding: &[&str], steps: usize) {
    let folder = Folder::new();
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
    let arguments: Vec<&str> =
        arguments.chain(["--param-dtype", "f32"]).chain(sharding.iter().copied()).collect();
    FSDP.succeed(&arguments);
    let what = format!("seed {}, {} ranks, {sharding:?}", run.seed, run.world_size);
    assert_close(&losses(&folder.path("m.jsonl")), &run.losses[..steps], &what);
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
    let golden: Golden = serde_json::from_str(include_str!("../fixtures/fsdp_mlp.json")).unwrap();
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

/// The document's own size, as far as a test has time for it.
#[test]
fn the_documents_model_begins_as_fsdp2s() {
    let golden: Golden = serde_json::from_str(include_str!("../fixtures/fsdp_mlp_document.json")).unwrap();
    compare(&golden.runs[0], &[], 4);
}
