//! Runs that are killed and resumed.

use rustix::process::{Signal, kill_process};

use crate::cifar10::CIFAR10;
use crate::common::{Folder, Session, kill_and_resume, text};

#[test]
fn a_run_that_is_killed_ends_as_one_that_nobody_disturbs() {
    let short = ["--samples", "24", "--test-samples", "5", "--momentum", "0.9"];
    kill_and_resume(&CIFAR10, &short);
}

#[test]
fn the_printed_losses_of_a_run_that_goes_on_are_those_of_the_whole() {
    let folder = Folder::new();
    let short = ["--samples", "80", "--test-samples", "5", "--print-every", "4", "--epochs", "2"];
    let whole = text(&CIFAR10.succeed(&short).stdout);
    let dir = folder.argument("checkpoints");
    let keeping = [&short[..], &["--checkpoint-dir", &dir, "--checkpoint-every", "7"]].concat();
    CIFAR10.succeed(&keeping);
    // Step 14 is the fourth of the second epoch; the mean printed next includes steps before the checkpoint.
    let earlier = format!("--resume={dir}/checkpoint-00000002");
    let rest = text(&CIFAR10.succeed(&[&keeping[..], &[&earlier]].concat()).stdout);
    assert!(rest.lines().count() < whole.lines().count() && whole.ends_with(&rest), "{rest}\nof\n{whole}");
    let line = CIFAR10.refuse(&[&keeping[..], &["--resume", "--momentum", "0.5"]].concat());
    assert!(line.contains("--momentum: got 0.5; ") && line.contains("began with 0.1"), "{line}");
    let other = ["--samples", "81", "--checkpoint-dir", &dir, "--resume"];
    let line = CIFAR10.refuse(&other);
    assert!(line.contains("--samples: got 81; ") && line.contains("began with 80"), "{line}");
}

#[test]
fn a_rank_that_is_killed_is_the_first_cause() {
    let folder = Folder::new();
    let lines = folder.argument("m.jsonl");
    let long = ["--epochs", "1000000", "--samples", "24", "--world-size", "3", "--metrics", &lines];
    let mut session = Session::start(&CIFAR10, &long);
    session.until("a step", || std::fs::metadata(&lines).is_ok_and(|file| file.len() > 0));
    let ranks = session.ranks();
    assert_eq!(ranks.len(), 3);
    kill_process(ranks[1], Signal::KILL).unwrap();
    let output = session.end();
    assert_eq!(output.status.code(), Some(1));
    let remarks = text(&output.stderr);
    assert!(
        remarks.contains(&format!("(pid {}) was killed by signal SIGKILL", ranks[1].as_raw_pid())),
        "{remarks}"
    );
}
