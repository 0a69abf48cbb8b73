//! Runs the examples, and checks their output.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The examples are built with the tests, unless `--test` leaves them out.
fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(
        program.exists(),
        "{} is missing: `cargo build -p girandole --examples` makes it",
        program.display()
    );
    program
}

/// Returns the output of an example; the order of lines of different ranks varies.
fn run(name: &str, arguments: &[&str]) -> String {
    let output = Command::new(example(name)).args(arguments).env("RAYON_NUM_THREADS", "1").output().unwrap();
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name}: {}\n{out}{errors}", output.status);
    format!("{out}{errors}")
}

/// Returns the numbers that follow the word, in order.
fn numbers(output: &str, word: &str) -> Vec<f64> {
    let after = |line: &str| line.split(word).nth(1)?.split([',', ' ']).next()?.trim().parse().ok();
    output.lines().filter_map(after).collect()
}

fn learns(name: &str, arguments: &[&str], part: f64) {
    let output = run(name, arguments);
    let losses = numbers(&output, "loss ");
    assert!(losses.len() > 1 && losses[losses.len() - 1] < part * losses[0], "{name}: {output}");
}

fn fixture() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/llama")
}

#[test]
fn copies_learn() {
    learns("ddp", &["2"], 0.1);
}

#[test]
fn shards_learn_and_are_parts() {
    let output = run("fsdp", &["2"]);
    let losses = numbers(&output, "loss ");
    assert!(losses.len() == 3 && losses[2] < 0.5 * losses[0], "{output}");
    assert_eq!(numbers(&output, "keeps ").iter().sum::<f64>(), 8.0 * 65.0 * 64.0, "{output}");
}

#[test]
fn divided_layers_learn() {
    learns("tensor_parallel", &["2"], 0.7);
}

#[test]
fn stages_learn() {
    learns("pipeline", &["3"], 0.5);
}

#[test]
fn one_model_learns_the_same_in_every_layout() {
    let losses = |layout: &str| numbers(&run("own_model", &[layout]), "loss ");
    let one = losses("dp=1");
    assert!(one.len() == 3 && one[2] < one[0] / 100.0, "{one:?}");
    for layout in ["dp=2", "shard=2", "tp=2", "pp=2", "pp=2,shard=2", "dp=3"] {
        let other = losses(layout);
        assert!(one.iter().zip(&other).all(|(one, other)| (one - other).abs() < 3e-6), "{layout}: {other:?}");
    }
}

#[test]
fn a_classifier_is_trained_and_an_interrupted_run_ends_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let run = || run("train_classifier", &[folder.path().to_str().unwrap()]);
    let (model, lines) = (
        || std::fs::read(path("model.safetensors")).unwrap(),
        || std::fs::read_to_string(path("steps.jsonl")).unwrap(),
    );
    let accuracies = numbers(&run(), "accuracy ");
    assert!(accuracies.len() == 10 && accuracies[9] > 95.0, "{accuracies:?}");
    let page = std::fs::read_to_string(path("run.html")).unwrap();
    assert!(page.contains("Learning rate") && !page.contains("data-reload"), "{page}");
    let (undisturbed, steps) = (model(), lines().matches("\"event\":\"step\"").count());
    assert_eq!(steps, 10 * 32);
    // As if it had been killed in its last epoch.
    std::fs::remove_dir_all(path("checkpoints/checkpoint-00000010")).unwrap();
    std::fs::remove_file(path("checkpoints/latest")).unwrap();
    std::fs::remove_file(path("model.safetensors")).unwrap();
    assert_eq!(numbers(&run(), "accuracy "), accuracies[9..]);
    assert_eq!((model(), lines().matches("\"event\":\"step\"").count()), (undisturbed, steps));
}

#[test]
fn a_transformer_learns_the_same_in_every_layout() {
    let losses = |layout: &str| numbers(&run("own_transformer", &[layout]), "loss ");
    let one = losses("dp=1");
    assert!(one.len() == 4 && one[3] < one[0] / 10.0, "{one:?}");
    for layout in [
        "dp=3", "shard=2", "tp=4", "pp=3", "dp=2,tp=2", "shard=2,tp=2", "pp=2,tp=2", "pp=2,shard=2",
        "pp=2,dp=2",
    ] {
        let other = losses(layout);
        let gap = one.iter().zip(&other).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max);
        assert!(other.len() == 4 && gap < 1e-4, "{layout}: {other:?}, {one:?}");
    }
}

