//! This program's own commands as ranks.

use std::process::Command;

use crate::common::{clean, girandole, sorted, succeed, text, without_times};

const SHORT: [&str; 5] = ["ddp-linear", "--epochs", "2", "--samples", "6400"];

fn bare() -> Vec<String> {
    without_times(&succeed(girandole().args(SHORT)))
}

#[test]
fn it_prints_what_the_bare_command_prints() {
    let launched =
        succeed(girandole().args(["launch", "--nproc-per-node", "2", "--", "girandole"]).args(SHORT));
    assert_eq!(without_times(&launched), bare());
    let remarks = text(&launched.stderr);
    assert!(remarks.starts_with("note: ") && remarks.lines().count() == 1, "{remarks}");
}

#[test]
fn so_it_is_with_each_experiment() {
    for (command, what) in [
        ("ddp-trainer", &["--epochs", "3"][..]),
        ("ddp-transformer", &["--epochs", "2"]),
        ("pipeline-transformer", &["--epochs", "2"]),
        ("ddp-mlp", &["--validation-samples", "77"]),
        ("cifar10", &["--samples", "40", "--test-samples", "21", "--print-every", "2"]),
    ] {
        let bare = succeed(girandole().arg(command).args(what));
        let launched = succeed(
            girandole().args(["launch", "--nproc-per-node", "2", "--", "girandole", command]).args(what),
        );
        // All ranks of the trainer print, without waiting for each other.
        assert_eq!(sorted(&launched), sorted(&bare), "{command}");
        assert_eq!(text(&launched.stderr), text(&bare.stderr), "{command}");
    }
}

#[test]
fn a_program_that_opens_the_port_itself_can() {
    // A copy under another name, with which the launcher must not hold the port.
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other");
    std::fs::copy(env!("CARGO_BIN_EXE_girandole"), &other).unwrap();
    let launched = succeed(girandole().args(["launch", "--nproc-per-node", "2"]).arg(&other).args(SHORT));
    assert_eq!(without_times(&launched), bare());
}

#[test]
fn a_launcher_in_a_launcher_starts_a_job_of_its_own() {
    let nested = ["launch", "girandole", "launch", "--nproc-per-node", "2", "girandole"];
    assert_eq!(without_times(&succeed(girandole().args(nested).args(SHORT))), bare());
}

#[test]
fn a_wrong_option_of_a_rank_is_told_with_its_code() {
    let wrong = ["launch", "--nproc-per-node", "2", "girandole", "ddp-linear", "--world-size", "3"];
    let output = girandole().args(wrong).output().unwrap();
    let remarks = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    assert!(
        remarks.lines().last().is_some_and(|line| line.contains(" exited with code 2")
            && line
                .ends_with(": --world-size: got 3; the environment says WORLD_SIZE=2; leave the option out")),
        "{remarks}"
    );
}

#[test]
fn where_it_is_not_installed_its_name_means_itself() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_girandole"));
    let printed = succeed(clean(&mut command).env("PATH", "").args(["launch", "girandole", "--version"]));
    assert!(text(&printed.stdout).starts_with("girandole "));
}
