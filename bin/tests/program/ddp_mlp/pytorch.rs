//! Losses, weights and validation equal PyTorch's, from the seed alone, on 1 to 4 ranks.

use std::collections::BTreeMap;

use candle_core::{Device, safetensors};
use serde::Deserialize;

use crate::common::{Folder, assert_close, losses, text};
use crate::ddp_mlp::MLP;

#[derive(Deserialize)]
struct Golden {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    world_size: usize,
    seed: u64,
    batch_size: usize,
    lr: f64,
    epochs: usize,
    validation_samples: usize,
    losses: Vec<f32>,
    /// Mean loss, and the number of correct predictions.
    validation: (f64, u64),
    weights: BTreeMap<String, Vec<f32>>,
}

#[test]
fn all_is_pytorchs() {
    let golden: Golden = serde_json::from_str(include_str!("../../fixtures/ddp_mlp.json")).unwrap();
    for run in golden.runs {
        let folder = Folder::new();
        let options = [
            ("--world-size", run.world_size.to_string()),
            ("--seed", run.seed.to_string()),
            ("--batch-size", run.batch_size.to_string()),
            ("--lr", run.lr.to_string()),
            ("--epochs", run.epochs.to_string()),
            ("--validation-samples", run.validation_samples.to_string()),
            ("--metrics", folder.argument("m.jsonl")),
            ("--save", folder.argument("w.safetensors")),
        ];
        let printed = text(&MLP.succeed_with(&options).stdout);
        let what = format!("seed {}, {} ranks", run.seed, run.world_size);
        assert_close(&losses(&folder.path("m.jsonl")), &run.losses, &what);
        let weights = safetensors::load(folder.path("w.safetensors"), &Device::Cpu).unwrap();
        assert_eq!(weights.len(), run.weights.len(), "{what}");
        for (name, expected) in &run.weights {
            let got = weights[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_close(&got, expected, &format!("{what}, {name}"));
        }
        let lines: Vec<&str> = printed.lines().collect();
        assert_eq!(lines.len(), run.epochs + 1, "{printed}");
        for (epoch, (line, loss)) in lines.iter().zip(&run.losses).enumerate() {
            let value: f32 = line.strip_prefix(&format!("Epoch {epoch}, Loss: ")).unwrap().parse().unwrap();
            assert!((value - loss).abs() < 1e-4, "{line}");
        }
        let (loss, correct) = run.validation;
        let (begin, end) = ("Validation, Loss: ", format!(" ({correct} of {})", run.validation_samples));
        let rest = lines[run.epochs].strip_prefix(begin).and_then(|line| line.strip_suffix(&end));
        let (got, accuracy) =
            rest.unwrap_or_else(|| panic!("{what}: {printed}")).split_once(", Accuracy: ").unwrap();
        assert!((got.parse::<f64>().unwrap() - loss).abs() < 1e-4, "{what}: {got}");
        assert_eq!(accuracy, format!("{:.4}", correct as f64 / run.validation_samples as f64));
    }
}
