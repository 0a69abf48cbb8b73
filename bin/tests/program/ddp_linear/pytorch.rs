//! Every loss equals PyTorch's, from the seed alone, for one process and 1 to 4 ranks.

use candle_core::{Device, safetensors};

use crate::common::{Folder, losses_of, metrics, text};
use crate::ddp_linear::LINEAR;
use crate::ddp_linear::golden::{Golden, Run, assert_close};

fn check(golden: &Golden, run: &Run) {
    let folder = Folder::new();
    let (file, save) = (folder.argument("metrics.jsonl"), folder.argument("weights.safetensors"));
    let numbers =
        [golden.seed, golden.size as u64, golden.epochs as u64, run.world_size as u64].map(|n| n.to_string());
    let [seed, samples, epochs, world_size] = &numbers;
    let mut arguments =
        vec!["--seed", seed, "--samples", samples, "--epochs", epochs, "--world-size", world_size];
    arguments.extend(["--metrics", &file, "--save", &save]);
    if run.keep_total_batch {
        arguments.push("--keep-total-batch");
    }
    let output = LINEAR.succeed(&arguments);

    let what = format!("seed {seed}, {world_size} ranks");
    let lines = metrics(&folder.path("metrics.jsonl"));
    assert_close(
        &losses_of(&lines, Some("single")),
        &golden.single().losses,
        &format!("{what}: one process"),
    );
    assert_close(&losses_of(&lines, Some("ddp")), &run.losses, &what);
    let summaries: Vec<_> = lines.iter().filter(|line| line["event"] == "summary").collect();
    assert_eq!(summaries.len(), 2);
    assert_eq!((&summaries[0]["run"], summaries[0]["world_size"].as_u64()), (&"single".into(), Some(1)));
    assert_eq!(
        (&summaries[1]["run"], summaries[1]["world_size"].as_u64()),
        (&"ddp".into(), Some(run.world_size as u64))
    );
    assert!(summaries.iter().all(|line| line["seconds"].as_f64().unwrap() > 0.0));

    let weights = safetensors::load(folder.path("weights.safetensors"), &Device::Cpu).unwrap();
    assert_eq!(weights["linear.weight"].dims(), [1, 1]);
    assert_eq!(weights["linear.bias"].dims(), [1]);
    for (name, expected) in [("linear.weight", run.weight), ("linear.bias", run.bias)] {
        let got = weights[name].flatten_all().unwrap().to_vec1::<f32>().unwrap()[0];
        assert!((got - expected).abs() < 1e-5, "{what}: {name} is {got}, PyTorch has {expected}");
        assert!(text(&output.stdout).contains(&format!("{name}: {got:.4}")));
    }
}

#[test]
fn losses_and_weights_are_pytorchs() {
    for golden in Golden::all() {
        for run in golden.runs.iter().filter(|run| run.run == "ddp") {
            check(&golden, run);
        }
    }
}

#[test]
fn the_printed_losses_are_means_of_a_hundred() {
    let golden = &Golden::all()[0];
    let output = text(&LINEAR.succeed(&["--epochs", "2", "--world-size", "2"]).stdout);
    let ddp = golden
        .runs
        .iter()
        .find(|run| run.world_size == 2 && run.run == "ddp" && !run.keep_total_batch)
        .unwrap();
    let mut expected = Vec::new();
    for run in [golden.single(), ddp] {
        let per_epoch = run.losses.len() / golden.epochs;
        for epoch in 0..2 {
            for (index, hundred) in run.losses[epoch * per_epoch..][..per_epoch].chunks_exact(100).enumerate()
            {
                let mean = hundred.iter().map(|loss| f64::from(*loss)).sum::<f64>() / 100.0;
                expected.push((format!("[{}, {}] loss: ", epoch + 1, 100 * (index + 1)), mean));
            }
        }
    }
    let printed: Vec<&str> = output.lines().filter(|line| line.starts_with('[')).collect();
    assert_eq!(printed.len(), expected.len());
    for (line, (prefix, mean)) in printed.iter().zip(expected) {
        let value: f64 = line.strip_prefix(&prefix).unwrap().parse().unwrap();
        assert!((value - mean).abs() < 2e-5 * mean.max(1.0), "{line}: expected {mean}");
    }
    assert!(
        output.contains("speed-up: ")
            && output.contains("===== DDP training (2 ranks, total batch size 64) =====")
    );
}

#[test]
fn a_run_goes_on_from_saved_weights_and_data() {
    let folder = Folder::new();
    let (first, second) = (folder.argument("first.safetensors"), folder.argument("second.safetensors"));
    LINEAR.succeed(&["--epochs", "1", "--samples", "320", "--save", &first]);
    let x = candle_core::Tensor::randn(0f32, 1.0, (64, 1), &Device::Cpu).unwrap();
    let y = ((&x * 2.0).unwrap() + 3.0).unwrap();
    let data = folder.argument("data.safetensors");
    safetensors::save(&[("x", x), ("y", y)].into_iter().collect(), &data).unwrap();
    let file = folder.argument("m.jsonl");
    LINEAR.succeed(&[
        "--epochs", "1", "--init", &first, "--data", &data, "--save", &second, "--metrics", &file,
    ]);
    let lines = metrics(&folder.path("m.jsonl"));
    assert_eq!((losses_of(&lines, Some("single")).len(), losses_of(&lines, Some("ddp")).len()), (2, 1));
    let value = |file: &str| {
        safetensors::load(file, &Device::Cpu).unwrap()["linear.weight"].clone().to_vec2::<f32>().unwrap()
    };
    assert_ne!(value(&first), value(&second));
}
