//! A launcher that is stopped (SIGSTOP), while its ranks and the other launcher continue.

use std::process::Output;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Folder, text};
use crate::launch::nodes::{LIMIT, Nodes, last_line};

/// Timeout in seconds. It must also suffice for the launchers to connect on a busy machine.
const TIMEOUT: &str = "5";

/// Returns a script that waits for a file.
fn gate(folder: &Folder, name: &str) -> String {
    format!("until [ -e {}/{name} ]; do sleep 0.05; done", folder.argument(""))
}

fn open(folder: &Folder, name: &str) {
    std::fs::write(folder.path(name), "").unwrap();
}

fn send(nodes: &Nodes, node: usize, signal: Signal) {
    kill_process(Pid::from_child(&nodes.0[node]), signal).unwrap();
}

/// Waits for the end of the running launcher, then continues the stopped one; returns both outputs.
fn end_without(nodes: Nodes, stopped: usize) -> [Output; 2] {
    let other = Pid::from_child(&nodes.0[1 - stopped]);
    let began = Instant::now();
    let has_ended = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", other.as_raw_pid())).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
    };
    while !has_ended() {
        if began.elapsed() > LIMIT {
            send(&nodes, stopped, Signal::CONT);
            panic!("node {} still waits", 1 - stopped);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    send(&nodes, stopped, Signal::CONT);
    nodes.end().try_into().unwrap()
}

#[test]
fn the_other_names_it_after_the_time_out() {
    for stopped in [0, 1] {
        let folder = Folder::new();
        let nodes = Nodes::start(&["--timeout", TIMEOUT], &["sh", "-c", &gate(&folder, "open")]);
        nodes.ranks();
        send(&nodes, stopped, Signal::STOP);
        open(&folder, "open");
        let outputs = end_without(nodes, stopped);
        let told = &outputs[1 - stopped];
        assert_eq!(told.status.code(), Some(1), "{}", text(&told.stderr));
        let line = last_line(told);
        assert!(line.starts_with(&format!("error: node {stopped} (host ")), "{line}");
        assert!(line.contains(") does not answer: nothing was heard of its launcher for "), "{line}");
        // The continued launcher finds that the others are gone. But node 0 may have learned before that all ranks of
        // node 1 are done, like its own.
        let woken = last_line(&outputs[stopped]);
        let is_done = stopped == 0 && outputs[0].status.success();
        let gone = format!("error: node {} (host ", 1 - stopped);
        assert!(is_done || woken.starts_with(&gone) && woken.contains(") is gone"), "{woken}");
    }
}

/// The failed rank is reported as the cause, whichever launcher is stopped.
#[test]
fn a_rank_that_has_failed_meanwhile_is_told_of() {
    for stopped in [0, 1] {
        let folder = Folder::new();
        let failing = 2 * (1 - stopped);
        let script = format!("[ $RANK = {failing} ] || exec sleep 1000; {}; exit 7", gate(&folder, "open"));
        let nodes = Nodes::start(&["--timeout", TIMEOUT, "--max-restarts", "3"], &["sh", "-c", &script]);
        nodes.ranks();
        send(&nodes, stopped, Signal::STOP);
        open(&folder, "open");
        let outputs = end_without(nodes, stopped);
        let told = &outputs[1 - stopped];
        let said = text(&told.stderr);
        assert_eq!(told.status.code(), Some(7), "{said}");
        assert!(last_line(told).starts_with(&format!("error: rank {failing} (pid ")), "{said}");
        let silent = |line: &str| {
            line.contains(&format!("node {stopped} (host ")) && line.contains("nothing was heard")
        };
        assert!(said.lines().any(silent), "{said}");
    }
}

#[test]
fn one_that_goes_on_in_time_is_waited_for() {
    let folder = Folder::new();
    let nodes = Nodes::start(&["--timeout", TIMEOUT], &["sh", "-c", &gate(&folder, "$GROUP_RANK")]);
    nodes.ranks();
    send(&nodes, 1, Signal::STOP);
    open(&folder, "0");
    std::thread::sleep(Duration::from_millis(300));
    send(&nodes, 1, Signal::CONT);
    // Its ranks take longer than the timeout after those of the other launcher are done.
    std::thread::sleep(Duration::from_secs(7));
    open(&folder, "1");
    for output in nodes.end() {
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
}
