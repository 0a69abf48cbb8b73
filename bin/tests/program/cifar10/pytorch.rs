//! Losses, weights and test results equal PyTorch's, from the seed alone, on 1 to 4 ranks.

use std::collections::BTreeMap;

use bin::documents::handbook::cifar10::synthetic::Patterns;
use candle_core::{DType, Device, safetensors};
use sampler::Generator;
use serde::Deserialize;

use crate::cifar10::CIFAR10;
use crate::common::{Folder, assert_close, losses, text};

const NAMES: [&str; 10] = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"];

#[derive(Deserialize)]
struct Golden {
    pictures: Vec<Sets>,
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Sets {
    seed: u64,
    samples: usize,
    test_samples: usize,
    sums: [u64; 2],
    labels: [Vec<u8>; 2],
}

#[derive(Deserialize)]
struct Run {
    world_size: usize,
    seed: u64,
    samples: usize,
    test_samples: usize,
    batch_size: usize,
    lr: f64,
    momentum: f64,
    epochs: usize,
    losses: Vec<f32>,
    test_loss: f64,
    correct: Vec<usize>,
    classes: Vec<usize>,
    predicted: Vec<usize>,
    /// Sum, and root of the sum of squares, of each tensor.
    norms: BTreeMap<String, [f64; 2]>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../../fixtures/cifar10.json")).unwrap()
}

/// Returns all lines that are printed at the end.
fn told(run: &Run) -> Vec<String> {
    let names: Vec<String> = run.predicted[..4].iter().map(|class| format!("{:>5}", NAMES[*class])).collect();
    let percent = |correct: usize, samples: usize| 100.0 * correct as f64 / samples as f64;
    let (correct, samples) = (run.correct.iter().sum(), run.classes.iter().sum());
    let total = format!("{:.1} % (loss {:.3})", percent(correct, samples), run.test_loss);
    let mut lines = vec![
        format!("Predicted:    {}", names.join(" ")),
        format!("Accuracy on the {samples} test pictures: {total}"),
    ];
    for (name, (&correct, &samples)) in NAMES.iter().zip(run.correct.iter().zip(&run.classes)) {
        lines.push(match samples {
            0 => format!("Accuracy of {name:>5}: no test pictures"),
            _ => {
                format!("Accuracy of {name:>5}: {:.1} % ({correct} of {samples})", percent(correct, samples))
            }
        });
    }
    lines
}

/// Runs the command with these options, compares losses, weights and test with PyTorch's, and returns what was printed.
fn compare(run: &Run, options: &[(&str, String)]) -> String {
    let folder = Folder::new();
    let files = [("--metrics", folder.argument("m.jsonl")), ("--save", folder.argument("w.safetensors"))];
    let printed = text(&CIFAR10.succeed_with(&[options, &files].concat()).stdout);
    let what = format!("seed {}, {} ranks", run.seed, run.world_size);
    assert_close(&losses(&folder.path("m.jsonl")), &run.losses, &what);
    for line in told(run) {
        assert!(printed.contains(&line), "{what}: no `{line}` in\n{printed}");
    }
    let weights = safetensors::load(folder.path("w.safetensors"), &Device::Cpu).unwrap();
    assert_eq!(weights.len(), run.norms.len(), "{what}");
    for (name, [sum, norm]) in &run.norms {
        let tensor = weights[name].to_dtype(DType::F64).unwrap();
        let of = |tensor: candle_core::Result<candle_core::Tensor>| {
            tensor.and_then(|tensor| tensor.sum_all()?.to_scalar::<f64>()).unwrap()
        };
        let got = [of(Ok(tensor.clone())), of(tensor.sqr()).sqrt()];
        for (got, expected) in got.into_iter().zip([sum, norm]) {
            assert!((got - expected).abs() < 1e-4 * norm, "{what}, {name}: {got}, PyTorch has {expected}");
        }
    }
    printed
}

#[test]
fn losses_weights_and_test_are_pytorchs() {
    let mut runs = golden().runs;
    // The next test has the last one.
    runs.pop();
    for run in runs {
        let options = [
            ("--world-size", run.world_size.to_string()),
            ("--seed", run.seed.to_string()),
            ("--samples", run.samples.to_string()),
            ("--test-samples", run.test_samples.to_string()),
            ("--batch-size", run.batch_size.to_string()),
            ("--lr", run.lr.to_string()),
            ("--momentum", run.momentum.to_string()),
            ("--epochs", run.epochs.to_string()),
        ];
        compare(&run, &options);
    }
}

#[test]
fn without_options_a_run_is_the_documents_and_the_printed_losses_are_means() {
    let run = golden().runs.pop().unwrap();
    let printed = compare(&run, &[]);
    let mut expected = Vec::new();
    for (epoch, losses) in (1..).zip(run.losses.chunks(250)) {
        for (fifty, losses) in (1..).zip(losses.chunks(50)) {
            let mean = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / 50.0;
            expected.push((format!("[{epoch}, {:5}] loss: ", 50 * fifty), mean));
        }
    }
    let lines: Vec<&str> = printed.lines().filter(|line| line.starts_with('[')).collect();
    assert_eq!(lines.len(), expected.len(), "{printed}");
    for (line, (begin, mean)) in lines.into_iter().zip(expected) {
        let value = line.strip_prefix(&begin).unwrap_or_else(|| panic!("{line} does not begin with {begin}"));
        assert!((value.parse::<f64>().unwrap() - mean).abs() < 6e-4, "{line}: expected {mean}");
    }
}

#[test]
fn the_pictures_are_pytorchs() {
    for sets in golden().pictures {
        let mut generator = Generator::new(sets.seed);
        let patterns = Patterns::draw(&mut generator).unwrap();
        for (set, len) in [sets.samples, sets.test_samples].into_iter().enumerate() {
            let pictures = patterns.pictures(&mut generator, len).unwrap();
            // Weighted as in the fixture's script.
            let weights = (0..8191).map(|weight| weight + 1).cycle();
            let sum: u64 = pictures.bytes.iter().zip(weights).map(|(b, w)| u64::from(*b) * w).sum();
            assert_eq!((sum, &pictures.labels), (sets.sums[set], &sets.labels[set]), "seed {}", sets.seed);
        }
    }
}
