//! Errors of `--elastic`: what a launcher and a rank refuse, each in one line.

use std::process::Command;

use crate::common::{girandole, refuse_with, text};
use crate::launch::nodes::{Nodes, last_line};

#[test]
fn what_cannot_be_is_one_line() {
    let refuse = |arguments: &[&str], part: &str| {
        let (line, code) = refuse_with(girandole().arg("launch"), arguments);
        assert!(line.contains(part) && code == 2, "{line}");
    };
    refuse(
        &["--elastic", "5:2", "true"],
        "error: invalid value '5:2' for '--elastic <MIN:MAX>': give the fewest",
    );
    refuse(&["--elastic", "2", "true"], "error: invalid value '2' for '--elastic <MIN:MAX>'");
    let few = "error: --elastic: got 3:4; the run begins with 2 ranks; give a range that includes it";
    refuse(&["--nproc-per-node", "2", "--elastic", "3:4", "true"], few);
    let many = "error: --elastic: got 1:3; the run begins with 4 ranks";
    let two = ["--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "2"];
    refuse(&[&two[..], &["--elastic", "1:3", "true"]].concat(), many);
    refuse(&["--nnodes", "1:2", "true"], "--elastic lets a job go on");
}

#[test]
fn a_rank_says_who_would_end_it() {
    let rank = |variables: &[(&str, &str)], options: &[&str]| -> String {
        let mut command: Command = girandole();
        command.envs([
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "1"),
        ]);
        let (line, code) = refuse_with(
            command.envs(variables.iter().copied()).args(["ddp-transformer", "--elastic", "1:2"]),
            options,
        );
        assert_eq!(code, 2, "{line}");
        line
    };
    let line = rank(&[("TORCHELASTIC_RUN_ID", "x")], &[]);
    assert_eq!(
        line.trim_end(),
        "error: --elastic: got 1:2; torchrun ends all ranks when one fails; start the ranks with girandole launch --elastic"
    );
    assert!(rank(&[], &["--replace", "1"]).starts_with("error: --replace: got 1; the launcher of this rank"));
    assert!(
        rank(&[("WORLD_SIZE", "3")], &[]).starts_with("error: --elastic: got 1:2; the run begins with 3")
    );
    let output = girandole()
        .args(["launch", "--nproc-per-node", "2", "girandole", "ddp-transformer", "--elastic", "1:2"])
        .output()
        .unwrap();
    let remarks = text(&output.stderr);
    assert!(
        output.status.code() == Some(2) && remarks.contains("the launcher was not given --elastic"),
        "{remarks}"
    );
}

#[test]
fn launchers_with_another_elastic_say_so() {
    let give = |node: usize, command: &mut Command| {
        if node == 0 {
            command.args(["--elastic", "2:4"]);
        }
    };
    for output in Nodes::start_with(&[], &["true"], give).end() {
        let line = last_line(&output);
        let part = "--elastic: got nothing, node 0 (host ";
        assert!(
            line.contains(part) && line.contains(") has at least 2 ranks; give the same on every node"),
            "{line}"
        );
    }
}
