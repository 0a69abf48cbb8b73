//! Simulation of regrouping: ranks come together in any order, are partitioned, end, and resume. Two groups, neither of
//! which follows from the other, must never both be alive. A partition means that a rank does not come to another, or
//! that its messages do not arrive.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::{History, Ranks};

/// One event; numbers stand for ranks, and are taken modulo how many there are.
#[derive(Debug, Clone)]
enum Event {
    /// A rank goes to another one's listener, and leaves the one at which it waited.
    Come {
        rank: usize,
        leader: usize,
    },
    /// A leader, which knows of some ranks that they have ended, offers a group to those that wait at its listener and to
    /// newcomers.
    Offer {
        leader: usize,
        knows: u32,
        newcomers: usize,
    },
    Promise {
        rank: usize,
    },
    Agree {
        rank: usize,
    },
    /// The leader learns that all have agreed.
    Decide {
        leader: usize,
    },
    /// A member learns that the group has met.
    Hear {
        rank: usize,
    },
    End {
        rank: usize,
    },
    /// A leader starts over.
    GiveUp {
        leader: usize,
    },
    /// All of these at once, for ranks that no partition separates, so that groups are formed at all.
    Meet {
        leader: usize,
        here: u32,
        knows: u32,
        newcomers: usize,
    },
}

/// What a rank knows, and from which attempt (its index in the simulation) it has the newest of it.
#[derive(Debug, Clone, Default)]
struct Known {
    history: History,
    newest_seen: u64,
    from: usize,
}

#[derive(Debug, Clone)]
struct Rank {
    known: Known,
    /// The attempt for whose leader it waits.
    at: Option<usize>,
    ended: bool,
}

#[derive(Debug)]
struct Attempt {
    leader: usize,
    /// The ranks that came, and what they knew.
    waiting: BTreeMap<usize, Known>,
    offer: Option<History>,
    /// The attempts from which this one follows.
    before: BTreeSet<usize>,
    promised: Ranks,
    agreed: Ranks,
    decided: bool,
}

#[derive(Debug)]
struct SimulatedJob {
    ranks: Vec<Rank>,
    attempts: Vec<Attempt>,
    /// Groups that have met: the attempt that formed each, and its members.
    groups: Vec<(usize, Ranks)>,
}

impl Attempt {
    fn of(leader: usize) -> Self {
        let (waiting, before, promised, agreed) = Default::default();
        Self { leader, waiting, offer: None, before, promised, agreed, decided: false }
    }
}

impl SimulatedJob {
    fn new(ranks: usize) -> Self {
        let history = History::first((0..ranks).collect());
        let known = Known { history, ..Known::default() };
        let rank = Rank { known, at: None, ended: false };
        let groups = vec![(0, (0..ranks).collect())];
        // The first meeting counts as an attempt without a leader.
        Self { ranks: vec![rank; ranks], attempts: vec![Attempt::of(usize::MAX)], groups }
    }

    /// Returns the attempt that this rank leads; a new one where it leads none.
    fn led_by(&mut self, leader: usize) -> usize {
        if let Some(at) = self.ranks[leader].at.filter(|at| self.attempts[*at].leader == leader) {
            return at;
        }
        self.attempts.push(Attempt::of(leader));
        self.ranks[leader].at = Some(self.attempts.len() - 1);
        self.attempts.len() - 1
    }

    fn is_waiting(&self, rank: usize, at: usize) -> bool {
        !self.ranks[rank].ended && self.ranks[rank].at == Some(at)
    }

