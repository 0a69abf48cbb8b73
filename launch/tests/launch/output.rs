//! Output of the ranks.

use rustix::process::{Pid, Signal, kill_process};

use crate::job::Job;

fn assert_whole<'a>(lines: impl Iterator<Item = &'a str>) {
    let mut next = [0; 4];
    for line in lines {
        let words: Vec<&str> = line.split(' ').collect();
        let [rank, number, text] = words[..] else { continue };
        let Ok(rank) = rank.parse::<usize>() else { continue };
        let letter = char::from(b'a' + rank as u8);
        assert_eq!(number, next[rank].to_string(), "lines of a rank stay in order");
        assert_eq!(text.len(), next[rank] * 7 % 9000);
        assert!(text.chars().all(|other| other == letter), "{line}");
        next[rank] += 1;
    }
    assert_eq!(next, [1000; 4]);
}

#[test]
fn lines_of_four_ranks_are_whole_and_in_order() {
    let finished = Job::start("lines", 4).finish();
    assert!(finished.status.success());
    assert_whole(finished.stdout.iter().map(String::as_str));
    assert_whole(finished.stderr.lines());
}

#[test]
fn an_over_long_line_of_one_rank_gets_through() {
    let finished = Job::start("long line", 1).finish();
    let line = finished.stdout.last().unwrap();
    assert_eq!(line.len(), 3 << 20);
    assert!(line.bytes().all(|byte| byte == b'a'));
}

#[test]
fn long_lines_of_several_ranks_stay_whole() {
    let finished = Job::start("long line", 3).finish();
    for letter in ["a", "b", "c"] {
        let own: Vec<_> = finished.stdout.iter().filter(|line| line.starts_with(letter)).collect();
        assert!(own == [&letter.repeat(3 << 20)], "{letter}: {} lines", own.len());
    }
}

#[test]
fn when_nobody_reads_any_more_the_ranks_are_ended() {
    let mut job = Job::start("talk", 2);
    while job.line() != "rank 1 goes on" {}
    job.stop_reading();
    let finished = job.finish();
    assert_eq!(finished.outcome(), "stopped by SIGPIPE; all ranks have ended");
    assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
}

#[test]
fn a_grandchild_that_holds_the_pipes_does_not_hold_up_the_launcher() {
    let job = Job::start("grandchild", 2);
    let lines = std::iter::repeat_with(|| job.line());
    let pids = lines.filter_map(|line| line.strip_prefix("sleep ").and_then(|pid| pid.parse().ok()));
    let sleeps: Vec<i32> = pids.take(2).collect();
    let finished = job.finish();
    // They belong to this test: children of the shells that were the ranks.
    sleeps.iter().for_each(|&pid| kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap());
    assert_eq!(finished.outcome(), "[None, None]");
}

#[test]
fn notes_go_to_the_launcher_and_leave_the_lines_as_they_are() {
    let finished = Job::start("notes", 2).finish();
    let summary = "200 notes, in order: true, at least 400 lines: true";
    assert!(finished.stderr.contains(summary), "{}", finished.stderr);
    for step in 0..100 {
        let line = format!("step {step}");
        assert_eq!(
            finished.stdout.iter().filter(|other| **other == line).count(),
            2,
            "{:?}",
            finished.stdout
        );
    }
}

#[test]
fn only_the_ranks_that_are_asked_for_are_shown() {
    let finished = Job::start("only rank 1", 3).finish();
    let roles: Vec<&String> = finished.stdout.iter().filter(|line| line.contains("role trainer")).collect();
    assert_eq!(roles, ["rank 1, role trainer"]);
    assert!(finished.stderr.contains("rank 1 says it") && !finished.stderr.contains("rank 0 says"));
}
