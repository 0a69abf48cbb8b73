//! A recording of several threads, and what it costs to record nothing. One test: logging is set up once in a process.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use report::Error;
use report::trace::{RankTrace, install, merge};
use serde_json::Value;

#[test]
fn each_thread_has_its_own_track() {
    let recorder = install(true).unwrap().unwrap();
    assert!(matches!(install(false), Err(Error::AlreadyInstalled)));
    let backward = tracing::debug_span!("backward").entered();
    let thread = std::thread::Builder::new().name("comm".into()).spawn(|| {
        tracing::trace_span!("all_reduce", bytes = 4096u64, op = ?"sum").in_scope(|| ());
    });
    thread.unwrap().join().unwrap();
    drop(backward);
    let part = recorder.finish(2, "somewhere");

    // It travels between ranks as bytes.
    let bytes = serde_json::to_vec(&part).unwrap();
    let part: RankTrace = serde_json::from_slice(&bytes).unwrap();
    let trace: Value = serde_json::from_str(&merge(&[part]).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    assert!(events.iter().all(|event| event["pid"] == 2));

    let find =
        |phase: &str, name: &str| events.iter().find(|e| e["ph"] == phase && e["name"] == name).unwrap();
    let time = |phase, name| find(phase, name)["ts"].as_f64().unwrap();
    // Under way while backward still ran.
    assert!(time("B", "backward") <= time("B", "all_reduce"));
    assert!(time("B", "all_reduce") <= time("E", "all_reduce"));
    assert!(time("E", "all_reduce") <= time("E", "backward"));
    assert_eq!(find("B", "all_reduce")["args"]["bytes"], 4096);
    assert_eq!(find("B", "all_reduce")["args"]["op"], "sum");

    let names: HashMap<_, _> = events
        .iter()
        .filter(|event| event["name"] == "thread_name")
        .map(|event| (event["tid"].as_u64().unwrap(), event["args"]["name"].as_str().unwrap()))
        .collect();
    let track = |name| names[&find("B", name)["tid"].as_u64().unwrap()];
    assert_eq!(track("all_reduce"), "comm");
    assert_ne!(track("backward"), "comm");
}
