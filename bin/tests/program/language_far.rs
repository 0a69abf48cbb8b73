//! `pretrain` of groups that train on their own: the same in every layout of a group, and what is wrong with their options.

use std::fs;
use std::path::Path;

use crate::common::{Folder, Girandole, metrics};

const PRETRAIN: Girandole = Girandole("pretrain");

/// Losses of the steps, and of the evaluations.
fn losses(path: &Path) -> Vec<f64> {
    let of = |event: &str| {
        let lines = metrics(path).into_iter().filter(|line| line["event"] == event).collect::<Vec<_>>();
        lines.into_iter().filter_map(|line| line["loss"].as_f64()).collect::<Vec<_>>()
    };
    let (steps, evaluations) = (of("step"), of("evaluation"));
    assert!(steps.len() == 7 && evaluations.len() == 2, "{steps:?}, {evaluations:?}");
    [steps, evaluations].concat()
}

#[test]
fn groups_learn_the_same_in_every_layout_of_a_group() {
    let folder = Folder::new();
    let words: String = (0..400).map(|i| ["ash ", "birch ", "elm ", "fir\n"][i * i * i % 13 % 4]).collect();
    fs::write(folder.path("text.txt"), words).unwrap();
    let [data, out, lines] = ["text.txt", "out", "m.jsonl"].map(|name| folder.argument(name));
    let run = |lr: &str, options: &[&str]| {
        let common = [
            "--data", &data, "--out", &out, "--metrics", &lines, "--overwrite", "--evaluate", &data,
            "--evaluate-every", "4", "--layers", "2", "--hidden", "32", "--heads", "4", "--length", "16",
            "--steps", "7", "--lr", lr,
        ];
        PRETRAIN.succeed(&[&common[..], options].concat());
        losses(&folder.path("m.jsonl"))
    };
    let every = ["--far-every", "3"];
    let expected = run("0.01", &[&every[..], &["--mesh", "far=2"]].concat());
    assert!(expected[6] < expected[0] - 0.3, "{expected:?}");
    for mesh in ["far=2,dp=2", "far=2,shard=2", "far=2,tp=2", "far=2,pp=2", "far=2,cp=2"] {
        let got = run("0.01", &[&every[..], &["--mesh", mesh]].concat());
        let apart = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(apart < 1e-5, "{mesh}: {apart}: {got:?}, expected {expected:?}");
    }
    // While what is sent is on its way, too.
    let late = ["--far-every", "3", "--far-delay", "2"];
    let expected_late = run("0.01", &[&late[..], &["--mesh", "far=2"]].concat());
    let got = run("0.01", &[&late[..], &["--mesh", "far=2,pp=2"]].concat());
    let apart = got.iter().zip(&expected_late).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(apart < 1e-5 && expected_late[4] != expected[4], "{got:?}, expected {expected_late:?}");
    // In few bits nearly the same, and plain data parallelism where groups average after each step of SGD.
    let few = run("0.01", &[&every[..], &["--mesh", "far=2", "--far-bits", "8"]].concat());
    assert!((few[8] - expected[8]).abs() < 1e-2 && few != expected, "{few:?}, expected {expected:?}");
    let sgd = ["--optimizer", "sgd", "--clip", "0", "--schedule", "constant"];
    let as_copies = ["--far-every", "1", "--far-lr", "1", "--far-momentum", "0", "--mesh", "far=2"];
    let (copies, far) =
        (run("0.5", &[&sgd[..], &["--mesh", "dp=2"]].concat()), run("0.5", &[&sgd[..], &as_copies].concat()));
    assert!((copies[8] - far[8]).abs() < 1e-5, "{copies:?}, {far:?}");
}

#[test]
fn options_of_groups_are_checked() {
    let folder = Folder::new();
    fs::write(folder.path("text.txt"), "some words, again and again ".repeat(20)).unwrap();
    let [data, out] = ["text.txt", "out"].map(|name| folder.argument(name));
    for (options, said) in [
        (
            &["--far-every", "5"][..],
            "--far-every: got 5; no groups train on their own: give a --mesh with far",
        ),
        (&["--mesh", "far=2", "--far-lr", "0"], "--far-lr: got 0; nothing would be learned"),
        (&["--mesh", "far=2", "--far-momentum", "1"], "from 0 to below 1"),
        (&["--mesh", "far=2", "--far-every", "4", "--far-fragments", "5"], "give at most --far-every, 4"),
        (
            &["--mesh", "far=2", "--far-every", "6", "--far-fragments", "2", "--far-delay", "3"],
            "--far-delay: got 3; give at most 2: less than --far-every divided by --far-fragments",
        ),
        (&["--far-delay", "0"], "--far-delay: got 0; no groups train on their own"),
        (&["--mesh", "far=3"], "--batch-size: got 8; give a multiple of 3"),
    ] {
        let got = PRETRAIN.refuse(&[&["--data", &data, "--out", &out], options].concat());
        assert!(got.contains(said), "{got}");
    }
    PRETRAIN.succeed(&[
        "--data", &data, "--out", &out, "--steps", "1", "--length", "8", "--hidden", "32", "--heads", "4",
    ]);
    let got = Girandole("evaluate").refuse(&["--model", &out, "--data", &data, "--mesh", "far=2"]);
    assert!(got.contains("--mesh: got far=2; far is for training"), "{got}");
}
