//! `finetune --task`: heads that label documents, with the same losses in every layout and after a resumption; `evaluate` measures
//! them, and wrong labels are told.

use std::fs;

use crate::common::{Folder, Girandole, losses, text};
use crate::language::{FINETUNE, PRETRAIN};
use crate::prefer::{numbers, steps};

const EVALUATE: Girandole = Girandole("evaluate");

/// A small model, and documents whose labels are told by a word.
fn base(folder: &Folder) -> (String, String) {
    let (text, out) = (folder.argument("text.txt"), folder.argument("base"));
    fs::write(&text, "the cat is glad and the dog is angry\n".repeat(20)).unwrap();
    let sizes = ["--layers", "2", "--hidden", "32", "--heads", "4", "--length", "48", "--batch-size", "4"];
    PRETRAIN.succeed(&[&["--data", &text, "--out", &out, "--steps", "1"], &sizes[..]].concat());
    let line = |number: usize| {
        let (word, label) = [("glad", "\"good\""), ("angry", "\"bad\""), ("there", "2")][number % 3];
        let name = ["cat", "dog", "old bear"][number / 3 % 3];
        format!("{{\"text\": \"the {name} is {word}\", \"label\": {label}}}\n")
    };
    let data = folder.argument("data.jsonl");
    fs::write(&data, (0..150).map(line).collect::<String>()).unwrap();
    (out, data)
}

#[test]
fn labels_have_one_curve() {
    let folder = Folder::new();
    let (base, data) = base(&folder);
    let (out, metrics) = (folder.argument("out"), folder.argument("m.jsonl"));
    let run = |options: &[&str]| {
        let common = ["--model", &base, "--data", &data, "--out", &out, "--overwrite", "--metrics", &metrics];
        let task =
            ["--task", "single-label", "--labels", "good,bad,none", "--length", "48", "--batch-size", "4"];
        let more = ["--lr", "0.01", "--evaluate", &data, "--schedule", "constant"];
        let output = FINETUNE.succeed(&[&common, &task[..], &more, options].concat());
        (losses(&folder.path("m.jsonl")), text(&output.stdout), text(&output.stderr))
    };
    let (expected, said, _) = run(&["--steps", "6"]);
    assert!(
        said.contains("model: llama, 3 labels, ") && said.contains("150 whole documents, 0 truncated"),
        "{said}"
    );
    assert!(
        said.contains("evaluation loss ") && said.contains(", accuracy ") && said.contains(", macro F1 "),
        "{said}"
    );
    let metrics = fs::read_to_string(folder.path("m.jsonl")).unwrap();
    assert!(metrics.contains("\"measures\":{\"accuracy\":"), "{metrics}");
    let close = |got: &[f32], layout: &str| {
        let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(got.len() == 6 && gap < 1e-4, "{layout}: {got:?}, {expected:?}");
    };
    for layout in ["dp=2", "shard=2,tp=2", "pp=2,cp=2"] {
        close(
            &run(&["--steps", "6", "--mesh", layout, "--accumulate", "2", "--evaluate-every", "3"]).0,
            layout,
        );
    }
    // Stopped, and gone on with in another layout.
    let kept = folder.argument("kept");
    let keep = ["--checkpoint-dir", &kept, "--checkpoint-every", "3"];
    run(&[&["--steps", "3", "--mesh", "dp=2"], &keep[..]].concat());
    let (got, _, said) = run(&[&["--steps", "6", "--mesh", "tp=2", "--resume"], &keep[..]].concat());
    assert!(said.contains("going on after step 3"), "{said}");
    close(&got, "resumed");

    let of = |options: &[&str]| {
        text(&EVALUATE.succeed(&[&["--model", &out, "--data", &data], options].concat()).stdout)
    };
    let line = of(&[]);
    assert!(line.starts_with("documents: 150, loss: ") && line.contains(", accuracy: "), "{line}");
    assert_eq!(of(&["--mesh", "pp=2"]), line);
    assert_eq!(of(&["--mesh", "dp=2,tp=2", "--batch-size", "2"]), line);
    let said = Girandole("generate").refuse(&["--model", &out, "--prompt", "the"]);
    assert!(said.contains("its model labels documents (good, bad, none), and writes no text"), "{said}");

    // Trained further, as it is.
    let again = folder.argument("again");
    let common =
        ["--model", &out, "--data", &data, "--out", &again, "--length", "48", "--steps", "1", "--overwrite"];
    FINETUNE.succeed(&common);
    let said = FINETUNE.refuse(&[&common[..], &["--task", "multi-label"]].concat());
    assert!(said.contains("--task: got multi-label; the model has a head for single-label"), "{said}");
}

