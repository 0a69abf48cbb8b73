//! `finetune --task reward`: TRL's losses, accuracies and margins, in every layout; a run that goes on, a new head, and what is refused.

use std::fs;

use serde_json::Value;

use crate::common::{Folder, Girandole, text};
use crate::language::{FINETUNE, PRETRAIN};
use crate::prefer::{AS_TRL, assert_close, numbers, steps};

const EVALUATE: Girandole = Girandole("evaluate");
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/rewards");

fn pairs(name: &str) -> String {
    format!("{FIXTURE}/{name}.jsonl")
}

/// All pairs are in so many rows of a length.
fn run(folder: &Folder, name: &str, rows: usize, options: &[&str]) -> Vec<Value> {
    let (out, metrics, rows) = (folder.argument("out"), folder.argument("m.jsonl"), rows.to_string());
    let task = ["--task", "reward", "--model", FIXTURE, "--data", &pairs(name), "--length", "176"];
    let common = ["--batch-size", &rows, "--out", &out, "--overwrite", "--metrics", &metrics];
    FINETUNE.succeed(&[&task, &common[..], &AS_TRL, options].concat());
    steps(&folder.path("m.jsonl"))
}

/// 20 losses, accuracies and margins of strings and conversations, with margins and centered, of one process and of layouts.
#[test]
fn losses_and_margins_are_those_of_trl() {
    let expected: Value =
        serde_json::from_slice(&fs::read(format!("{FIXTURE}/expected.json")).unwrap()).unwrap();
    let folder = Folder::new();
    for (name, data, rows) in [
        ("plain", "plain", 2),
        ("centered", "plain", 2),
        ("margins", "margins", 2),
        ("without-prompts", "without-prompts", 2),
        ("chats", "chats", 4),
        ("whole-chats", "whole-chats", 4),
    ] {
        let options: &[&str] = if name == "centered" { &["--center-rewards", "0.1"] } else { &[] };
        let meshes: &[&str] = match name {
            "plain" | "chats" => &[""],
            _ => &["", "shard=2", "pp=2,tp=2", "cp=2"],
        };
        for mesh in meshes {
            let mesh: &[&str] = if mesh.is_empty() { &[] } else { &["--mesh", mesh] };
            let found = run(&folder, data, rows, &[&["--steps", "20"], options, mesh].concat());
            for own in ["loss", "accuracy", "margin"] {
                let theirs = expected[name][own].as_array().unwrap();
                let theirs: Vec<f64> = theirs.iter().map(|number| number.as_f64().unwrap()).collect();
                // Margins are far from 0.
                let most = if own == "margin" { 5e-5 } else { 1e-5 };
                assert_close(&numbers(&found, own), &theirs, most, &format!("{name} {mesh:?} {own}"));
            }
        }
        let evaluated = EVALUATE.succeed(&["--model", FIXTURE, "--data", &pairs(data), "--length", "176"]);
        let of = |name: &str, own: &str| expected[name]["evaluation"][own].as_f64().unwrap();
        let line = text(&evaluated.stdout);
        if !matches!(name, "margins" | "centered") {
            let [loss, accuracy, margin] = ["loss", "accuracy", "margin"].map(|own| of(name, own));
            let said = format!("pairs: 6, loss: {loss:.4}, accuracy: {accuracy:.4}, margin: {margin:.4}");
            assert_eq!(line.trim(), said);
        }
    }
}

