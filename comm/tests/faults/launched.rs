//! A job under the launcher: what its user sees.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::worker::{LAUNCH, PARENT, SCRIPT, SLOW_WARNING, now};

/// Exit code, standard error, and milliseconds from the death of the rank to the end of the launcher.
fn launch(script: &str, ranks: usize) -> (Option<i32>, String, f64) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["worker::process", "--exact", "--nocapture", "--quiet", "--test-threads=1"])
        .env(SCRIPT, script)
        .env(LAUNCH, ranks.to_string())
        .env(PARENT, std::process::id().to_string())
        .env(SLOW_WARNING, Duration::from_secs(30).as_millis().to_string())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let ended = now();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let died = stdout.lines().find_map(|line| line.strip_prefix("@dying ")?.parse().ok());
    let delay = (ended - died.unwrap_or(ended)) as f64 / 1e6;
    (output.status.code(), String::from_utf8(output.stderr).unwrap(), delay)
}

/// The rank that was killed is the cause, not those that noticed; and no process that holds the pipes is left, or
/// `output` would not have returned.
#[test]
fn the_launcher_names_the_rank_that_was_killed() {
    for (ranks, victim) in [(2, 0), (2, 1), (3, 0), (3, 2), (4, 1)] {
        let script = format!("all_reduce f32 1000 sum; die {victim}; repeat all_reduce f32 1000 sum");
        let (code, stderr, delay) = launch(&script, ranks);
        println!("rank {victim} of {ranks}: launcher ended after {delay:.1} ms");
        assert_eq!(code, Some(1), "{stderr}");
        let outcome = stderr.split_once("OUTCOME ").unwrap().1;
        assert!(outcome.starts_with(&format!("rank {victim} (pid ")), "{stderr}");
        assert!(outcome.lines().next().unwrap().ends_with(" was killed by signal SIGKILL"), "{stderr}");
        assert!(delay < 6000.0, "{stderr}");
    }
}

#[test]
fn a_job_without_a_fault_is_done() {
    let (code, stderr, _) = launch("all_reduce f32 1000 sum; barrier", 4);
    assert_eq!((code, stderr.contains("OUTCOME done")), (Some(0), true), "{stderr}");
}
