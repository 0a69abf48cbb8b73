//! Tests of the choice of a cause from what the ranks report.

use std::time::Duration;

use super::*;
use crate::ReduceOp;
use crate::base::fingerprint::CallKind;
use crate::base::members::Members;
use candle_core::DType;

fn call(sequence: u64, elements: usize) -> Fingerprint {
    Fingerprint::new(CallKind::AllReduce, sequence).reduce(ReduceOp::Sum).tensor(DType::F32, elements)
}

fn within(call: Fingerprint) -> Status {
    let mut activity = Activity::default();
    activity.begin(call);
    Status::Active(activity)
}

fn after(call: Fingerprint) -> Status {
    let mut activity = Activity::default();
    activity.begin(call);
    activity.end();
    Status::Active(activity)
}

#[test]
fn the_odd_rank_is_the_one_that_most_disagree_with() {
    let question = Question::Mismatch { peer: 0, mine: call(4, 10), theirs: call(4, 11) };
    let statuses = [within(call(4, 11)), within(call(4, 10)), within(call(4, 10))];
    let cause = choose_cause(1, &question, &statuses);
    assert_eq!(cause, Some(Cause::Mismatch { odd_rank: 0, odd: call(4, 11), rank: 1, call: call(4, 10) }));
    let statuses = [within(call(4, 11)), within(call(4, 10))];
    let cause = choose_cause(1, &question, &statuses);
    assert_eq!(cause, Some(Cause::Mismatch { odd_rank: 1, odd: call(4, 10), rank: 0, call: call(4, 11) }));
}

#[test]
fn ranks_that_never_talked_are_found_to_disagree() {
    let barrier = Fingerprint::new(CallKind::Barrier, 2);
    let question = Question::Stuck { peer: 1, last: false, apart: false };
    let cause = choose_cause(0, &question, &[within(call(2, 1)), within(call(2, 1)), within(barrier)]);
    assert_eq!(cause, Some(Cause::Mismatch { odd_rank: 2, odd: barrier, rank: 0, call: call(2, 1) }));
    assert_eq!(choose_cause(0, &question, &[within(call(2, 1)), after(call(1, 1))]), None);
}

#[test]
fn the_first_place_counts_where_ranks_went_on() {
    let mut ahead = Activity::default();
    ahead.begin(call(1, 10));
    ahead.end();
    ahead.begin(call(2, 10));
    // Rank 0 received nothing from rank 2 in its first call, and detects the difference in the second.
    let statuses = [Status::Active(ahead), within(call(1, 10)), within(call(1, 11))];
    let question = Question::Mismatch { peer: 2, mine: call(2, 10), theirs: call(1, 11) };
    let cause = choose_cause(0, &question, &statuses);
    assert_eq!(cause, Some(Cause::Mismatch { odd_rank: 2, odd: call(1, 11), rank: 0, call: call(1, 10) }));
}

#[test]
fn a_rank_on_its_way_may_turn_the_majority() {
    let question = Question::Mismatch { peer: 1, mine: call(4, 10), theirs: call(4, 11) };
    let late = after(call(3, 10));
    let undecided = [within(call(4, 10)), within(call(4, 11)), late.clone()];
    assert!(may_change(&choose_cause(0, &question, &undecided).unwrap(), &undecided));
    let decided = [within(call(4, 10)), within(call(4, 11)), within(call(4, 10))];
    assert!(!may_change(&choose_cause(0, &question, &decided).unwrap(), &decided));
    let decided = [vec![within(call(4, 10)); 3], vec![within(call(4, 11)), late]].concat();
    assert!(!may_change(&choose_cause(0, &question, &decided).unwrap(), &decided));
}

#[test]
fn a_rank_that_has_left_may_have_done_its_part() {
    let statuses = [within(call(1, 1)), Status::Left, within(call(1, 1))];
    let stuck = |last, apart| choose_cause(0, &Question::Stuck { peer: 1, last, apart }, &statuses);
    // What it sent before may still arrive.
    assert_eq!(stuck(false, false), None);
    for (last, apart) in [(false, true), (true, false)] {
        assert_eq!(stuck(last, apart), Some(Cause::Left { rank: 1 }));
    }
    let ended = Question::Lost { peer: 1, left: true, because: None };
    assert_eq!(choose_cause(0, &ended, &statuses), Some(Cause::Left { rank: 1 }));
}

