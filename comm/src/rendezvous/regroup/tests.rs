//! Regrouping tests with ranks as threads, some of which are stopped. The system accepts connections for a stopped
//! process; a listener that nobody serves does the same.

use std::thread::{JoinHandle, sleep, spawn};

use super::super::machine::BuildInfo;
use super::super::message::Hello;
use super::*;
use crate::connection::obstacle::Obstacle;
use crate::connection::wire::HandshakeStream;
use crate::transport::site::Site;
use crate::{Tcp, Tls, Transport};

/// A rank that does not answer counts as unresponsive after a quarter of this.
const TIMEOUT: Duration = Duration::from_secs(20);

type Outcome = Result<Vec<usize>>;

fn config() -> TcpConfig {
    TcpConfig { timeout: TIMEOUT, world_size: 4, ..TcpConfig::default() }
}

fn listeners(ranks: usize) -> Vec<TcpListener> {
    (0..ranks).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect()
}

fn contacts(listeners: &[TcpListener]) -> Vec<RankAddress> {
    let contact = |(number, listener): (usize, &TcpListener)| RankAddress {
        number,
        address: listener.local_addr().unwrap(),
    };
    listeners.iter().enumerate().map(contact).collect()
}

/// Opens the listener of a rank of the group with these members.
fn rank(number: usize, listener: TcpListener, contacts: &[RankAddress]) -> Arc<RegroupEndpoint> {
    let endpoint = RegroupEndpoint::open(listener, &config(), &Elastic::default(), number, [7; 32]).unwrap();
    endpoint.set_first_group(contacts).unwrap();
    endpoint
}

/// Regroups in a thread; returns the numbers of the ranks of the new group.
fn regroup(endpoint: &Arc<RegroupEndpoint>) -> JoinHandle<Outcome> {
    let endpoint = endpoint.clone();
    spawn(move || endpoint.regroup(&[], 0).map(|regrouped| regrouped.numbers))
}

fn probe(number: usize) -> message::RegroupRequest {
    message::RegroupRequest::Probe { number, generation: 0 }
}

fn wait_until(is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        sleep(Duration::from_millis(1));
    }
}

fn numbers(outcomes: Vec<JoinHandle<Outcome>>) -> Vec<Vec<usize>> {
    let outcomes: Vec<Outcome> = outcomes.into_iter().map(|outcome| outcome.join().unwrap()).collect();
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    outcomes.into_iter().flatten().collect()
}

#[test]
fn a_leader_gives_way_to_a_lower_rank_that_wakes() {
    let listeners = listeners(4);
    let contacts = contacts(&listeners);
    // The first has ended, and the second is stopped.
    let [gone, still, third, fourth] = <[TcpListener; 4]>::try_from(listeners).unwrap();
    drop(gone);
    let (third, fourth) = (rank(2, third, &contacts), rank(3, fourth, &contacts));
    let mut outcomes = vec![regroup(&third), regroup(&fourth)];
    wait_until(|| third.state().waiting.len() == 1);
    let awake = rank(1, still, &contacts);
    outcomes.push(regroup(&awake));
    assert_eq!(numbers(outcomes), [[1, 2, 3], [1, 2, 3], [1, 2, 3]]);
}

/// The others have agreed to a group with one more, which the leader does not know of.
#[test]
fn those_who_know_of_another_group_tell_the_leader() {
    let listeners = listeners(5);
    let contacts = contacts(&listeners);
    let [first, second, third, gone, newcomer] = <[TcpListener; 5]>::try_from(listeners).unwrap();
    drop((gone, newcomer));
    let ranks =
        [rank(0, first, &contacts[..4]), rank(1, second, &contacts[..4]), rank(2, third, &contacts[..4])];
    let newer = History::first((0..4).collect()).with_group(6, [0, 1, 2, 4].into());
    for endpoint in &ranks[1..] {
        endpoint.set_group(newer.clone(), &contacts).unwrap();
    }
    assert_eq!(numbers(ranks.iter().map(regroup).collect()), [[0, 1, 2]; 3]);
    let known = ranks.each_ref().map(|endpoint| endpoint.state().knowledge());
    assert!(known[0].history.newest > 6 && known[0].contacts == contacts[..3]);
    assert!(
        known
            .iter()
            .all(|other| (&other.history, &other.contacts) == (&known[0].history, &known[0].contacts))
    );
}

