//! Wrong options and files: rejected before anything is done.

use candle_core::{Device, Tensor, safetensors};

use crate::common::Folder;
use crate::pipeline_transformer::PIPELINE;

#[test]
fn what_does_not_go_together() {
    for (arguments, part) in [
        (
            &["--schedule", "2f2b"][..],
            "give one of naive, gpipe, 1f1b, interleaved-1f1b, looped-bfs, zb-h1, zb-v",
        ),
        (
            &["--micro-batches", "3"],
            "--batch-size: got 4; it is cut in 3 micro-batches (--micro-batches): give a multiple",
        ),
        (&["--micro-batches", "0"], "1 or more"),
        (&["--samples", "14"], "--samples: got 14; every step takes 4 rows (--batch-size), and stages take"),
        (
            &["--dp", "2", "--world-size", "3"],
            "--dp: got 2; 3 ranks (--world-size) cannot be divided into that many copies",
        ),
        (
            &["--dp", "2", "--samples", "12"],
            "--samples: got 12; every step takes 4 rows (--batch-size) for each of 2",
        ),
        (
            &["--split", "layers.7"],
            "--split: got layers.7; the model has embedding, pos_encoding, layers.0, layers.1, out_linear",
        ),
        (&["--split", "embedding"], "--split: got embedding; nothing is before it"),
        (&["--split", "layers.0,layers.1"], "--split: got layers.0,layers.1 (3 stages); 2 stages need 1"),
        (
            &["--split", "layers.1,layers.0", "--world-size", "3"],
            "--split: got layers.0; the cut before it is at layers.1",
        ),
        (&["--world-size", "6"], "--world-size: got 6; that makes 6 stages of 5 modules"),
        (
            &["--schedule", "zb-v", "--world-size", "3"],
            "--world-size: got 3; that makes 6 stages of 5 modules",
        ),
        (&["--stages-per-rank", "2"], "--stages-per-rank: got 2; it has 1"),
        (&["--schedule", "zb-v", "--stages-per-rank", "3"], "--stages-per-rank: got 3; it has 2"),
        (&["--d-model", "10"], "--d-model: got 10; it is split over 4 heads"),
        (&["--show-schedule", "--micro-batches", "3"], "--batch-size: got 4"),
    ] {
        let line = PIPELINE.refuse(arguments);
        assert!(line.contains(part), "{arguments:?}: {line}");
    }
}

#[test]
fn data_that_does_not_fit() {
    let folder = Folder::new();
    let path = folder.argument("data.safetensors");
    let tokens = Tensor::new(&[[1i64, 2, 3]; 5], &Device::Cpu).unwrap();
    safetensors::save(&[("tokens".to_string(), tokens)].into(), &path).unwrap();
    let line = PIPELINE.refuse(&["--data", &path]);
    assert!(line.contains("it has 5 rows; every step takes 4 rows"), "{line}");
    PIPELINE.succeed(&["--data", &path, "--batch-size", "5", "--micro-batches", "5", "--epochs", "1"]);
}
