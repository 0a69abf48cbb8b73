//! `pretrain --elastic`: data-parallel ranks continue when others are lost, with unchanged losses.

use std::fs;
use std::path::Path;
use std::process::Output;

use rustix::process::{Signal, kill_process};
use sampler::Generator;

use crate::common::{Folder, Girandole, Session, metrics, text};
use crate::tensorboard::{files, read};

const PRETRAIN: Girandole = Girandole("pretrain");

const STEPS: usize = 120;

/// A small model and 12 rows per step, which 4, 3, 2 and 1 ranks divide.
const SMALL: [&str; 14] = [
    "--layers", "2", "--hidden", "32", "--heads", "4", "--length", "16", "--batch-size", "12", "--steps",
    "120", "--evaluate-every", "7",
];

/// Returns the number of lines of a file, which may not be there yet.
fn lines_of(path: &Path) -> usize {
    fs::read(path).map_or(0, |text| text.iter().filter(|byte| **byte == b'\n').count())
}

/// Returns the losses of a metrics file, whose batches count up over all epochs.
fn losses(path: &Path) -> Vec<f32> {
    let steps = metrics(path).into_iter().filter(|line| line["event"] == "step");
    steps.map(|step| step["loss"].as_f64().unwrap() as f32).collect()
}

/// Returns a folder with a text, and the losses of one process that trains on it.
fn expected() -> (Folder, String, Vec<f32>) {
    let (folder, words) = (Folder::new(), ["one ", "two ", "three ", "four\n"]);
    // Epochs of a few steps, so that ranks go back over their ends.
    let written: String = (0..240).map(|i| words[i * i % 7 % 4]).collect();
    fs::write(folder.path("text.txt"), written).unwrap();
    let data = folder.argument("text.txt");
    let (out, lines) = (folder.argument("one"), folder.argument("one.jsonl"));
    let own = ["--data", &data, "--evaluate", &data, "--out", &out, "--metrics", &lines];
    PRETRAIN.succeed(&[&own, &SMALL[..]].concat());
    let losses = losses(&folder.path("one.jsonl"));
    assert_eq!(losses.len(), STEPS);
    (folder, data, losses)
}

#[test]
fn whoever_is_lost_the_losses_are_those_of_a_run_that_lost_none() {
    let (folder, data, expected) = expected();
    let rounds = std::env::var("GIRANDOLE_FAULT_ROUNDS").map_or(3, |rounds| rounds.parse().unwrap());
    let mut random = Generator::new(7);
    for round in 0..rounds {
        let name = |what: &str| folder.argument(&format!("{round}.{what}"));
        let (out, file, checkpoints) = (name("out"), name("jsonl"), name("checkpoints"));
        let own = ["--data", &data, "--evaluate", &data, "--out", &out, "--metrics", &file];
        let more = ["--elastic", "1:4", "--checkpoint-dir", &checkpoints, "--checkpoint-every", "5"];
        let mut session = Session::start(&PRETRAIN, &[&own, &SMALL[..], &more].concat());
        let path = folder.path(&format!("{round}.jsonl"));
        let steps = || lines_of(&path);
        let mut ranks = Vec::new();
        for _ in 0..1 + round % 3 {
            let next = steps() + 1 + random.next_u32() as usize % 20;
            session.until("more steps", || steps() >= next.min(STEPS / 2));
            if ranks.is_empty() {
                ranks = session.ranks();
            }
            // Any rank, including the first.
            let lost = ranks.swap_remove(random.next_u32() as usize % ranks.len());
            kill_process(lost, Signal::KILL).unwrap();
        }
        assert_undisturbed(&session.end(), Path::new(&out), &path, &expected);
    }
}