#[test]
fn one_that_does_not_know_the_first_group_yet_excludes_nobody() {
    let listeners = listeners(3);
    let contacts = contacts(&listeners);
    let [first, second, gone] = <[TcpListener; 3]>::try_from(listeners).unwrap();
    drop(gone);
    let second = RegroupEndpoint::open(second, &config(), &Elastic::default(), 1, [7; 32]).unwrap();
    let first = rank(0, first, &contacts);
    // What the first rank does before it waits for the second.
    let (own, until) = ((&first.credentials, 0), Instant::now() + TIMEOUT);
    let mut wire = search::connect(second.address, Some(1), own, &probe(0), until).unwrap();
    assert!(matches!(wire.receive(message::LIMIT, until), Ok(message::Reply::Here)));
    let waits = regroup(&first);
    second.set_first_group(&contacts).unwrap();
    assert_eq!(numbers(vec![waits, regroup(&second)]), [[0, 1], [0, 1]]);
}

#[test]
fn a_group_of_one_that_others_may_join_needs_a_secret_as_any() {
    let folder = tempfile::tempdir().unwrap();
    for newcomer in [false, true] {
        let elastic = Some(Elastic { file: Some(folder.path().join("group")), ended: None, newcomer });
        let alone = TcpConfig { elastic, timeout: Duration::from_secs(1), ..TcpConfig::default() };
        let encrypted = TcpConfig { tls: Tls::All, ..alone.clone() };
        let error = Tcp::connect(&encrypted).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { what, .. } if what.starts_with("TLS")), "{error}");
        // An address that no host has: it could not be listened on either.
        let bind = "192.0.2.2".parse().unwrap();
        let seen = TcpConfig { bind, ..alone };
        let error = Tcp::connect(&seen).unwrap_err();
        assert!(matches!(error, Error::NoSecret { .. }), "{error}");
    }
}

/// A rank that is blamed is not waited for; once it has ended, those that its loss leaves too few of may still go on.
#[test]
fn a_rank_that_is_not_waited_for_is_asked_again_where_its_end_matters() {
    let listeners = listeners(2);
    let contacts = contacts(&listeners);
    let [still, second] = <[TcpListener; 2]>::try_from(listeners).unwrap();
    let second = rank(1, second, &contacts);
    let outcome = {
        let second = second.clone();
        spawn(move || second.regroup(&[0], 0).map(|regrouped| regrouped.numbers))
    };
    // It was asked, and has not answered.
    still.accept().unwrap();
    sleep(Duration::from_millis(200));
    drop(still);
    assert_eq!(outcome.join().unwrap().unwrap(), [1]);
}

/// A process of this job, or of another one, may be given the port of a rank that has ended.
#[test]
fn a_port_that_has_another_owner_now_stands_for_no_rank() {
    let listeners = listeners(3);
    let contacts = contacts(&listeners);
    let [first, second, third] = <[TcpListener; 3]>::try_from(listeners).unwrap();
    // A rank of another job, and one of this job that waits to be let in.
    let _other_job = RegroupEndpoint::open(first, &config(), &Elastic::default(), 0, [8; 32]).unwrap();
    let newcomer_there = RegroupEndpoint::open(second, &config(), &Elastic::default(), 7, [7; 32]).unwrap();
    assert_eq!(regroup(&rank(2, third, &contacts)).join().unwrap().unwrap(), [2]);
    // Nor does it let others in.
    let mut wire = newcomer(&newcomer_there, 8, "127.0.0.1");
    let reply = wire.receive(message::LIMIT, Instant::now() + TIMEOUT);
    assert!(matches!(reply, Ok(message::Reply::Elsewhere)), "{reply:?}");
}

/// The file's rank has ended, and the newcomer has its port.
#[test]
fn a_newcomer_does_not_ask_itself() {
    let config = TcpConfig { timeout: Duration::from_millis(300), ..config() };
    let (listener, _) = RegroupEndpoint::listen(&config).unwrap();
    let endpoint = RegroupEndpoint::open(listener, &config, &Elastic::default(), 5, [7; 32]).unwrap();
    let deadline = Instant::now() + config.timeout;
    let Err(AttemptError::Again(why)) = endpoint.request_admission(endpoint.address, deadline) else {
        panic!("it has been let in, or refused for good")
    };
    assert!(why.contains("has ended"), "{why}");
}

/// The first group that a newcomer agrees to may never meet, and the others go on without it.
#[test]
fn a_newcomer_whose_group_has_not_met_asks_again() {
    let [listener] = <[TcpListener; 1]>::try_from(listeners(1)).unwrap();
    let endpoint = RegroupEndpoint::open(listener, &config(), &Elastic::default(), 5, [7; 32]).unwrap();
    endpoint.agree(History::first([0, 1].into()).with_group(1, [1, 5].into()));
    assert!(endpoint.state().history().is_known() && !endpoint.has_met());
    endpoint.forget_groups();
    assert!(!endpoint.state().history().is_known());
    endpoint.agree(History::first([0, 1].into()).with_group(1, [1, 5].into()).met());
    assert!(endpoint.has_met());
}

/// Connects as a newcomer with this number and address.
fn newcomer(endpoint: &RegroupEndpoint, number: usize, ip: &str) -> HandshakeStream {
    newcomer_of(endpoint, number, ip, BuildInfo::own())
}

