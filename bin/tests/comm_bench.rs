//! `comm-bench` as a user runs it.
#![allow(clippy::unwrap_used)]

#[path = "common/mod.rs"]
mod common;

use common::{Folder, Girandole, metrics, refuse_with, text};

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
    let output = BENCH.succeed(&[
        "--world-size",
        "1",
        "--sizes",
        "4K",
        "--calls",
        "1",
        "--ops",
        "all_reduce,send_recv",
    ]);
    assert_eq!(text(&output.stdout).lines().count(), 3);
}
