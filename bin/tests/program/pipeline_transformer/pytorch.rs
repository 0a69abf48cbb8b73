//! Losses and weights equal those of PyTorch's `pipelining` with `ScheduleGPipe`, from the seed alone, on 2 to 4 stages.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::common::{Folder, assert_close, assert_norms, losses};
use crate::pipeline_transformer::PIPELINE;

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
    batch_size: usize,
    micro_batches: usize,
    split: Vec<String>,
    steps: usize,
    losses: Vec<f32>,
    last: f32,
    /// Sum, and root of the sum of squares, by tensor.
    norms: BTreeMap<String, [f64; 2]>,
}

#[test]
fn losses_and_weights_are_pytorchs() {
    let golden: Golden =
        serde_json::from_str(include_str!("../../fixtures/pipeline_transformer.json")).unwrap();
    assert!(golden.runs.len() >= 7);
    for run in golden.runs {
        let folder = Folder::new();
        let options = [
            ("--world-size", run.world_size.to_string()),
            ("--seed", run.seed.to_string()),
            ("--samples", run.samples.to_string()),
            ("--epochs", run.epochs.to_string()),
            ("--batch-size", run.batch_size.to_string()),
            ("--micro-batches", run.micro_batches.to_string()),
            ("--split", run.split.join(",")),
            ("--dropout", "0".to_string()),
            ("--metrics", folder.argument("m.jsonl")),
            ("--save", folder.argument("w.safetensors")),
        ];
        PIPELINE.succeed_with(&options);
        let what =
            format!("seed {}, {} ranks, {} micro-batches", run.seed, run.world_size, run.micro_batches);
        let got = losses(&folder.path("m.jsonl"));
        assert_eq!(got.len(), run.steps, "{what}");
        assert_close(&got[got.len() - 1..], &[run.last], &what);
        let got: Vec<f32> = got.into_iter().step_by(golden.every).collect();
        assert_close(&got, &run.losses, &what);
        assert_norms(&folder.path("w.safetensors"), &run.norms, |_| false, &what);
    }
}
