//! A rank is killed with SIGKILL.

use std::sync::Mutex;

use rustix::process::Signal;

use crate::ending::summary;
use crate::group::{Group, Setup, in_parallel};

/// Time limit for detecting a death. It takes less than a second on a quiet machine; the time is printed.
const BOUND_MS: f64 = 5000.0;

const COLLECTIVES: [&str; 7] = [
    "all_reduce f32 4 sum", "all_reduce f32 2000000 sum", "broadcast f32 1000 0", "reduce f32 1000 sum 0",
    "all_gather f32 1000", "reduce_scatter f32 1000 sum", "barrier",
];

/// Kills the victim when all are ready, and asserts that the others report it. Returns the longest delay in
/// milliseconds.
fn kill(scripts: &[String], victim: usize, operation: &str) -> f64 {
    let mut group = Group::start(scripts, &Setup::default());
    group.ready(group.all());
    let at = group.signal(victim, Signal::KILL);
    let mut longest: f64 = 0.0;
    for ending in group.finish_all() {
        if ending.rank == victim {
            assert_eq!(ending.signal, Some(9));
            continue;
        }
        ending.assert_blames("PeerDied", victim, &format!("died during {operation}"));
        let delay = ending.delay(at);
        assert!(delay < BOUND_MS, "{delay} ms, {ending:#?}");
        longest = longest.max(delay);
    }
    longest
}

fn in_every_collective(world_size: usize) {
    let cases: Vec<(usize, &str)> =
        (0..world_size).flat_map(|victim| COLLECTIVES.map(|call| (victim, call))).collect();
    let delays = Mutex::new(Vec::new());
    in_parallel(1, &cases, |(victim, call)| {
        let scripts = vec![format!("repeat {call}"); world_size];
        let delay = kill(&scripts, *victim, call.split(' ').next().unwrap());
        delays.lock().unwrap().push(delay);
    });
    let what = format!("{world_size} ranks, from kill to the last error");
    println!("{}", summary(&what, &delays.into_inner().unwrap()));
}

#[test]
fn each_of_two_in_every_collective() {
    in_every_collective(2);
}

#[test]
fn each_of_three_in_every_collective() {
    in_every_collective(3);
}

#[test]
fn each_of_four_in_every_collective() {
    in_every_collective(4);
}

#[test]
fn while_the_others_wait_for_its_message() {
    for world_size in [2, 3, 4] {
        for victim in 0..world_size {
            let script = |rank| match rank == victim {
                true => "ready; await".to_string(),
                false => format!("ready; recv f32 10 {victim}"),
            };
            let scripts: Vec<String> = (0..world_size).map(script).collect();
            kill(&scripts, victim, "");
        }
    }
}

#[test]
fn while_the_others_wait_in_the_queue() {
    for victim in 0..3 {
        let script = |rank| match rank == victim {
            true => "barrier; ready; await".to_string(),
            false => "barrier; submit barrier; submit all_reduce f32 10 sum; ready; wait_all".to_string(),
        };
        let scripts: Vec<String> = (0..3).map(script).collect();
        // The first of them may not have begun yet.
        kill(&scripts, victim, "barrier");
    }
}

#[test]
fn while_the_others_compute() {
    for (world_size, victim) in [(2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 3)] {
        let script = "barrier; ready; await; all_reduce f32 10 sum";
        let mut group = Group::start(&vec![script; world_size], &Setup::default());
        group.ready(group.all());
        group.signal(victim, Signal::KILL);
        assert_eq!(group.finish(victim).signal, Some(9));
        let others = group.all().filter(|rank| *rank != victim);
        group.tell_all(others);
        let at = crate::worker::now();
        for ending in group.finish_all() {
            ending.assert_blames("PeerDied", victim, "died during all_reduce");
            assert!(ending.delay(at) < BOUND_MS, "{ending:#?}");
        }
    }
}

#[test]
fn when_it_ends_without_a_word() {
    for victim in [0, 1] {
        let script = |rank| if rank == victim { "barrier; exit 3" } else { "barrier; barrier" };
        let scripts: Vec<&str> = (0..3).map(script).collect();
        for ending in Group::start(&scripts, &Setup::default()).finish_all() {
            match ending.rank == victim {
                true => assert_eq!(ending.code, Some(3)),
                false => ending.assert_blames("PeerDied", victim, "died during barrier"),
            }
        }
    }
}

#[test]
fn when_it_panics() {
    for victim in [0, 1, 2] {
        let script = |rank| match rank == victim {
            true => "barrier; await; panic",
            false => "barrier; ready; all_reduce f32 10 sum",
        };
        let scripts: Vec<&str> = (0..3).map(script).collect();
        let mut group = Group::start(&scripts, &Setup::default());
        group.ready(group.all().filter(|rank| *rank != victim));
        group.tell(victim);
        for ending in group.finish_all() {
            match ending.rank == victim {
                true => assert_eq!(ending.code, Some(101), "{ending:#?}"),
                false => ending.assert_blames("PeerDied", victim, "died during all_reduce"),
            }
        }
    }
}
