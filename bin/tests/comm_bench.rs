//! `comm-bench` as a user runs it.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn comm_bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_girandole"));
    for name in ["RANK", "WORLD_SIZE", "GIRANDOLE_TRANSPORT", "GIRANDOLE_SECRET"] {
        command.env_remove(name);
    }
    command.arg("comm-bench").args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn the_table_and_the_file_have_a_line_for_each_operation_and_size() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bench.jsonl");
    let all =
        "all_reduce,all_gather,reduce_scatter,broadcast,reduce,gather,scatter,all_to_all,send_recv,barrier";
    for transport in ["tcp", "shm"] {
        let file = path.to_str().unwrap();
        let arguments = ["--world-size", "3", "--ops", all, "--sizes", "0,400,64K", "--calls", "2"];
        let output = comm_bench(&[&arguments[..], &["--transport", transport, "--json", file]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let printed: Vec<Vec<&str>> =
            text(&output.stdout).lines().skip(2).map(|line| line.split_whitespace().collect()).collect();
        let rows: Vec<Value> = std::fs::read_to_string(&path)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
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
        assert_eq!(
            printed.iter().map(|line| line[0]).collect::<Vec<_>>(),
            expected.iter().map(|row| row.0).collect::<Vec<_>>()
        );
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
        let output = comm_bench(arguments);
        let error = text(&output.stderr);
        assert!(!output.status.success() && error.starts_with("error: "), "{error}");
        assert!(error.contains(said) && error.lines().count() == 1, "{error}");
        assert_eq!(text(&output.stdout), "");
    }
    for arguments in
        [["--sizes", "4X"], ["--ops", "all"], ["--dtype", "f8"], ["--seconds", "0"], ["--calls", "0"]]
    {
        let output = comm_bench(&arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(arguments[1]), "{}", text(&output.stderr));
    }
}

#[test]
fn one_rank_measures_what_it_can() {
    let output =
        comm_bench(&["--world-size", "1", "--sizes", "4K", "--calls", "1", "--ops", "all_reduce,send_recv"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).lines().count(), 3);
}
