//! A group is dropped while operations are in progress.

use std::time::Duration;

use rustix::process::Signal;

use crate::group::{Group, Setup, in_parallel};

const NEVER_DONE: [&str; 4] =
    ["recv f32 10 1", "barrier", "all_reduce f32 3000000 sum", "send f32 3000000 1"];

/// An operation that no other rank takes part in is aborted, and its waiters get an error; the drop does not wait until
/// the timeout.
#[test]
fn a_drop_with_an_operation_that_cannot_end() {
    in_parallel(NEVER_DONE.len(), &NEVER_DONE, |call| {
        let queued = format!("barrier; submit {call}; submit barrier; ready; close; wait_all");
        let mut group = Group::start(&[queued.as_str(), "barrier; ready; await"], &Setup::default());
        group.ready([0, 1]);
        let ending = group.finish(0);
        ending.assert_aborted();
        assert!(ending.closed.unwrap() >= Duration::from_millis(1500), "it had some time: {ending:#?}");
        assert!(ending.stderr.contains("is aborted, because its communicator was dropped"), "{ending:#?}");
        group.tell(1);
        group.finish(1).assert_done();
    });
}

/// All waiting threads get an error at once, and the other ranks the failure that this rank has left.
#[test]
fn an_abort_ends_everything() {
    let cases: Vec<(usize, usize)> = (0..4).flat_map(|call| [(call, 0), (call, 2)]).collect();
    in_parallel(4, &cases, |(call, aborts)| {
        // The calls that it has started, and what the others call then.
        let (begun, then) = match call {
            0 => ("recv f32 10 1".to_string(), "barrier".to_string()),
            // Some ranks may have received its part of the first barrier.
            1 => ("barrier".into(), "barrier; barrier".into()),
            2 => ("all_reduce f32 3000000 sum".into(), "all_reduce f32 3000000 sum".into()),
            _ => ("send f32 3000000 1".into(), format!("recv f32 3000000 {aborts}")),
        };
        let begun = format!("barrier; submit {begun}; submit barrier; ready; await; abort; wait_all");
        let then = format!("barrier; ready; await; {then}");
        let script = |rank| if rank == *aborts { begun.as_str() } else { then.as_str() };
        let scripts: Vec<&str> = (0..3).map(script).collect();
        let mut group = Group::start(&scripts, &Setup::default());
        group.ready(0..3);
        group.tell(*aborts);
        group.finish(*aborts).assert_aborted();
        let others: Vec<usize> = (0..3).filter(|rank| rank != aborts).collect();
        group.tell_all(others.iter().copied());
        for rank in others {
            group.finish(rank).assert_failed("PeerLeft", *aborts);
        }
    });
}

/// What can be completed is completed before the group closes.
#[test]
fn a_drop_finishes_what_is_queued() {
    let late = "barrier; ready; await; all_reduce f32 3000000 sum; barrier; recv f32 10 0";
    let early =
        "barrier; submit all_reduce f32 3000000 sum; submit barrier; submit send f32 10 1; ready; close";
    let mut group = Group::start(&[early, late], &Setup::default());
    group.ready([0, 1]);
    group.tell(1);
    group.assert_all_done();
}

/// It does not matter which thread runs the operations.
#[test]
fn a_drop_finishes_what_another_thread_waits_for() {
    for _ in 0..5 {
        let late = "barrier; ready; await; all_reduce f32 3000000 sum; barrier";
        let early = "barrier; submit all_reduce f32 3000000 sum; submit barrier; detach; ready; close";
        let mut group = Group::start(&[early, late], &Setup::default());
        group.ready([0, 1]);
        group.tell(1);
        group.assert_all_done();
    }
}

/// The death of a peer ends the wait of a drop.
#[test]
fn a_drop_while_a_peer_dies() {
    for victim in [0, 1] {
        let waits = "barrier; submit all_reduce f32 10 sum; submit barrier; ready; close";
        let script = |rank| if rank == victim { "barrier; ready; await" } else { waits };
        let scripts: Vec<&str> = (0..3).map(script).collect();
        let mut group = Group::start(&scripts, &Setup::default());
        group.ready(group.all());
        group.signal(victim, Signal::KILL);
        for ending in group.finish_all().iter().filter(|ending| ending.rank != victim) {
            ending.assert_done();
        }
    }
}

/// A stopped peer does not delay ranks that need nothing from it.
#[test]
fn a_drop_while_a_peer_is_stopped() {
    for victim in [0, 1] {
        let script =
            |rank| if rank == victim { "barrier; ready; await" } else { "barrier; ready; await; close" };
        let scripts: Vec<&str> = (0..3).map(script).collect();
        let mut group = Group::start(&scripts, &Setup::default());
        group.ready(group.all());
        group.signal(victim, Signal::STOP);
        let others: Vec<usize> = group.all().filter(|rank| *rank != victim).collect();
        for rank in others {
            group.tell(rank);
            group.finish(rank).assert_done();
        }
        group.signal(victim, Signal::CONT);
        group.tell(victim);
        group.finish(victim).assert_done();
    }
}
