//! Ten thousand ranks regroup after a loss, over a model of a network: what it takes in messages, bytes and time, by the messages that
//! are sent and the rules by which they are (`findings`, `records`, `knowledge`, and those of the meeting that follows).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::super::simulation::{HANDSHAKE, LINK, Meeting, RANKS, bytes, hello};
use super::findings::{AT_ONCE, Findings, ProbeResult};
use super::history::History;
use super::knowledge::{Knowledge, RankAddress};
use super::lead::ROUND;
use super::message::{GroupOffer, Promise, RegroupRequest, Reply};
use super::records::{NewGroup, RegroupRecords, WaitingRank};
use super::search::UNRESPONSIVE_AFTER;
use super::{AttemptError, listener};
use crate::base::network_model::Network;
use crate::connection::connect_error::ConnectError;

/// How ranks are lost.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Loss {
    /// Their processes end, and their hosts refuse connections.
    Processes,
    /// Their hosts do not answer any more.
    Hosts,
}

/// What arrives at a rank.
enum Packet {
    /// A message of the handshake between the rank that dials and another one, and whether that is a probe.
    Handshake {
        step: usize,
        ranks: [usize; 2],
        probe: bool,
    },
    /// From this rank.
    Probe(usize),
    /// The result of the probe of this rank.
    Result(usize, ProbeResult),
    Come(Box<RegroupRequest>),
    Offer(Box<GroupOffer>),
    Promise,
    /// The leader looks who has come.
    Look,
}

#[derive(Clone)]
struct Rank {
    records: RegroupRecords<()>,
    findings: Findings,
    /// Probes whose results are to come, and those results.
    probing: BTreeSet<usize>,
    results: Vec<(usize, ProbeResult)>,
    leads: bool,
    /// Those that a leader probes next.
    next: VecDeque<Vec<usize>>,
}

struct Job {
    began: Instant,
    network: Network<Packet>,
    ranks: Vec<Rank>,
    lost: BTreeSet<usize>,
    loss: Loss,
    group: Option<NewGroup<()>>,
    promised: usize,
    /// Number of probes.
    probes: usize,
    /// Longest message of a rank that comes, and longest offer.
    longest: [usize; 2],
}

fn contact(number: usize) -> RankAddress {
    let host = number / 8;
    RankAddress {
        number,
        address: ([10, 0, (host / 256) as u8, (host % 256) as u8], 30_000 + number as u16 % 8).into(),
    }
}

impl Job {
    fn new(lost: impl IntoIterator<Item = usize>, loss: Loss) -> Self {
        let mut records = RegroupRecords::default();
        records.set_history(History::first((0..RANKS).collect()));
        records.add_addresses(&(0..RANKS).map(contact).collect::<Vec<_>>());
        // All know the same, and have the digest of it from here on.
        records.digest();
        let (findings, results, next) = (Findings::new(&[]), Vec::new(), VecDeque::new());
        let rank = Rank { records, findings, probing: BTreeSet::new(), results, leads: false, next };
        Self {
            began: Instant::now(),
            network: Network::new(RANKS, LINK),
            ranks: vec![rank; RANKS],
            lost: lost.into_iter().collect(),
            loss,
            group: None,
            promised: 0,
            probes: 0,
            longest: [0; 2],
        }
    }