    fn happen(&mut self, event: &Event) {
        let count = self.ranks.len();
        match *event {
            Event::Come { rank, leader } => self.come(rank % count, leader % count),
            Event::Offer { leader, knows, newcomers } => self.offer(leader % count, knows, newcomers),
            Event::Promise { rank } => self.promise(rank % count),
            Event::Agree { rank } => self.agree(rank % count),
            Event::Decide { leader } => self.decide(leader % count),
            Event::Hear { rank } => self.hear(rank % count),
            Event::End { rank } => self.ranks[rank % count].ended = true,
            Event::GiveUp { leader } => self.ranks[leader % count].at = None,
            Event::Meet { leader, here, knows, newcomers } => {
                let leader = leader % count;
                self.ranks[leader].at = None;
                (0..count).filter(|n| here >> n & 1 == 1).for_each(|n| self.come(n, leader));
                self.offer(leader, knows, newcomers);
                (0..self.ranks.len()).for_each(|rank| self.promise(rank));
                (0..self.ranks.len()).for_each(|rank| self.agree(rank));
                self.decide(leader);
                (0..self.ranks.len()).for_each(|rank| self.hear(rank));
            }
        }
    }

    fn come(&mut self, rank: usize, leader: usize) {
        if rank == leader || self.ranks[rank].ended || self.ranks[leader].ended {
            return;
        }
        let at = self.led_by(leader);
        if self.attempts[at].offer.is_some() {
            return;
        }
        let known = self.ranks[rank].known.clone();
        self.attempts[at].waiting.insert(rank, known);
        self.ranks[rank].at = Some(at);
    }

    fn offer(&mut self, leader: usize, knows: u32, newcomers: usize) {
        if self.ranks[leader].ended {
            return;
        }
        let at = self.led_by(leader);
        let waiting: Vec<usize> =
            self.attempts[at].waiting.keys().copied().filter(|rank| self.is_waiting(*rank, at)).collect();
        let attending = waiting.iter().map(|rank| self.attempts[at].waiting[rank].clone());
        let all: Vec<Known> = attending.chain([self.ranks[leader].known.clone()]).collect();
        let Known { history: mut newest, from, .. } =
            all.iter().max_by_key(|known| known.history.newest).unwrap().clone();
        let is_known = |n: &usize| self.ranks[*n].ended && knows >> n & 1 == 1;
        newest.add_ended((0..self.ranks.len()).filter(is_known));
        let members = newest.members();
        let mut here: Ranks =
            waiting.into_iter().chain([leader]).filter(|rank| members.contains(rank)).collect();
        if self.attempts[at].offer.is_some() || !here.contains(&leader) || !newest.may_form(&here) {
            return;
        }
        let number = all.iter().map(|known| known.newest_seen).max().unwrap() + 1;
        self.attempts[at].waiting.retain(|rank, _| here.contains(rank));
        for _ in 0..newcomers {
            let new = self.ranks.len();
            self.ranks.push(Rank { known: Known::default(), at: Some(at), ended: false });
            self.attempts[at].waiting.insert(new, Known::default());
            here.insert(new);
        }
        let before = self.attempts[from].before.iter().copied().chain([from]).collect();
        self.attempts[at].before = before;
        self.attempts[at].offer = Some(newest.with_group(number, here));
        self.ranks[leader].known.newest_seen = number;
    }

    /// Returns the attempt at which this rank waits, with what is offered there; `None` where nothing is offered to it.
    fn offered(&self, rank: usize) -> Option<(usize, History)> {
        let at = self.ranks[rank].at.filter(|_| !self.ranks[rank].ended)?;
        let offer = self.attempts[at].offer.clone()?;
        self.attempts[at].waiting.contains_key(&rank).then_some((at, offer))
    }

    fn promise(&mut self, rank: usize) {
        let Some((at, offer)) = self.offered(rank) else { return };
        let known = &mut self.ranks[rank].known;
        known.newest_seen = known.newest_seen.max(offer.newest);
        self.attempts[at].promised.insert(rank);
    }

    fn agree(&mut self, rank: usize) {
        let Some((at, offer)) = self.offered(rank) else { return };
        let attempt = &mut self.attempts[at];
        if attempt.promised.len() == attempt.waiting.len() && !attempt.decided {
            attempt.agreed.insert(rank);
            let known = &mut self.ranks[rank].known;
            (known.history, known.from) = (offer, at);
        }
    }

