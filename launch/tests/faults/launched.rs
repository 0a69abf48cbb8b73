//! A job under the launcher: what its user sees.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::group::{files, memory_left};
use crate::rank::itself;
use crate::worker::{LAUNCH, SCRIPT, SLOW_WARNING, now};

/// Returns the command of a launcher with this number of ranks.
fn command(script: &str, ranks: usize) -> Command {
    let mut command = itself();
    command
        .env(SCRIPT, script)
        .env("GIRANDOLE_TRANSPORT", crate::TRANSPORT)
        .env(LAUNCH, ranks.to_string())
        .env(SLOW_WARNING, Duration::from_secs(30).as_millis().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs a launcher. Returns the exit code, standard error, and the milliseconds from the death of the rank to the end
/// of the launcher.
fn launch(script: &str, ranks: usize) -> (Option<i32>, String, f64) {
    let output = command(script, ranks).output().unwrap();
    let ended = now();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let died = stdout.lines().find_map(|line| line.strip_prefix("@dying ")?.parse().ok());
    let delay = (ended - died.unwrap_or(ended)) as f64 / 1e6;
    (output.status.code(), String::from_utf8(output.stderr).unwrap(), delay)
}

/// The rank that was killed is the cause, not the ranks that noticed it. No process that holds the pipes is left, or
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

/// A killed launcher cannot clean up, and still nothing is left: no process, not even a stopped one, no file, no
/// memory.
#[test]
fn a_launcher_that_is_killed_leaves_nothing() {
    let all = [(2, None), (4, Some(0)), (3, Some(2))];
    // Without the Linux feature, a stopped rank only ends when it is continued.
    let cases = if cfg!(portable) { &all[..1] } else { &all };
    for &(ranks, stopped) in cases {
        let folder = tempfile::tempdir().unwrap();
        let mut launcher = command("pid; random 5", ranks).env("TMPDIR", folder.path()).spawn().unwrap();
        let lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map_while(Result::ok);
        let pids = lines.filter_map(|line| Pid::from_raw(line.strip_prefix("@pid ")?.parse().ok()?));
        let pids: Vec<Pid> = pids.take(ranks).collect();
        let handles: Vec<_> = pids.iter().map(|p| pidfd_open(*p, PidfdFlags::empty()).unwrap()).collect();
        if let Some(rank) = stopped {
            kill_process(pids[rank], Signal::STOP).unwrap();
        }
        launcher.kill().unwrap();
        launcher.wait().unwrap();
        for handle in &handles {
            let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
            let ended = poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&limit)).unwrap();
            assert_eq!(ended, 1, "a rank lives on without its launcher");
        }
        assert_eq!((files(folder.path()), memory_left()), (Vec::new(), Vec::new()));
    }
}

#[test]
fn a_job_without_a_fault_is_done() {
    let (code, stderr, _) = launch("all_reduce f32 1000 sum; barrier", 4);
    assert_eq!((code, stderr.contains("OUTCOME done")), (Some(0), true), "{stderr}");
}
