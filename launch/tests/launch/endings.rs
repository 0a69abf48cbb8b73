//! The launcher itself is stopped or killed.

use std::os::unix::process::ExitStatusExt;

use rustix::process::Signal;

use crate::job::{Job, is_ignored};

fn stopped_by(signal: Signal) -> String {
    let name = signal_hook::low_level::signal_name(signal.as_raw()).unwrap();
    format!("stopped by {name}; all ranks have ended")
}

#[test]
fn signals_are_passed_on() {
    for signal in [Signal::INT, Signal::TERM].into_iter().filter(|&signal| !is_ignored(signal)) {
        let job = Job::start("handler", 2);
        job.ready(2);
        job.signal(signal);
        let finished = job.finish();
        assert_eq!(finished.outcome(), stopped_by(signal));
        let got = format!("got {}", signal.as_raw());
        assert_eq!(
            finished.stdout.iter().filter(|line| line.ends_with(&got)).count(),
            2,
            "{:?}",
            finished.stdout
        );
    }
}

#[test]
fn ranks_without_a_handler_end_by_the_signal() {
    for signal in [Signal::HUP, Signal::TERM].into_iter().filter(|&signal| !is_ignored(signal)) {
        let job = Job::start("wait", 2);
        job.ready(2);
        job.signal(signal);
        assert_eq!(job.finish().outcome(), stopped_by(signal));
    }
}

#[test]
fn ranks_that_ignore_a_signal_are_killed() {
    let job = Job::start("hurry", 2);
    job.ready(2);
    job.signal(Signal::TERM);
    let finished = job.finish();
    assert_eq!(finished.outcome(), stopped_by(Signal::TERM));
    let said = "WARN ranks 0, 1 have not ended within 0.05 s of being asked to (--grace): killed";
    assert!(finished.stderr.contains(said), "{}", finished.stderr);
}

/// Waits until both ranks have got a signal.
fn both_got(job: &Job, signal: i32) {
    let mut lines = [job.line(), job.line()];
    lines.sort();
    assert_eq!(lines, [0, 1].map(|rank| format!("rank {rank} got {signal}")));
}

#[test]
fn another_signal_kills_at_once() {
    let job = Job::start("stubborn", 2);
    job.ready(2);
    job.signal(Signal::TERM);
    both_got(&job, 15);
    let mut second = Signal::INT;
    if is_ignored(second) {
        // The same one is another after a second.
        std::thread::sleep(std::time::Duration::from_millis(1100));
        second = Signal::TERM;
    }
    job.signal(second);
    assert_eq!(job.finish().outcome(), stopped_by(second));
}

/// As GNU `timeout` does.
#[test]
fn a_signal_that_is_sent_twice_is_one_wish() {
    let job = Job::start("saver", 2);
    job.ready(2);
    job.signal(Signal::TERM);
    job.signal(Signal::TERM);
    let finished = job.finish();
    assert_eq!(finished.outcome(), stopped_by(Signal::TERM));
    let saved = finished.stdout.iter().filter(|line| line.ends_with("has saved"));
    assert_eq!(saved.count(), 2, "{:?}", finished.stdout);
}

#[test]
fn signals_of_the_ranks_programs_are_passed_on_and_end_nothing() {
    let job = Job::start("handler", 2);
    job.ready(2);
    for signal in [Signal::USR1, Signal::USR2, Signal::USR1] {
        job.signal(signal);
        both_got(&job, signal.as_raw());
    }
    job.signal(Signal::TERM);
    assert_eq!(job.finish().outcome(), stopped_by(Signal::TERM));
}

#[test]
fn a_reader_that_stands_still_does_not_hold_up_the_end() {
    let job = Job::start_unread("talk", 2);
    job.wait_until_full();
    job.signal(Signal::TERM);
    assert_eq!(job.finish().outcome(), stopped_by(Signal::TERM));
}

#[test]
fn after_a_job_the_process_is_as_it_was() {
    let job = Job::start("twice", 3);
    job.ready(1);
    job.signal(Signal::TERM);
    let finished = job.finish();
    assert_eq!(finished.status.signal(), Some(15), "{}", finished.stderr);
}

#[test]
fn no_rank_outlives_a_killed_launcher() {
    let job = Job::start("wait", 3);
    job.ready(3);
    assert_eq!(job.processes().len(), 4);
    job.kill_and_expect_no_orphan();
}

/// Without the Linux feature, a stopped rank only ends when it is continued, or through the reaper.
#[cfg(not(portable))]
#[test]
fn not_even_one_that_is_stopped() {
    let job = Job::start("wait", 3);
    let pids = job.ready(3);
    rustix::process::kill_process(pids[1], Signal::STOP).unwrap();
    job.kill_and_expect_no_orphan();
}

#[test]
fn not_even_one_behind_a_shell() {
    let job = Job::start("wrapped", 3);
    job.ready(3);
    job.kill_and_expect_no_orphan();
}

#[test]
fn not_even_one_that_has_just_been_started() {
    for processes in [1, 2, 2, 3, 3, 4, 4] {
        let job = Job::start("wait", 3);
        // Kills as soon as this number of the four processes exists, whatever they are doing.
        while job.processes().len() < processes {
            std::thread::yield_now();
        }
        job.kill_and_expect_no_orphan();
    }
}

#[test]
fn ranks_that_have_stopped_with_a_checkpoint_have_not_failed_and_are_not_restarted() {
    let finished = Job::start("checkpointed", 2).finish();
    let said = "stopped with a checkpoint, from which the job goes on when it is started again to resume";
    assert_eq!(finished.outcome(), said);
}