/// Asserts that a run lost ranks and wrote all it should, each step once, with the expected losses.
fn assert_undisturbed(output: &Output, out: &Path, path: &Path, expected: &[f32]) {
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("on after step "), "{said}");
    assert!(out.join("model.safetensors").exists(), "{said}");
    let lines = metrics(path);
    let batches: Vec<u64> = lines.iter().filter_map(|line| line["batch"].as_u64()).collect();
    assert_eq!(batches, (0..STEPS as u64).collect::<Vec<_>>(), "{said}");
    let gap = losses(path).iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(gap < 1e-4, "{gap}: {said}");
    assert_eq!(lines.iter().filter(|line| line["event"] == "summary").count(), 1);
}

/// Returns the steps whose losses TensorBoard shows: the beginning of a file invalidates later steps of earlier ones.
fn shown_steps(dir: &Path) -> Vec<u64> {
    let mut shown = Vec::new();
    for events in files(dir).iter().map(|file| read(file)) {
        shown.retain(|step| *step < events.begin);
        shown.extend(events.values.get("train/loss").into_iter().flatten().map(|(step, _)| *step));
    }
    shown
}

#[test]
fn parts_of_the_model_go_on_in_another_layout_or_from_a_checkpoint() {
    let (folder, data, expected) = expected();
    let mut random = Generator::new(11);
    for (mesh, elastic, layout) in [
        ("dp=2,shard=2", "1:4", "shard=3"),
        ("dp=2,tp=2", "2:4", "tp=2"),
        ("pp=2,dp=2", "2:4", "pp=2"),
        // The part of the lost rank is in the last checkpoint only.
        ("shard=4", "1:4", "shard=3"),
        ("shard=2,tp=2", "2:4", "tp=2"),
    ] {
        let name = |what: &str| folder.argument(&format!("{mesh}.{what}"));
        let (out, file, checkpoints) = (name("out"), name("jsonl"), name("checkpoints"));
        let events = name("events");
        let own = ["--data", &data, "--evaluate", &data, "--out", &out, "--metrics", &file, "--mesh", mesh];
        let kept = ["--checkpoint-dir", &checkpoints, "--checkpoint-every", "5", "--tensorboard", &events];
        let more = [&["--elastic", elastic], &kept[..]].concat();
        let mut session = Session::start(&PRETRAIN, &[&own, &SMALL[..], &more].concat());
        let path = folder.path(&format!("{mesh}.jsonl"));
        let steps = || lines_of(&path);
        let wanted = 12 + random.next_u32() as usize % 30;
        session.until("some steps", || steps() >= wanted);
        let ranks = session.ranks();
        kill_process(ranks[random.next_u32() as usize % ranks.len()], Signal::KILL).unwrap();
        let output = session.end();
        let said = text(&output.stderr);
        assert!(said.contains(&format!("in the layout {layout}")), "{mesh}: {said}");
        assert_undisturbed(&output, Path::new(&out), &path, &expected);
        let shown = shown_steps(Path::new(&events));
        assert_eq!(shown, (1..=STEPS as u64).collect::<Vec<_>>(), "{mesh}: {said}");
    }
}

#[test]
fn new_ranks_take_the_place_of_lost_ones() {
    let (folder, data, expected) = expected();
    let mut random = Generator::new(13);
    // Five of six ranks have copies only if one of them leaves, which then is missing when the new one has come.
    for (mesh, lost) in [("dp=3", 2), ("dp=2,shard=2", 1), ("shard=2", 1), ("dp=3,shard=2", 1)] {
        let name = |what: &str| folder.argument(&format!("{mesh}.{what}"));
        let (out, file, checkpoints) = (name("out"), name("jsonl"), name("checkpoints"));
        let own = ["--data", &data, "--evaluate", &data, "--out", &out, "--metrics", &file, "--mesh", mesh];
        let ranks: usize = mesh.split(['=', ',']).filter_map(|size| size.parse::<usize>().ok()).product();
        // The others wait for the new rank.
        let (elastic, replace) = (format!("{ranks}:{ranks}"), lost.to_string());
        let more = ["--elastic", &elastic, "--replace", &replace, "--checkpoint-dir", &checkpoints];
        let mut session =
            Session::start(&PRETRAIN, &[&own, &SMALL[..], &more, &["--checkpoint-every", "5"]].concat());
        let path = folder.path(&format!("{mesh}.jsonl"));
        let steps = || lines_of(&path);
        let mut killed = Vec::new();
        for _ in 0..lost {
            let wanted = steps() + 12 + random.next_u32() as usize % 15;
            session.until("more steps", || steps() >= wanted);
            session.kill_another(&mut killed, &mut random);
        }
        let output = session.end();
        let said = text(&output.stderr);
        let come = said.matches(&format!("has come; {ranks} ranks go on after step ")).count();
        assert_eq!(come, lost, "{mesh}: {said}");
        assert_undisturbed(&output, Path::new(&out), &path, &expected);
    }
}

