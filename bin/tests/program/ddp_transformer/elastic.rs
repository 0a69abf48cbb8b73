//! Elastic runs that lose ranks and admit new ones.

use std::process::Command;

use rustix::process::{Signal, kill_process};
use sampler::Generator;

use crate::common::{Folder, losses, metrics, refuse_with, text};
use crate::ddp_transformer::TRANSFORMER;
use crate::watched::{Job, Watched, places, replayed};

/// 40 rows, reshuffled in each epoch, with dropout: results depend on rank and step, so a mistake in either is visible.
const JOB: Job =
    Job { command: "ddp-transformer", options: &["--samples", "40", "--reshuffle", "--lr", "0.001"] };

#[test]
fn after_a_loss_the_numbers_are_those_of_a_run_that_goes_on_with_fewer_ranks() {
    for lost in 0..3 {
        let run = Watched::start(&JOB, "1:3", &["--epochs", "80"]);
        run.kill(lost);
        let (output, folder) = run.end();
        let remarks = text(&output.stderr);
        assert!(remarks.contains("was killed by signal SIGKILL; the others go on"), "{remarks}");
        let places = places(&output);
        assert_eq!(places.len(), 1, "{remarks}");
        let whole = replayed(&JOB, &[(3, places[0])], (2, 80), &folder);
        assert!(
            std::fs::read(folder.path("saved")).unwrap() == whole,
            "rank {lost}: other weights\n{remarks}"
        );
        let losses = losses(&folder.path("m.jsonl"));
        let (before, after) = losses.split_at(places[0].0);
        let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
        assert!(mean(after) < mean(before), "the loss does not go on falling");
    }
}

#[test]
fn one_that_joins_goes_on_from_the_state_of_the_others() {
    for lost in [0, 2] {
        let run = Watched::start(&JOB, "2:3", &["--epochs", "200", "--replace", "1"]);
        run.kill(lost);
        let (output, folder) = run.end();
        let remarks = text(&output.stderr);
        assert!(
            remarks.contains("rank 3 takes its place") && remarks.contains("rank 3 has come"),
            "{remarks}"
        );
        let places = places(&output);
        assert_eq!(places.len(), 2, "{remarks}");
        let whole = replayed(&JOB, &[(3, places[0]), (2, places[1])], (3, 200), &folder);
        assert!(
            std::fs::read(folder.path("saved")).unwrap() == whole,
            "rank {lost}: other weights\n{remarks}"
        );
        // The metrics have each step once.
        losses(&folder.path("m.jsonl"));
    }
}

#[test]
fn ranks_may_be_lost_one_after_the_other_and_at_once() {
    let mut generator = Generator::new(7);
    let mut random = |below: u32| generator.next_u32() % below;
    for round in 0..3 {
        let mut run = Watched::start(&JOB, "1:4", &["--epochs", "120"]);
        let mut left: Vec<usize> = (0..4).collect();
        for _ in 0..3 {
            let lost = left.remove(random(left.len() as u32) as usize);
            if random(2) == 0 {
                run.more(random(20) as usize);
            }
            run.kill(lost);
        }
        let (output, folder) = run.end();
        let remarks = text(&output.stderr);
        let losses = losses(&folder.path("m.jsonl"));
        let world_size = metrics(&folder.path("m.jsonl")).last().unwrap()["world_size"].clone();
        assert_eq!(world_size, 1, "round {round}: {remarks}");
        // 40 rows in batches of 2 on a single rank: 20 steps in the last epoch.
        assert!(losses.len() > 120 * 5 && losses.last() < losses.first(), "round {round}: {remarks}");
        assert!(folder.path("saved").exists());
    }
}

#[test]
fn ranks_may_be_lost_where_one_epoch_ends_and_the_next_begins() {
    // Each epoch is a single step.
    let mut run = Watched::start(&JOB, "1:6", &["--batch-size", "40", "--epochs", "600"]);
    for lost in [3, 0, 5, 1, 4] {
        run.kill(lost);
        run.more(25);
    }
    let (output, folder) = run.end();
    let losses = losses(&folder.path("m.jsonl"));
    assert!(losses.len() == 600 && losses.last() < losses.first(), "{}", text(&output.stderr));
}

#[test]
fn one_that_stands_still_is_ended_and_named_when_the_others_are_done() {
    let run = Watched::start(&JOB, "1:2", &["--epochs", "40", "--timeout", "5"]);
    kill_process(run.ranks[1], Signal::STOP).unwrap();
    let pid = run.ranks[1].as_raw_nonzero();
    let (output, folder) = run.end();
    let remarks = text(&output.stderr);
    let said = format!("rank 1 (pid {pid}) is ended: the others have left it behind, and are done");
    assert!(remarks.contains(&said), "{remarks}");
    assert_eq!(metrics(&folder.path("m.jsonl")).last().unwrap()["world_size"], 1, "{remarks}");
    assert!(folder.path("saved").exists());
}

#[test]
fn fewer_than_the_least_are_not_enough() {
    let run = Watched::start(&JOB, "2:2", &["--epochs", "1000000"]);
    run.kill(1);
    let output = run.session.end();
    let remarks = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{remarks}");
    let last = remarks.lines().rfind(|line| line.starts_with("error: ")).unwrap();
    assert!(last.starts_with("error: rank 1 (pid ") && last.contains("SIGKILL"), "{remarks}");
    assert!(remarks.contains("1 of at least 2 ranks are left: rank 1"), "{remarks}");
}

#[test]
fn checkpoints_go_on_when_the_first_rank_is_lost() {
    let folder = Folder::new();
    let dir = folder.argument("checkpoints");
    let mut run = Watched::start(
        &JOB,
        "1:3",
        &["--epochs", "150", "--checkpoint-dir", &dir, "--checkpoint-every", "50"],
    );
    run.kill(0);
    run.more(100);
    let (_, of_run) = run.end();
    let last = folder.argument("last");
    let resume =
        ["--checkpoint-dir", &dir, "--resume", "--epochs", "150", "--world-size", "2", "--save", &last];
    TRANSFORMER.succeed(&[JOB.options, &resume].concat());
    assert!(std::fs::read(last).unwrap() == std::fs::read(of_run.path("saved")).unwrap());
}

#[test]
fn what_cannot_be_is_refused() {
    for (options, begin) in [
        (
            vec!["--elastic", "2:4", "--world-size", "5"],
            "error: --elastic: got 2:4; the run begins with 5 ranks",
        ),
        (vec!["--elastic", "4:2"], "error: invalid value '4:2' for '--elastic <MIN:MAX>'"),
        (vec!["--replace", "1"], "error: the following required arguments were not provided"),
        (vec!["--elastic", "1:2", "--backend", "mpi"], "error: "),
    ] {
        let line = TRANSFORMER.refuse(&options);
        assert!(line.starts_with(begin), "{line}");
    }
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 64 && exec \"$0\" \"$@\""]).arg(TRANSFORMER.command().get_program());
    let replace = ["ddp-transformer", "--elastic", "1:2", "--replace", "7"];
    let (line, code) = refuse_with(&mut limited, &replace);
    let begin = "error: --replace: got 7; this process may have 64 files open, enough to replace 6 ranks ";
    assert!(line.starts_with(begin) && code == 2, "{line}");
}
