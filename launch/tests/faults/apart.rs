//! Ranks that have no data connection to each other, because they never needed one.

use std::time::Duration;

use rustix::process::Signal;

use crate::group::{Group, Setup, in_parallel};

/// The others wait for each other, and not for the victim.
#[test]
fn a_death_is_noticed_by_those_that_never_talked_to_the_dead() {
    let cases = [0, 3, 5];
    in_parallel(2, &cases, |victim| {
        let after = |rank: usize| (1..6).map(|step| (rank + step) % 6).find(|other| other != victim).unwrap();
        let script = |rank| match rank == *victim {
            true => "ready; await".to_string(),
            false => format!("ready; recv f32 10 {}", after(rank)),
        };
        let scripts: Vec<String> = (0..6).map(script).collect();
        let mut group = Group::start(&scripts, &Setup::default());
        group.ready(group.all());
        let at = group.signal(*victim, Signal::KILL);
        for ending in group.finish_all().iter().filter(|ending| ending.rank != *victim) {
            // A rank may get the failure before it has started its own call, so the operation is not checked.
            ending.assert_blames("PeerDied", *victim, "died during ");
            assert!(ending.delay(at) < 5000.0, "{ending:#?}");
        }
    });
}

/// The victim dies during the handshakes of the first calls.
#[test]
fn a_death_while_all_connect() {
    let cases: Vec<(usize, u64)> =
        (0..4).flat_map(|victim| [0, 300, 1000, 3000].map(|delay| (victim, delay))).collect();
    in_parallel(2, &cases, |(victim, delay)| {
        let script = "ready; await; barrier; all_gather f32 1000; all_reduce f32 10 sum; repeat barrier";
        let mut group = Group::start(&[script; 4], &Setup::default());
        group.ready(group.all());
        group.tell_all(0..4);
        std::thread::sleep(Duration::from_micros(*delay));
        group.signal(*victim, Signal::KILL);
        for ending in group.finish_all().iter().filter(|ending| ending.rank != *victim) {
            ending.assert_blames("PeerDied", *victim, "died during ");
        }
    });
}

#[test]
fn one_that_has_left_is_named_though_nobody_ever_talked_to_it() {
    let cases =
        [("recv f32 10 4", "barrier"), ("send f32 10 4", "barrier"), ("barrier", "all_reduce f32 4 sum")];
    in_parallel(3, &cases, |(first, others)| {
        let script = |rank| match rank {
            0 => format!("ready; await; {first}"),
            4 => String::new(),
            _ => format!("ready; await; {others}"),
        };
        let scripts: Vec<String> = (0..5).map(script).collect();
        let mut group = Group::start(&scripts, &Setup::default());
        group.ready(0..4);
        group.finish(4).assert_done();
        // The first rank that needs it tells all others.
        group.tell_all(0..4);
        let endings = group.finish_all();
        let kind = endings[0].failure.as_ref().unwrap().kind.clone();
        match kind.as_str() {
            "PeerLeft" => endings.iter().for_each(|ending| ending.assert_blames("PeerLeft", 4, "")),
            // The ranks that were first have noticed instead that the others are in another call.
            _ => endings.iter().for_each(|ending| assert!(!ending.assert_failed("Mismatch", 0).is_empty())),
        }
    });
}

/// A message that was sent is received even if the sender has ended, and the receiver had no connection to it before.
#[test]
fn a_message_outlives_its_sender() {
    let scripts = ["send f32 10 3", "ready; await", "ready; await", "ready; await; recv f32 10 0"];
    let mut group = Group::start(&scripts, &Setup::default());
    group.finish(0).assert_done();
    group.tell_all(1..4);
    group.assert_all_done();
}

#[test]
fn without_rank_0_ranks_still_connect() {
    let scripts = [
        "",
        "ready; await; send f32 100000 4; recv f32 10 4",
        "ready; await",
        "ready; await",
        "ready; await; recv f32 100000 1; send f32 10 1",
    ];
    let mut group = Group::start(&scripts, &Setup::default());
    group.finish(0).assert_done();
    group.ready(1..5);
    group.tell_all(1..5);
    group.assert_all_done();
}

/// No rank can be asked any more, but it is still detected that this one is gone.
#[test]
fn without_rank_0_one_that_is_gone_is_named() {
    for end in ["close", "exit 3"] {
        let last = format!("ready; await; {end}");
        let scripts = ["", "ready; await; recv f32 10 4", "ready; await", "ready; await", &last];
        let mut group = Group::start(&scripts, &Setup::default());
        group.finish(0).assert_done();
        group.ready(1..5);
        group.tell(4);
        group.finish(4);
        group.tell_all(1..4);
        group.finish(1).assert_blames("PeerLeft", 4, "message #1 (from rank 4, f32, 10 elements)");
        group.assert_all_done();
    }
}

/// The system accepts connections for the stopped rank, but the rank does not answer.
#[test]
fn one_that_is_stopped_is_named() {
    let cases = [0, 1, 2, 3];
    in_parallel(4, &cases, |victim| {
        let other = (victim + 2) % 4;
        let script = |rank| match rank == other {
            true => format!("ready; await; recv f32 10 {victim}"),
            false => "ready; await".to_string(),
        };
        let scripts: Vec<String> = (0..4).map(script).collect();
        let setup = Setup { timeout: Duration::from_secs(2), ..Setup::default() };
        let mut group = Group::start(&scripts, &setup);
        group.ready(group.all());
        group.signal(*victim, Signal::STOP);
        group.tell(other);
        let ending = group.finish(other);
        ending.assert_blames("Timeout", *victim, "did not take part in message #1");
        assert!(ending.failure.as_ref().unwrap().text.contains("does not answer"), "{ending:#?}");
        group.signal(*victim, Signal::KILL);
    });
}

/// A rank that continues in time does no harm.
#[test]
fn one_that_is_stopped_for_a_while_is_waited_for() {
    let cases = [0, 1, 2, 3];
    in_parallel(4, &cases, |victim| {
        let script = "ready; await; barrier; all_reduce f32 100000 sum";
        let mut group = Group::start(&[script; 4], &Setup::default());
        group.ready(group.all());
        group.signal(*victim, Signal::STOP);
        group.tell_all(0..4);
        // Longer than a handshake may take.
        std::thread::sleep(Duration::from_secs(6));
        group.signal(*victim, Signal::CONT);
        group.assert_all_done();
    });
}

/// The rank that has no file descriptors left reports that, and what to do; the others name it.
#[test]
fn one_that_has_no_files_left_says_so() {
    for victim in [1, 3] {
        let script =
            |rank| if rank == victim { "ready; await; limit; barrier" } else { "ready; await; barrier" };
        let scripts: Vec<&str> = (0..4).map(script).collect();
        let mut group = Group::start(&scripts, &Setup::default());
        group.ready(group.all());
        group.tell(victim);
        let ending = group.finish(victim);
        let text = &ending.failure.as_ref().unwrap().text;
        assert!(text.starts_with("connecting to rank ") && text.contains("Too many open files"), "{text}");
        assert!(text.contains("ulimit -n"), "{text}");
        group.tell_all((0..4).filter(|rank| *rank != victim));
        for ending in group.finish_all() {
            let text = ending.assert_failed("PeerFailed", victim);
            assert!(
                text.starts_with(&format!("rank {victim} could not go on: connecting to rank ")),
                "{text}"
            );
            assert!(text.contains("Too many open files"), "{text}");
        }
    }
}