#[test]
fn the_dead_explain_everything() {
    let statuses = [within(call(1, 1)), Status::Silent, Status::Died];
    for question in [
        Question::Lost { peer: 1, left: true, because: None },
        Question::Stuck { peer: 1, last: true, apart: false },
    ] {
        assert_eq!(choose_cause(0, &question, &statuses), Some(Cause::Died { rank: 2 }));
    }
}

#[test]
fn who_cannot_be_reached_has_left_or_hangs_or_is_cut_off() {
    let question = Question::Unreached { peer: 1, detail: "refused".into() };
    let cause = |status| choose_cause(0, &question, &[within(call(1, 1)), status]).unwrap();
    assert_eq!(cause(Status::Left), Cause::Left { rank: 1 });
    assert_eq!(cause(Status::Unknown), Cause::Left { rank: 1 });
    assert_eq!(cause(Status::Died), Cause::Died { rank: 1 });
    assert_eq!(cause(Status::Silent), Cause::Stalled { rank: 1, detail: NO_ANSWER.into() });
    let unreachable = Cause::Unreachable { rank: 1, by: 0, detail: "refused".into() };
    assert_eq!(cause(within(call(1, 1))), unreachable);
    assert!(matches!(cause(within(call(1, 2))), Cause::Mismatch { .. }));
}

/// Point-to-point messages between some of the ranks, however many, are no progress of the group, and push out no
/// collective.
#[test]
fn messages_do_not_make_a_rank_forget_its_collectives() {
    let message = |sequence| Fingerprint::new(CallKind::Message, sequence).root(3);
    for messages in [1, 3, 9, 100] {
        let mut activity = Activity::default();
        for call in (1..20).map(|sequence| call(sequence, 1)).chain((1..=messages).map(message)) {
            activity.begin(call);
            activity.end();
        }
        activity.begin(message(messages + 1));
        assert_eq!((activity.progress(), activity.current()), (19, Some(&message(messages + 1))));
        assert_eq!(activity.collectives().next().map(|call| call.sequence), Some(13));
        // Rank 1 waits for rank 2, which is outside of any operation; the others wait for both.
        let waiting = within(call(20, 1));
        let statuses = [waiting.clone(), Status::Active(activity), after(call(19, 1)), waiting];
        let question = Question::Stuck { peer: 1, last: true, apart: false };
        for asker in [0, 3] {
            let cause = choose_cause(asker, &question, &statuses);
            assert!(matches!(cause, Some(Cause::Stalled { rank: 2, .. })), "{messages}: {cause:?}");
        }
    }
}

#[test]
fn ranks_that_send_to_each_other_are_told_to_use_a_batch() {
    let sent_by =
        |rank| within(Fingerprint::new(CallKind::Message, 1).root(rank).tensor(DType::F32, 1 << 20));
    let line = |statuses: &[Status]| match choose_cause(
        0,
        &Question::Stuck { peer: 1, last: true, apart: false },
        statuses,
    ) {
        Some(Cause::Stalled { rank: 1, detail }) => detail,
        other => panic!("{other:?}"),
    };
    let both = line(&[sent_by(0), sent_by(1)]);
    assert!(
        both.starts_with("it is still in message #1 (from rank 1, f32, 1048576 elements), and"),
        "{both}"
    );
    assert!(both.contains("both send") && both.contains("`batch`"), "{both}");
    // Rank 1 receives from rank 0, but slowly.
    assert!(!line(&[sent_by(0), sent_by(0)]).contains("batch"));
    assert!(!line(&[within(call(1, 1)), sent_by(1)]).contains("batch"));
}

/// All report the same call; only the rank on which the library has failed knows that it is the one.
#[test]
fn a_library_fails_on_one_rank_and_the_others_only_notice() {
    let cause = Cause::Failed { rank: 1, detail: "it broke".into() };
    let members = Members::subgroup([4, 2]);
    let error = |own| cause.to_error(own, "barrier #3".into(), Duration::ZERO, &members, |_| "a".into());
    for own in 0..2 {
        assert_eq!(error(own).to_string(), "barrier #3: on rank 2 (host a), it broke");
    }
    assert!(error(0).is_peer_failure() && !error(1).is_peer_failure());
}

