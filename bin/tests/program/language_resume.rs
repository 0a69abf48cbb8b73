//! Output of `pretrain` when it resumes from a checkpoint, and when it would overwrite a model.

use std::fs;

use crate::common::{Folder, Girandole, assert_close, losses, metrics, refuse_with, text};

const PRETRAIN: Girandole = Girandole("pretrain");

/// A small model; 8 rows of 16 tokens per step.
const SMALL: [&str; 10] =
    ["--layers", "1", "--hidden", "16", "--heads", "2", "--length", "16", "--metrics", "m.jsonl"];

/// A folder with a text, in which the commands run.
struct Runs(Folder);

impl Runs {
    fn new() -> Self {
        let folder = Folder::new();
        let words: String = (0..1000).map(|i| ["one ", "two ", "three ", "four\n"][i * i % 7 % 4]).collect();
        fs::write(folder.path("text.txt"), words).unwrap();
        Self(folder)
    }

    fn arguments<'a>(options: &[&'a str]) -> Vec<&'a str> {
        [&["--data", "text.txt", "--out", "out"], &SMALL[..], options].concat()
    }

    /// Runs it, which must succeed; returns standard error.
    fn run(&self, options: &[&str]) -> String {
        let mut command = PRETRAIN.command();
        command.current_dir(self.0.path("")).args(Self::arguments(options));
        text(&crate::common::succeed(&mut command).stderr)
    }

    fn refuse(&self, options: &[&str]) -> String {
        let mut command = PRETRAIN.command();
        command.current_dir(self.0.path(""));
        refuse_with(&mut command, &Self::arguments(options)).0
    }
}

const KEEP: [&str; 4] = ["--checkpoint-dir", "kept", "--checkpoint-every", "2"];

fn with<'a>(options: &[&'a str]) -> Vec<&'a str> {
    [&KEEP[..], options].concat()
}

#[test]
fn options_that_a_resumed_run_has_otherwise_are_named() {
    let runs = Runs::new();
    runs.run(&with(&["--steps", "4"]));
    let same = runs.run(&with(&["--steps", "4", "--resume"]));
    assert_eq!(same, "note: going on after step 4, from kept/checkpoint-00000002\n");
    let said = runs.run(&with(&[
        "--steps", "6", "--lr", "0.01", "--schedule", "wsd", "--warmup", "2", "--weight-decay", "0",
        "--betas", "0.9,0.99", "--mesh", "dp=2", "--resume",
    ]));
    let expected = "note: other options than those of the checkpoint: --betas 0.9,0.95, now 0.9,0.99; --lr 0.0003, now 0.01; \
                    --schedule cosine, now wsd; --steps 4, now 6; --warmup 0, now 2; --weight-decay 0.1, now 0\n";
    assert!(said.starts_with(expected), "{said}");
    // The next resume compares with the settings of the last run.
    let said = runs.run(&with(&["--steps", "7", "--resume"]));
    assert!(said.contains("--lr 0.01, now 0.0003") && said.contains("--steps 6, now 7"), "{said}");
}

