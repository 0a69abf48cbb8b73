//! A group is dropped while something goes on in it.

use std::time::Duration;

use rustix::process::Signal;

use crate::group::{Group, Setup, in_parallel};

/// What can never be done ends at the time-out, and the drop with it.
#[test]
fn a_drop_with_an_operation_that_cannot_end() {
    let calls = ["recv f32 10 1", "barrier", "all_reduce f32 3000000 sum", "send f32 3000000 1"];
    in_parallel(calls.len(), &calls, |call| {
        let queued = format!("barrier; submit {call}; submit barrier; close");
        let setup = Setup { timeout: Duration::from_secs(2), ..Setup::default() };
        let mut group = Group::start(&[queued.as_str(), "barrier; ready; await"], &setup);
        group.ready([1]);
        let ending = group.finish(0);
        ending.assert_done();
        assert!(ending.closed.unwrap() >= Duration::from_millis(1500), "{ending:#?}");
        group.tell(1);
        group.finish(1).assert_done();
    });
}

/// What can be done is done before the group closes.
#[test]
fn a_drop_finishes_what_is_queued() {
    let late = "barrier; ready; await; all_reduce f32 3000000 sum; barrier; recv f32 10 0";
    let early =
        "barrier; submit all_reduce f32 3000000 sum; submit barrier; submit send f32 10 1; ready; close";
    let mut group = Group::start(&[early, late], &Setup::default());
    group.ready([0, 1]);
    group.tell(1);
    group.finish_all().iter().for_each(|ending| ending.assert_done());
}

/// Whichever thread runs them.
#[test]
fn a_drop_finishes_what_another_thread_waits_for() {
    for _ in 0..5 {
        let late = "barrier; ready; await; all_reduce f32 3000000 sum; barrier";
        let early = "barrier; submit all_reduce f32 3000000 sum; submit barrier; detach; ready; close";
        let mut group = Group::start(&[early, late], &Setup::default());
        group.ready([0, 1]);
        group.tell(1);
        group.finish_all().iter().for_each(|ending| ending.assert_done());
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

/// A stopped peer holds up nobody who needs nothing of it.
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
