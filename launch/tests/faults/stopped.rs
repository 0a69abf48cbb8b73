//! A rank is stopped (SIGSTOP): it exists, and does nothing.

use std::time::Duration;

use rustix::process::Signal;

use crate::ending::summary;
use crate::group::{Group, Setup, in_parallel};

const TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for the error. It should come at most 2 s after the timeout; the time is printed.
const BOUND_MS: f64 = 8000.0;

fn setup() -> Setup {
    Setup { timeout: TIMEOUT, ..Setup::default() }
}

/// Stops the victim in the middle of this call, and asserts that all others name it.
fn stop(world_size: usize, victim: usize, call: &str) {
    let scripts = vec![format!("repeat {call}"); world_size];
    let mut group = Group::start(&scripts, &setup());
    group.ready(group.all());
    let at = group.signal(victim, Signal::STOP);
    let others: Vec<usize> = group.all().filter(|rank| *rank != victim).collect();
    let endings: Vec<_> = others.iter().map(|rank| group.finish(*rank)).collect();
    let operation = call.split(' ').next().unwrap();
    for ending in &endings {
        ending.assert_blames("Timeout", victim, &format!("did not take part in {operation}"));
        assert!(ending.failure.as_ref().unwrap().text.contains("does not answer"), "{ending:#?}");
        assert!(ending.delay(at) < BOUND_MS, "{ending:#?}");
    }
    // When it is continued it finds that the group has failed.
    group.signal(victim, Signal::CONT);
    let ending = group.finish(victim);
    assert!(ending.failure.is_some(), "{ending:#?}");
    let delays: Vec<f64> = endings.iter().map(|ending| ending.delay(at)).collect();
    println!("{}", summary(&format!("rank {victim} of {world_size} stopped, time-out 2 s, {call}"), &delays));
}

#[test]
fn each_of_two_three_and_four() {
    let cases: Vec<(usize, usize)> =
        [2, 3, 4].into_iter().flat_map(|world| (0..world).map(move |victim| (world, victim))).collect();
    in_parallel(cases.len(), &cases, |(world, victim)| stop(*world, *victim, "all_reduce f32 4 sum"));
}

#[test]
fn in_other_collectives() {
    let calls = ["all_reduce f32 2000000 sum", "broadcast f32 100000 0", "barrier", "all_gather f32 100000"];
    let cases: Vec<(usize, &str)> = (0..4).flat_map(|victim| calls.map(|call| (victim, call))).collect();
    in_parallel(cases.len(), &cases, |(victim, call)| stop(4, *victim, call));
}

/// Ranks that start the call later learn of the failure from those that were first.
#[test]
fn while_others_come_late() {
    let cases: Vec<usize> = (0..4).collect();
    in_parallel(cases.len(), &cases, |victim| {
        let script = |rank| format!("barrier; ready; await; sleep {}; all_reduce f32 10 sum", 400 * rank);
        let scripts: Vec<String> = (0..4).map(script).collect();
        let mut group = Group::start(&scripts, &setup());
        group.ready(group.all());
        group.signal(*victim, Signal::STOP);
        let others: Vec<usize> = group.all().filter(|rank| rank != victim).collect();
        group.tell_all(others.iter().copied());
        for rank in others {
            group.finish(rank).assert_blames("Timeout", *victim, "all_reduce");
        }
        group.signal(*victim, Signal::KILL);
    });
}

/// A rank that only computes is not needed: one that is stopped and continues in time does no harm.
#[test]
fn for_a_short_while() {
    let cases = [0, 1, 2];
    in_parallel(3, &cases, |victim| {
        let script = "barrier; ready; await; all_reduce f32 1000 sum; barrier";
        let mut group = Group::start(&[script; 3], &Setup { timeout: Duration::from_secs(30), ..setup() });
        group.ready(group.all());
        group.signal(*victim, Signal::STOP);
        group.tell_all(0..3);
        // Long enough that the others query its status.
        std::thread::sleep(Duration::from_millis(2500));
        group.signal(*victim, Signal::CONT);
        group.assert_all_done();
    });
}
