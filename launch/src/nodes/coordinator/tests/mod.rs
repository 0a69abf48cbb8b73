//! Tests of the coordinator: the messages that nodes send, in many orders, and the orders that they get.

mod lost;

use proptest::prelude::*;

use super::*;

fn coordinator(nodes: usize, max_restarts: usize) -> Coordinator {
    let round = Round { run_id: "run".into(), secret: None, host: None, port: 0, restart: 0, max_restarts };
    Coordinator::new((0..nodes).map(|node| format!("h{node}")).collect(), round)
}

fn ready(node: usize) -> NodeMessage {
    ready_with(node, None)
}

fn ready_with(node: usize, elastic: Option<usize>) -> NodeMessage {
    let (host, port) = (format!("h{node}"), 1000 + node as u16);
    NodeMessage::Ready { host, local_world_size: 2, port, elastic, max_restarts: 0 }
}

fn failed(rank: usize, status: ExitKind, ago_ms: u64) -> NodeMessage {
    let failure =
        WorkerFailure { rank, pid: 9, status, stderr_tail: vec![], also_failed: 1, node: None, log: None };
    NodeMessage::Ended(Ending::Failed { failure, ago_ms, is_final: false })
}

/// Orders in short form, with their nodes.
fn shown(orders: &Orders) -> Vec<String> {
    let short = |order: &Order| match order {
        Order::Start(round) => format!("start {} at {}", round.restart, round.port),
        Order::Stop => "stop".into(),
        Order::GoOn(what) | Order::Note(what) => what.clone(),
        Order::HasEnded(rank) => format!("ended {rank}"),
        Order::IsMissed { rank, host } => format!("missed {rank} of {host}"),
        Order::Again { reason, restart, of } => format!("again {restart}/{of}: {reason}"),
        Order::Over(outcome) => format!("over: {outcome:?}"),
    };
    orders.iter().map(|(node, order)| format!("{node} {}", short(order))).collect()
}

/// Starts a round on all nodes.
fn start(coordinator: &mut Coordinator) {
    let nodes = coordinator.states.len();
    let now = Instant::now();
    let orders: Orders =
        (0..nodes).rev().flat_map(|node| coordinator.handle(node, ready(node), now)).collect();
    assert_eq!(orders.len(), nodes);
}

#[test]
fn all_start_once_all_are_ready_and_end_when_all_have_ended() {
    let mut coordinator = coordinator(2, 0);
    let now = Instant::now();
    assert!(coordinator.handle(1, ready(1), now).is_empty());
    assert_eq!(shown(&coordinator.handle(0, ready(0), now)), ["0 start 0 at 1000", "1 start 0 at 1000"]);
    assert!(coordinator.handle(0, NodeMessage::Ended(Ending::Done), now).is_empty());
    assert_eq!(
        shown(&coordinator.handle(1, NodeMessage::Ended(Ending::Done), now)),
        ["0 over: Done", "1 over: Done"]
    );
    assert!(
        coordinator.handle(1, NodeMessage::Gone, now).is_empty(),
        "what comes after the end means nothing"
    );
}

#[test]
fn a_failure_stops_the_others_and_all_start_again_as_often_as_they_may() {
    let mut coordinator = coordinator(2, 1);
    let now = Instant::now();
    start(&mut coordinator);
    let failing = NodeMessage::Failing { rank: 3, status: SIGKILL };
    assert_eq!(shown(&coordinator.handle(1, failing, now)), ["0 stop", "1 stop", "0 missed 3 of h1"]);
    assert_eq!(shown(&coordinator.handle(1, failed(3, SIGKILL, 5), now)), ["0 stop"]);
    let again = "again 1/1: rank 3 (pid 9, node 1, host h1) was killed by signal SIGKILL";
    let orders = coordinator.handle(0, failed(0, ExitKind::Code(75), 3), now);
    assert_eq!(shown(&orders), [format!("0 {again}"), format!("1 {again}")]);
    assert!(coordinator.handle(0, ready(0), now).is_empty());
    assert_eq!(shown(&coordinator.handle(1, ready(1), now)), ["0 start 1 at 1000", "1 start 1 at 1000"]);
    coordinator.handle(0, NodeMessage::Ended(Ending::Done), now);
    let over = shown(&coordinator.handle(1, failed(2, ExitKind::Code(3), 0), now));
    assert!(over.len() == 2 && over[0].contains("rank: 2") && over[0].contains("also_failed: 1"), "{over:?}");
}