/// A new head for a base, from the seed alone; a run that is stopped goes on in another layout; the folder is measured.
#[test]
fn a_base_gets_a_reward_head() {
    let folder = Folder::new();
    let [text_of, base, data, kept, out] =
        ["text.txt", "base", "pairs.jsonl", "kept", "out"].map(|name| folder.argument(name));
    fs::write(&text_of, "the cat is glad and the dog is angry\n".repeat(20)).unwrap();
    let sizes = ["--layers", "2", "--hidden", "32", "--heads", "4", "--length", "64", "--batch-size", "4"];
    PRETRAIN.succeed(&[&["--data", &text_of, "--out", &base, "--steps", "1"], &sizes[..]].concat());
    let line = |number: usize| {
        let (name, place) = (["cat", "dog", "bear"][number % 3], ["here", "there"][number % 2]);
        format!(
            "{{\"prompt\": \"the {name} \", \"chosen\": \"is glad {place}\", \"rejected\": \"is angry {place}\"}}\n"
        )
    };
    fs::write(&data, (0..30).map(line).collect::<String>()).unwrap();
    let train = |options: &[&str]| {
        let metrics = folder.argument("m.jsonl");
        let common = ["--model", &base, "--task", "reward", "--data", &data, "--out", &out, "--overwrite"];
        let more = ["--length", "64", "--batch-size", "4", "--lr", "0.01", "--schedule", "constant"];
        let evaluated = ["--evaluate", &data, "--metrics", &metrics];
        let output = FINETUNE.succeed(&[&common, &more[..], &evaluated, options].concat());
        (numbers(&steps(&folder.path("m.jsonl")), "loss"), text(&output.stdout), text(&output.stderr))
    };
    let (expected, said, _) = train(&["--steps", "8"]);
    assert!(said.contains("model: llama, 1 label, ") && said.contains("30 pairs, 0 left out"), "{said}");
    assert!(said.contains("evaluation loss ") && said.contains(", margin "), "{said}");
    let keep = ["--checkpoint-dir", &kept, "--checkpoint-every", "3"];
    for mesh in ["dp=2,tp=2", "pp=2,cp=2"] {
        train(&[&["--steps", "3", "--mesh", "shard=2", "--accumulate", "2"], &keep[..]].concat());
        let (got, _, said) = train(&[&["--steps", "8", "--mesh", mesh, "--resume"], &keep[..]].concat());
        assert!(said.contains("going on after step 3"), "{said}");
        assert_close(&got, &expected[8 - got.len()..], 1e-4, mesh);
        fs::remove_dir_all(&kept).unwrap();
    }
    let config: Value = serde_json::from_slice(&fs::read(folder.path("out/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"][0], "LlamaForSequenceClassification");
    assert_eq!(config["id2label"].as_object().unwrap().len(), 1);
    let of = |options: &[&str]| {
        let given = ["--model", &out, "--data", &data, "--length", "64"];
        text(&EVALUATE.succeed(&[&given[..], options].concat()).stdout)
    };
    let line = of(&[]);
    assert!(line.starts_with("pairs: 30, loss: ") && line.contains(", accuracy: 1.0000, margin: "), "{line}");
    for mesh in ["dp=2", "pp=2", "cp=2,tp=2"] {
        assert_eq!(of(&["--mesh", mesh]), line, "{mesh}");
    }
}

#[test]
fn what_teaches_no_reward_is_refused() {
    let folder = Folder::new();
    let [path, out] = ["p.jsonl", "out"].map(|name| folder.argument(name));
    let refuse = |line: &str, options: &[&str]| {
        fs::write(&path, line).unwrap();
        let given = ["--model", FIXTURE, "--data", &path, "--out", &out, "--length", "64"];
        FINETUNE.refuse(&[&given, options].concat())
    };
    let (good, task) = (r#"{"prompt": "a ", "chosen": "b", "rejected": "c"}"#, ["--task", "reward"]);
    for (line, expected) in [
        (r#"{"prompt": "a", "chosen": "b", "rejected": "b"}"#, "line 1: `chosen` and `rejected` are equal"),
        (
            r#"{"chosen": "b", "rejected": "c", "margin": "far"}"#,
            "line 1: field `margin`: expected a number, got \"far\"",
        ),
        (r#"{"text": "b", "label": 1}"#, "line 1: there is no `chosen`, or it is empty"),
        (
            r#"{"chosen": [{"role": "user"}], "rejected": [{"content": "x"}]}"#,
            "field `rejected`: message 0 has no `role`",
        ),
    ] {
        let said = refuse(line, &task);
        assert!(said.contains(expected) && said.trim().lines().count() == 1, "{line}: {said}");
    }
    for (options, expected) in [
        (&[][..], "line 1: it is a pair of answers, without a label: give --task reward"),
        (
            &["--task", "reward", "--labels", "good"],
            "--labels: got good; a reward is one number, without a name",
        ),
        (
            &["--task", "regression", "--center-rewards", "1"],
            "--center-rewards: got 1; it is for --task reward",
        ),
        (&["--task", "reward", "--center-rewards", "-1"], "give a number, 0 or more"),
        (&["--task", "reward", "--field", "text"], "pairs are the fields"),
        (&["--task", "reward", "--packing", "stream"], "rows have whole pairs"),
        (&["--task", "reward", "--too-long", "truncate"], "a cut pair cannot be compared"),
    ] {
        assert!(refuse(good, options).contains(expected), "{options:?}: {}", refuse(good, options));
    }
    let base = format!("{FIXTURE}/../preferences");
    for command in ["evaluate", "finetune"] {
        let out: &[&str] = if command == "finetune" { &["--out", &out] } else { &[] };
        let said = Girandole(command).refuse(&[&["--model", &base, "--data", &path], out].concat());
        assert!(said.contains("it is a pair of answers: `prefer` trains on those"), "{said}");
    }
    // A head for several labels.
    let heads = format!("{FIXTURE}/../heads/llama");
    let said = FINETUNE.refuse(&["--model", &heads, "--data", &path, "--out", &out, "--task", "reward"]);
    assert!(said.contains("--task: got reward; the model has a head for 3 labels"), "{said}");
}
