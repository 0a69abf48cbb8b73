//! Runs that are killed, or lose a rank.

use rustix::process::{Signal, kill_process};

use crate::common::{Folder, Session, kill_and_resume, text};
use crate::ddp_transformer::TRANSFORMER;

#[test]
fn a_run_with_dropout_that_is_killed_again_and_again_ends_as_one_that_nobody_disturbs() {
    kill_and_resume(&TRANSFORMER, &["--world-size", "2", "--samples", "20", "--reshuffle"]);
}

#[test]
fn epochs_of_the_same_order_go_on_as_well() {
    kill_and_resume(&TRANSFORMER, &["--world-size", "3", "--samples", "40"]);
}

#[test]
fn a_rank_that_is_killed_is_the_first_cause() {
    let folder = Folder::new();
    let lines = folder.argument("m.jsonl");
    let mut session = Session::start(&TRANSFORMER, &["--epochs", "1000000", "--metrics", &lines]);
    session.until("steps", || std::fs::metadata(folder.path("m.jsonl")).is_ok_and(|file| file.len() > 0));
    let rank = session.ranks()[1];
    kill_process(rank, Signal::KILL).unwrap();
    let output = session.end();
    let remarks = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{remarks}");
    assert!(remarks.contains("was killed by signal SIGKILL"), "{remarks}");
}

#[test]
fn another_model_does_not_go_on_from_it() {
    let folder = Folder::new();
    let dir = folder.argument("checkpoints");
    TRANSFORMER.succeed(&["--epochs", "1", "--checkpoint-dir", &dir]);
    for (option, value, then) in [
        ("--d-ff", "32", "24"),
        ("--mask", "causal", "document"),
        ("--dropout", "0", "0.1"),
        ("--num-heads", "2", "4"),
    ] {
        let line =
            TRANSFORMER.refuse(&["--epochs", "2", "--checkpoint-dir", &dir, "--resume", option, value]);
        assert!(
            line.starts_with(&format!("error: {option}: got {value}; the run in {dir} began with {then}")),
            "{line}"
        );
    }
}
