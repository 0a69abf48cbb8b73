//! `prefer`: TRL's losses, rewards and accuracies, in every layout; what a resumed run keeps, adapters, and what is refused.

use std::fs;
use std::path::Path;

#[cfg(target_os = "linux")]
use rustix::process::{Signal, kill_process};
use serde_json::Value;

#[cfg(target_os = "linux")]
use crate::common::Session;
use crate::common::{Folder, Girandole, text};

const PREFER: Girandole = Girandole("prefer");
const PRETRAIN: Girandole = Girandole("pretrain");
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/preferences");

/// As `make_preferences.py` trains.
pub(crate) const AS_TRL: [&str; 12] = [
    "--lr", "0.002", "--schedule", "constant", "--weight-decay", "0", "--betas", "0.9,0.95", "--clip", "1",
    "--log-every", "1",
];

fn pairs() -> String {
    format!("{FIXTURE}/pairs.jsonl")
}

/// Four rows have all pairs.
fn run(folder: &Folder, options: &[&str]) -> Vec<Value> {
    let (out, metrics) = (folder.argument("out"), folder.argument("m.jsonl"));
    let rows = ["--length", "100", "--batch-size", "4", "--out", &out, "--overwrite", "--metrics", &metrics];
    PREFER.succeed(&[&["--model", FIXTURE, "--data", &pairs()], &rows[..], &AS_TRL, options].concat());
    steps(&folder.path("m.jsonl"))
}

pub(crate) fn steps(metrics: &Path) -> Vec<Value> {
    let lines = fs::read_to_string(metrics).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["event"] == "step").collect()
}

pub(crate) fn numbers(steps: &[Value], name: &str) -> Vec<f64> {
    steps.iter().map(|step| step[name].as_f64().unwrap()).collect()
}

pub(crate) fn assert_close(got: &[f64], expected: &[f64], most: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let gap = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(gap < most, "{what}: {gap}\n{got:?}\n{expected:?}");
}

/// 20 losses, margins, accuracies and rewards, of one process and of layouts.
#[test]
fn losses_and_rewards_are_those_of_trl() {
    let expected: Value =
        serde_json::from_slice(&fs::read(format!("{FIXTURE}/expected.json")).unwrap()).unwrap();
    let folder = Folder::new();
    let names = [
        ("loss", "loss"),
        ("margin", "margin"),
        ("accuracy", "accuracy"),
        ("chosen", "reward_chosen"),
        ("rejected", "reward_rejected"),
    ];
    for (name, options) in [
        ("dpo", &[][..]),
        ("ipo", &["--loss", "ipo"]),
        ("hinge", &["--loss", "hinge"]),
        ("smoothed", &["--label-smoothing", "0.1"]),
        ("orpo", &["--loss", "orpo"]),
        ("simpo", &["--loss", "simpo", "--beta", "2"]),
    ] {
        for mesh in [&[][..], &["--mesh", "shard=2"], &["--mesh", "pp=2,tp=2"], &["--mesh", "cp=2"]] {
            let found = run(&folder, &[&["--steps", "20"], options, mesh].concat());
            for (theirs, own) in names {
                let theirs: Vec<f64> =
                    expected[name][theirs].as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect();
                assert_close(&numbers(&found, own), &theirs, 1e-4, &format!("{name} {mesh:?} {own}"));
            }
        }
    }
}