#[test]
fn the_first_cause_is_the_earliest_own_one_and_a_kill_comes_first() {
    let now = Instant::now();
    let cause = |messages: [(usize, ExitKind, u64); 2]| {
        let mut coordinator = coordinator(2, 0);
        start(&mut coordinator);
        let mut orders = Vec::new();
        for (node, (rank, status, ago)) in messages.into_iter().enumerate() {
            orders = coordinator.handle(node, failed(rank, status, ago), now);
        }
        match &orders[0].1 {
            Order::Over(JobOutcome::Failed(failure)) => (failure.rank, failure.also_failed),
            _ => panic!("{:?}", shown(&orders)),
        }
    };
    use ExitKind::Code;
    assert_eq!(cause([(0, Code(75), 900), (2, Code(1), 100)]), (2, 3));
    assert_eq!(cause([(0, Code(1), 900), (2, Code(1), 100)]), (0, 3));
    assert_eq!(cause([(0, Code(1), 300), (2, SIGKILL, 100)]), (2, 3));
    assert_eq!(cause([(0, Code(1), 900), (2, SIGKILL, 100)]), (0, 3));
    assert_eq!(cause([(0, Code(75), 100), (2, Code(75), 200)]), (2, 3));
}

#[test]
fn a_node_that_is_gone_ends_the_job_without_a_restart() {
    let mut coordinator = coordinator(3, 5);
    let now = Instant::now();
    start(&mut coordinator);
    assert_eq!(shown(&coordinator.handle(1, NodeMessage::Gone, now)), ["0 stop", "2 stop"]);
    assert_eq!(shown(&coordinator.handle(0, failed(0, ExitKind::Code(75), 0), now)), ["2 stop"]);
    let over = "over: Gone(NodeName { node: 1, host: \"h1\" })";
    let orders = coordinator.handle(2, NodeMessage::Ended(Ending::Done), now);
    assert_eq!(shown(&orders), [format!("0 {over}"), format!("2 {over}")]);
}

#[test]
fn one_that_goes_before_the_start_ends_the_job_at_once() {
    let mut coordinator = coordinator(2, 5);
    let now = Instant::now();
    coordinator.handle(0, ready(0), now);
    assert_eq!(coordinator.handle(1, NodeMessage::Gone, now).len(), 1);
}

#[test]
fn other_numbers_of_ranks_are_refused_by_name() {
    let mut coordinator = coordinator(2, 0);
    let now = Instant::now();
    coordinator.handle(0, ready(0), now);
    let odd =
        NodeMessage::Ready { host: "b".into(), local_world_size: 3, port: 0, elastic: None, max_restarts: 0 };
    let orders = shown(&coordinator.handle(1, odd, now));
    let part = "--nproc-per-node: got 3, node 0 (host h0) has 2; give the same on every node";
    assert!(orders.len() == 2 && orders[0].contains(part) && orders[0].contains("node: 1"), "{orders:?}");
}

#[test]
fn another_elastic_is_refused_by_name() {
    for (first, second, part) in [
        (Some(2), None, "--elastic: got nothing, node 0 (host h0) has at least 2 ranks; give the same"),
        (None, Some(3), "--elastic: got at least 3 ranks, node 0 (host h0) has nothing; give the same"),
    ] {
        let mut coordinator = coordinator(2, 0);
        let now = Instant::now();
        coordinator.handle(0, ready_with(0, first), now);
        let orders = shown(&coordinator.handle(1, ready_with(1, second), now));
        assert!(orders.len() == 2 && orders[0].contains(part), "{orders:?}");
    }
}

#[test]
fn another_number_of_restarts_is_refused_by_name() {
    let mut coordinator = coordinator(2, 1);
    let now = Instant::now();
    coordinator.handle(0, ready(0), now);
    let odd =
        NodeMessage::Ready { host: "b".into(), local_world_size: 2, port: 0, elastic: None, max_restarts: 3 };
    let orders = shown(&coordinator.handle(1, odd, now));
    let part = "--max-restarts: got 3, node 0 (host h0) has 0; give the same on every node";
    assert!(orders.len() == 2 && orders[0].contains(part) && orders[0].contains("node: 1"), "{orders:?}");
}

