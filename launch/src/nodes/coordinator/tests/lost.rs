//! Tests of rounds that continue without some of their ranks.

use super::*;

#[test]
fn ranks_and_nodes_may_be_lost_as_long_as_there_are_enough() {
    let mut coordinator = elastic(3, 0);
    let now = Instant::now();
    let one = "rank 3 (pid 9, node 1, host h1) was killed by signal SIGKILL; the others go on, 5 in all";
    assert_eq!(shown(&coordinator.handle(1, lost(3), now)), [0, 1, 2].map(|node| format!("{node} {one}")));
    // A node that has lost all of its ranks still receives the outcome.
    assert_eq!(coordinator.handle(1, lost(2), now).len(), 3);
    assert!(coordinator.handle(1, NodeMessage::Ended(Ending::Done), now).is_empty());
    let too_few = shown(&coordinator.handle(2, NodeMessage::Gone, now));
    assert_eq!(too_few, ["0 stop"], "two are left of at least three");
    let over = shown(&coordinator.handle(0, failed(0, ExitKind::Code(75), 0), now));
    assert!(over.len() == 2 && over[0].contains("over: Gone(NodeName { node: 2"), "{over:?}");

    let mut coordinator = elastic(3, 0);
    let gone = "node 1 (host h1) is gone; the others go on, 4 in all";
    assert_eq!(
        shown(&coordinator.handle(1, NodeMessage::Gone, now)),
        [format!("0 {gone}"), format!("2 {gone}")]
    );
    assert!(coordinator.handle(0, NodeMessage::Ended(Ending::Done), now).is_empty());
    assert_eq!(
        shown(&coordinator.handle(2, NodeMessage::Ended(Ending::Done), now)),
        ["0 over: Done", "2 over: Done"]
    );
}

#[test]
fn without_the_last_rank_at_work_none_goes_on() {
    let now = Instant::now();
    let all_others_end = |coordinator: &mut Coordinator, last: usize| {
        for rank in (0..6).filter(|rank| *rank != last) {
            coordinator.handle(rank / 2, NodeMessage::HasEnded(rank), now);
        }
        coordinator.handle(1, NodeMessage::Ended(Ending::Done), now);
        coordinator.handle(last / 2, NodeMessage::HasEnded(last), now);
    };
    let mut coordinator = elastic(1, 0);
    all_others_end(&mut coordinator, 0);
    assert_eq!(shown(&coordinator.handle(0, lost(0), now)), ["0 stop", "2 stop"]);
    coordinator.handle(2, NodeMessage::Ended(Ending::Done), now);
    let over = shown(&coordinator.handle(0, NodeMessage::Ended(Ending::Done), now));
    assert!(over.len() == 3 && over[0].contains("over: Failed(WorkerFailure { rank: 0, "), "{over:?}");

    // One that the group excludes had no part in the work.
    let mut coordinator = elastic(1, 0);
    coordinator.handle(0, met(&[4]), now);
    all_others_end(&mut coordinator, 4);
    let orders = shown(&coordinator.handle(2, lost(4), now));
    assert!(orders[0].ends_with("; the others go on, 5 in all"), "{orders:?}");
}

#[test]
fn those_that_were_left_behind_are_not_left() {
    let now = Instant::now();
    let mut coordinator = elastic(1, 0);
    // The remaining ranks have formed a group without a stopped one, and two of them report that.
    assert!(coordinator.handle(0, met(&[4]), now).is_empty());
    assert!(coordinator.handle(1, met(&[4]), now).is_empty());
    let orders = shown(&coordinator.handle(0, lost(0), now));
    assert!(orders[0].ends_with("; the others go on, 4 in all"), "{orders:?}");
    // The excluded rank is counted once, even when it ends as well.
    let orders = shown(&coordinator.handle(2, lost(4), now));
    assert!(orders[0].ends_with("; the others go on, 4 in all"), "{orders:?}");

    let mut coordinator = elastic(1, 0);
    coordinator.handle(0, met(&[4, 5]), now);
    for rank in [0, 1, 2] {
        assert_eq!(coordinator.handle(rank / 2, lost(rank), now).len(), 3, "rank {rank}");
    }
    assert_eq!(shown(&coordinator.handle(1, lost(3), now)), ["0 stop", "1 stop", "2 stop"], "nobody is left");
}