    /// Lets all that are left look for the leader at once, and everything happen until all have promised.
    fn run(mut self) -> Self {
        (0..RANKS)
            .filter(|rank| !self.lost.contains(rank))
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|rank| self.seek(rank));
        while let Some((at, packet)) = self.network.next() {
            self.receive(at, packet);
            if self.group.as_ref().is_some_and(|group| group.next.contacts.len() == self.promised + 1) {
                break;
            }
        }
        self
    }

    /// Probes those that perhaps lead; leads where there is none. As `Search::find_leader` does.
    fn seek(&mut self, rank: usize) {
        let Rank { records, findings, .. } = &mut self.ranks[rank];
        let lower = records.newest_known().lower_members(rank).map(|number| (number, ()));
        let perhaps: Vec<usize> =
            findings.perhaps_leads(lower).into_iter().map(|(number, ())| number).collect();
        if perhaps.is_empty() {
            findings.silent.clear();
            self.ranks[rank].leads = true;
            return self.look(rank);
        }
        self.probe(rank, perhaps);
    }

    fn probe(&mut self, rank: usize, numbers: Vec<usize>) {
        self.probes += numbers.len();
        self.ranks[rank].probing = numbers.iter().copied().collect();
        for number in numbers {
            match (self.lost.contains(&number), self.loss) {
                (false, _) => self.handshake(0, [rank, number], true),
                (true, Loss::Processes) => {
                    let time = self.network.now() + 2 * LINK.latency;
                    let refused = std::io::ErrorKind::ConnectionRefused.into();
                    let same_host = number / 8 == rank / 8;
                    let result = ProbeResult::of(&ConnectError::Io(refused), same_host);
                    self.network.at(time, rank, Packet::Result(number, result));
                }
                (true, Loss::Hosts) => {
                    let time = self.network.now() + UNRESPONSIVE_AFTER;
                    self.network.at(time, rank, Packet::Result(number, ProbeResult::Silent));
                }
            }
        }
    }

    fn handshake(&mut self, step: usize, ranks: [usize; 2], probe: bool) {
        let [from, to] = [ranks[step % 2], ranks[1 - step % 2]];
        self.network.send(from, to, HANDSHAKE[step], Packet::Handshake { step, ranks, probe });
    }

    fn receive(&mut self, at: usize, packet: Packet) {
        match packet {
            Packet::Handshake { step: 5, ranks: [_, other], probe: true } => {
                let generation = self.ranks[at].records.history().newest;
                let probe = bytes(&RegroupRequest::Probe { number: at, generation });
                self.network.send(at, other, probe, Packet::Probe(at));
            }
            Packet::Handshake { step: 5, ranks: [_, leader], .. } => {
                let come = RegroupRequest::Come(self.ranks[at].records.join_attempt(contact(at), hello(at)));
                self.longest[0] = self.longest[0].max(bytes(&come));
                self.network.send(at, leader, bytes(&come), Packet::Come(Box::new(come)));
            }
            Packet::Handshake { step, ranks, probe } => self.handshake(step + 1, ranks, probe),
            Packet::Probe(from) => {
                assert!(!self.ranks[at].records.excludes(from, 0));
                self.network.send(at, from, bytes(&Reply::Here), Packet::Result(at, ProbeResult::Here));
            }
            Packet::Result(number, result) => {
                let rank = &mut self.ranks[at];
                rank.probing.remove(&number);
                rank.results.push((number, result));
                if rank.probing.is_empty() {
                    self.probed(at);
                }
            }
            Packet::Come(come) => self.came(at, *come),
            Packet::Offer(offer) => self.offered(at, *offer),
            Packet::Promise => self.promised += 1,
            Packet::Look => self.look(at),
        }
    }

    /// All results have come.
    fn probed(&mut self, at: usize) {
        let now = self.began + self.network.now();
        let Rank { records, findings, results, leads, next, .. } = &mut self.ranks[at];
        let results = std::mem::take(results);
        let numbers: Vec<usize> = results.iter().map(|(number, _)| *number).collect();
        let Ok(here) = findings.record(at, results) else { panic!("rank {at} is excluded") };
        records.add_ended(findings.ended().iter().copied());
        if !*leads {
            let lowest = numbers.iter().filter(|number| !findings.is_given_up(**number)).min();
            return match lowest.filter(|number| here.contains(number)) {
                Some(leader) => self.handshake(0, [at, *leader], false),
                None => self.seek(at),
            };
        }
        findings.were_probed(numbers, now);
        assert!(findings.check_leads(at, &here, &records.newest_known().members()).is_ok());
        match next.pop_front() {
            Some(some) => self.probe(at, some),
            None => self.network.at(self.network.now() + ROUND, at, Packet::Look),
        }
    }

    /// The leader looks who is missing, and probes those; or forms the group. As `RegroupState::gather` does.
    fn look(&mut self, at: usize) {
        let now = self.began + self.network.now();
        let Rank { records, findings, next, .. } = &mut self.ranks[at];
        let (missing, members) = records.missing(at);
        if findings.are_complete(&missing, &members) {
            return self.form(at);
        }
        let due: Vec<usize> = findings.due(&missing, now).into_iter().map(|(number, _)| number).collect();
        *next = due.chunks(AT_ONCE).map(<[usize]>::to_vec).collect();
        match next.pop_front() {
            Some(some) => self.probe(at, some),
            None => self.network.at(self.network.now() + ROUND, at, Packet::Look),
        }
    }

    /// As `RegroupState::add_member` does.
    fn came(&mut self, at: usize, come: RegroupRequest) {
        let RegroupRequest::Come(attempt) = come else { panic!("it comes") };
        let records = &mut self.ranks[at].records;
        assert!(records.sends_away(attempt.contact.number, attempt.newest).is_none());
        let history = records.history_of(attempt.knows).expect("all know the same");
        records.add_waiting(listener::waiting_rank(attempt, history, IpAddr::from([10, 0, 0, 1]), ()));
    }

    fn form(&mut self, at: usize) {
        let Rank { records, findings, .. } = &mut self.ranks[at];
        let group = match records.choose(at, findings, 0) {
            Ok(group) => group,
            Err(AttemptError::Again(why)) => panic!("{why}"),
            Err(AttemptError::Final(error)) => panic!("{error}"),
        };
        for (rank, WaitingRank { contact, knows, .. }) in (1..).zip(&group.waiting) {
            let reply = Reply::Offer(group.offer(rank, *knows));
            let bytes = bytes(&reply);
            self.longest[1] = self.longest[1].max(bytes);
            let Reply::Offer(offer) = reply else { continue };
            self.network.send(at, contact.number, bytes, Packet::Offer(Box::new(offer)));
        }
        self.group = Some(group);
    }

    fn offered(&mut self, at: usize, offer: GroupOffer) {
        let next = &self.group.as_ref().unwrap().next;
        let number = next.history.newest;
        // What follows from the offer is the same for all of them, and takes long to compute for ten thousand.
        if at.is_multiple_of(97) {
            let Ok(own) = self.ranks[at].records.promise(at, offer) else {
                panic!("rank {at} does not take part")
            };
            assert_eq!((&own.history, &own.contacts), (&next.history, &next.contacts));
        }
        let leader = next.contacts[0].number;
        self.network.send(at, leader, bytes(&Promise { number }), Packet::Promise);
    }
}