/// The same for a program with this version and target.
fn newcomer_of(endpoint: &RegroupEndpoint, number: usize, ip: &str, machine: BuildInfo) -> HandshakeStream {
    let hello = Hello {
        ip: Some(ip.parse().unwrap()),
        port: 1,
        host: "h".into(),
        pid: 1,
        site: Site::own(Some(Obstacle::Unwanted)),
        timeout_ms: 1000,
        regroup_port: 0,
        machine,
    };
    let contact = RankAddress { number, address: ([127, 0, 0, 1], number as u16 + 1).into() };
    let own = (&endpoint.credentials, message::NO_NUMBER);
    let until = Instant::now() + TIMEOUT;
    search::connect(endpoint.address, None, own, &message::RegroupRequest::Join { contact, hello }, until)
        .unwrap()
}

/// Returns why a newcomer is refused.
fn refusal(mut wire: HandshakeStream) -> String {
    match wire.receive(message::LIMIT, Instant::now() + TIMEOUT) {
        Ok(message::Reply::Refused(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn newcomers_that_do_not_fit_hear_it_at_the_door() {
    let [first, second] = <[TcpListener; 2]>::try_from(listeners(2)).unwrap();
    let contacts = contacts(&[first.try_clone().unwrap(), second]);
    let endpoint = rank(0, first, &contacts);
    let taken = "there is a rank 1 already";
    assert!(refusal(newcomer(&endpoint, 1, "127.0.0.1")).starts_with(taken));
    let no_secret = refusal(newcomer(&endpoint, 2, "192.0.2.2"));
    assert!(no_secret.contains("192.0.2.2 without a secret"), "{no_secret}");
    let other = newcomer_of(&endpoint, 2, "127.0.0.1", BuildInfo::of_version("9.8.7"));
    let version = refusal(other);
    assert!(
        version.starts_with("rank 2 (host h) runs version 9.8.7 (") && version.contains("rank 0 (host "),
        "{version}"
    );
    assert_eq!(endpoint.waiting(), 0);
    let waits = newcomer(&endpoint, 7, "127.0.0.1");
    wait_until(|| endpoint.waiting() == 1);
    // A newcomer that has lost its connection, and connects again, has the same address as before.
    let again = newcomer(&endpoint, 7, "127.0.0.1");
    wait_until(|| !waits.is_open());
    assert_eq!(endpoint.waiting(), 1);
    drop(again);
    wait_until(|| endpoint.waiting() == 0);
}

#[test]
fn a_number_is_taken_by_one_that_waits_as_well() {
    let [first, second] = <[TcpListener; 2]>::try_from(listeners(2)).unwrap();
    let contacts = contacts(&[first.try_clone().unwrap(), second]);
    let endpoint = rank(0, first, &contacts[..1]);
    let _waits = newcomer(&endpoint, 7, "127.0.0.1");
    wait_until(|| endpoint.waiting() == 1);
    endpoint.state().newcomers[0].contact.address.set_port(9);
    assert!(refusal(newcomer(&endpoint, 7, "127.0.0.1")).starts_with("there is a rank 7 already"));
    let first_to_know = newcomer(&endpoint, 1, "127.0.0.1");
    wait_until(|| endpoint.waiting() == 2);
    let history = History::first([0].into()).with_group(1, [0, 1].into()).met();
    endpoint.set_group(history, &contacts).unwrap();
    assert!(refusal(first_to_know).starts_with("there is a rank 1 already"));
    assert_eq!(endpoint.waiting(), 1);
}

#[test]
fn where_all_share_memory_a_newcomer_must_too() {
    let [first] = <[TcpListener; 1]>::try_from(listeners(1)).unwrap();
    let contacts = contacts(&[first.try_clone().unwrap()]);
    let config = TcpConfig { transport: Transport::Shm, ..config() };
    let endpoint = RegroupEndpoint::open(first, &config, &Elastic::default(), 0, [7; 32]).unwrap();
    endpoint.set_first_group(&contacts).unwrap();
    let reason = refusal(newcomer(&endpoint, 1, "127.0.0.1"));
    assert!(reason.contains("one of the two was told to use TCP"), "{reason}");
}

#[test]
fn a_rank_that_is_there_and_does_not_come_is_left_behind() {
    let listeners = listeners(5);
    let contacts = contacts(&listeners);
    let [gone, second, third, fourth, busy] = <[TcpListener; 5]>::try_from(listeners).unwrap();
    drop(gone);
    let ranks = [rank(1, second, &contacts), rank(2, third, &contacts), rank(3, fourth, &contacts)];
    let busy = rank(4, busy, &contacts);
    assert_eq!(numbers(ranks.iter().map(regroup).collect()), [[1, 2, 3]; 3]);
    assert!(matches!(regroup(&busy).join().unwrap(), Err(Error::Excluded { rank: 4 })));
}

/// Regroups rank 2 of a group whose other ranks are on a host that cannot be reached. `ended`: those that a launcher has
/// seen end. Returns the members of the new group.
fn without_a_host(ended: &[u8]) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let elastic = Elastic { ended: Some(folder.path().join("ended")), ..Elastic::default() };
    std::fs::write(folder.path().join("ended"), ended).unwrap();
    let [listener] = <[TcpListener; 1]>::try_from(listeners(1)).unwrap();
    let own = RankAddress { number: 2, address: listener.local_addr().unwrap() };
    // An address that no host has.
    let elsewhere = |number| RankAddress { number, address: "192.0.2.2:1".parse().unwrap() };
    let config = TcpConfig { timeout: Duration::from_secs(2), ..config() };
    let endpoint = RegroupEndpoint::open(listener, &config, &elastic, 2, [7; 32]).unwrap();
    endpoint.set_first_group(&[elsewhere(0), elsewhere(1), own]).unwrap();
    regroup(&endpoint).join().unwrap()
}

#[test]
fn ranks_that_cannot_be_reached_count_as_alive_unless_a_launcher_has_seen_them_end() {
    for ended in ["", "0\n", "0\n1", "0\n7\n"] {
        let outcome = without_a_host(ended.as_bytes());
        let Err(Error::Regroup { detail, .. }) = &outcome else { panic!("{ended:?}: {outcome:?}") };
        assert!(detail.contains("cannot be reached") || detail.contains("may still be there"), "{detail}");
    }
    assert_eq!(without_a_host(b"1\n0\n").unwrap(), [2]);
}

/// The minority after a partition: all name the ranks that are missing, not each other, whichever one's time is over
/// first.
#[test]
fn those_who_are_not_enough_miss_the_same_ranks() {
    let listeners = listeners(5);
    let contacts = contacts(&listeners);
    let mut listeners = listeners.into_iter();
    let _still: Vec<TcpListener> = listeners.by_ref().take(3).collect();
    let open = |number: usize, listener| {
        let config = TcpConfig { timeout: Duration::from_secs(4), world_size: 5, ..config() };
        let endpoint =
            RegroupEndpoint::open(listener, &config, &Elastic::default(), number, [7; 32]).unwrap();
        endpoint.set_first_group(&contacts).unwrap();
        endpoint
    };
    let [third, fourth] = [3, 4].map(|number| open(number, listeners.next().unwrap()));
    let follower = regroup(&fourth);
    sleep(Duration::from_millis(500));
    for outcome in [regroup(&third), follower] {
        let Err(Error::Regroup { detail, .. }) = outcome.join().unwrap() else { panic!("they went on") };
        let missed = ["ranks 0, 1 and 2 may still be there and did not come", "rank 0 cannot be reached"];
        assert!(missed.iter().any(|missed| detail.starts_with(missed)), "{detail}");
    }
}

#[test]
fn ranks_that_stand_still_are_waited_for_together() {
    // One after the other, they would take all of the time.
    const STILL: usize = 8;
    const RANKS: usize = 2 * STILL + 1;
    let config = TcpConfig { timeout: 2 * TIMEOUT, world_size: RANKS, ..TcpConfig::default() };
    let mut still = listeners(RANKS);
    let contacts = contacts(&still);
    let at_work: Vec<_> = still.split_off(STILL).into_iter().zip(STILL..).collect();
    let at_work = at_work.into_iter().map(|(listener, number)| {
        let endpoint =
            RegroupEndpoint::open(listener, &config, &Elastic::default(), number, [7; 32]).unwrap();
        endpoint.set_first_group(&contacts).unwrap();
        endpoint
    });
    let at_work: Vec<_> = at_work.collect();
    let left: Vec<usize> = (STILL..RANKS).collect();
    let outcomes = at_work.iter().map(regroup).collect();
    assert_eq!(numbers(outcomes), vec![left; RANKS - STILL]);
    drop(still);
}

#[test]
fn a_leader_that_falls_silent_is_left_behind() {
    let listeners = listeners(5);
    let contacts = contacts(&listeners);
    let [gone, leader, third, fourth, fifth] = <[TcpListener; 5]>::try_from(listeners).unwrap();
    drop(gone);
    let still = leader.try_clone().unwrap();
    let leader = rank(1, leader, &contacts);
    let ranks = [rank(2, third, &contacts), rank(3, fourth, &contacts), rank(4, fifth, &contacts)];
    let outcomes = ranks.iter().map(regroup).collect();
    wait_until(|| leader.state().waiting.len() == 3);
    // It keeps its connections, and sends nothing more.
    let stopped = leader.regroup_state.clone();
    drop(leader);
    assert_eq!(numbers(outcomes), [[2, 3, 4]; 3]);
    drop((still, stopped));
}
