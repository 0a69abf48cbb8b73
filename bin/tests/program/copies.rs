//! Elastic runs of data-parallel experiments when ranks are lost.

use std::fs;

use crate::common::{Folder, losses, text};
use crate::watched::{Job, Watched, places, replayed};

/// With steps long enough to be interrupted.
const TRAINER: Job =
    Job { command: "ddp-trainer", options: &["--samples", "100000", "--batch-size", "2000"] };
const PICTURES: Job = Job { command: "cifar10", options: &["--samples", "300", "--test-samples", "20"] };
const CLASSIFIER: Job = Job { command: "ddp-mlp", options: &["--batch-size", "20000"] };

/// Runs a job that loses one of three ranks; returns where the others continued, and the folder.
fn lose(job: &Job, lost: usize, epochs: &str) -> ((usize, usize), Folder) {
    let run = Watched::start(job, "2:3", &["--epochs", epochs]);
    run.kill(lost);
    let (output, folder) = run.end();
    let remarks = text(&output.stderr);
    assert!(remarks.contains("2 ranks of 3 go on at epoch"), "{}: {remarks}", job.command);
    let places = places(&output);
    assert_eq!(places.len(), 1, "{}: {remarks}", job.command);
    // The metrics have each step once.
    losses(&folder.path("m.jsonl"));
    (places[0], folder)
}

#[test]
fn the_numbers_are_those_of_a_run_that_goes_on_with_fewer_ranks() {
    for (job, epochs) in [(TRAINER, 24), (PICTURES, 7)] {
        for lost in [0, 1] {
            let (place, folder) = lose(&job, lost, &epochs.to_string());
            let whole = replayed(&job, &[(3, place)], (2, epochs), &folder);
            assert!(fs::read(folder.path("saved")).unwrap() == whole, "{} without rank {lost}", job.command);
        }
    }
}

/// Each rank has its own batch, which is lost with it.
#[test]
fn the_others_go_on_with_batches_of_their_own() {
    for lost in [0, 2] {
        let (_, folder) = lose(&CLASSIFIER, lost, "160");
        let losses = losses(&folder.path("m.jsonl"));
        assert!(losses.last() < losses.first(), "the loss has not fallen");
        assert!(folder.path("saved").exists());
    }
}
