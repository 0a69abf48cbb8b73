//! `--trace` and `--report` of a run.

use serde_json::Value;

use crate::common::{Folder, losses_of, metrics};
use crate::ddp_linear::LINEAR;

#[test]
fn all_files_are_written_together() {
    let folder = Folder::new();
    let (trace, report) = (folder.argument("trace.json"), folder.argument("report.html"));
    let (lines, weights) = (folder.argument("metrics.jsonl"), folder.argument("weights.safetensors"));
    LINEAR.succeed(&[
        "--epochs", "1", "--samples", "640", "--world-size", "3", "--trace", &trace, "--report", &report,
        "--metrics", &lines, "--save", &weights,
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
    let facts = [("ranks", "3"), ("backend", "tcp"), ("device", "cpu"), ("seed", "42"), ("samples", "640")];
    let more = [("learning rate, DDP", "0.03"), ("version", env!("CARGO_PKG_VERSION"))];
    for (name, value) in facts.into_iter().chain(more) {
        let row = format!("<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>");
        assert!(report.contains(&row), "{row}");
    }
    let links = report.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    assert!(!links.contains("http") && !links.contains("src="), "nothing is loaded from outside");

    let lines = metrics(lines.as_ref());
    assert_eq!((losses_of(&lines, Some("single")).len(), losses_of(&lines, Some("ddp")).len()), (20, 7));
    assert_eq!(lines.last().unwrap()["world_size"], 3);
    assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 4, "these four files and no others");
    assert!(std::fs::metadata(weights).unwrap().len() > 0);
}
