//! Tests of the command `sampler`, compared with PyTorch.

use std::process::Stdio;

use crate::common::{Girandole, text};

const SAMPLER: Girandole = Girandole("sampler");

fn succeed(arguments: &[&str]) -> String {
    let output = SAMPLER.succeed(arguments);
    let remarks = text(&output.stderr);
    assert!(remarks.starts_with("note: ") && remarks.lines().count() == 1, "{remarks}");
    text(&output.stdout)
}

#[test]
fn everything_printed_is_what_pytorchs_samplers_give() {
    for fixture in [
        include_str!("../fixtures/sampler_1.txt"),
        include_str!("../fixtures/sampler_2.txt"),
        include_str!("../fixtures/sampler_3.txt"),
        include_str!("../fixtures/sampler_4.txt"),
        include_str!("../fixtures/sampler_5.txt"),
    ] {
        let (options, expected) = fixture.split_once('\n').unwrap();
        let options: Vec<&str> = options.split_whitespace().collect();
        assert_eq!(succeed(&options), expected, "{options:?}");
    }
}

#[test]
fn workers_change_nothing() {
    let options = ["--samples", "1003", "--keep-last"];
    let with = |workers: &str| succeed(&[&options[..], &["--num-workers", workers]].concat());
    let alone = with("0");
    for workers in ["1", "2", "7"] {
        assert_eq!(with(workers), alone, "{workers}");
    }
    assert_eq!(succeed(&options), alone);
}

#[test]
fn what_overlaps_is_found() {
    let epochs = |tail: &str| {
        let options = ["--samples", "10", "--epochs", "2", "--batch-size", "1", "--tail", tail];
        let printed = succeed(&options);
        printed.lines().filter(|line| line.starts_with("Epoch ")).map(str::to_string).collect::<Vec<_>>()
    };
    let both = |what: &str| [format!("Epoch 0: {what}"), format!("Epoch 1: {what}")];
    assert_eq!(epochs("pad"), both("12 indices, 10 of 10 samples, 2 on more than one rank"));
    assert_eq!(epochs("drop"), both("8 indices, 8 of 10 samples, none on more than one rank"));
    assert_eq!(epochs("uneven"), both("10 indices, 10 of 10 samples, none on more than one rank"));
}

#[test]
fn without_shuffling_all_epochs_are_alike() {
    let options = ["--samples", "16", "--batch-size", "2"];
    assert!(succeed(&options).contains("\n3 epochs, 3 different orders\n"));
    assert!(succeed(&[&options[..], &["--no-shuffle"]].concat()).contains("\n3 epochs, 1 order\n"));
}

#[test]
fn options_that_cannot_be_used() {
    for (arguments, part) in [
        (&["--samples", "0"][..], "1 or more"),
        (&["--epochs", "-1"], "1 or more"),
        (&["--world-size", "x"], "1 or more"),
        (&["--world-size", "5000"], "error: --world-size: got 5000; give 1 to 4096 ranks"),
        (&["--samples", "99999999999999999"], "got 99999999999999999; "),
        (&["--samples", "99999999999999999", "--no-shuffle"], "got 99999999999999999; "),
        (&["--compared", "99999999999999999"], "got 99999999999999999; "),
        (&["--tail", "cut"], "[possible values: pad, drop, uneven]"),
        (&["--seed", "-1"], "--seed"),
        (&["--lr", "1"], "--lr"),
    ] {
        let line = SAMPLER.refuse(arguments);
        assert!(line.contains(part), "{arguments:?}: {line}");
    }
}

#[test]
fn a_reader_that_has_read_enough_ends_it_quietly() {
    let mut command = SAMPLER.command();
    command.args(["--epochs", "100000"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(141));
    assert_eq!(text(&output.stderr).lines().count(), 1);
}
