//! `plan --json` compared with the last line of a run's `--metrics`: memory by kind and bytes sent per step, within a
//! tenth; activations, which are neither rounded nor packed, to the byte.

use serde_json::Value;

use crate::common::{Folder, Girandole, metrics};
use crate::plan::PLAN;

const KINDS: [&str; 6] = ["weights", "copies", "gradients", "optimizer", "activations", "sent"];

/// Returns what a run has measured of each kind, on the rank with the most.
fn measured(command: &'static str, arguments: &str) -> impl Fn(&str) -> f64 + use<> {
    let folder = Folder::new();
    let lines = folder.argument("m.jsonl");
    let arguments: Vec<&str> = arguments.split_whitespace().chain(["--metrics", &lines]).collect();
    Girandole(command).succeed(&arguments);
    let last = metrics(lines.as_ref()).pop().unwrap();
    let ranks = last["held"].as_array().unwrap_or_else(|| panic!("{last}")).clone();
    assert_eq!(Some(ranks.len() as u64), last["world_size"].as_u64());
    move |kind| ranks.iter().map(|rank| rank[kind].as_f64().unwrap()).fold(0.0, f64::max)
}

/// Returns the planned strategies.
fn planned(arguments: &str) -> Vec<Value> {
    let folder = Folder::new();
    let file = folder.argument("plan.json");
    let machine = "--bandwidth 10GB/s --latency 10us --flops 1TFLOP/s --memory 1GB --json";
    let arguments = arguments.split_whitespace().chain(machine.split_whitespace()).chain([&file[..]]);
    PLAN.succeed(&arguments.collect::<Vec<_>>());
    let plan: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    plan["strategies"].as_array().unwrap().clone()
}