#[test]
fn before_the_first_checkpoint_those_that_are_left_begin_anew_until_a_new_rank_comes() {
    let (folder, data, expected) = expected();
    let name = |what: &str| folder.argument(what);
    let (out, file, checkpoints) = (name("out"), name("jsonl"), name("checkpoints"));
    let own = ["--data", &data, "--evaluate", &data, "--out", &out, "--metrics", &file, "--mesh", "shard=2"];
    let more = ["--elastic", "1:2", "--replace", "1", "--checkpoint-dir", &checkpoints];
    let rare = ["--checkpoint-every", "100"];
    let mut session = Session::start(&PRETRAIN, &[&own, &SMALL[..], &more, &rare].concat());
    let path = folder.path("jsonl");
    let steps = || lines_of(&path);
    session.until("some steps", || steps() >= 20);
    kill_process(session.ranks()[1], Signal::KILL).unwrap();
    let output = session.end();
    let said = text(&output.stderr);
    assert!(said.contains("the others start again, as there is no checkpoint yet"), "{said}");
    assert!(said.contains("rank 2 has come; 2 ranks go on after step "), "{said}");
    assert_undisturbed(&output, Path::new(&out), &path, &expected);
}

#[test]
fn what_cannot_go_on_is_said_before_ranks_start() {
    let (folder, text_file) = (Folder::new(), "text.txt");
    fs::write(folder.path(text_file), "one two three ".repeat(200)).unwrap();
    let (data, out) = (folder.argument(text_file), folder.argument("out"));
    let refuse = |options: &[&str], expected: &str| {
        let own = ["--data", &data, "--out", &out, "--length", "16"];
        let said = PRETRAIN.refuse(&[&own, options].concat());
        assert!(said.contains(expected), "{said}");
    };
    let parts = "--elastic: got 1:2 with --mesh shard=2; a lost rank's part";
    refuse(&["--mesh", "shard=2", "--elastic", "1:2"], parts);
    let stages = "--elastic: got 1:2 with --mesh pp=2; pp, cp, ep and tp keep their sizes";
    refuse(&["--mesh", "pp=2", "--elastic", "1:2"], stages);
    let few =
        "--elastic: got 1:4 with --mesh dp=2,tp=2; pp, cp, ep and tp keep their sizes, so give at least 2:4";
    refuse(&["--mesh", "dp=2,tp=2", "--elastic", "1:4"], few);
    refuse(
        &["--mesh", "dp=2,tp=2", "--elastic", "2:4", "--replace", "1"],
        "--replace: got 1; with pp, cp, ep or tp, 2 ranks at once would have to be replaced",
    );
    for (mesh, elastic, give) in
        [("dp=2", "1:3", "1:2"), ("dp=4", "2:6", "2:4"), ("shard=2,dp=2", "2:5", "2:4")]
    {
        let help = format!("the mesh is that of all ranks, so give {give}, or another --mesh");
        refuse(&["--mesh", mesh, "--elastic", elastic], &help);
    }
    refuse(&["--mesh", "dp=2", "--elastic", "3:4"], "--elastic: got 3:4; the run begins with 2 ranks");
}