#[test]
fn a_launcher_that_is_not_heard_of_ends_the_job_by_name() {
    let mut coordinator = coordinator(3, 5);
    let now = Instant::now();
    start(&mut coordinator);
    coordinator.handle(0, NodeMessage::Ended(Ending::Done), now);
    coordinator.handle(2, NodeMessage::Ended(Ending::Done), now);
    let over = "over: Silent { node: NodeName { node: 1, host: \"h1\" }, ms: 5000 }";
    let orders = coordinator.handle(1, NodeMessage::Silent { ms: 5000 }, now);
    assert_eq!(shown(&orders), [format!("0 {over}"), format!("2 {over}")]);

    let mut coordinator = elastic(3, 0);
    let go_on = "node 1 (host h1) is given up: nothing was heard of its launcher for 5.0 s; the others go on, 4 in all";
    let orders = coordinator.handle(1, NodeMessage::Silent { ms: 5000 }, now);
    assert_eq!(shown(&orders), [0, 2].map(|node| format!("{node} {go_on}")));
}

/// It is the first cause, unless it failed because of another rank.
#[test]
fn a_rank_that_had_failed_before_a_node_is_missed_is_told_of() {
    let now = Instant::now();
    for (message, what) in [
        (NodeMessage::Silent { ms: 5000 }, "is given up: nothing was heard of its launcher for 5.0 s"),
        (NodeMessage::Gone, "is gone"),
    ] {
        let mut coordinator = coordinator_of_two(ExitKind::Code(3));
        let orders = shown(&coordinator.handle(1, message.clone(), now));
        assert_eq!(orders[0], format!("0 node 1 (host h1) {what}"));
        assert!(
            orders.len() == 2 && orders[1].starts_with("0 over: Failed(") && orders[1].contains("Code(3)")
        );

        let mut coordinator = coordinator_of_two(ExitKind::Code(EXIT_PEER_FAILED));
        let orders = shown(&coordinator.handle(1, message, now));
        assert!(orders.len() == 1 && !orders[0].contains("Failed"), "{orders:?}");
    }
}

/// A rank of the first node has failed; the second node still runs.
fn coordinator_of_two(status: ExitKind) -> Coordinator {
    let mut coordinator = coordinator(2, 3);
    start(&mut coordinator);
    coordinator.handle(0, failed(1, status, 0), Instant::now());
    coordinator
}

fn lost(rank: usize) -> NodeMessage {
    let status = SIGKILL;
    let failure =
        WorkerFailure { rank, pid: 9, status, stderr_tail: vec![], also_failed: 0, node: None, log: None };
    NodeMessage::Lost { failure, is_final: false }
}

fn met(without: &[usize]) -> NodeMessage {
    NodeMessage::Met { without: without.to_vec() }
}

/// An elastic round of three nodes with two ranks each, whose ranks have formed a group.
fn elastic(min: usize, max_restarts: usize) -> Coordinator {
    let mut coordinator = coordinator(3, max_restarts);
    let now = Instant::now();
    let orders: Orders =
        (0..3).flat_map(|node| coordinator.handle(node, ready_with(node, Some(min)), now)).collect();
    assert_eq!(orders.len(), 3);
    assert!(coordinator.handle(1, met(&[]), now).is_empty());
    coordinator
}

#[test]
fn who_blames_another_rank_or_is_of_the_first_node_is_not_missed() {
    let now = Instant::now();
    let stop = ["0 stop", "1 stop"];
    for (node, rank, status) in [(1, 3, ExitKind::Code(75)), (0, 1, SIGKILL), (1, 0, SIGKILL)] {
        let mut coordinator = coordinator(2, 0);
        start(&mut coordinator);
        assert_eq!(shown(&coordinator.handle(node, NodeMessage::Failing { rank, status }, now)), stop);
    }
}

#[test]
fn a_stop_and_a_failure_that_is_final_end_it_in_spite_of_restarts() {
    let now = Instant::now();
    let mut stopped = coordinator(2, 5);
    start(&mut stopped);
    assert_eq!(
        shown(&stopped.handle(0, NodeMessage::Ended(Ending::Stopped("SIGINT".into())), now)),
        ["1 stop"]
    );
    let orders = shown(&stopped.handle(1, failed(2, ExitKind::Code(75), 0), now));
    assert!(orders.len() == 2 && orders[0].contains("SIGINT"), "{orders:?}");

    let mut alone = coordinator(1, 5);
    start(&mut alone);
    let NodeMessage::Ended(Ending::Failed { failure, ago_ms, .. }) = failed(1, ExitKind::Code(2), 0) else {
        panic!()
    };
    let orders = alone.handle(0, NodeMessage::Ended(Ending::Failed { failure, ago_ms, is_final: true }), now);
    assert!(matches!(&orders[0].1, Order::Over(JobOutcome::Failed(failure)) if failure.node.is_none()));
}

