//! Options of `pretrain` and `finetune`: wrong values are named before ranks start, and `--trace` shows the parts of a
//! step. The page of a run that was killed.

use std::fs;

#[cfg(target_os = "linux")]
use rustix::process::{Signal, kill_process};

#[cfg(target_os = "linux")]
use crate::common::Session;
use crate::common::{Folder, Girandole, refuse_with};

const PRETRAIN: Girandole = Girandole("pretrain");
const LARGEST: &str = "18446744073709551615";

/// Returns a folder with a text, and arguments for a small model.
fn small() -> (Folder, Vec<String>) {
    let folder = Folder::new();
    fs::write(folder.path("text.txt"), "one two three four\n".repeat(100)).unwrap();
    let (data, out) = (folder.argument("text.txt"), folder.argument("out"));
    let all =
        ["--data", &data, "--out", &out, "--layers", "6", "--hidden", "16", "--heads", "2", "--length", "16"];
    let all = all.map(String::from).to_vec();
    (folder, all)
}

#[test]
fn the_option_that_is_wrong_is_named() {
    let (folder, arguments) = small();
    let refuse = |options: &[&str], says: &str| {
        let (said, code) = refuse_with(PRETRAIN.command().args(&arguments), options);
        assert!(code == 2 && said.contains(says), "{options:?}: {code}, {said}");
    };
    let stages = ["--mesh", "pp=5", "--batch-size", "10", "--pipeline-schedule", "zb-v"];
    refuse(&stages, "error: --pipeline-schedule: got zb-v; it has 2 stages on each of pp=5 ranks");
    let schedule = ["--mesh", "dp=2", "--pipeline-schedule", "gpipe"];
    refuse(&schedule, "error: --pipeline-schedule: got gpipe; there are no stages to schedule");
    refuse(&["--mesh", "dp=5000"], "error: --mesh: got dp=5000; give 1 to 4096 ranks");
    refuse(&["--world-size", "5000"], "error: --world-size: got 5000; give 1 to 4096 ranks");
    refuse(&["--batch-size", LARGEST, "--no-memory-check"], "error: --batch-size: got 18446744073709551615");
    for (options, says) in [
        (
            &["--optimizer", "sgd", "--betas", "0.9,0.99"][..],
            "--betas: got 0.9,0.99; the optimizer sgd has none",
        ),
        (
            &["--momentum", "0.9"],
            "--momentum: got 0.9; the optimizer adamw has none: leave it out, or give --optimizer muon or sgd",
        ),
        (
            &["--optimizer", "sgd", "--adjust-lr", "original"],
            "--adjust-lr: got original; the optimizer sgd has none",
        ),
        (
            &["--optimizer", "sgd", "--nesterov", "true"],
            "--nesterov: got true; it needs a --momentum above 0",
        ),
        (&["--optimizer", "muon", "--lr", "0"], "--lr: got 0; it must be above 0 with --optimizer muon"),
    ] {
        refuse(options, says);
    }
    refuse(&["--warmup", "x"], "'--warmup <STEPS>': give a whole number, 0 or more");
    assert!(!folder.path("out/config.json").exists());
}

#[test]
fn sizes_whose_weights_cannot_be_counted_are_refused() {
    let (_folder, arguments) = small();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let sizes = ["--hidden", "800000000", "--heads", "1", "--layers", "6"];
    for more in [&[][..], &["--no-memory-check"]] {
        let said = PRETRAIN.refuse(&[&arguments[..4], &sizes, more].concat());
        assert!(said.contains("the number of weights that its sizes make is 4.6e19; it must be"), "{said}");
    }
}

#[test]
fn a_rank_of_adapters_that_cannot_be_is_refused() {
    let (folder, arguments) = small();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    PRETRAIN.succeed(&[&arguments[..], &["--steps", "1"]].concat());
    let (model, data, out) = (folder.argument("out"), folder.argument("text.txt"), folder.argument("tuned"));
    let tune = ["--model", &model, "--data", &data, "--out", &out, "--lora-rank", LARGEST];
    let said = Girandole("finetune").refuse(&tune);
    assert!(said.contains("--lora-rank: got 18446744073709551615; give at most 65536"), "{said}");
    let said = Girandole("plan").refuse(&["--model", &model, "--lora-rank", LARGEST]);
    assert!(said.contains("--lora-rank: got 18446744073709551615; give at most 65536"), "{said}");
}

#[test]
fn a_trace_shows_the_parts_of_a_step() {
    let (folder, arguments) = small();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (trace, kept, data) =
        (folder.argument("t.json"), folder.argument("kept"), folder.argument("text.txt"));
    let more = ["--steps", "2", "--trace", &trace, "--checkpoint-dir", &kept, "--evaluate", &data];
    PRETRAIN.succeed(&[&arguments[..], &more].concat());
    let trace = fs::read_to_string(trace).unwrap();
    for span in
        ["forward and backward", "optimizer", "evaluation", "sample", "checkpoint", "write checkpoint"]
    {
        assert!(trace.contains(&format!("\"name\":\"{span}\"")), "{span}");
    }
    assert!(!trace.contains("cli/src/language"), "{trace}");
}

#[cfg(target_os = "linux")]
#[test]
fn the_page_of_a_run_that_was_killed_says_that_it_has_ended() {
    let (folder, arguments) = small();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (data, page) = (folder.argument("text.txt"), folder.argument("run.html"));
    let more = ["--steps", "1000000", "--evaluate", &data, "--evaluate-every", "1", "--overwrite"];
    let read = || fs::read_to_string(&page).unwrap_or_default();
    for ends_rank in [false, true] {
        let words = [&arguments[..], &more, &["--mesh", "dp=2", "--report", &page]].concat();
        let mut session = Session::start(&PRETRAIN, &words);
        session.until("a page", || read().contains("data-reload"));
        match ends_rank {
            true => {
                kill_process(session.ranks()[0], Signal::KILL).unwrap();
                assert!(!session.end().status.success());
            }
            false => assert!(!session.stop(Signal::TERM).success()),
        }
        let said = read();
        assert!(said.contains("ended before its last step") && !said.contains("data-reload"), "{ends_rank}");
    }
}
