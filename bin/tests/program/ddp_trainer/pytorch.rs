//! Losses and weights equal PyTorch's, from the seed alone, on 1 to 4 ranks.

use std::collections::BTreeMap;

use candle_core::{Device, safetensors};
use serde::Deserialize;

use crate::common::{Folder, assert_close, losses};
use crate::ddp_trainer::TRAINER;

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
    batch_size: usize,
    lr: f64,
    epochs: usize,
    loss: String,
    steps: usize,
    losses: Vec<f32>,
    weights: BTreeMap<String, Vec<f32>>,
}

#[test]
fn losses_and_weights_are_pytorchs() {
    let golden: Golden = serde_json::from_str(include_str!("../../fixtures/ddp_trainer.json")).unwrap();
    for run in golden.runs {
        let folder = Folder::new();
        let (metrics, save) = (folder.argument("m.jsonl"), folder.argument("w.safetensors"));
        let options = [
            ("--world-size", run.world_size.to_string()),
            ("--seed", run.seed.to_string()),
            ("--samples", run.samples.to_string()),
            ("--batch-size", run.batch_size.to_string()),
            ("--lr", run.lr.to_string()),
            ("--epochs", run.epochs.to_string()),
            ("--loss", run.loss.clone()),
            ("--metrics", metrics),
            ("--save", save),
        ];
        TRAINER.succeed_with(&options);
        let what = format!("seed {}, {} ranks, {}", run.seed, run.world_size, run.loss);
        let got = losses(&folder.path("m.jsonl"));
        assert_eq!(got.len(), run.steps, "{what}");
        let got: Vec<f32> = got.into_iter().step_by(golden.every).collect();
        assert_close(&got, &run.losses, &what);
        let weights = safetensors::load(folder.path("w.safetensors"), &Device::Cpu).unwrap();
        assert_eq!(weights.len(), run.weights.len(), "{what}");
        for (name, expected) in &run.weights {
            let got = weights[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_close(&got, expected, &format!("{what}, {name}"));
        }
    }
}