/// What a node does next; only relevant while its ranks run.
#[derive(Debug, Clone, Copy)]
enum Move {
    Done,
    Fails,
    IsKilled,
    Stops,
    Goes,
    LosesOne,
}

fn moves() -> impl Strategy<Value = Vec<(usize, Move)>> {
    let one = prop_oneof![
        6 => Just(Move::Done),
        3 => Just(Move::Fails),
        1 => Just(Move::IsKilled),
        1 => Just(Move::Stops),
        1 => Just(Move::Goes),
        3 => Just(Move::LosesOne),
    ];
    proptest::collection::vec((0_usize..8, one), 0..60)
}

proptest! {
    /// Whatever happens in whatever order, all remaining nodes receive the same outcome, once, after at most the
    /// permitted number of rounds.
    #[test]
    fn all_come_to_the_same_end(
        (nodes, max_restarts) in (1_usize..5, 0_usize..3),
        elastic in proptest::option::of(1_usize..5),
        moves in moves(),
    ) {
        let mut coordinator = coordinator(nodes, max_restarts);
        let now = Instant::now();
        let (mut runs, mut gone, mut starts) = (vec![false; nodes], vec![false; nodes], 0);
        let mut ends: Vec<Vec<JobOutcome>> = vec![Vec::new(); nodes];
        let ready = |node: usize| (node, ready_with(node, elastic));
        let mut messages: std::collections::VecDeque<(usize, NodeMessage)> = (0..nodes).map(ready).collect();
        let mut moves = moves.into_iter();
        loop {
            while let Some((node, message)) = messages.pop_front() {
                for (to, order) in coordinator.handle(node, message, now) {
                    match order {
                        Order::Start(round) => {
                            prop_assert!(!gone[to] && round.restart <= max_restarts);
                            starts += usize::from(to == 0);
                            runs[to] = true;
                            messages.push_back((to, met(&[])));
                        }
                        // The node's ranks end, and it reports that.
                        Order::Stop if runs[to] => {
                            runs[to] = false;
                            messages.push_back((to, failed(to, ExitKind::Code(75), 0)));
                        }
                        Order::Stop
                        | Order::GoOn(_)
                        | Order::Note(_)
                        | Order::HasEnded(_)
                        | Order::IsMissed { .. } => {}
                        Order::Again { .. } => messages.push_back(ready(to)),
                        Order::Over(outcome) => ends[to].push(outcome),
                    }
                }
            }
            if !runs.contains(&true) {
                break;
            }
            let (node, next) = moves.next().unwrap_or((starts % nodes, Move::Done));
            let node = (node..node + nodes).map(|node| node % nodes).find(|&node| runs[node]).unwrap();
            runs[node] = matches!(next, Move::LosesOne);
            let message = match next {
                Move::LosesOne => lost(2 * node),
                Move::Done => NodeMessage::Ended(Ending::Done),
                Move::Fails => failed(node, ExitKind::Code(1), 0),
                Move::IsKilled => failed(node, SIGKILL, 0),
                Move::Stops => NodeMessage::Ended(Ending::Stopped("stopped".into())),
                Move::Goes => {
                    gone[node] = true;
                    NodeMessage::Gone
                }
            };
            messages.push_back((node, message));
        }
        prop_assert!(starts <= max_restarts + 1);
        let left: Vec<_> = (0..nodes).filter(|&node| !gone[node]).collect();
        prop_assert!(left.iter().all(|&node| ends[node].len() == 1), "{ends:?}");
        // A launcher that was stopped may have left while the others continued.
        let has_left = |&node: &usize| {
            elastic.is_some() && matches!(&ends[node][0], JobOutcome::Stopped { node: by, .. } if by.node == node)
        };
        let stayed: Vec<_> = left.into_iter().filter(|node| !has_left(node)).collect();
        prop_assert!(stayed.iter().all(|&node| ends[node] == ends[stayed[0]]), "{ends:?}");
    }
}
