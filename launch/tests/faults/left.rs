//! A rank closes its group: too early, or at the right time.

use crate::group::{Group, Setup, in_parallel};

#[test]
fn one_that_leaves_early_is_named() {
    let cases: Vec<(usize, usize)> =
        [2, 3, 4].into_iter().flat_map(|world| (0..world).map(move |early| (world, early))).collect();
    in_parallel(2, &cases, |(world_size, early)| {
        for (short, long) in [("", "barrier"), ("barrier; await", "barrier; ready; all_reduce f32 10 sum")] {
            let script = |rank| if rank == *early { short } else { long };
            let scripts: Vec<&str> = (0..*world_size).map(script).collect();
            let mut group = Group::start(&scripts, &Setup::default());
            if short.ends_with("await") {
                // Whoever is still in the barrier when the first of the others fails would name the barrier.
                group.ready(group.all().filter(|rank| rank != early));
                group.tell(*early);
            }
            for ending in group.finish_all() {
                match ending.rank == *early {
                    true => ending.assert_done(),
                    false => ending.assert_blames(
                        "PeerLeft",
                        *early,
                        long.rsplit("; ").next().unwrap().split(' ').next().unwrap(),
                    ),
                }
            }
        }
    });
}

/// It drops its group, and its process keeps running.
#[test]
fn one_that_drops_its_group_is_named() {
    for early in [0, 1] {
        let script = |rank| if rank == early { "barrier; close; await" } else { "barrier; barrier" };
        let scripts: Vec<&str> = (0..3).map(script).collect();
        let mut group = Group::start(&scripts, &Setup::default());
        let others: Vec<usize> = group.all().filter(|rank| *rank != early).collect();
        for rank in others {
            group.finish(rank).assert_blames("PeerLeft", early, "barrier");
        }
        group.tell(early);
        group.finish(early).assert_done();
    }
}

/// The others do not need rank 0 to communicate with each other.
#[test]
fn rank_0_may_be_the_first_to_end() {
    let scripts = [
        "barrier",
        "barrier; await; send f32 100000 2; recv f32 10 2; submit send f32 10 2; wait_all",
        "barrier; await; recv f32 100000 1; send f32 10 1; recv f32 10 1",
    ];
    let mut group = Group::start(&scripts, &Setup::default());
    group.finish(0).assert_done();
    group.tell_all(1..3);
    group.assert_all_done();
}

/// Rank 0 has left regularly; then another rank leaves too early, or dies.
#[test]
fn without_rank_0_the_others_still_name_the_culprit() {
    let cases = [("close", "PeerLeft"), ("exit 3", "PeerDied"), ("panic", "PeerDied")];
    for (end, kind) in cases {
        let scripts =
            ["barrier".into(), format!("barrier; await; {end}"), "barrier; ready; recv f32 10 1".into()];
        let mut group = Group::start(&scripts, &Setup::default());
        group.finish(0).assert_done();
        group.ready([2]);
        group.tell(1);
        group.finish(2).assert_blames(kind, 1, "message #1 (from rank 1, f32, 10 elements)");
    }
}

/// Rank 0 has done its part in the broadcast, and has sent messages after it; another rank left before the broadcast
/// was done.
#[test]
fn the_last_messages_of_rank_0_hide_no_collective() {
    let (calls, messages) = ("barrier; ready; broadcast f32 300000 0", "; send f32 10 1".repeat(9));
    let scripts = [format!("{calls}{messages}"), calls.into(), "barrier; await".into(), calls.into()];
    let mut group = Group::start(&scripts, &Setup::default());
    group.finish(0).assert_done();
    group.ready([1, 3]);
    group.tell(2);
    for rank in [1, 3] {
        group.finish(rank).assert_blames("PeerLeft", 2, "broadcast #2 (root 0, f32, 300000 elements)");
    }
    group.finish(2).assert_done();
}

/// Rank 0 has left regularly. Ranks wait for each other in a chain, at whose end one leaves too early, or dies: all
/// name that rank, not their neighbour.
#[test]
fn without_rank_0_the_culprit_is_passed_on() {
    for (end, kind) in [("close", "PeerLeft"), ("exit 3", "PeerDied"), ("panic", "PeerDied")] {
        let scripts = [
            "barrier".into(),
            "barrier; ready; recv f32 10 2".into(),
            "barrier; ready; recv f32 10 3; send f32 10 1".into(),
            "barrier; ready; recv f32 10 4; send f32 10 2".into(),
            format!("barrier; await; {end}"),
        ];
        let mut group = Group::start(&scripts, &Setup::default());
        group.finish(0).assert_done();
        group.ready(1..4);
        group.tell(4);
        for rank in 1..4 {
            let message = format!("message #1 (from rank {}, f32, 10 elements)", rank + 1);
            group.finish(rank).assert_blames(kind, 4, &message);
        }
        group.finish(4);
    }
}

/// The last call of a group completes at different times on different ranks.
#[test]
fn ranks_that_end_at_different_times_do_not_disturb_each_other() {
    for late in 0..4 {
        let script = |rank| match rank == late {
            true => "broadcast f32 100000 0; barrier; await",
            false => "broadcast f32 100000 0; barrier",
        };
        let scripts: Vec<&str> = (0..4).map(script).collect();
        let mut group = Group::start(&scripts, &Setup::default());
        let others: Vec<usize> = group.all().filter(|rank| *rank != late).collect();
        others.into_iter().for_each(|rank| group.finish(rank).assert_done());
        group.tell(late);
        group.finish(late).assert_done();
    }
}

#[test]
fn two_hundred_short_lives() {
    let endings = Group::start(&["cycles 200"; 3], &Setup::default()).finish_all();
    endings.iter().for_each(|ending| ending.assert_done());
}