/// The reference is the model that a run began with, also where it goes on in another layout, and for accumulated parts.
#[test]
fn a_resumed_run_has_the_same_reference() {
    let folder = Folder::new();
    let kept = folder.argument("kept");
    let keep = ["--checkpoint-dir", &kept, "--checkpoint-every", "2"];
    let evaluate = ["--evaluate", &pairs(), "--evaluate-every", "2"];
    let all =
        numbers(&run(&folder, &[&["--steps", "5", "--accumulate", "2"], &evaluate[..]].concat()), "loss");
    run(&folder, &[&["--steps", "2"], &keep[..], &evaluate].concat());
    for mesh in ["shard=2", "pp=2,cp=2"] {
        let later =
            run(&folder, &[&["--steps", "5", "--mesh", mesh, "--resume"], &keep[..], &evaluate].concat());
        assert_close(&numbers(&later, "loss"), &all[5 - later.len()..], 1e-5, mesh);
        fs::remove_dir_all(&kept).unwrap();
        run(&folder, &[&["--steps", "2"], &keep[..], &evaluate].concat());
    }
    let lines = fs::read_to_string(folder.path("m.jsonl")).unwrap();
    assert!(lines.contains(r#""event":"evaluation""#) && lines.contains(r#""reward_chosen""#), "{lines}");
}

/// Adapters, also on a base in 4 bits, whose reference is that base; and a page with the margins.
#[test]
fn adapters_have_one_curve() {
    let (folder, text_of) = (Folder::new(), "to be or not to be, that is the question\n".repeat(30));
    let [data, base, page] = ["text.txt", "base", "page.html"].map(|name| folder.argument(name));
    fs::write(folder.path("text.txt"), text_of).unwrap();
    let sizes = ["--layers", "1", "--hidden", "384", "--heads", "6", "--length", "128", "--batch-size", "1"];
    PRETRAIN.succeed(&[&["--data", &data, "--out", &base, "--steps", "1"], &sizes[..]].concat());
    for bits in [&[][..], &["--base-bits", "4"]] {
        let out = folder.argument("out");
        let run = |options: &[&str]| {
            let metrics = folder.argument("m.jsonl");
            let common =
                ["--model", &base, "--data", &pairs(), "--out", &out, "--overwrite", "--length", "128"];
            let tuned =
                ["--lora-rank", "2", "--lr", "0.01", "--batch-size", "4", "--steps", "3", "--report", &page];
            PREFER.succeed(&[&common, &tuned[..], &["--metrics", &metrics], bits, options].concat());
            numbers(&steps(&folder.path("m.jsonl")), "loss")
        };
        let expected = run(&[]);
        // At the first step the model is its reference.
        assert!(
            (expected[0] - std::f64::consts::LN_2).abs() < 1e-5 && expected[2] < expected[0],
            "{expected:?}"
        );
        assert!(folder.path("out/adapter_model.safetensors").exists());
        for mesh in ["shard=2", "tp=2", "pp=2,dp=2"] {
            let gap =
                run(&["--mesh", mesh]).iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(gap < 1e-4, "{bits:?} {mesh}: {gap}");
        }
    }
    let html = fs::read_to_string(folder.path("page.html")).unwrap();
    assert!(html.contains("Margin of rewards") && html.contains("Accuracy of rewards"));
}

/// A rank that joins has the same reference, which it has not computed.
#[cfg(target_os = "linux")]
#[test]
fn a_new_rank_gets_the_reference() {
    let folder = Folder::new();
    let expected = numbers(&run(&folder, &["--steps", "200", "--evaluate", &pairs()]), "loss");
    let (out, file) = (folder.argument("elastic"), folder.argument("e.jsonl"));
    let (path, data) = (folder.path("e.jsonl"), pairs());
    let own = ["--model", FIXTURE, "--data", &data, "--evaluate", &data, "--out", &out, "--metrics", &file];
    let rows =
        ["--length", "100", "--batch-size", "4", "--steps", "200", "--mesh", "dp=2", "--evaluate-every", "7"];
    let elastic = ["--elastic", "2:2", "--replace", "1"];
    let mut session = Session::start(&PREFER, &[&own, &rows[..], &AS_TRL, &elastic].concat());
    session.until("some steps", || fs::read_to_string(&path).is_ok_and(|text| text.lines().count() > 20));
    kill_process(session.ranks()[1], Signal::KILL).unwrap();
    let output = session.end();
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("rank 2 has come; 2 ranks go on after step "), "{said}");
    assert_close(&numbers(&steps(&path), "loss"), &expected, 1e-4, &said);
}

#[test]
fn what_is_no_pair_is_refused() {
    let folder = Folder::new();
    let path = folder.argument("p.jsonl");
    let refuse = |lines: &str, options: &[&str]| {
        fs::write(folder.path("p.jsonl"), lines).unwrap();
        let out = folder.argument("out");
        let given = ["--model", FIXTURE, "--data", &path, "--out", &out, "--length", "64"];
        PREFER.refuse(&[&given, options].concat())
    };
    let good = r#"{"prompt": "a ", "chosen": "b", "rejected": "c"}"#;
    for (line, said) in [
        (r#"{"prompt": "a", "chosen": "b", "rejected": "b"}"#, "line 2: `chosen` and `rejected` are equal"),
        (r#"{"prompt": "a", "chosen": "b"}"#, "line 2: there is no `rejected`, or it is empty"),
        (r#"{"prompt": "a", "rejected": "b"}"#, "line 2: there is no `chosen`"),
        (
            r#"{"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "x"}]}"#,
            "`rejected` is a list",
        ),
        (
            r#"{"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}"#,
            "both answers are a string",
        ),
        (
            r#"{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                "rejected": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "c"}]}"#,
            "begin with different messages: give the messages before both answers as `prompt`",
        ),
    ] {
        let error = refuse(&format!("{good}\n{}\n", line.replace('\n', " ")), &[]);
        assert!(error.contains(said), "{line}: {error}");
    }
    let long = format!(r#"{{"prompt": "a", "chosen": "{}", "rejected": "c"}}"#, "word and ".repeat(60));
    let error = refuse(&format!("{good}\n{long}\n"), &["--too-long", "error"]);
    assert!(error.contains("pair 2 has ") && error.contains("tokens, and rows have 64"), "{error}");
    assert!(refuse(&long, &[]).contains("each of its pairs has more than 64 tokens"));
    let other = Path::new(FIXTURE).join("../qwen2").display().to_string();
    let error = refuse(good, &["--reference", &other]);
    assert!(
        error.contains("--reference: got ") && error.contains("give one of the same vocabulary"),
        "{error}"
    );
    fs::write(folder.path("plain.txt"), "text").unwrap();
    let (plain, out) = (folder.argument("plain.txt"), folder.argument("out"));
    let error = PREFER.refuse(&["--model", FIXTURE, "--data", &plain, "--out", &out]);
    assert!(error.contains("it is plain text: pairs are JSON lines"), "{error}");
}

#[test]
fn options_without_a_use_are_refused() {
    let folder = Folder::new();
    let (path, out) = (folder.argument("p.jsonl"), folder.argument("out"));
    fs::write(folder.path("p.jsonl"), r#"{"prompt": "a ", "chosen": "b", "rejected": "c"}"#).unwrap();
    for (options, said) in [
        (&["--beta", "0"][..], "give a number above 0"),
        (&["--beta", "-1"], "give a number above 0"),
        (&["--beta", "nan"], "give a number above 0"),
        (&["--label-smoothing", "0.5"], "from 0 to below 0.5"),
        (
            &["--loss", "ipo", "--label-smoothing", "0.1"],
            "--label-smoothing: got 0.1; it is for --loss dpo and simpo",
        ),
        (&["--simpo-gamma", "1"], "--simpo-gamma: got 1; it is for --loss simpo"),
        (&["--loss", "orpo", "--reference", FIXTURE], "orpo and simpo compare with no reference"),
        (&["--packing", "stream"], "rows have whole pairs"),
        (&["--too-long", "cut"], "--too-long: got cut; a cut pair cannot be compared"),
        (&["--too-long", "truncate"], "--too-long: got truncate; a cut pair cannot be compared"),
        (&["--field", "text"], "pairs are the fields"),
    ] {
        let given = ["--model", FIXTURE, "--data", &path, "--out", &out, "--length", "64"];
        let error = PREFER.refuse(&[&given, options].concat());
        assert!(error.contains(said), "{options:?}: {error}");
    }
}

/// A pair that is longer than a row is left out, and that is said; what both answers begin with is their prompt.
#[test]
fn pairs_that_are_too_long_are_counted() {
    let folder = Folder::new();
    let long = "word and ".repeat(60);
    let lines = format!(
        "{}\n{}\n",
        r#"{"chosen": "What is it? A cat.", "rejected": "What is it? No dog."}"#,
        format_args!(r#"{{"prompt": "a", "chosen": "{long}", "rejected": "c"}}"#)
    );
    fs::write(folder.path("p.jsonl"), lines).unwrap();
    let (data, out) = (folder.argument("p.jsonl"), folder.argument("out"));
    let given = ["--model", FIXTURE, "--data", &data, "--out", &out, "--length", "64", "--batch-size", "1"];
    let output = PREFER.succeed(&[&given[..], &["--steps", "2", "--reference", FIXTURE]].concat());
    let said = text(&output.stdout);
    assert!(said.contains("1 rows of 64 tokens (2 pairs, 1 left out;"), "{said}");
    assert!(
        said.contains("reference: computing its log-probabilities once") && said.contains("margin"),
        "{said}"
    );
}
