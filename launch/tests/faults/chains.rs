//! Ranks that wait for each other in several groups: all name the rank at the end of the chain, however far away it is.

use std::time::Duration;

use rustix::process::Signal;

use crate::ending::Ending;
use crate::group::{Group, Setup, in_parallel};

const GROUPS: &str = "group 0 1; group 1 2; group 2 3; ";

fn setup() -> Setup {
    Setup { timeout: Duration::from_secs(3), ..Setup::default() }
}

/// Each rank waits for the next one, which waits in another group; the last one does nothing. The first ones start to
/// wait first, so their timeouts expire first.
fn chain() -> Vec<String> {
    let script = |rank: usize| match rank {
        3 => "ready; await".to_string(),
        _ => format!("within {rank} {}; ready; await; sleep {}; recv f32 10 1", rank + 1, 150 * rank),
    };
    (0..4).map(|rank| GROUPS.to_string() + &script(rank)).collect()
}

fn assert_blames(ending: &Ending, kind: &str, operation: &str) {
    let place = format!("in the group [{}, {}]", ending.rank, ending.rank + 1);
    ending.assert_blames(kind, 3, operation);
    let text = &ending.failure.as_ref().unwrap().text;
    assert!(text.contains(&place), "{text}");
}

#[test]
fn who_stands_still_at_the_end_of_a_chain_is_named_by_all() {
    let mut group = Group::start(&chain(), &setup());
    group.ready(group.all());
    group.signal(3, Signal::STOP);
    group.tell_all(0..3);
    for rank in 0..3 {
        let ending = group.finish(rank);
        assert_blames(&ending, "Timeout", "did not take part in message #1");
        assert!(ending.failure.unwrap().text.contains("does not answer"));
    }
    group.signal(3, Signal::KILL);
}

#[test]
fn who_dies_at_the_end_of_a_chain_is_named_by_all() {
    let mut group = Group::start(&chain(), &Setup::default());
    group.ready(group.all());
    group.tell_all(0..3);
    std::thread::sleep(Duration::from_millis(500));
    group.signal(3, Signal::KILL);
    (0..3).for_each(|rank| assert_blames(&group.finish(rank), "PeerDied", "died during message #1"));
}

/// The rank answers, but makes no calls.
#[test]
fn who_is_in_no_operation_at_the_end_of_a_chain_is_named_by_all() {
    let mut group = Group::start(&chain(), &setup());
    group.ready(group.all());
    group.tell_all(0..3);
    (0..3).for_each(|rank| assert_blames(&group.finish(rank), "Timeout", "did not take part in message #1"));
    group.tell(3);
    group.finish(3);
}

#[test]
fn who_leaves_at_the_end_of_a_chain_is_named_by_all() {
    let mut scripts = chain();
    scripts[3] += "; close; await";
    let mut group = Group::start(&scripts, &Setup::default());
    group.ready(group.all());
    group.tell_all(0..3);
    std::thread::sleep(Duration::from_millis(500));
    group.tell(3);
    (0..3)
        .for_each(|rank| assert_blames(&group.finish(rank), "PeerLeft", "left the group before message #1"));
    group.tell(3);
    group.finish(3);
}

fn assert_told(ending: &Ending, culprit: usize) {
    let told = format!("rank {culprit} could not go on: out of luck");
    assert_eq!(ending.assert_failed("PeerFailed", culprit), told);
}

#[test]
fn who_says_why_it_leaves_at_the_end_of_a_chain_is_heard_by_all() {
    let mut scripts = chain();
    scripts[3] += "; announce out of luck; close; await";
    let mut group = Group::start(&scripts, &Setup::default());
    group.ready(group.all());
    group.tell_all(0..3);
    std::thread::sleep(Duration::from_millis(500));
    group.tell(3);
    (0..3).for_each(|rank| assert_told(&group.finish(rank), 3));
    group.tell(3);
    group.finish(3);
}

