//! Runs that are killed and resumed, also with other stages; checkpoints that must be rejected.

use std::path::Path;

use candle_core::{Device, safetensors};

use crate::common::{Folder, assert_close, kill_and_resume, losses, text};
use crate::pipeline_transformer::PIPELINE;

#[test]
fn a_run_with_dropout_that_is_killed_again_and_again_ends_as_one_that_nobody_disturbs() {
    kill_and_resume(&PIPELINE, &["--world-size", "2", "--samples", "20"]);
}

#[test]
fn copies_in_several_stages_a_rank_go_on_as_well() {
    let stages = ["--world-size", "4", "--dp", "2", "--schedule", "zb-v", "--batch-size", "2"];
    kill_and_resume(&PIPELINE, &[&stages[..], &["--samples", "20"]].concat());
}

#[test]
fn a_run_goes_on_in_other_stages() {
    let folder = Folder::new();
    let [dir, lines, saved, whole_lines, whole] =
        ["checkpoints", "m.jsonl", "saved", "whole.jsonl", "whole"].map(|name| folder.argument(name));
    let common = ["--dropout", "0", "--num-layers", "4", "--schedule", "interleaved-1f1b"];
    let keep = ["--checkpoint-dir", &dir, "--metrics", &lines, "--save", &saved];
    PIPELINE.succeed(&[&common[..], &keep, &["--epochs", "2", "--world-size", "2"]].concat());
    let resumed =
        PIPELINE.succeed(&[&common[..], &keep, &["--epochs", "5", "--world-size", "3", "--resume"]].concat());
    let note = format!(
        "going on from {dir} at epoch 2, batch 0 (step 6); it was made with world size 2, the model is cut again"
    );
    assert!(text(&resumed.stderr).contains(&note), "{resumed:?}");
    PIPELINE
        .succeed(&[&common[..], &["--epochs", "5", "--save", &whole, "--metrics", &whole_lines]].concat());
    assert_close(&losses(lines.as_ref()), &losses(whole_lines.as_ref()), "resumed on 3 ranks");
    let [saved, whole] = [saved, whole].map(|path| safetensors::load(path, &Device::Cpu).unwrap());
    for (name, expected) in whole {
        let gap = (&saved[&name] - expected).unwrap().abs().unwrap().max_all().unwrap();
        assert!(gap.to_scalar::<f32>().unwrap() < 1e-5, "{name}");
    }
}

#[test]
fn other_runs_and_damaged_checkpoints_are_refused() {
    let folder = Folder::new();
    let dir = folder.argument("checkpoints");
    let keep = ["--epochs", "2", "--checkpoint-dir", &dir];
    PIPELINE.succeed(&keep);
    for (option, value, then) in [
        ("--d-ff", "32", "24"),
        ("--schedule", "zb-h1", "gpipe"),
        ("--micro-batches", "4", "2"),
        ("--seed", "1", "42"),
    ] {
        let line = PIPELINE.refuse(&[&keep[..], &["--resume", option, value]].concat());
        let expected = format!("error: {option}: got {value}; the run in {dir} began with {then}");
        assert!(line.starts_with(&expected), "{line}");
    }
    for name in
        ["rank-00000.safetensors", "rank-00001.safetensors", "observer.safetensors", "checkpoint.json"]
    {
        let file = Path::new(&dir).join("checkpoint-00000002").join(name);
        let whole = std::fs::read(&file).unwrap();
        let mut bytes = whole.clone();
        bytes[whole.len() / 2] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        let line = PIPELINE.refuse(&[&keep[..], &["--resume"]].concat());
        assert!(line.starts_with(&format!("error: `{}` cannot be trusted: ", file.display())), "{line}");
        assert!(line.ends_with(&format!("--resume={dir}/checkpoint-00000001 goes on from it\n")), "{line}");
        std::fs::write(&file, whole).unwrap();
    }
}