#[test]
fn another_order_of_rows_is_refused_and_another_batch_size_is_not() {
    let runs = Runs::new();
    runs.run(&with(&["--steps", "4"]));
    let refuse = |option: &[&str]| runs.refuse(&with(&[option, &["--steps", "6", "--resume"]].concat()));
    let line = refuse(&["--seed", "7"]);
    assert!(line.contains("it was made with seed 42, and now it is 7; an epoch's rows"), "{line}");
    let line = refuse(&["--no-shuffle"]);
    assert!(line.contains("its rows were shuffled, and now they are not shuffled"), "{line}");
    // 32 rows are read; the next step reads 4 more, and the change is reported.
    let said = runs.run(&with(&["--batch-size", "4", "--steps", "5", "--resume"]));
    assert!(said.contains("--batch-size 8, now 4"), "{said}");
    let json = fs::read(runs.0.path("kept/checkpoint-00000003/checkpoint.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["sampler"]["consumed"], 36, "{}", json["sampler"]);
}

#[test]
fn a_model_is_replaced_where_that_is_asked_for() {
    let runs = Runs::new();
    runs.run(&["--steps", "2"]);
    let model = || fs::read(runs.0.path("out/model.safetensors")).unwrap();
    let before = model();
    let expected = "error: --out: got out; it holds a model already (model.safetensors): give another folder, \
                    or --overwrite to replace the model\n";
    assert_eq!(runs.refuse(&["--steps", "3"]), expected);
    // There is no checkpoint to resume from: the run would start from the beginning.
    assert_eq!(runs.refuse(&with(&["--steps", "3", "--resume"])), expected);
    assert!(model() == before);
    runs.run(&with(&["--steps", "3", "--overwrite"]));
    assert!(model() != before);
    assert_eq!(runs.refuse(&with(&["--steps", "3"])), expected);
    // A resumed run may replace its own model.
    runs.run(&with(&["--steps", "4", "--resume"]));
    assert_eq!(losses(&runs.0.path("m.jsonl")).len(), 4);
    // A configuration alone, as for `--model`, does not count as a model.
    fs::remove_file(runs.0.path("out/model.safetensors")).unwrap();
    runs.run(&["--steps", "2"]);
}

#[test]
fn a_checkpoint_that_is_not_there_is_told_with_those_that_are() {
    let runs = Runs::new();
    let line = runs.refuse(&with(&["--resume", "ck2"]));
    assert_eq!(line, "error: --resume: got ck2; there is no such folder, and no checkpoint in kept\n");
    runs.run(&with(&["--steps", "4"]));
    let line = runs.refuse(&with(&["--resume", "ck2"]));
    let expected = "error: --resume: got ck2; there is no such folder; kept holds checkpoint-00000001, checkpoint-00000002\n";
    assert_eq!(line, expected);
}

#[test]
fn a_checkpoint_of_another_command_is_refused_by_its_name() {
    let runs = Runs::new();
    runs.run(&with(&["--steps", "2"]));
    let path = |name: &str| runs.0.argument(name);
    let (kept, data, out) = (path("kept"), path("text.txt"), path("out"));
    let resume = ["--checkpoint-dir", &kept, "--resume"];
    let tune = ["--model", &out, "--data", &data, "--out", &path("tuned"), "--length", "16"];
    let tuned = refuse_with(Girandole("finetune").command().args(tune), &resume).0;
    assert!(tuned.contains("that is of the command pretrain, and this is finetune"), "{tuned}");
    for command in ["ddp-mlp", "ddp-trainer", "pipeline-transformer"] {
        let said = refuse_with(&mut Girandole(command).command(), &resume).0;
        let expected = format!("that is of the command pretrain, and this is {command}");
        assert!(said.contains(&expected), "{said}");
    }
    Girandole("ddp-trainer").succeed(&["--epochs", "1", "--checkpoint-dir", &path("other")]);
    let said = runs.refuse(&["--checkpoint-dir", &path("other"), "--resume"]);
    assert!(said.contains("that is of the command ddp-trainer, and this is pretrain"), "{said}");
}

#[test]
fn the_page_of_a_run_that_went_on_shows_all_of_it() {
    let runs = Runs::new();
    let evaluated = with(&["--evaluate", "text.txt", "--evaluate-every", "2", "--sample", "8"]);
    runs.run(&[&evaluated[..], &["--steps", "4"]].concat());
    let steps = |event: &str, field: &str| -> Vec<u64> {
        let lines = metrics(&runs.0.path("m.jsonl"));
        let of = lines.iter().filter(|line| line["event"] == event);
        of.map(|line| line[field].as_u64().unwrap()).collect()
    };
    assert_eq!(steps("evaluation", "step"), [2, 4]);
    // Repeats the run from the third step on, as a pipeline.
    let from = ["--resume", "checkpoint-00000001", "--mesh", "pp=2", "--report", "page.html"];
    runs.run(&[&evaluated[..], &["--steps", "6"], &from].concat());
    assert_eq!(steps("step", "batch"), [0, 1, 2, 3, 4, 5]);
    assert_eq!(steps("evaluation", "step"), [2, 4, 6]);
    let page = fs::read_to_string(runs.0.path("page.html")).unwrap();
    assert!(page.contains("data-head=\"steps\">6</td>"), "six steps in all");
    let rates = page.split("<figcaption>Learning rate").nth(1).unwrap();
    let rates = rates.split("data-curves=\"").nth(1).unwrap().split('"').next().unwrap();
    assert_eq!(rates.matches("],[").count(), 5, "six points: {rates}");
    assert_eq!(page.matches("<td class=\"sample\">").count(), 3);
    for line in metrics(&runs.0.path("m.jsonl")).iter().filter(|line| line["event"] == "evaluation") {
        assert!(line["sample"].as_str().unwrap().starts_with("one two "), "{line}");
    }
}

#[test]
fn training_data_are_not_written_over() {
    let runs = Runs::new();
    let before = fs::read(runs.0.path("text.txt")).unwrap();
    for option in ["--trace", "--report"] {
        let line = runs.refuse(&["--steps", "2", option, "text.txt"]);
        assert!(line.contains(option) && line.contains("--data"), "{line}");
    }
    fs::copy(runs.0.path("text.txt"), runs.0.path("other.txt")).unwrap();
    let line = runs.refuse(&["--steps", "2", "--evaluate", "other.txt", "--report", "other.txt"]);
    assert!(line.contains("--report") && line.contains("--evaluate"), "{line}");
    fs::create_dir_all(runs.0.path("out")).unwrap();
    fs::rename(runs.0.path("other.txt"), runs.0.path("out/vocab.txt")).unwrap();
    let line = runs.refuse(&["--steps", "2", "--evaluate", "out/vocab.txt"]);
    assert!(line.contains("vocab.txt is a file of the model"), "{line}");
    assert!(fs::read(runs.0.path("text.txt")).unwrap() == before);
}

/// A launcher that knows nothing of exit codes starts a job again that has refused to begin.
#[test]
fn what_was_refused_is_refused_again_after_a_restart() {
    let runs = Runs::new();
    runs.run(&with(&["--steps", "4"]));
    let model = || fs::read(runs.0.path("out/model.safetensors")).unwrap();
    let before = model();
    let again = |options: &[&str]| {
        let program = env!("CARGO_BIN_EXE_girandole");
        let arguments = Runs::arguments(&[options, &["--steps", "5"]].concat()).join(" ");
        let script = format!("{program} pretrain {arguments}");
        let mut command = crate::common::girandole();
        command
            .current_dir(runs.0.path(""))
            .args(["launch", "--nproc-per-node", "1", "--max-restarts", "1", "--"]);
        command.args(["sh", "-c", &script]).output().unwrap()
    };
    for (options, reason) in [
        (&[][..], "it holds a model already"),
        (&with(&["--overwrite"])[..], "it holds checkpoints of an earlier run"),
    ] {
        let output = again(options);
        let said = text(&output.stderr);
        // By both starts, and by the launcher.
        assert_eq!(said.matches(reason).count(), 3, "{said}");
        assert!(!output.status.success() && model() == before, "{said}");
    }
    // One that has begun goes on.
    let output = again(&with(&["--overwrite", "--resume"]));
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn adapters_do_not_go_beside_a_whole_model() {
    let runs = Runs::new();
    runs.run(&["--steps", "2"]);
    let finetune = |options: &[&str]| {
        let mut command = Girandole("finetune").command();
        command.current_dir(runs.0.path("")).args(["--data", "text.txt", "--length", "16", "--steps", "1"]);
        command.args(options).output().unwrap()
    };
    let output = finetune(&["--model", "out", "--lora-rank", "2", "--out", "out", "--overwrite"]);
    let said = text(&output.stderr);
    assert!(said.contains("--out: got out; it holds a whole model (model.safetensors)"), "{said}");
    assert_eq!(output.status.code(), Some(2));
    let output = finetune(&["--model", "out", "--lora-rank", "2", "--out", "adapters"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = finetune(&[
        "--model", "out", "--adapters", "adapters", "--out", "adapters", "--merge", "--overwrite",
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!runs.0.path("adapters/adapter_config.json").exists());
    let output = finetune(&["--model", "out", "--merge", "--out", "more"]);
    assert!(text(&output.stderr).contains("--merge"), "{}", text(&output.stderr));
}

const MUON: [&str; 6] = ["--optimizer", "muon", "--lr", "0.02", "--schedule", "constant"];

/// Muon is another optimizer than AdamW, and needs whole matrices in every layout.
#[test]
fn muon_goes_on_in_another_layout_and_its_checkpoint_is_no_other_optimizers() {
    let runs = Runs::new();
    let muon = |options: &[&'static str]| [&MUON[..], &with(options)].concat();
    // A run that goes on adds to the file.
    let losses = || losses(&runs.0.path("m.jsonl"));
    runs.run(&[&MUON[..], &["--steps", "6"]].concat());
    let expected = losses();
    runs.run(&muon(&["--steps", "2", "--mesh", "shard=2", "--overwrite"]));
    let said = runs.refuse(&with(&["--steps", "4", "--resume"]));
    let expected_message =
        "it was made with the optimizer muon, from whose state adamw cannot go on: give the same";
    assert!(said.contains(expected_message) && said.trim().lines().count() == 1, "{said}");
    for (steps, mesh) in [("4", "tp=2"), ("6", "dp=2")] {
        runs.run(&muon(&["--steps", steps, "--mesh", mesh, "--resume"]));
    }
    assert_close(&losses(), &expected, "muon");
}
