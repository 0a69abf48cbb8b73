//! `pretrain --mesh far=N --elastic`: groups go on without those that are lost, and with new ones in their places.

use std::fs;
use std::path::Path;
use std::process::Output;

use rustix::process::{Signal, kill_process};
use sampler::Generator;

use crate::common::{Folder, Girandole, Session, free_port, metrics, text};

const PRETRAIN: Girandole = Girandole("pretrain");
const STEPS: usize = 120;

/// A folder with a text.
fn folder() -> Folder {
    let (folder, words) = (Folder::new(), ["one ", "two ", "three ", "four\n"]);
    let written: String = (0..240).map(|i| words[i * i % 7 % 4]).collect();
    fs::write(folder.path("text.txt"), written).unwrap();
    folder
}

/// The arguments for a small model in a layout, the options of which are given.
fn arguments(folder: &Folder, name: &str, options: &[&str]) -> Vec<String> {
    let argument = |what: &str| folder.argument(&format!("{name}.{what}"));
    let (data, out, lines, checkpoints) =
        (folder.argument("text.txt"), argument("out"), argument("jsonl"), argument("checkpoints"));
    let own = ["--data", &data, "--evaluate", &data, "--out", &out, "--metrics", &lines];
    let kept = ["--checkpoint-dir", &checkpoints, "--checkpoint-every", "10", "--far-every", "4"];
    let small = "--layers 2 --hidden 32 --heads 4 --length 16 --batch-size 12 --steps 120 --evaluate-every 7 --lr 0.01";
    let small: Vec<&str> = small.split(' ').collect();
    [&own, &kept[..], &small, options].concat().into_iter().map(String::from).collect()
}