#[test]
fn those_that_were_left_behind_are_not_left_even_where_that_is_heard_late() {
    let now = Instant::now();
    // Four have continued without two that are stopped, and have then failed.
    let mut coordinator = elastic(2, 0);
    for rank in 0..4 {
        assert_eq!(coordinator.handle(rank / 2, lost(rank), now).len(), 3, "rank {rank}");
    }
    assert_eq!(shown(&coordinator.handle(1, met(&[4, 5]), now)), ["0 stop", "1 stop", "2 stop"]);
    assert!(coordinator.handle(0, met(&[4, 5]), now).is_empty());
    coordinator.handle(0, NodeMessage::Ended(Ending::Done), now);
    coordinator.handle(1, NodeMessage::Ended(Ending::Done), now);
    let over = shown(&coordinator.handle(2, NodeMessage::Ended(Ending::Done), now));
    assert!(over.len() == 3 && over[0].contains("over: Failed(WorkerFailure { rank: 3, "), "{over:?}");
}

#[test]
fn with_too_few_all_start_again_where_all_launchers_are_there() {
    let now = Instant::now();
    let mut coordinator = elastic(5, 1);
    coordinator.handle(2, lost(5), now);
    assert_eq!(shown(&coordinator.handle(1, lost(3), now)), ["0 stop", "1 stop", "2 stop"]);
    coordinator.handle(0, failed(0, ExitKind::Code(75), 0), now);
    coordinator.handle(1, NodeMessage::Ended(Ending::Done), now);
    let again = shown(&coordinator.handle(2, NodeMessage::Ended(Ending::Done), now));
    assert!(again[0].starts_with("0 again 1/1: rank 3 (pid 9, node 1, host h1)"), "{again:?}");
    // The next round begins with all ranks.
    (0..3).for_each(|node| drop(coordinator.handle(node, ready_with(node, Some(5)), now)));
    let stop = ["0 stop", "1 stop", "2 stop", "0 missed 5 of h2"];
    assert!(shown(&coordinator.handle(2, lost(5), now)) == stop, "before they have met");

    let mut coordinator = elastic(3, 1);
    coordinator.handle(2, NodeMessage::Gone, now);
    coordinator.handle(0, lost(0), now);
    assert_eq!(shown(&coordinator.handle(0, lost(1), now)), ["0 stop", "1 stop"]);
    coordinator.handle(0, NodeMessage::Ended(Ending::Done), now);
    let over = shown(&coordinator.handle(1, failed(2, ExitKind::Code(75), 0), now));
    assert!(over.len() == 2 && over[0].contains("over: Failed(WorkerFailure { rank: 1, "), "{over:?}");
}

#[test]
fn a_launcher_that_is_stopped_leaves_but_the_first_one_ends_the_job() {
    let now = Instant::now();
    let stopped = || NodeMessage::Ended(Ending::Stopped("stopped by SIGTERM".into()));
    let mut coordinator = elastic(4, 1);
    let left = "node 2 (host h2) has left: stopped by SIGTERM; the others go on, 4 in all";
    let orders = shown(&coordinator.handle(2, stopped(), now));
    assert_eq!(orders[..2], [format!("0 {left}"), format!("1 {left}")]);
    assert!(orders[2].starts_with("2 over: Stopped"), "{orders:?}");
    assert_eq!(shown(&coordinator.handle(0, stopped(), now)), ["1 stop"]);
    let over = shown(&coordinator.handle(1, NodeMessage::Ended(Ending::Done), now));
    assert!(over.len() == 2 && over[0].contains("node: 0"), "{over:?}");

    let mut coordinator = elastic(5, 1);
    assert_eq!(shown(&coordinator.handle(2, stopped(), now)), ["0 stop", "1 stop"], "too few are left");
}

/// Two nodes with two ranks each; no report yet that they have formed a group.
fn before_they_met(min: usize) -> Coordinator {
    let mut coordinator = coordinator(2, 0);
    let now = Instant::now();
    (0..2).for_each(|node| drop(coordinator.handle(node, ready_with(node, Some(min)), now)));
    coordinator
}

