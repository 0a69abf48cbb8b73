//! `--num-workers` and `--pin-memory` do not change results, which are bitwise equal.

use serde_json::Value;

use crate::common::{Folder, Girandole, metrics, sorted, without_times};

/// Returns what a run prints, its steps, and the weights it saves.
fn run(command: &'static str, arguments: &str, loading: &[&str]) -> (Vec<String>, Vec<Value>, Vec<u8>) {
    let folder = Folder::new();
    let [save, lines] = ["w", "m.jsonl"].map(|name| folder.argument(name));
    let files = ["--save", &save, "--metrics", &lines];
    let arguments: Vec<&str> =
        arguments.split_whitespace().chain(files).chain(loading.iter().copied()).collect();
    let output = Girandole(command).succeed(&arguments);
    let printed = if command == "ddp-linear" { without_times(&output) } else { sorted(&output) };
    let steps = metrics(lines.as_ref()).into_iter().filter(|line| line["event"] == "step").collect();
    (printed, steps, std::fs::read(&save).unwrap())
}

#[test]
fn workers_change_no_bit() {
    for (command, arguments) in [
        ("ddp-linear", "--epochs 1 --samples 999"),
        ("ddp-trainer", "--epochs 2 --samples 301 --world-size 3"),
        ("ddp-mlp", "--epochs 3"),
        ("ddp-transformer", "--epochs 2 --reshuffle"),
        ("cifar10", "--epochs 1 --samples 50 --test-samples 20 --print-every 3"),
    ] {
        let alone = run(command, arguments, &[]);
        assert!(!alone.1.is_empty());
        for loading in
            [&["--num-workers", "1"][..], &["--num-workers", "5", "--pin-memory"], &["--pin-memory"]]
        {
            assert!(run(command, arguments, loading) == alone, "{command} {loading:?}");
        }
    }
}

#[test]
fn a_run_with_workers_goes_on_where_it_was() {
    let folder = Folder::new();
    let [dir, whole, cut] = ["c", "whole", "cut"].map(|name| folder.argument(name));
    let steps = "--samples 40 --batch-size 2 --epochs 2 --checkpoint-every 7 --num-workers 3";
    let trained = |more: &[&str]| {
        let keeping = ["--checkpoint-dir", dir.as_str()];
        let arguments: Vec<&str> = steps.split(' ').chain(keeping).chain(more.iter().copied()).collect();
        Girandole("ddp-trainer").succeed(&arguments);
    };
    trained(&["--save", &whole]);
    // After step 14 of 20, in the middle of an epoch: batches that workers had loaded ahead are loaded again.
    trained(&["--resume=checkpoint-00000002", "--save", &cut]);
    assert!(std::fs::read(&whole).unwrap() == std::fs::read(&cut).unwrap());
}

#[test]
fn numbers_of_workers_that_cannot_be() {
    for command in ["ddp-linear", "ddp-trainer", "ddp-mlp", "ddp-transformer", "cifar10", "sampler"] {
        for value in ["-1", "x", "257", "99999999999999999999"] {
            let line = Girandole(command).refuse(&["--num-workers", value]);
            assert!(line.contains("--num-workers") && line.contains("0 to 256"), "{command}: {line}");
        }
    }
}