/// Runs a command, and compares it with a strategy of its plan.
fn compare(strategy: &str, (command, run): (&'static str, &str), (model, plan): (&str, &str)) {
    let found = measured(command, run);
    let strategies = planned(&format!("{model} {plan}"));
    let expected = strategies.iter().find(|planned| planned["strategy"] == strategy);
    let expected = expected.unwrap_or_else(|| panic!("{strategy}: {strategies:?}"));
    for kind in KINDS {
        let (bytes, found) = (expected[kind].as_f64().unwrap(), found(kind));
        let allowed = if kind == "activations" { 0.0 } else { 0.1 * found };
        assert!(
            (bytes - found).abs() <= allowed,
            "{strategy}, {command} {run}: {kind}: {bytes} planned, {found} measured"
        );
    }
}

/// Sizes of the tutorial's Transformer, as options of the commands and of `plan`.
const TRANSFORMERS: [&str; 2] = [
    "--vocab-size 100 --d-model 12 --num-heads 4 --d-ff 24 --num-layers 2 --max-len 100 --length 10",
    "--vocab-size 320 --d-model 64 --num-heads 2 --d-ff 160 --num-layers 4 --max-len 30 --length 17",
];

#[test]
fn copies_of_the_model() {
    for sizes in TRANSFORMERS {
        for (ranks, batch) in [(2, 2), (3, 4), (4, 2)] {
            let run = format!(
                "{sizes} --epochs 2 --dropout 0 --world-size {ranks} --batch-size {batch} --samples 24"
            );
            let plan = format!("{sizes} --dropout 0 --ranks {ranks} --batch-size {}", batch * ranks);
            compare(&format!("dp {ranks}"), ("ddp-transformer", &run), ("ddp-transformer", &plan));
        }
    }
}

/// With the tutorials' models: `plan` is only given ranks and batch sizes.
#[test]
fn the_documents_models() {
    for (ranks, batch) in [(2, 32), (3, 32), (3, 1), (4, 7)] {
        let run = format!("--epochs 1 --world-size {ranks} --batch-size {batch}");
        let plan = format!("--ranks {ranks} --batch-size {}", batch * ranks);
        for command in ["ddp-linear", "ddp-trainer", "ddp-mlp"] {
            compare(&format!("dp {ranks}"), (command, &run), (command, &plan));
        }
    }
    for (ranks, batch, length) in [(2, 2, 10), (3, 4, 10), (4, 1, 10), (2, 3, 2), (2, 2, 57)] {
        let run =
            format!("--epochs 1 --samples 24 --world-size {ranks} --batch-size {batch} --length {length}");
        let plan = format!("--ranks {ranks} --batch-size {} --length {length}", batch * ranks);
        compare(&format!("dp {ranks}"), ("ddp-transformer", &run), ("ddp-transformer", &plan));
    }
    for (ranks, batch, micro_batches, length) in [(2, 4, 2, 10), (3, 4, 2, 10), (4, 6, 3, 33)] {
        let sizes = format!("--batch-size {batch} --micro-batches {micro_batches} --length {length}");
        let run = format!("--epochs 1 --split parameters --world-size {ranks} {sizes}");
        let plan = format!("--ranks {ranks} {sizes}");
        compare(&format!("pipeline {ranks}"), ("pipeline-transformer", &run), ("ddp-transformer", &plan));
    }
    for (tp, dp, batch, length) in [(2, 1, 8, 33), (4, 1, 3, 21), (2, 2, 4, 33)] {
        let run = format!(
            "--epochs 1 --samples {} --batch-size {batch} --tp {tp} --dp {dp} --length {length}",
            2 * batch * dp
        );
        let plan = format!("--ranks {} --batch-size {} --length {length}", tp * dp, batch * dp);
        compare(&layout(tp, "", dp), (LANGUAGE_MODEL, &run), (LANGUAGE_MODEL, &plan));
        let dropout = "--dropout 0.3";
        compare(
            &layout(tp, "", dp),
            (LANGUAGE_MODEL, &format!("{run} {dropout}")),
            (LANGUAGE_MODEL, &format!("{plan} {dropout}")),
        );
    }
}

#[test]
fn divided_copies() {
    for (features, hidden, batch) in [(64, 256, 16), (96, 40, 5)] {
        let sizes = format!("--sizes {features},{hidden},{hidden},{features},10");
        for (ranks, sharding, strategy) in [
            (2, "full-shard", "fsdp 2"),
            (4, "full-shard", "fsdp 4"),
            (3, "shard-grad-op", "fsdp 3 grad-op"),
            (4, "shard-grad-op", "fsdp 4 grad-op"),
            (4, "hybrid-shard --shard-ranks 2", "fsdp 2, dp 2"),
            (3, "no-shard", "fsdp 3 no-shard"),
            (4, "no-shard", "fsdp 4 no-shard"),
        ] {
            for (dtype, gathered) in [("f32", 4), ("f16", 2)] {
                let run = format!(
                    "--features {features} --hidden {hidden} --batch-size {batch} --world-size {ranks} --sharding {sharding} \
                     --param-dtype {dtype} --steps 3"
                );
                let batch = batch * ranks;
                let plan =
                    format!("{sizes} --ranks {ranks} --batch-size {batch} --gathered-bytes {gathered}");
                compare(strategy, ("fsdp-mlp", &run), ("fsdp-mlp", &plan));
            }
        }
    }
}

#[test]
fn divided_layers() {
    for sizes in [
        "--vocab-size 101 --d-model 16 --num-heads 4 --d-ff 48 --num-layers 1 --max-len 30 --length 9",
        "--vocab-size 64 --d-model 32 --num-heads 4 --d-ff 96 --num-layers 2 --max-len 30 --length 13",
        "--vocab-size 256 --d-model 64 --num-heads 8 --num-layers 3 --max-len 64 --length 33",
    ] {
        for (tp, dp) in [(2, 1), (4, 1), (2, 2)] {
            for (option, name) in [("", ""), ("--sequence-parallel", " sequence")] {
                let run =
                    format!("{sizes} --epochs 1 --samples 16 --batch-size 4 --tp {tp} --dp {dp} {option}");
                let plan = format!("{sizes} --ranks {} --batch-size {}", tp * dp, 4 * dp);
                compare(&layout(tp, name, dp), (LANGUAGE_MODEL, &run), (LANGUAGE_MODEL, &plan));
            }
        }
    }
    for (tp, dp, option, name) in [
        (2, 1, "", ""),
        (4, 1, "", ""),
        (2, 2, "", ""),
        (2, 1, "--sequence-parallel", " sequence"),
        (2, 2, "--sequence-parallel", " sequence"),
    ] {
        let run = format!("--hidden-size 64 --samples 64 --batch-size 16 --tp {tp} --dp {dp} {option}");
        let plan = format!("--sizes 64,256,64 --ranks {} --batch-size {}", tp * dp, 16 * dp);
        compare(&layout(tp, name, dp), ("tensor-parallel-mlp", &run), ("tensor-parallel-mlp", &plan));
    }
}

const LANGUAGE_MODEL: &str = "tensor-parallel-transformer";

fn layout(tp: usize, name: &str, dp: usize) -> String {
    let copies = if dp > 1 { format!(", dp {dp}") } else { String::new() };
    format!("tp {tp}{name}{copies}")
}

#[test]
fn stages() {
    for (sizes, ranks) in
        [(TRANSFORMERS[0], 2), (TRANSFORMERS[1], 2), (TRANSFORMERS[1], 3), (TRANSFORMERS[1], 4)]
    {
        for (batch, micro_batches) in [(8, 2), (8, 4)] {
            let run = format!(
                "{sizes} --epochs 1 --samples 16 --dropout 0 --split parameters --world-size {ranks} --batch-size {batch} \
                 --micro-batches {micro_batches}"
            );
            let plan = format!(
                "{sizes} --dropout 0 --ranks {ranks} --batch-size {batch} --micro-batches {micro_batches}"
            );
            compare(&format!("pipeline {ranks}"), ("pipeline-transformer", &run), ("ddp-transformer", &plan));
        }
    }
}
