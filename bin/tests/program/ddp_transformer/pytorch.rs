//! Losses and weights equal PyTorch's, from the seed alone, on 1 to 4 ranks, with each mask.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::common::{Folder, assert_close, assert_norms, losses};
use crate::ddp_transformer::TRANSFORMER;

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
    let golden: Golden = serde_json::from_str(include_str!("../../fixtures/ddp_transformer.json")).unwrap();
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
        assert_norms(&folder.path("w.safetensors"), &run.norms, |_| false, &what);
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
