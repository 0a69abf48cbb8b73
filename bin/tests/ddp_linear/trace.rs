//! `--trace` and `--report` of a run.

use serde_json::Value;

use crate::command::{Folder, succeed};

#[test]
fn trace_and_report_are_written() {
    let folder = Folder::new();
    let (trace, report) = (folder.argument("trace.json"), folder.argument("report.html"));
    succeed(&[
        "--epochs",
        "1",
        "--samples",
        "640",
        "--world-size",
        "3",
        "--trace",
        &trace,
        "--report",
        &report,
    ]);

    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    let events = trace.as_array().or_else(|| trace["traceEvents"].as_array()).unwrap();
    for rank in 0..3 {
        let of_rank = |event: &&Value| event["pid"].as_u64() == Some(rank);
        let named = |name: &str| events.iter().filter(of_rank).filter(|event| event["name"] == name).count();
        assert!(named("backward") > 0 && named("collective") > 0, "rank {rank} recorded its steps");
    }

    let report = std::fs::read_to_string(report).unwrap();
    assert!(report.contains("<svg") && report.contains("ddp-linear"));
    assert!(!report.contains("http://") || !report.contains("src=\"http"), "nothing is loaded from outside");
}