/// What the leader has sent (messages and bytes), what all have, and how long it took.
#[derive(Debug)]
struct Costs {
    leader: [usize; 2],
    all: [usize; 2],
    probes: usize,
    longest: [usize; 2],
    time: Duration,
}

/// Regroups after the loss of these ranks.
fn regroup(lost: impl IntoIterator<Item = usize> + Clone, loss: Loss) -> Costs {
    let job = Job::new(lost.clone(), loss).run();
    let group = job.group.expect("there is a group").next;
    let lost: BTreeSet<usize> = lost.into_iter().collect();
    let left: Vec<usize> = (0..RANKS).filter(|rank| !lost.contains(rank)).collect();
    assert!(group.contacts.iter().map(|contact| contact.number).eq(left.iter().copied()));
    let meeting = Meeting::of_registered(left.len());
    assert_eq!(meeting.complete, left.len() - 1);
    let add = |one: [usize; 2], other: [usize; 2]| [one[0] + other[0], one[1] + other[1]];
    let costs = Costs {
        leader: add(job.network.sent_by(left[0]), meeting.network.sent_by(0)),
        all: add(job.network.sent(), meeting.network.sent()),
        probes: job.probes,
        longest: job.longest,
        time: job.network.now() + meeting.completed,
    };
    println!("{} ranks go on without {}, {loss:?}: {costs:?}", left.len(), lost.len());
    costs
}

/// Asserts what is the same for every loss: the leader sends each rank few and short messages, but for eight tables.
fn check(costs: &Costs) {
    let Costs { leader: [messages, sent], all: [all, _], longest, .. } = costs;
    // Two handshakes, that it is there, the offer, the table or where it is, and that all are connected; where it probed that rank
    // as well, four more.
    assert!(*messages < 14 * RANKS, "{messages} messages");
    let addresses: BTreeMap<usize, _> = (0..RANKS).map(|rank| (rank, contact(rank).address)).collect();
    let whole = bytes(&Knowledge::new(&History::first((0..RANKS).collect()), &addresses));
    assert!(whole > 400_000 && longest.iter().all(|bytes| *bytes < 1000), "{longest:?}, {whole}");
    assert!(*sent < 40_000_000, "{sent} bytes");
    assert!(*all < 100 * RANKS, "{all} messages");
}

#[test]
fn ten_thousand_go_on_without_one() {
    for lost in [0, 7_777] {
        let costs = regroup([lost], Loss::Processes);
        check(&costs);
        // Each probes at most the one that was lost and the eight after it.
        assert!(costs.probes < 11 * RANKS, "{} probes", costs.probes);
        assert!(costs.time < Duration::from_secs(1), "{:?}", costs.time);
    }
}

#[test]
fn ten_thousand_go_on_without_a_rack() {
    // The first ranks, and others.
    for (first, waits) in [(0, 4), (4_992, 1)] {
        let costs = regroup(first..first + 64, Loss::Hosts);
        check(&costs);
        // As often as ranks are found to be silent, most of them together.
        let least = UNRESPONSIVE_AFTER * waits;
        assert!(costs.time > least && costs.time < least + Duration::from_secs(1), "{:?}", costs.time);
    }
}