/// A line for a task.
fn record(task: &str, number: usize) -> String {
    let (word, label) = [("glad", 0), ("angry", 1), ("there", 2)][number % 3];
    match task {
        "single-label" => format!("{{\"text\": \"it is {word}\", \"label\": {label}}}\n"),
        "multi-label" => format!("{{\"text\": \"it is {word}\", \"label\": [{label}]}}\n"),
        "regression" => format!("{{\"text\": \"it is {word}\", \"label\": {label}.5}}\n"),
        _ => format!("{{\"prompt\": \"it is {word} \", \"chosen\": \"yes\", \"rejected\": \"no\"}}\n"),
    }
}

/// Evaluates adapters as peft leaves a folder: what the scores are for is said by nothing, and taken as in transformers.
fn without_labels_are_noted(folder: &Folder, (base, out, data): (&str, &str, &str), line: &str) {
    let path = folder.path("out/config.json");
    let config = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    for mesh in ["dp=1", "tp=2"] {
        let given = ["--model", base, "--adapters", out, "--data", data, "--length", "48"];
        let output = EVALUATE.succeed(&[&given[..], &["--mesh", mesh]].concat());
        let notes = text(&output.stderr);
        let note = "note: the adapters do not say what their 3 scores are for: each document is taken to have one label";
        assert_eq!((&*text(&output.stdout), notes.matches(note).count()), (line, 1), "{notes}");
    }
    fs::write(&path, config).unwrap();
}

/// Adapters beside a head, for every task: one curve, also on a base in 4 bits; measured, continued, merged.
#[test]
fn adapters_beside_a_head_have_one_curve() {
    let folder = Folder::new();
    let [text_of, base, metrics, out] =
        ["text.txt", "base", "m.jsonl", "out"].map(|name| folder.argument(name));
    fs::write(&text_of, "the cat is glad and the dog is angry\n".repeat(20)).unwrap();
    let sizes = ["--layers", "1", "--hidden", "384", "--heads", "6", "--length", "48", "--batch-size", "1"];
    PRETRAIN.succeed(&[&["--data", &text_of, "--out", &base, "--steps", "1"], &sizes[..]].concat());
    for (task, names, bits) in [
        ("single-label", "a,b,c", &[][..]),
        ("multi-label", "a,b,c", &["--base-bits", "4"]),
        ("regression", "", &[]),
        ("reward", "", &["--base-bits", "4"]),
    ] {
        let data = folder.argument("data.jsonl");
        fs::write(&data, (0..12).map(|number| record(task, number)).collect::<String>()).unwrap();
        let names: Vec<&str> = if names.is_empty() { vec![] } else { vec!["--labels", names] };
        let run = |out: &str, options: &[&str]| {
            let rows = ["--data", &data, "--length", "48", "--batch-size", "4", "--lr", "0.01"];
            let more = ["--schedule", "constant", "--steps", "4", "--overwrite", "--metrics", &metrics];
            let output = FINETUNE
                .succeed(&[&["--model", &base, "--out", out], &rows[..], &more, bits, options].concat());
            (numbers(&steps(&folder.path("m.jsonl")), "loss"), text(&output.stdout))
        };
        let new = [&["--task", task, "--lora-rank", "2"], &names[..]].concat();
        let (expected, said) = run(&out, &new);
        assert!(said.contains("adapters: rank 2, "), "{said}");
        for mesh in ["dp=2", "shard=2", "tp=2", "pp=2"] {
            let (got, _) = run(&out, &[&new[..], &["--mesh", mesh]].concat());
            let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(got.len() == 4 && gap < 1e-4, "{task} {mesh}: {got:?}, {expected:?}");
        }
        let config = fs::read_to_string(folder.path("out/adapter_config.json")).unwrap();
        assert!(config.contains("\"SEQ_CLS\"") && config.contains("\"score\""), "{config}");
        let of = |options: &[&str]| {
            text(&EVALUATE.succeed(&[&["--data", &data, "--length", "48"], options].concat()).stdout)
        };
        let line = of(&["--model", &base, "--adapters", &out]);
        assert!(line.starts_with(if task == "reward" { "pairs: 12, " } else { "documents: 12, " }), "{line}");
        assert_eq!(of(&["--model", &base, "--adapters", &out, "--mesh", "tp=2"]), line);
        if task == "single-label" {
            without_labels_are_noted(&folder, (&base, &out, &data), &line);
        }
        // Continued: the labels are those of the adapters.
        let again = folder.argument("again");
        let task_again: &[&str] = if task == "reward" { &["--task", "reward"] } else { &[] };
        let (more, _) = run(&again, &[&["--adapters", &out], task_again].concat());
        assert!(more[0] < expected[0], "{task}: {more:?}, {expected:?}");
        if bits.is_empty() {
            let merged = folder.argument("merged");
            let given = ["--model", &base, "--adapters", &out, "--out", &merged, "--to", "transformers"];
            Girandole("export").succeed(&[&given[..], &["--overwrite"]].concat());
            assert_eq!(of(&["--model", &merged]), line, "{task}");
            let given = ["--model", &base, "--adapters", &out, "--prompt", "it"];
            assert!(Girandole("generate").refuse(&given).contains("its model labels documents"), "{task}");
        }
    }
    let other = ["--task", "regression", "--adapters", &out];
    let data = folder.argument("data.jsonl");
    let given = ["--model", &base, "--data", &data, "--out", &folder.argument("other"), "--length", "48"];
    let said = FINETUNE.refuse(&[&given[..], &["--labels", "x,y"], &other].concat());
    assert!(said.contains("--labels: got x,y; the model has a head for LABEL_0"), "{said}");
}