#[test]
fn each_row_of_own_data_comes_once_in_an_epoch() {
    let output = run("own_data", &["2"]);
    let mut of_epoch: Vec<&str> = output.lines().filter(|line| line.contains("epoch 1")).collect();
    of_epoch.sort_unstable();
    assert_eq!(of_epoch.len(), 4, "{output}");
    for row in 0..12 {
        let found = format!("({row}, {})", row * row);
        assert_eq!(of_epoch.iter().filter(|line| line.contains(&found)).count(), 1, "{found}: {output}");
    }
}

#[test]
fn own_sampler_gives_each_row_once_with_little_padding() {
    let output = run("own_sampler", &["2"]);
    let epoch = |epoch: usize| -> Vec<u32> {
        let lines = output.lines().filter(|line| line.contains(&format!("epoch {epoch}, ")));
        let of_line = |line: &str| -> Vec<u32> {
            let rows = line.split_once(", ").unwrap().1;
            rows.split([',', '[', ']', ' ']).filter_map(|number| number.parse().ok()).collect()
        };
        lines.flat_map(of_line).collect()
    };
    let (first, second) = (epoch(0), epoch(1));
    for (number, row) in (1..=32).zip(1..=32usize) {
        assert_eq!(
            first.iter().filter(|found| **found == number).count(),
            3 + row * 7 % 29,
            "{number}: {output}"
        );
    }
    assert!(first != second && first.len() == second.len(), "{output}");
    let plain = numbers(&output, "have ")[0];
    assert!((first.len() as f64) < 0.8 * plain, "{} of {plain}: {output}", first.len());
}

#[test]
fn own_collective_adds_what_lower_ranks_have() {
    let output = run("own_collective", &["4"]);
    for (rank, sum) in [1.0, 3.0, 6.0, 10.0].into_iter().enumerate() {
        assert!(output.contains(&format!("rank {rank}: [{sum:.1}, {sum:.1}]")), "{output}");
    }
}

#[test]
fn a_callback_sees_steps_and_a_second_run_has_nothing_left() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("checkpoints");
    let first = run("callback", &[folder.to_str().unwrap()]);
    let losses = numbers(&first, "loss ");
    assert!(losses.len() == 5 && losses[4] < 0.5 * losses[0], "{first}");
    assert!(!run("callback", &[folder.to_str().unwrap()]).contains("step 20"));
}

#[test]
fn adapters_are_trained_and_saved() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("adapters");
    learns("lora", &[fixture(), out.to_str().unwrap()], 0.98);
    assert!(out.join("adapter_model.safetensors").exists() && out.join("adapter_config.json").exists());
}

/// Writes a folder with a model, and a tokenizer with one token for each byte.
fn model_of_bytes(folder: &Path) {
    let config = r#"{"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "initializer_range": 0.1, "tie_word_embeddings": true, "rope_theta": 10000.0}"#;
    let config = girandole::models::ModelConfig::from_json(config).unwrap();
    let (weights, vars) = (girandole::models::Weights::random(&config, 1).unwrap(), candle_nn::VarMap::new());
    let builder = girandole::training::build::Builder::new(weights.vars(
        &vars,
        candle_core::DType::F32,
        &candle_core::Device::Cpu,
    ));
    girandole::models::CausalLm::new(&config, &builder).unwrap();
    let how = girandole::models::FolderConfig::default();
    girandole::models::save_folder(folder, &config, &girandole::training::named_vars(&vars), &how).unwrap();
    girandole::models::Tokenizer::bytes().unwrap().save(folder).unwrap();
}

#[test]
fn text_is_made_and_evaluated() {
    let folder = tempfile::tempdir().unwrap();
    let (model, text) = (folder.path().join("model"), folder.path().join("text.txt"));
    model_of_bytes(&model);
    std::fs::write(&text, "To be, or not to be, that is the question. ".repeat(8)).unwrap();
    let output = run("generate", &[model.to_str().unwrap(), "To be"]);
    assert!(output.starts_with("To be") && output.len() > "To be\n".len(), "{output}");
    let output = run("evaluate", &[model.to_str().unwrap(), text.to_str().unwrap()]);
    // A random model predicts all 257 tokens equally.
    assert!((numbers(&output, "loss ")[0] - 257f64.ln()).abs() < 0.5, "{output}");
}

#[test]
fn what_is_not_given_is_asked_for_in_one_line() {
    for name in ["generate", "lora", "evaluate"] {
        let output = Command::new(example(name)).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains("give the model's folder"), "{name}: {errors}");
    }
}