/// Each other rank is in the same call, in which it hears of it from its neighbours.
#[test]
fn who_says_why_it_leaves_is_heard_in_every_call() {
    let cases: Vec<(&str, usize)> = ["barrier", "all_reduce f32 100000 sum", "all_reduce f32 10 sum"]
        .into_iter()
        .flat_map(|call| [0, 1, 3].map(|leaves| (call, leaves)))
        .collect();
    in_parallel(2, &cases, |(call, leaves)| {
        let script = |rank: usize| match rank == *leaves {
            true => format!("group 3 1 0 2; {call}; announce out of luck; close"),
            false => format!("group 3 1 0 2; {call}; {call}"),
        };
        let scripts: Vec<String> = (0..4).map(script).collect();
        for ending in Group::start(&scripts, &Setup::default()).finish_all() {
            match ending.rank == *leaves {
                true => ending.assert_done(),
                false => assert_told(&ending, *leaves),
            }
        }
    });
}

/// While the ranks create further groups, each rank another one.
#[test]
fn while_groups_are_made() {
    for signal in [Signal::STOP, Signal::KILL] {
        let script = |rank| match rank {
            3 => "ready; await".to_string(),
            _ => format!("ready; await; sleep {}; meet {rank} {}", 150 * rank, rank + 1),
        };
        let mut group = Group::start(&(0..4).map(script).collect::<Vec<_>>(), &setup());
        group.ready(group.all());
        if signal == Signal::STOP {
            group.signal(3, signal);
        }
        group.tell_all(0..3);
        if signal == Signal::KILL {
            std::thread::sleep(Duration::from_millis(700));
            group.signal(3, signal);
        }
        for rank in 0..3 {
            let ending = group.finish(rank);
            let failure = ending.failure.as_ref().unwrap();
            assert_eq!(failure.culprit, Some(3), "{signal:?} {ending:#?}");
        }
        if signal == Signal::STOP {
            group.signal(3, Signal::KILL);
        }
    }
}

/// Four ranks in a mesh: each is in one group of a row and one of a column.
#[test]
fn on_a_mesh() {
    let cases: Vec<(usize, Signal)> =
        (0..4).flat_map(|victim| [Signal::KILL, Signal::STOP].map(|signal| (victim, signal))).collect();
    in_parallel(4, &cases, |(victim, signal)| {
        let script = "group 0 1; group 2 3; group 0 2; group 1 3; around all_reduce f32 1000 sum";
        let mut group = Group::start(&[script; 4], &setup());
        group.ready(group.all());
        std::thread::sleep(Duration::from_millis(10));
        group.signal(*victim, *signal);
        let others: Vec<usize> = group.all().filter(|rank| rank != victim).collect();
        for rank in others {
            let kind = if *signal == Signal::KILL { "PeerDied" } else { "Timeout" };
            group.finish(rank).assert_blames(kind, *victim, "all_reduce #");
        }
        group.signal(*victim, Signal::KILL);
    });
}

/// Rank 1 has aborted a group, and the others continue without that group.
const SURVIVED: [&str; 3] = [
    "group 0 1 2; survive barrier; world; barrier; ready; await; ",
    "group 0 1 2; abort; world; barrier; ready; await; ",
    "group 0 1 2; survive barrier; world; barrier; ready; await; ",
];

#[test]
fn a_failure_that_all_have_survived_is_not_blamed_for_what_comes_later() {
    let calls = ["sleep 150; recv f32 10 3", "sleep 300; recv f32 10 2", "recv f32 10 0"];
    let mut scripts: Vec<String> =
        SURVIVED.iter().zip(calls).map(|(before, call)| before.to_string() + call).collect();
    scripts.push("group 0 1 2; barrier; ready; await".into());
    let mut group = Group::start(&scripts, &setup());
    group.ready(group.all());
    group.tell_all(0..3);
    for rank in 0..3 {
        group.finish(rank).assert_blames("Timeout", 3, "did not take part in message #");
    }
    group.tell(3);
    group.finish(3);
}

#[test]
fn who_leaves_after_a_failure_that_all_have_survived_is_named_itself() {
    for early in 0..3 {
        let script =
            |rank: usize| SURVIVED[rank].to_string() + if rank == early { "close" } else { "barrier" };
        let mut group = Group::start(&(0..3).map(script).collect::<Vec<_>>(), &Setup::default());
        group.ready(group.all());
        group.tell(early);
        group.finish(early).assert_done();
        let others = (0..3).filter(|rank| *rank != early);
        group.tell_all(others.clone());
        others.for_each(|rank| group.finish(rank).assert_blames("PeerLeft", early, "barrier #"));
    }
}