#[test]
fn one_that_was_lost_before_the_ranks_were_heard_to_have_met_is_lost_like_a_later_one() {
    let now = Instant::now();
    let go_on = "rank 3 (pid 9, node 1, host h1) was killed by signal SIGKILL; the others go on, 3 in all";
    let all_go_on = |what: &str| [0, 1].map(|node| format!("{node} {what}"));
    // The other node's launcher has received the report, its own has not yet.
    let mut coordinator = before_they_met(2);
    assert!(coordinator.handle(0, met(&[]), now).is_empty());
    assert_eq!(shown(&coordinator.handle(1, lost(3), now)), all_go_on(go_on));
    // No launcher has received the report.
    let mut coordinator = before_they_met(2);
    assert_eq!(shown(&coordinator.handle(1, lost(3), now)), ["0 stop", "1 stop", "0 missed 3 of h1"]);
    assert_eq!(shown(&coordinator.handle(0, met(&[]), now)), all_go_on(go_on));
    assert!(coordinator.handle(1, met(&[]), now).is_empty());
    assert!(coordinator.handle(0, NodeMessage::Ended(Ending::Done), now).is_empty());
    let over = shown(&coordinator.handle(1, NodeMessage::Ended(Ending::Done), now));
    assert_eq!(over, ["0 over: Done", "1 over: Done"]);
    // Too few ranks are left.
    let mut coordinator = before_they_met(4);
    assert_eq!(coordinator.handle(1, lost(3), now).len(), 3);
    assert!(coordinator.handle(0, met(&[]), now).is_empty());
    assert_eq!(coordinator.handle(0, failed(0, ExitKind::Code(75), 0), now).len(), 1);
    let over = shown(&coordinator.handle(1, failed(3, SIGKILL, 9), now));
    assert!(over[0].starts_with("0 over: Failed(WorkerFailure { rank: 3"), "{over:?}");
}

#[test]
fn a_node_that_was_lost_before_the_ranks_were_heard_to_have_met_as_well() {
    let now = Instant::now();
    let mut coordinator = before_they_met(2);
    assert_eq!(shown(&coordinator.handle(1, NodeMessage::Gone, now)), ["0 stop"]);
    assert_eq!(
        shown(&coordinator.handle(0, met(&[]), now)),
        ["0 node 1 (host h1) is gone; the others go on, 2 in all"]
    );
    assert_eq!(shown(&coordinator.handle(0, NodeMessage::Ended(Ending::Done), now)), ["0 over: Done"]);

    // A node that has lost its ranks has nothing to stop, and receives the outcome.
    let mut coordinator = before_they_met(1);
    assert_eq!(coordinator.handle(1, lost(3), now).len(), 3);
    assert_eq!(shown(&coordinator.handle(1, lost(2), now)), ["0 stop", "0 missed 2 of h1"]);
    assert_eq!(shown(&coordinator.handle(1, NodeMessage::Ended(Ending::Done), now)), ["0 stop"]);
    assert_eq!(shown(&coordinator.handle(0, met(&[]), now)).len(), 4);
    assert_eq!(
        shown(&coordinator.handle(0, NodeMessage::Ended(Ending::Done), now)),
        ["0 over: Done", "1 over: Done"]
    );
}

#[test]
fn the_last_lines_of_the_first_cause_come_when_they_are_all_there() {
    let now = Instant::now();
    let mut coordinator = before_they_met(2);
    coordinator.handle(1, lost(3), now);
    coordinator.handle(1, lost(2), now);
    for rank in [3, 2, 7] {
        let lines = vec![format!("of {rank}")];
        assert!(coordinator.handle(1, NodeMessage::LastLines { rank, lines }, now).is_empty());
    }
    // A node's messages about the ranks of another node are ignored.
    coordinator.handle(0, NodeMessage::LastLines { rank: 3, lines: vec![] }, now);
    coordinator.handle(1, NodeMessage::Ended(Ending::Done), now);
    let orders = coordinator.handle(0, NodeMessage::Ended(Ending::Done), now);
    assert_eq!(orders.len(), 2);
    for (_, order) in orders {
        let Order::Over(JobOutcome::Failed(failure)) = order else { panic!() };
        assert_eq!(
            (failure.rank, failure.also_failed, failure.stderr_tail),
            (3, 1, vec!["of 3".to_string()])
        );
    }
}

#[test]
fn before_the_ranks_have_met_none_may_be_lost() {
    let now = Instant::now();
    let mut coordinator = coordinator(2, 0);
    (0..2).for_each(|node| drop(coordinator.handle(node, ready_with(node, Some(1)), now)));
    assert_eq!(shown(&coordinator.handle(1, NodeMessage::Gone, now)), ["0 stop"]);
}

#[test]
fn a_launcher_vouches_for_the_end_of_its_own_ranks_only() {
    let mut coordinator = elastic(1, 0);
    let now = Instant::now();
    assert_eq!(
        shown(&coordinator.handle(1, NodeMessage::HasEnded(2), now)),
        ["0 ended 2", "1 ended 2", "2 ended 2"]
    );
    assert!(coordinator.handle(1, NodeMessage::HasEnded(0), now).is_empty());
    assert!(coordinator.handle(2, NodeMessage::HasEnded(6), now).is_empty());
    // The fate of the ranks of a lost node is unknown.
    assert_eq!(coordinator.handle(2, NodeMessage::Gone, now).len(), 2);
    assert_eq!(shown(&coordinator.handle(0, NodeMessage::HasEnded(1), now)), ["0 ended 1", "1 ended 1"]);
}
