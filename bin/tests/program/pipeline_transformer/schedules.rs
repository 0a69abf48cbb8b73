//! All schedules give the same results on any number of ranks, also with dropout; so do copies of the model.

use candle_core::{Device, safetensors};

use crate::common::{Folder, assert_close, losses, text};
use crate::pipeline_transformer::PIPELINE;

/// Returns the losses and weights of a short run.
fn run(arguments: &[&str]) -> (Vec<f32>, Vec<(String, Vec<f32>)>) {
    let folder = Folder::new();
    let (lines, saved) = (folder.argument("m.jsonl"), folder.argument("w.safetensors"));
    let own = ["--epochs", "4", "--metrics", &lines, "--save", &saved];
    PIPELINE.succeed(&[&own[..], arguments].concat());
    let weights = safetensors::load(&saved, &Device::Cpu).unwrap();
    let mut weights: Vec<_> = weights
        .into_iter()
        .map(|(name, tensor)| (name, tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()))
        .collect();
    weights.sort_by(|a, b| a.0.cmp(&b.0));
    (losses(lines.as_ref()), weights)
}

fn assert_same(
    got: &(Vec<f32>, Vec<(String, Vec<f32>)>),
    expected: &(Vec<f32>, Vec<(String, Vec<f32>)>),
    what: &str,
) {
    assert_close(&got.0, &expected.0, what);
    for ((name, got), (other, expected)) in got.1.iter().zip(&expected.1) {
        assert_eq!(name, other);
        let gap = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(gap < 1e-5, "{what}, {name}: {gap}");
    }
}

#[test]
fn schedules_differ_in_nothing_but_time() {
    let common = ["--num-layers", "4", "--micro-batches", "4", "--dropout", "0"];
    let expected = run(&[&common[..], &["--world-size", "1"]].concat());
    for (schedule, ranks) in [
        ("naive", "2"),
        ("gpipe", "3"),
        ("1f1b", "4"),
        ("interleaved-1f1b", "3"),
        ("looped-bfs", "2"),
        ("zb-h1", "4"),
        ("zb-v", "3"),
    ] {
        let got = run(&[&common[..], &["--schedule", schedule, "--world-size", ranks]].concat());
        assert_same(&got, &expected, &format!("{schedule} on {ranks} ranks"));
    }
}

#[test]
fn cuts_make_no_difference() {
    let common = ["--num-layers", "3", "--dropout", "0"];
    let expected = run(&common);
    for split in ["pos_encoding", "out_linear", "parameters", "time"] {
        assert_same(&run(&[&common[..], &["--split", split]].concat()), &expected, split);
    }
}

#[test]
fn dropout_depends_on_stage_and_micro_batch_alone() {
    let common = ["--micro-batches", "4", "--split", "layers.1", "--dropout"];
    let with = |dropout: &str, more: &[&str]| run(&[&common[..], &[dropout], more].concat());
    let expected = with("0.2", &[]);
    for schedule in ["naive", "1f1b", "zb-h1"] {
        assert_same(&with("0.2", &["--schedule", schedule]), &expected, schedule);
    }
    assert_ne!(with("0", &[]).0, expected.0);
}

/// Two copies with a batch of 2 each take the same steps as one with a batch of 4.
#[test]
fn copies_share_a_batch() {
    let folder = Folder::new();
    let [one, two] = ["one", "two"].map(|name| folder.argument(name));
    let common = ["--epochs", "4", "--dropout", "0", "--save"];
    PIPELINE.succeed(&[&common[..], &[&one, "--batch-size", "4", "--micro-batches", "2"]].concat());
    let copies = ["--dp", "2", "--world-size", "4", "--batch-size", "2", "--schedule", "1f1b"];
    PIPELINE.succeed(&[&common[..], &[&two], &copies].concat());
    let [one, two] = [one, two].map(|path| safetensors::load(path, &Device::Cpu).unwrap());
    assert_eq!(one.len(), two.len());
    for (name, expected) in one {
        let gap = (&two[&name] - expected).unwrap().abs().unwrap().max_all().unwrap();
        assert!(gap.to_scalar::<f32>().unwrap() < 1e-5, "{name}");
    }
}

#[test]
fn a_run_goes_on_from_saved_weights() {
    let folder = Folder::new();
    let saved = folder.argument("w.safetensors");
    PIPELINE.succeed(&["--epochs", "3", "--dropout", "0", "--save", &saved]);
    let metrics = |name: &str| folder.argument(name);
    let lines = metrics("m.jsonl");
    PIPELINE.succeed(&["--epochs", "1", "--dropout", "0", "--init", &saved, "--metrics", &lines]);
    let whole = metrics("whole.jsonl");
    PIPELINE.succeed(&["--epochs", "4", "--dropout", "0", "--metrics", &whole]);
    assert_eq!(losses(lines.as_ref()), losses(whole.as_ref())[9..]);
    let line = PIPELINE.refuse(&["--init", &saved, "--d-ff", "32"]);
    assert!(line.contains("`layers.0.ffn.fc1.bias` is F32 [24], expected F32 [32]"), "{line}");
}

#[test]
fn a_launcher_may_start_the_ranks() {
    let folder = Folder::new();
    let lines = folder.argument("m.jsonl");
    let program = env!("CARGO_BIN_EXE_girandole");
    let launch = crate::common::Girandole("launch");
    let own = ["--epochs", "2", "--dropout", "0", "--metrics", &lines];
    let start = ["--nproc-per-node", "3", "--", program, "pipeline-transformer"];
    let output = launch.succeed(&[&start[..], &own].concat());
    let direct = PIPELINE.succeed(&[&own[..4], &["--world-size", "3"]].concat());
    assert_eq!(text(&output.stdout), text(&direct.stdout));
    assert_eq!(losses(lines.as_ref()).len(), 6);
}