    fn decide(&mut self, leader: usize) {
        let Some(at) = self.ranks[leader].at.filter(|_| !self.ranks[leader].ended) else { return };
        let attempt = &mut self.attempts[at];
        let Some(offer) = attempt.offer.clone().filter(|_| attempt.leader == leader && !attempt.decided)
        else {
            return;
        };
        if attempt.agreed.len() == attempt.waiting.len() {
            attempt.decided = true;
            self.groups.push((at, offer.members()));
            let known = &mut self.ranks[leader].known;
            (known.history, known.from) = (offer.met(), at);
            self.ranks[leader].at = None;
        }
    }

    fn hear(&mut self, rank: usize) {
        let Some((at, offer)) = self.offered(rank) else { return };
        if self.attempts[at].decided {
            self.ranks[rank].known.history = offer.met();
            self.ranks[rank].at = None;
        }
    }

    /// Returns two groups, neither of which follows from the other, with all of their members alive.
    fn two_groups(&self) -> Option<[&(usize, Ranks); 2]> {
        let lives = |group: &&(usize, Ranks)| group.1.iter().all(|rank| !self.ranks[*rank].ended);
        let follows = |one: usize, other: usize| self.attempts[one].before.contains(&other);
        let living: Vec<_> = self.groups.iter().filter(lives).collect();
        living.iter().enumerate().find_map(|(at, one)| {
            let apart = |other: &&&(usize, Ranks)| !follows(one.0, other.0) && !follows(other.0, one.0);
            living[at + 1..].iter().find(apart).map(|other| [*one, *other])
        })
    }
}

fn event() -> impl Strategy<Value = Event> {
    let rank = || 0..24_usize;
    prop_oneof![
        6 => (rank(), rank()).prop_map(|(rank, leader)| Event::Come { rank, leader }),
        3 => (rank(), any::<u32>(), 0..3_usize)
            .prop_map(|(leader, knows, new)| Event::Offer { leader, knows, newcomers: new / 2 }),
        5 => rank().prop_map(|rank| Event::Promise { rank }),
        5 => rank().prop_map(|rank| Event::Agree { rank }),
        2 => rank().prop_map(|leader| Event::Decide { leader }),
        2 => rank().prop_map(|rank| Event::Hear { rank }),
        2 => rank().prop_map(|rank| Event::End { rank }),
        1 => rank().prop_map(|leader| Event::GiveUp { leader }),
        5 => (rank(), any::<u32>(), any::<u32>(), 0..4_usize).prop_map(|(leader, here, knows, new)| {
            Event::Meet { leader, here, knows: knows | knows >> 3, newcomers: new / 3 }
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn two_groups_never_both_live(ranks in 2..7_usize, events in proptest::collection::vec(event(), 1..60)) {
        let mut world = SimulatedJob::new(ranks);
        for event in &events {
            if world.ranks.len() > 24 {
                break;
            }
            world.happen(event);
            let two = world.two_groups();
            prop_assert!(two.is_none(), "{two:?} after {event:?}");
        }
    }

    #[test]
    fn two_parts_that_take_each_other_for_unreachable_never_both_go_on(
        of in proptest::collection::vec(0..3_u8, 2..16), knows in any::<[u16; 2]>()
    ) {
        // 0: ranks that have ended, some of which each part knows to have ended; 1 and 2: the two parts.
        let part = |which| (0..of.len()).filter(|number| of[*number] == which).collect::<Ranks>();
        let goes_on = |which, knows: u16| {
            let mut history = History::first((0..of.len()).collect());
            history.add_ended(part(0).into_iter().filter(|number| knows >> number & 1 == 1));
            history.may_form(&part(which))
        };
        prop_assert!(!(goes_on(1, knows[0]) && goes_on(2, knows[1])));
    }
}