#[test]
fn a_time_out_names_who_is_silent_or_behind() {
    let question = Question::Stuck { peer: 3, last: true, apart: false };
    let stalled = |statuses: &[Status]| match choose_cause(0, &question, statuses) {
        Some(Cause::Stalled { rank, detail }) => (rank, detail),
        other => panic!("{other:?}"),
    };
    let waiting = within(call(5, 1));
    let (rank, detail) = stalled(&[waiting.clone(), waiting.clone(), Status::Silent, waiting.clone()]);
    assert_eq!(rank, 2);
    assert!(detail.contains("does not answer"));
    let (rank, detail) = stalled(&[waiting.clone(), after(call(4, 1)), waiting.clone(), waiting.clone()]);
    assert_eq!(rank, 1);
    assert!(detail.contains("outside of any operation"), "{detail}");
    let (rank, detail) = stalled(&[waiting.clone(), within(call(4, 1)), waiting.clone(), waiting.clone()]);
    assert_eq!(rank, 1);
    assert!(detail.contains("still in all_reduce #4"), "{detail}");
    // All are in the same call: only the silent stream is known.
    assert_eq!(stalled(&[waiting.clone(), waiting.clone(), waiting.clone(), waiting]).0, 3);
}

/// In a call, waiting for these peers.
fn waiting_for(peers: &[usize]) -> Status {
    let mut activity = Activity::default();
    activity.begin(call(5, 1));
    activity.wait_for(&mut peers.iter().copied());
    Status::Active(activity)
}

/// In a call of another group, waiting there for these peers.
fn elsewhere(peers: &[usize]) -> Status {
    let call = OtherGroupCall { call: "barrier #1 in the group [1, 2]".into(), waits: peers.to_vec() };
    Status::Active(Activity { elsewhere: vec![call], ..Activity::default() })
}

#[test]
fn who_is_at_the_end_of_a_chain_over_groups_is_to_blame() {
    let ask = |peers: &[usize], lost, statuses: &[Status]| {
        choose_cause(0, &Question::Elsewhere { peers: peers.to_vec(), lost }, statuses)
    };
    let outside = after(call(1, 1));
    let chain = |last: &Status| [waiting_for(&[1]), elsewhere(&[2]), elsewhere(&[0, 3]), last.clone()];
    let silent = Cause::Stalled { rank: 3, detail: NO_ANSWER.into() };
    assert_eq!(ask(&[1], false, &chain(&Status::Silent)), Some(silent.clone()));
    assert_eq!(ask(&[1], false, &chain(&Status::Left)), Some(Cause::Left { rank: 3 }));
    assert_eq!(ask(&[1], false, &chain(&Status::Died)), Some(Cause::Died { rank: 3 }));
    let Some(Cause::Stalled { rank: 3, detail }) = ask(&[1], false, &chain(&outside)) else {
        panic!("another one")
    };
    assert!(detail.contains("outside of any operation"), "{detail}");
    // A rank that already knows the failure is about to end.
    let blames = Status::Active(Activity { failed: Some(silent.clone()), ..Activity::default() });
    assert_eq!(ask(&[1], false, &[waiting_for(&[1]), blames, Status::Left]), Some(silent.clone()));
    // A rank that continues although it knows a failure is in another call, and not about to end.
    let Status::Active(goes_on) = waiting_for(&[2]) else { panic!("it is") };
    let goes_on = Status::Active(Activity { failed: Some(Cause::Left { rank: 0 }), ..goes_on });
    let blamed = ask(&[1], false, &[waiting_for(&[1]), goes_on, outside.clone()]);
    assert!(matches!(blamed, Some(Cause::Stalled { rank: 2, .. })), "{blamed:?}");
    // All wait for each other, or are busy: no cause is known.
    assert_eq!(ask(&[1], false, &chain(&elsewhere(&[1]))), None);
    assert_eq!(ask(&[1], false, &chain(&elsewhere(&[]))), None);
    assert_eq!(ask(&[9], false, &chain(&Status::Silent)), None);
    // A silent rank is named before one that may be late for good reason. A rank outside the chain is not named.
    let two = [waiting_for(&[1, 2]), outside.clone(), elsewhere(&[3]), Status::Silent];
    assert_eq!(ask(&[1, 2], false, &two), Some(silent));
    let apart = [waiting_for(&[1]), outside.clone(), Status::Silent];
    assert!(matches!(ask(&[1], false, &apart), Some(Cause::Stalled { rank: 1, .. })));
    // If a rank has left some group, it matters only whether it has left this one, too.
    assert_eq!(ask(&[1], true, &[outside.clone(), outside.clone()]), None);
    assert_eq!(ask(&[1], true, &[outside, Status::Left]), Some(Cause::Left { rank: 1 }));
}

