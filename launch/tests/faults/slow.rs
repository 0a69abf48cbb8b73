//! A rank that is slow.

use std::time::Duration;

use crate::group::{Group, Setup, in_parallel};

/// Slower than the warning, faster than the timeout.
#[test]
fn the_others_are_warned_and_the_job_is_done() {
    let cases: Vec<usize> = (0..3).collect();
    in_parallel(cases.len(), &cases, |slow| {
        let script = |rank| match rank == *slow {
            true => "barrier; sleep 2000; all_reduce f32 10 sum; barrier",
            false => "barrier; all_reduce f32 10 sum; barrier",
        };
        let scripts: Vec<&str> = (0..3).map(script).collect();
        let setup = Setup { slow_warning: Duration::from_secs(1), ..Setup::default() };
        for ending in Group::start(&scripts, &setup).finish_all() {
            ending.assert_done();
            let warning =
                format!("WARN all_reduce #2 (sum, f32, 10 elements): waiting for rank {slow} (host ");
            let warned = ending.stderr.lines().filter(|line| line.starts_with(&warning)).count();
            assert_eq!(warned, usize::from(ending.rank != *slow), "{ending:#?}");
            let warnings = ending.stderr.lines().filter(|line| line.starts_with("WARN")).count();
            assert_eq!(warnings, warned, "{ending:#?}");
            if warned > 0 {
                assert!(ending.stderr.contains("outside of any operation, barrier #1 was its last"));
            }
        }
    });
}

/// Slower than the timeout: in user code, not stopped.
#[test]
fn too_slow_is_a_time_out() {
    let cases: Vec<(usize, usize)> =
        [2, 3, 4].into_iter().flat_map(|world| (0..world).map(move |slow| (world, slow))).collect();
    in_parallel(cases.len(), &cases, |(world_size, slow)| {
        let script = |rank| match rank == *slow {
            // What the others sent may have come whole before they gave up: only the barrier needs more of them.
            true => "barrier; ready; await; all_reduce f32 10 sum; barrier",
            false => "barrier; all_reduce f32 10 sum",
        };
        let scripts: Vec<&str> = (0..*world_size).map(script).collect();
        let setup = Setup { timeout: Duration::from_secs(2), ..Setup::default() };
        let mut group = Group::start(&scripts, &setup);
        group.ready([*slow]);
        let others: Vec<usize> = group.all().filter(|rank| rank != slow).collect();
        for ending in others.into_iter().map(|rank| group.finish(rank)) {
            ending.assert_blames("Timeout", *slow, "all_reduce #2 (sum, f32, 10 elements) within 2.0 s");
            let text = &ending.failure.as_ref().unwrap().text;
            assert!(text.contains("it is outside of any operation, barrier #1 was its last"), "{text}");
        }
        group.tell(*slow);
        // It gets the cause of the failure: itself.
        let ending = group.finish(*slow);
        if *slow != 0 || *world_size == 2 {
            ending.assert_failed("Timeout", *slow);
        }
    });
}

/// The sender is outside of any operation.
#[test]
fn a_message_that_never_comes() {
    let scripts = ["barrier; recv f32 10 1", "barrier; ready; await", "barrier; ready; await"];
    let setup = Setup { timeout: Duration::from_secs(2), ..Setup::default() };
    let mut group = Group::start(&scripts, &setup);
    group.ready([1, 2]);
    group.finish(0).assert_blames("Timeout", 1, "message #1 (from rank 1, f32, 10 elements)");
    group.tell_all(1..3);
    // They needed nothing more from the group.
    group.assert_all_done();
}

/// Ranks that wait for each other in different operations, and would wait indefinitely: the message says what the
/// culprit is doing.
#[test]
fn a_message_among_collectives() {
    let mut scripts = ["all_reduce f32 10 sum"; 4];
    scripts[0] = "recv f32 10 3";
    let setup = Setup { timeout: Duration::from_secs(2), ..Setup::default() };
    let endings = Group::start(&scripts, &setup).finish_all();
    let culprit = endings[0].failure.as_ref().unwrap().culprit.unwrap();
    assert!(culprit == 0 || culprit == 3, "{endings:#?}");
    for ending in &endings {
        let text = ending.assert_failed("Timeout", culprit);
        let does = ["it is still in message #1 (from rank 3", "it is still in all_reduce #1 (sum"];
        assert!(text.contains(does[usize::from(culprit == 3)]), "{text}");
    }
}
