//! Processes that are killed or stopped, or whose output is not read.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Signal, kill_process_group};

use crate::common::{is_ignored, text};
use crate::ddp_linear::LINEAR;
use crate::ddp_linear::job::Job;

/// Generous limit for what takes a second or two, since other tests run at the same time.
const SOON: Duration = Duration::from_secs(10);

fn assert_soon(what: &str, took: Duration) {
    eprintln!("{what}: over after {} ms", took.as_millis());
    assert!(took < SOON, "{what}: took {took:?}");
}

/// Checks that every line of the metrics is complete JSON.
fn assert_whole(job: &Job) {
    let metrics = job.read("metrics.jsonl");
    assert!(metrics.ends_with('\n'));
    for line in metrics.lines() {
        let parsed: Result<serde_json::Value, _> = serde_json::from_str(line);
        assert!(parsed.is_ok(), "{line}");
    }
}

#[test]
fn a_rank_that_is_killed_is_the_first_cause() {
    for rank in [0, 1] {
        let mut job = Job::training(&[]);
        job.send(job.rank(rank), Signal::KILL);
        let (status, took) = job.end();
        assert_soon(&format!("rank {rank} killed"), took);
        assert_eq!(status.code(), Some(1));
        job.ranks_are_gone();
        let remarks = job.read("stderr");
        let cause = format!("error: rank {rank} (pid {}) was killed by signal SIGKILL", job.rank(rank));
        let at = remarks.find(&cause).unwrap_or_else(|| panic!("no `{cause}` in\n{remarks}"));
        assert!(remarks[at..].lines().count() <= 2, "{remarks}");
        for other in (0..3).filter(|other| *other != rank) {
            let line = remarks.lines().find(|line| line.starts_with(&format!("rank {other}: error: ")));
            let line = line.unwrap_or_else(|| panic!("rank {other} says nothing:\n{remarks}"));
            assert!(line.contains(&format!("rank {rank} (host ")), "{line}");
        }
        assert_whole(&job);
        assert!(!job.read("stdout").contains("comparison"));
    }
}

#[test]
fn no_rank_outlives_its_launcher() {
    let mut job = Job::training(&[]);
    job.send(job.launcher(), Signal::KILL);
    let (status, _) = job.end();
    assert_eq!(status.signal(), Some(9));
    assert_soon("launcher killed", job.ranks_are_gone());
    assert_whole(&job);
}

#[test]
fn a_rank_that_stands_still_is_named_at_the_time_out() {
    let mut job = Job::training(&["--timeout", "2"]);
    job.send(job.rank(1), Signal::STOP);
    let (status, took) = job.end();
    assert_soon("rank 1 stopped, 2 s time-out", took.saturating_sub(Duration::from_secs(2)));
    assert_eq!(status.code(), Some(1));
    job.ranks_are_gone();
    let remarks = job.read("stderr");
    let cause = remarks.lines().rfind(|line| line.starts_with("error: ")).unwrap_or(&remarks);
    assert!(cause.starts_with("error: rank 1 (host ") && cause.contains("did not take part in"), "{remarks}");
    assert_whole(&job);
}

#[test]
fn a_signal_to_the_launcher_ends_the_job() {
    // A terminal sends Ctrl-C to the ranks, too.
    for (signal, number, to_all) in
        [(Signal::TERM, 15, false), (Signal::INT, 2, false), (Signal::INT, 2, true), (Signal::HUP, 1, false)]
    {
        if is_ignored(number) {
            eprintln!("signal {number} is ignored here: nothing to test");
            continue;
        }
        let mut job = Job::training(&[]);
        match to_all {
            true => kill_process_group(job.launcher(), signal).unwrap(),
            false => job.send(job.launcher(), signal),
        }
        let (status, took) = job.end();
        assert_soon(&format!("signal {number}"), took);
        let remarks = job.read("stderr");
        assert_eq!(status.code(), Some(128 + number), "{status}\n{remarks}");
        job.ranks_are_gone();
        assert!(remarks.lines().last().unwrap().starts_with("error: stopped by SIG"), "{remarks}");
        assert_whole(&job);
    }
}

#[test]
fn a_reader_that_has_read_enough_ends_it_quietly() {
    for enough in ["available GPUs", "===== DDP training"] {
        let mut child = LINEAR
            .command()
            .args(["--world-size", "3", "--epochs", "20", "--samples", "3200", "--batch-size", "4"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let reader = BufReader::new(child.stdout.take().unwrap());
        // The reader is dropped after the line is found.
        assert!(reader.lines().any(|line| line.unwrap().starts_with(enough)));
        let mut remarks = Vec::new();
        child.stderr.take().unwrap().read_to_end(&mut remarks).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(141), "{status}");
        let remarks = text(&remarks);
        assert!(remarks.starts_with("note: ") && remarks.lines().count() == 1, "{remarks}");
    }
}

#[test]
fn two_jobs_at_once_do_not_disturb_each_other() {
    let jobs = [(); 3].map(|()| {
        LINEAR
            .command()
            .args(["--epochs", "1", "--samples", "3200"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    for job in jobs {
        let output = job.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
}
