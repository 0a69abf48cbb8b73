//! One rank fails.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use crate::job::{Finished, Job};

/// Returns the first line of the error.
fn headline(finished: &Finished) -> &str {
    assert_eq!(finished.status.code(), Some(1));
    finished.outcome().lines().next().unwrap()
}

#[test]
fn a_rank_that_is_killed_is_named_and_those_that_noticed_are_not() {
    let job = Job::start("peers", 4);
    let pids = job.ready(4);
    let start = Instant::now();
    kill_process(pids[1], Signal::KILL).unwrap();
    let finished = job.finish();
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    let pid = pids[1].as_raw_nonzero();
    assert_eq!(headline(&finished), format!("rank 1 (pid {pid}) was killed by signal SIGKILL"));
    assert!(finished.outcome().ends_with("3 other ranks failed after it"), "{}", finished.outcome());
}

#[test]
fn a_rank_that_is_killed_is_named_even_where_the_others_end_as_if_it_were_their_own_fault() {
    let job = Job::start("careless peers", 3);
    let pids = job.ready(3);
    kill_process(pids[1], Signal::KILL).unwrap();
    let finished = job.finish();
    assert!(headline(&finished).ends_with(" was killed by signal SIGKILL"), "{}", finished.outcome());
}

#[test]
fn where_all_blame_another_the_first_is_named() {
    let finished = Job::start("only peers", 2).finish();
    assert!(headline(&finished).starts_with("rank 1 (pid "), "{}", finished.outcome());
    assert!(headline(&finished).ends_with(" exited with code 75"), "{}", finished.outcome());
    assert!(finished.outcome().contains("    rank 1: a peer failed"), "{}", finished.outcome());
}

#[test]
fn an_exit_code_is_told_with_the_last_lines() {
    let finished = Job::start("code 3", 3).finish();
    assert!(headline(&finished).starts_with("rank 1 (pid "), "{}", finished.outcome());
    assert!(headline(&finished).ends_with(" exited with code 3"), "{}", finished.outcome());
    let shown: Vec<&str> = finished.outcome().lines().skip(2).map(str::trim).collect();
    assert_eq!(shown, ["line 26", "line 27", "line 28", "line 29", "the end"]);
    // All of it was forwarded, and the last line was ended.
    assert!(finished.stderr.contains("line 0\nline 1\n"));
    assert!(finished.stderr.contains("line 29\nthe end\n"));
}

#[test]
fn ranks_that_do_not_notice_are_ended_even_when_stopped() {
    let job = Job::start("wait", 4);
    let pids = job.ready(4);
    kill_process(pids[2], Signal::STOP).unwrap();
    kill_process(pids[1], Signal::USR1).unwrap();
    let finished = job.finish();
    let pid = pids[1].as_raw_nonzero();
    assert_eq!(finished.outcome(), format!("rank 1 (pid {pid}) was killed by signal SIGUSR1"));
}
