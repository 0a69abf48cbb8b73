//! Tests of messages and exit codes.

use super::*;

fn failure(status: ExitKind, tail: &[&str]) -> String {
    let stderr_tail = tail.iter().map(|line| line.to_string()).collect();
    let failure =
        WorkerFailure { rank: 1, pid: 7, status, stderr_tail, also_failed: 2, node: None, log: None };
    Error::Launch(Box::new(failure).into()).message().unwrap()
}

#[test]
fn the_first_cause_is_told_once() {
    let others = "2 other ranks failed after it";
    let tail = ["a warning", "rank 1: error: cannot read x: it is gone"];
    assert_eq!(
        failure(ExitKind::Code(1), &tail),
        format!("error: rank 1 (pid 7) exited with code 1 ({others}): cannot read x: it is gone")
    );
    assert_eq!(
        failure(ExitKind::Code(EXIT_PEER_FAILED), &["rank 1: error: rank 2 (host a) died"]),
        format!("error: rank 2 (host a) died (so says rank 1; {others})")
    );
    let missing = "rank 1: the group of 2 did not meet at a:1 within 3.0 s: rank 0 was not found there";
    assert_eq!(
        failure(ExitKind::Code(1), &[&format!("error: {missing}")]),
        format!("error: {missing} (so says rank 1; {others})")
    );
    let panicked = failure(ExitKind::Code(101), &["thread 'main' panicked", "index out of bounds"]);
    let lines = "rank 1's last lines on stderr:\n    thread 'main' panicked\n    index out of bounds";
    let cause = format!("error: rank 1 (pid 7) exited with code 101 ({others})");
    assert_eq!(panicked, format!("{lines}\n{cause}"));
    let killed = failure(ExitKind::Signal(9), &[]);
    assert_eq!(killed, format!("error: rank 1 (pid 7) was killed by signal SIGKILL ({others})"));
}

#[test]
fn a_reader_that_has_read_enough_is_told_nothing() {
    let gone = [
        Error::Output(ErrorKind::BrokenPipe.into()),
        Error::in_rank(0, Error::Output(ErrorKind::BrokenPipe.into())),
        Error::Launch(launch::Error::Interrupted { signal: SIGPIPE }),
    ];
    for error in gone {
        assert_eq!((error.message(), error.exit_code()), (None, 141));
    }
}

#[test]
fn a_stop_with_a_checkpoint_is_said_by_the_rank_that_knows_the_step() {
    let stopped = || Error::Stopped { step: 12, signal: Some(15), dir: "ck".into() };
    let said = "stopped by SIGTERM after step 12; --resume goes on from there (checkpoints in ck)";
    assert_eq!(stopped().to_string(), said);
    for error in [Error::in_rank(1, stopped()), Error::Launch(launch::Error::Checkpointed)] {
        assert_eq!((error.message(), error.exit_code()), (None, EXIT_CHECKPOINTED as u8));
    }
}

#[test]
fn a_signal_has_a_name() {
    let stopped = Error::Launch(launch::Error::Interrupted { signal: 15 });
    assert_eq!(stopped.message().unwrap(), "error: stopped by SIGTERM; all ranks have ended");
}
