//! Losses and weights equal PyTorch's, from the seed alone, on 1 to 4 ranks, with each mask.

use std::collections::BTreeMap;

use candle_core::{DType, Device, safetensors};
use serde::Deserialize;

use crate::TRANSFORMER;
use crate::common::{Folder, assert_close, losses};

#[derive(Deserialize)]
struct Golden {
    every: usize,
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    world_size: usize,
    seed: u64,
    samples: usize,
    epochs: usize,
    mask: String,
    steps: usize,
    losses: Vec<f32>,
    last: f32,
    /// Sum, and root of the sum of squares, by tensor.
    norms: BTreeMap<String, [f64; 2]>,
}

fn check(mask: &str) {
    let golden: Golden = serde_json::from_str(include_str!("../fixtures/ddp_transformer.json")).unwrap();
    let runs: Vec<&Run> = golden.runs.iter().filter(|run| run.mask == mask).collect();
    assert!(runs.len() >= 4, "{mask}");
    for run in runs {
        let folder = Folder::new();
        let options = [
            ("--world-size", run.world_size.to_string()),
            ("--seed", run.seed.to_string()),
            ("--samples", run.samples.to_string()),
            ("--epochs", run.epochs.to_string()),
            ("--mask", run.mask.clone()),
            ("--dropout", "0".to_string()),
            ("--metrics", folder.argument("m.jsonl")),
            ("--save", folder.argument("w.safetensors")),
        ];
        TRANSFORMER.succeed_with(&options);
        let what = format!("{mask}, seed {}, {} ranks", run.seed, run.world_size);
        let got = losses(&folder.path("m.jsonl"));
        assert_eq!(got.len(), run.steps, "{what}");
        assert_close(&got[got.len() - 1..], &[run.last], &what);
        let got: Vec<f32> = got.into_iter().step_by(golden.every).collect();
        assert_close(&got, &run.losses, &what);
        let weights = safetensors::load(folder.path("w.safetensors"), &Device::Cpu).unwrap();
        assert_eq!(weights.keys().collect::<std::collections::BTreeSet<_>>(), run.norms.keys().collect());
        for (name, expected) in &run.norms {
            let wide = weights[name].to_dtype(DType::F64).unwrap();
            let sum = wide.sum_all().unwrap().to_scalar::<f64>().unwrap();
            let norm = wide.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt();
            // A sum of numbers of both signs is small beside them.
            let [gap, error] =
                [sum - expected[0], norm - expected[1]].map(|gap| gap.abs() / expected[1].max(1e-3));
            assert!(gap < 1e-3 && error < 1e-4, "{what}, {name}: {sum} and {norm}, PyTorch has {expected:?}");
        }
    }
}

#[test]
fn with_the_documents_mask() {
    check("document");
}

#[test]
fn with_a_causal_mask() {
    check("causal");
}

#[test]
fn without_a_mask() {
    check("none");
}