/// Also within one group: the first of two waiting ranks is not to blame.
#[test]
fn a_time_out_follows_the_chain() {
    let question = Question::Stuck { peer: 1, last: true, apart: false };
    let statuses = [waiting_for(&[1]), waiting_for(&[2]), after(call(5, 1)), waiting_for(&[2])];
    assert!(matches!(choose_cause(0, &question, &statuses), Some(Cause::Stalled { rank: 2, .. })));
}

#[test]
fn a_cause_of_another_group_has_the_jobs_numbers() {
    let cause = Cause::Unreachable { rank: 0, by: 1, detail: "refused".into() };
    let told = cause.renumbered(|rank| [4, 2].get(rank).copied()).unwrap();
    assert_eq!(told, Cause::Unreachable { rank: 4, by: 2, detail: "refused".into() });
    assert_eq!(told.renumbered(|number| [4, 3].iter().position(|other| *other == number)), None);
    assert_eq!(Cause::Hung.renumbered(Some), None);
    let (members, host) = (Members::subgroup([4, 2]), "b".into());
    let in_job = Cause::InJob { cause: Box::new(Cause::Died { rank: 0 }), host };
    let error = in_job.to_error(0, "barrier #3".into(), Duration::ZERO, &members, |_| "a".into());
    assert_eq!(error.to_string(), "rank 0 (host b) died during barrier #3");
}

#[test]
fn a_connection_that_stands_still_is_named_and_no_rank() {
    let link = |peer, silence_ms, detail: &str| StalledLink { peer, silence_ms, detail: detail.into() };
    let with = |status, stalled| match status {
        Status::Active(activity) => Status::Active(Activity { stalled, ..activity }),
        other => other,
    };
    // Rank 2 is behind, because what rank 0 has sent does not arrive; rank 3 waits for rank 2.
    let statuses = [
        with(within(call(5, 1)), vec![link(2, 7000, "9123 bytes"), link(3, 4000, "later")]),
        with(within(call(5, 1)), vec![link(3, 6000, "another")]),
        within(call(4, 1)),
        within(call(5, 1)),
    ];
    let cause = Some(Cause::Link { from: 0, to: 2, detail: "9123 bytes".into() });
    for (asker, peer) in [(0, 2), (1, 2), (2, 0), (3, 2)] {
        let stuck = |last| choose_cause(asker, &Question::Stuck { peer, last, apart: false }, &statuses);
        assert_eq!((stuck(false), stuck(true)), (None, cause.clone()));
        assert_eq!(choose_cause(asker, &Question::Suspect { peer }, &statuses), cause);
    }
    let members = Members::subgroup([4, 5, 6, 7]);
    let host = |rank| format!("host-{rank}");
    for own in 0..4 {
        let second = Duration::from_secs(1);
        let error = cause.clone().unwrap().to_error(own, "broadcast #4".into(), second, &members, host);
        let told = "the connection from rank 4 (host host-0) to rank 6 (host host-2) stands still in broadcast #4: 9123 bytes";
        assert_eq!(error.to_string(), told);
        assert!(error.is_loss());
    }
    // A host that is gone answers nothing either.
    let gone = [statuses[0].clone(), statuses[1].clone(), Status::Silent, statuses[3].clone()];
    let told = choose_cause(0, &Question::Stuck { peer: 2, last: true, apart: false }, &gone);
    assert_eq!(told, Some(Cause::Stalled { rank: 2, detail: NO_ANSWER.into() }));
}