/// Starts it.
fn start(folder: &Folder, name: &str, options: &[&str]) -> Session {
    let arguments = arguments(folder, name, options);
    Session::start(&PRETRAIN, &arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Returns the number of lines of a file, which may not be there yet.
fn lines_of(path: &Path) -> usize {
    fs::read(path).map_or(0, |text| text.iter().filter(|byte| **byte == b'\n').count())
}

/// Asserts that a run has ended well after losses, with a model that has learned.
fn assert_went_on(output: &Output, folder: &Folder, name: &str, losses: usize) {
    let said = text(&output.stderr);
    assert!(output.status.success(), "{name}: {said}");
    let named = said.matches(" of far is left out after step ").count();
    assert!(named >= losses, "{name}: {said}");
    assert!(folder.path(&format!("{name}.out")).join("model.safetensors").exists(), "{said}");
    let lines = metrics(&folder.path(&format!("{name}.jsonl")));
    let steps: Vec<&serde_json::Value> = lines.iter().filter(|line| line["event"] == "step").collect();
    assert_eq!(steps.last().unwrap()["batch"], STEPS as u64 - 1, "{name}: {said}");
    let loss = |line: &serde_json::Value| line["loss"].as_f64().unwrap();
    assert!(loss(steps.last().unwrap()) < loss(steps[0]) - 0.5, "{name}: {said}");
    assert_eq!(lines.iter().filter(|line| line["event"] == "summary").count(), 1, "{name}: {said}");
}

#[test]
fn the_others_go_on_whichever_group_is_lost() {
    let folder = folder();
    let rounds = std::env::var("GIRANDOLE_FAULT_ROUNDS").map_or(3, |rounds| rounds.parse().unwrap());
    let mut random = Generator::new(17);
    for round in 0..rounds {
        let (mesh, elastic, group, losses) = [
            ("far=3", "1:3", 1, 2),
            ("far=2,tp=2", "2:4", 2, 1),
            ("far=2,dp=2", "2:4", 2, 1),
            ("far=2", "1:2", 1, 1),
        ][round % 4];
        let name = round.to_string();
        let mut session = start(&folder, &name, &["--mesh", mesh, "--elastic", elastic]);
        let path = folder.path(&format!("{name}.jsonl"));
        let steps = || lines_of(&path);
        let mut ranks = Vec::new();
        for _ in 0..losses {
            let next = steps() + 1 + random.next_u32() as usize % 20;
            session.until("more steps", || steps() >= next.min(STEPS / 2));
            if ranks.is_empty() {
                ranks = session.ranks();
            }
            // Any rank, including the first; those of its group are not needed any more.
            let at = random.next_u32() as usize % ranks.len();
            kill_process(ranks[at], Signal::KILL).unwrap();
            ranks.drain(at / group * group..(at / group + 1) * group);
        }
        assert_went_on(&session.end(), &folder, &name, losses);
    }
}

#[test]
fn a_new_group_takes_the_place_of_a_lost_one() {
    let folder = folder();
    let rounds = std::env::var("GIRANDOLE_FAULT_ROUNDS").map_or(2, |rounds| rounds.parse().unwrap());
    let mut random = Generator::new(19);
    for round in 0..rounds {
        let name = round.to_string();
        // The others wait for the new group.
        let mut session = start(&folder, &name, &["--mesh", "far=2", "--elastic", "2:2", "--replace", "2"]);
        let path = folder.path(&format!("{name}.jsonl"));
        let steps = || lines_of(&path);
        let mut killed = Vec::new();
        for loss in 0..1 + round % 2 {
            let wanted = steps() + 5 + random.next_u32() as usize % 25;
            session.until("more steps", || steps() >= wanted.min((loss + 1) * STEPS / 3));
            session.kill_another(&mut killed, &mut random);
        }
        let output = session.end();
        let said = text(&output.stderr);
        let come = said.matches("has come; 2 ranks go on after step ").count();
        assert_eq!(come, 1 + round % 2, "{round}: {said}");
        assert_went_on(&output, &folder, &name, 1 + round % 2);
    }
}

/// Ranks that are started one by one, on whatever hosts, find the group through a file.
#[test]
fn ranks_that_are_started_by_hand_make_a_new_group() {
    let folder = folder();
    let port = free_port().to_string();
    let start = |rank: usize, is_new: bool| {
        let (name, options) = ("run", ["--mesh", "far=2,tp=2", "--far-delay", "1", "--elastic", "4:4"]);
        let mut command = PRETRAIN.command();
        command.args(arguments(&folder, name, &options)).env("RANK", rank.to_string());
        command.envs([("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port.as_str())]);
        command.env("GIRANDOLE_ELASTIC_FILE", folder.path("group"));
        if is_new {
            command.env("GIRANDOLE_NEWCOMER", "1");
        }
        Session::of(command)
    };
    let mut ranks: Vec<Session> = (0..4).map(|rank| start(rank, false)).collect();
    let path = folder.path("run.jsonl");
    ranks[0].until("some steps", || lines_of(&path) >= 10);
    // It is killed.
    drop(ranks.pop());
    ranks.extend((4..6).map(|rank| start(rank, true)));
    let ended: Vec<Output> = ranks.into_iter().map(Session::end).collect();
    let said: Vec<String> = ended.iter().map(|rank| text(&rank.stderr)).collect();
    assert!(ended.iter().all(|rank| rank.status.success()), "{said:?}");
    assert!(said[0].contains("rank 4 and rank 5 have come; 4 ranks go on after step "), "{said:?}");
    assert!(said[2].contains("this rank is not needed any more"), "{said:?}");
    assert_went_on(&ended[0], &folder, "run", 1);
}

#[test]
fn all_groups_stop_when_one_is_asked_to() {
    let folder = folder();
    let mut session = start(&folder, "run", &["--mesh", "far=2", "--elastic", "1:2"]);
    let path = folder.path("run.jsonl");
    session.until("some steps", || lines_of(&path) >= 20);
    let ended = session.stop(Signal::TERM);
    assert!(!ended.success());
    let session = start(&folder, "run", &["--mesh", "far=2", "--elastic", "1:2", "--resume", "--overwrite"]);
    let output = session.end();
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("going on after step "), "{said}");
}

#[test]
fn what_cannot_go_on_without_a_group_is_said_before_ranks_start() {
    let folder = folder();
    let (data, out) = (folder.argument("text.txt"), folder.argument("out"));
    let refuse = |options: &[&str], expected: &str| {
        let own = ["--data", &data, "--out", &out, "--length", "16", "--batch-size", "12"];
        let said = PRETRAIN.refuse(&[&own, options].concat());
        assert!(said.contains(expected), "{said}");
    };
    refuse(
        &["--mesh", "far=2,tp=2", "--elastic", "1:4"],
        "a group of far is lost with any of its ranks, so give at least 2:4",
    );
    refuse(
        &["--mesh", "far=2,dp=2", "--elastic", "2:4", "--replace", "1"],
        "with groups of several ranks, 2 ranks at once would have to be replaced",
    );
}