#[test]
fn wrong_labels_are_told() {
    let folder = Folder::new();
    let (base, _) = base(&folder);
    let (data, out) = (folder.argument("wrong.jsonl"), folder.argument("out"));
    let refuse = |line: &str, options: &[&str]| {
        fs::write(&data, format!("{{\"text\": \"a\", \"label\": 0}}\n{line}\n")).unwrap();
        let common =
            ["--model", &base, "--data", &data, "--out", &out, "--length", "16", "--batch-size", "1"];
        let said = FINETUNE.refuse(&[&common[..], options].concat());
        assert_eq!(said.trim().lines().count(), 1, "{said}");
        said
    };
    let single = ["--task", "single-label", "--labels", "good,bad"];
    for (line, expected) in [
        (
            r#"{"text": "b", "label": "ugly"}"#,
            "line 2: field `label`: \"ugly\" is no label of the model: it has good, bad (0 to 1)",
        ),
        (r#"{"text": "b", "label": 2}"#, "line 2: field `label`: 2 is no label of the model"),
        (r#"{"text": "b"}"#, "line 2: there is no `label` or `labels`; give each document one"),
        (
            r#"{"text": "b", "label": ["bad"]}"#,
            "line 2: field `label`: expected a name or a number, got a list",
        ),
        (r#"{"text": "", "label": "bad"}"#, "line 2: it has a label, and no text"),
    ] {
        let said = refuse(line, &single);
        assert!(said.contains(expected), "{said}");
    }
    let fine = r#"{"text": "b", "label": 1}"#;
    let said = refuse(fine, &["--task", "multi-label", "--labels", "good,bad"]);
    assert!(said.contains("line 1: field `label`: expected a list of labels, got 0"), "{said}");
    assert!(refuse(fine, &["--task", "single-label"]).contains("--labels ham,spam"));
    assert!(refuse(fine, &["--task", "single-label", "--labels", "a,a"]).contains("a twice"));
    let said = refuse(fine, &[&single[..], &["--too-long", "cut"]].concat());
    assert!(said.contains("pieces would have no label: give truncate, drop or error"), "{said}");
    let said = refuse(fine, &[&single[..], &["--packing", "stream"]].concat());
    assert!(said.contains("the packing is stream; they are whole"), "{said}");
    let said = refuse(fine, &[&single[..], &["--sample-prompt", "a", "--evaluate", &data]].concat());
    assert!(said.contains("the model labels documents, and writes no text"), "{said}");
    fs::write(folder.path("text.txt"), "a text").unwrap();
    let text = folder.argument("text.txt");
    let said = FINETUNE.refuse(&[&["--model", &base, "--data", &text, "--out", &out], &single[..]].concat());
    assert!(said.contains("it is one text, without labels"), "{said}");
}
