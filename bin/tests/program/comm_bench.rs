//! Tests of the command `comm-bench`.

use std::process::Stdio;

use crate::common::{Folder, Girandole, free_port, girandole, metrics, refuse_with, succeed, text};

const BENCH: Girandole = Girandole("comm-bench");

#[test]
fn the_table_and_the_file_have_a_line_for_each_operation_and_size() {
    let folder = Folder::new();
    let file = folder.argument("bench.jsonl");
    let all =
        "all_reduce,all_gather,reduce_scatter,broadcast,reduce,gather,scatter,all_to_all,send_recv,barrier";
    for transport in ["tcp", "shm"] {
        let arguments = ["--world-size", "3", "--ops", all, "--sizes", "0,400,64K", "--calls", "2"];
        let output = BENCH.succeed(&[&arguments[..], &["--transport", transport, "--json", &file]].concat());
        let table = text(&output.stdout);
        let printed: Vec<&str> =
            table.lines().skip(2).filter_map(|line| line.split_whitespace().next()).collect();
        let rows = metrics(file.as_ref());
        // A barrier has no size.
        let expected: Vec<(&str, u64)> = all
            .split(',')
            .flat_map(|op| {
                [0, 400, 65536].into_iter().take(if op == "barrier" { 1 } else { 3 }).map(move |b| (op, b))
            })
            .collect();
        let found: Vec<(&str, u64)> =
            rows.iter().map(|row| (row["op"].as_str().unwrap(), row["bytes"].as_u64().unwrap())).collect();
        assert_eq!(found, expected);
        assert_eq!(printed, expected.iter().map(|row| row.0).collect::<Vec<_>>());
        assert!(
            rows.iter().all(|row| row["world"] == 3 && row["s"].as_f64().unwrap() > 0.0 && row["calls"] == 2)
        );
    }
}

#[test]
fn what_cannot_be_measured_is_refused_in_one_line() {
    for (arguments, said) in [
        (&["--sizes", "6"][..], "--sizes: got 6; give multiples of 4, the bytes of an element of f32"),
        (&["--json", "/nowhere/b.json"], "/nowhere/b.json: "),
        (&["--backend", "nccl"], "--backend nccl is not available"),
    ] {
        let error = BENCH.refuse(arguments);
        assert!(error.contains(said) && error.lines().count() == 1, "{error}");
    }
    for arguments in
        [["--sizes", "4X"], ["--ops", "all"], ["--dtype", "f8"], ["--seconds", "0"], ["--calls", "0"]]
    {
        let (error, code) = refuse_with(&mut BENCH.command(), &arguments);
        assert!(code == 2 && error.contains(arguments[1]), "{arguments:?}: {error}");
    }
}

#[test]
fn one_rank_measures_what_it_can() {
    let output = BENCH
        .succeed(&["--world-size", "1", "--sizes", "4K", "--calls", "1", "--ops", "all_reduce,send_recv"]);
    assert_eq!(text(&output.stdout).lines().count(), 3);
    assert_eq!(text(&output.stderr), "note: send_recv is not measured: it takes 2 ranks or more\n");
}

/// The ranks of `plan` measure with the same code.
#[test]
fn ranks_say_what_they_warn_of() {
    let bench = ["comm-bench", "--sizes", "4K", "--ops", "all_reduce", "--calls", "1"];
    for arguments in [&bench[..], &["plan"]] {
        let port = free_port().to_string();
        let rank = |rank: &str, world_size: &str| {
            let mut command = girandole();
            command.env("RANK", rank).env("WORLD_SIZE", world_size);
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            // Like a rank that the command has started.
            command.env("GIRANDOLE_SPAWNED_FOR", arguments[0]);
            command.env("GIRANDOLE_SPAWNER_PID", std::process::id().to_string());
            command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
            command
        };
        let first = rank("0", "2").spawn().unwrap();
        assert!(!rank("1", "3").output().unwrap().status.success());
        succeed(&mut rank("1", "2"));
        let first = first.wait_with_output().unwrap();
        let said = "refused: rank 1 came with world size 3, this group has 2";
        assert!(first.status.success() && text(&first.stderr).contains(said), "{first:?}");
    }
}
