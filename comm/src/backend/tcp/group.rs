//! Subgroups over TCP: their members find each other in a rendezvous of their own, at an address that the first member
//! sends to the others.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use crate::base::members::{Members, rank_in};
use crate::base::tree;
use crate::failure::control::failure_state::job::FormationGuard;
use crate::failure::peer_failures;
use crate::failure::supervisor::Supervisor;
use crate::rendezvous::parent::Parent;
use crate::rendezvous::{Meeting, Options, meet_with};
use crate::{Communicator, Error, InitMethod, Message, Operation, Result, TcpConfig};

use super::Tcp;

/// To how many others a member passes an invitation on at most.
const PASSES: usize = 4;
/// Bytes of an invitation at most, for each member.
const INVITATION: usize = 128;

/// What the first member of a new group sends to the others, each of which passes it on. So no rank needs connections to all.
#[derive(Debug, Serialize, Deserialize)]
struct Invitation {
    /// Number of the group among those of which this rank was the first member.
    number: u64,
    /// Where the members meet: for how many members in a row an address counts, and the address at which they reach the first
    /// one. Empty if there will be no group.
    places: Vec<(usize, SocketAddr)>,
}

impl Invitation {
    fn place_of(&self, member: usize) -> Option<SocketAddr> {
        let mut places = self.places.iter().flat_map(|(count, address)| std::iter::repeat_n(address, *count));
        places.nth(member).copied()
    }
}

impl Tcp {
    /// Returns this group as the parent of a new one, to be watched for failures during the rendezvous that `register_rendezvous`
    /// stands for.
    pub(crate) fn as_parent(&self, meets: &FormationGuard) -> Parent {
        let above = meets.above.iter().map(|group| group.clone() as Arc<dyn Supervisor>).collect();
        Parent { supervisor: self.failure_state.clone(), above, ended: meets.ended.clone() }
    }

    /// Registers, until the result is dropped, that this rank is in a rendezvous (`operation`) with `others`, given by
    /// their world ranks.
    pub(crate) fn register_rendezvous(
        &self,
        operation: String,
        others: Vec<usize>,
    ) -> Result<FormationGuard> {
        self.failure_state.job().begin_formation(&self.failure_state, operation, others)
    }

    /// Runs the rendezvous of a new group. Called on its members, by all at the same point of their sequence of
    /// operations.
    pub(crate) fn rendezvous(&self, ranks: &[usize]) -> Result<(TcpConfig, Meeting, Members)> {
        let (config, listener) = self.exchange_invitation(ranks)?;
        self.rendezvous_of_members(ranks, config, listener)
    }

    /// Returns the configuration for the rendezvous, and on the first member the listener for it. The first member's address goes
    /// from member to member.
    fn exchange_invitation(&self, ranks: &[usize]) -> Result<(TcpConfig, Option<TcpListener>)> {
        let place = rank_in(self.rank, ranks)?;
        let config = TcpConfig {
            rank: place,
            world_size: ranks.len(),
            init_method: InitMethod::Tcp { host: "127.0.0.1".into(), port: 1 },
            ..self.config.clone()
        };
        if ranks.len() == 1 {
            return Ok((config, None));
        }
        let opened = (place == 0).then(|| {
            TcpListener::bind((config.bind, 0)).and_then(|listener| {
                let port = listener.local_addr()?.port();
                Ok((listener, port))
            })
        });
        let invitation = match &opened {
            Some(opened) => self.invitation(ranks, opened.as_ref().ok().map(|(_, port)| *port)),
            None => self.receive_invitation(ranks, ranks[tree::parent(place, PASSES)])?,
        };
        self.pass_on(&invitation, &ranks[tree::children(place, ranks.len(), PASSES)])?;
        let first = ranks[0];
        let (listener, address) = match opened {
            Some(opened) => {
                let (listener, port) = opened.map_err(|reason| Error::Listen {
                    address: SocketAddr::new(config.bind, 0).to_string(),
                    reason: reason.to_string(),
                })?;
                (Some(listener), Some(SocketAddr::new(config.bind, port)))
            }
            None => (None, invitation.place_of(place)),
        };
        let address = address.ok_or_else(|| {
            let first = self.members.world_rank(first);
            Error::system("a new group", format!("rank {first} could not open a meeting point for it"))
        })?;
        Ok((self.rendezvous_config(config, address, first, invitation.number), listener))
    }

    /// Runs the rendezvous itself. If this group fails meanwhile, some members may not come, and the rendezvous ends with
    /// an error.
    fn rendezvous_of_members(
        &self,
        ranks: &[usize],
        config: TcpConfig,
        listener: Option<TcpListener>,
    ) -> Result<(TcpConfig, Meeting, Members)> {
        let members = Members::subgroup(ranks.iter().map(|rank| self.members.world_rank(*rank)));
        let operation = "rendezvous".to_string() + &members.suffix();
        let own = self.members.world_rank(self.rank);
        let others: Vec<usize> = members.world_ranks().iter().copied().filter(|rank| *rank != own).collect();
        let job = self.failure_state.job().clone();
        let waits = self.register_rendezvous(operation.clone(), others.clone())?;
        let options = Options {
            listener,
            members: Some(members.clone()),
            parent: Some(self.as_parent(&waits)),
            thread: job.thread().clone(),
            ..Options::default()
        };
        let met = meet_with(&config, options);
        let met = met.map_err(|error| self.failure_state.explain(error, operation, &others));
        let met = met.inspect_err(peer_failures::record);
        drop(waits);
        Ok((config, Meeting { job, ..met? }, members))
    }

    /// Returns the invitation to the port at which this rank, the first member, listens.
    fn invitation(&self, ranks: &[usize], port: Option<u16>) -> Invitation {
        let number = self.groups.fetch_add(1, Ordering::Relaxed);
        let mut places: Vec<(usize, SocketAddr)> = Vec::new();
        for (rank, port) in ranks.iter().zip(port.iter().cycle()) {
            let address = SocketAddr::new(self.address_for(*rank), *port);
            match places.last_mut() {
                Some((count, last)) if *last == address => *count += 1,
                _ => places.push((1, address)),
            }
        }
        Invitation { number, places }
    }

    /// Sends an invitation to some members: its length, then itself.
    fn pass_on(&self, invitation: &Invitation, ranks: &[usize]) -> Result<()> {
        let text = serde_json::to_vec(invitation).map_err(|reason| Error::system("an invitation", reason))?;
        let mut messages = Vec::new();
        for &to in ranks {
            let length = Tensor::new(&[text.len() as u32], &Device::Cpu)?;
            messages.push(Message::Send { tensor: length, to });
            let tensor = Tensor::from_vec(text.clone(), text.len(), &Device::Cpu)?;
            messages.push(Message::Send { tensor, to });
        }
        if messages.is_empty() { Ok(()) } else { self.run(Operation::Batch { messages }) }
    }

    /// Receives the invitation to a group of these ranks.
    fn receive_invitation(&self, ranks: &[usize], from: usize) -> Result<Invitation> {
        let length = Tensor::zeros(1, DType::U32, &Device::Cpu)?;
        self.run(Operation::Recv { tensor: length.clone(), from })?;
        let bytes = length.to_vec1::<u32>()?[0] as usize;
        let invalid = |reason: String| Error::system("an invitation to a new group", reason);
        if bytes > INVITATION * ranks.len() {
            return Err(invalid(format!("it has {bytes} bytes")));
        }
        let text = Tensor::zeros(bytes, DType::U8, &Device::Cpu)?;
        self.run(Operation::Recv { tensor: text.clone(), from })?;
        serde_json::from_slice(&text.to_vec1::<u8>()?).map_err(|reason| invalid(reason.to_string()))
    }

    fn rendezvous_config(
        &self,
        config: TcpConfig,
        address: SocketAddr,
        first: usize,
        number: u64,
    ) -> TcpConfig {
        let (host, port) = (address.ip().to_string(), address.port());
        let job_id = format!("{}/{first}.{number}", self.config.job_id);
        TcpConfig { init_method: InitMethod::Tcp { host, port }, job_id, ..config }
    }

    /// Returns the address at which `rank` reaches this one.
    fn address_for(&self, rank: usize) -> IpAddr {
        self.own_ips.get(rank).copied().unwrap_or(self.config.bind)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::resume_unwind;
    use std::sync::mpsc::channel;
    use std::sync::{Arc, Barrier, Mutex};
    use std::thread::{JoinHandle, spawn};
    use std::time::Duration;

    use super::*;
    use crate::failure::control::failure_state::job::Job;

    const LONG: Duration = Duration::from_secs(60);

    type Part = Box<dyn Fn(&Tcp) -> Result<()> + Send + Sync>;

    /// Runs a group whose ranks are threads, with one part for each, and returns their errors by rank: None for a rank
    /// that succeeded or died. All ranks keep their group open until the last one is done, except for those that die.
    fn outcomes(timeout: Duration, parts: Vec<Part>) -> Vec<Option<Error>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (host, port) = ("127.0.0.1".into(), listener.local_addr().unwrap().port());
        let config = TcpConfig {
            world_size: parts.len(),
            init_method: InitMethod::Tcp { host, port },
            timeout,
            ..TcpConfig::default()
        };
        let mut listener = Some(listener);
        let ranks = parts.into_iter().enumerate().map(|(rank, part)| {
            let config = TcpConfig { rank, ..config.clone() };
            let options = Options { listener: listener.take(), ..Options::default() };
            spawn(move || {
                let meeting = meet_with(&config, options).unwrap();
                let tcp = Tcp::join(&config, meeting, Members::world(config.world_size), None).unwrap();
                let outcome = part(&tcp);
                (tcp, outcome)
            })
        });
        let ranks: Vec<JoinHandle<(Tcp, Result<()>)>> = ranks.collect();
        let ends: Vec<_> = ranks.into_iter().map(|rank| rank.join().ok()).collect();
        ends.iter().map(|end| end.as_ref().and_then(|(_, outcome)| outcome.clone().err())).collect()
    }

    /// Returns one part for each rank: all members in `ranks` exchange the invitation, then those in `come` go to the
    /// rendezvous; the others call `stay_away`.
    fn parts(world_size: usize, ranks: &'static [usize], come: &[usize], stay_away: fn()) -> Vec<Part> {
        let arranged = Arc::new(Barrier::new(ranks.len()));
        let part = |rank: usize| -> Part {
            if !ranks.contains(&rank) {
                return Box::new(|_| Ok(()));
            }
            let (arranged, comes) = (arranged.clone(), come.contains(&rank));
            Box::new(move |tcp| {
                let (config, listener) = tcp.exchange_invitation(ranks)?;
                arranged.wait();
                if comes {
                    return tcp.rendezvous_of_members(ranks, config, listener).map(drop);
                }
                stay_away();
                Ok(())
            })
        };
        (0..world_size).map(part).collect()
    }

    #[test]
    fn a_member_that_dies_before_it_comes_is_named_on_the_others() {
        let dies = || resume_unwind(Box::new("it dies"));
        for ranks in [&[1, 3][..], &[3, 1], &[0, 1, 3], &[1, 0, 3], &[3, 1, 0]] {
            let outcomes = outcomes(LONG, parts(4, ranks, &[0, 1], dies));
            for &rank in ranks.iter().filter(|rank| **rank != 3) {
                let error = outcomes[rank].clone().unwrap();
                assert!(matches!(error, Error::PeerDied { rank: 3, .. }), "{error}");
                let place = format!("died during rendezvous in the group {ranks:?}");
                assert!(error.to_string().ends_with(&place), "{error}");
            }
        }
    }

    #[test]
    fn a_member_that_does_not_come_has_its_number_in_the_job() {
        let ways: [(&[usize], _); 2] =
            [(&[1, 2], "rank 1 was not found there"), (&[2, 1], "rank 1 is missing")];
        for (ranks, told) in ways {
            let outcomes = outcomes(Duration::from_secs(2), parts(3, ranks, &[2], || ()));
            let error = outcomes[2].clone().unwrap();
            assert!(matches!(error, Error::Rendezvous { rank: 2, .. }), "{error}");
            assert!(error.to_string().contains(told), "{error}");
        }
    }

    /// The rank that aborts is the first member, or another one; rank 2 never comes.
    #[test]
    fn a_meeting_ends_where_the_group_is_aborted_and_the_others_say_who_has_left() {
        for victim in [0, 1] {
            let mut parts = parts(3, &[0, 1, 2], &[0, 1], || ());
            let part = std::mem::replace(&mut parts[victim], Box::new(|_| Ok(())));
            let part = move |tcp: &Tcp| {
                std::thread::scope(|scope| {
                    let part = scope.spawn(|| part(tcp));
                    while tcp.failure_state.job().formations().is_empty() && !part.is_finished() {
                        std::thread::yield_now();
                    }
                    tcp.abort();
                    part.join().unwrap()
                })
            };
            parts[victim] = Box::new(part);
            let outcomes = outcomes(Duration::from_secs(2), parts);
            let [own, other] = [victim, 1 - victim].map(|rank| outcomes[rank].clone().unwrap());
            assert!(matches!(own, Error::Aborted { .. }), "{own}");
            assert!(matches!(other, Error::PeerLeft { rank, .. } if rank == victim), "{other}");
        }
    }

    /// Ranks 0 and 1 of a group of four form a group and then make another one of it, with the members in the order of
    /// `ranks`. Rank 0 waits for rank 1, for the whole time-out if need be; meanwhile rank 3 dies. Returns the error of
    /// rank 0.
    fn waits_while_a_stranger_dies(ranks: &'static [usize]) -> Error {
        let arranged = Arc::new(Barrier::new(2));
        let (meets, under_way) = channel::<Arc<Job>>();
        let (end, ended) = channel();
        let under_way = Mutex::new(under_way);
        let ended = Mutex::new(ended);
        let there = arranged.clone();
        let pair = |tcp: &Tcp| {
            let (config, meeting, members) = tcp.rendezvous(&[0, 1])?;
            Tcp::join(&config, meeting, members, None)
        };
        let waits = move |tcp: &Tcp| {
            let pair = pair(tcp)?;
            let (config, listener) = pair.exchange_invitation(ranks)?;
            arranged.wait();
            meets.send(pair.failure_state.job().clone()).unwrap();
            let outcome = pair.rendezvous_of_members(ranks, config, listener).map(drop);
            end.send(()).unwrap();
            outcome
        };
        let stays_away = move |tcp: &Tcp| {
            let pair = pair(tcp)?;
            let _invited = pair.exchange_invitation(ranks)?;
            there.wait();
            ended.lock().unwrap().recv_timeout(LONG / 2).unwrap();
            Ok(())
        };
        let dies = move |_: &Tcp| {
            let job = under_way.lock().unwrap().recv().unwrap();
            while job.formations().is_empty() {
                std::thread::yield_now();
            }
            resume_unwind(Box::new("it dies"))
        };
        let parts: Vec<Part> =
            vec![Box::new(waits), Box::new(stays_away), Box::new(|_| Ok(())), Box::new(dies)];
        outcomes(LONG, parts)[0].clone().unwrap()
    }

    /// The rank that waits is the first member, or another one.
    #[test]
    fn a_meeting_ends_where_a_rank_dies_that_is_not_of_the_parent() {
        for ranks in [&[0, 1], &[1, 0]] {
            let error = waits_while_a_stranger_dies(ranks);
            assert!(matches!(error, Error::PeerDied { rank: 3, .. }), "{error}");
            let place = format!("died during rendezvous in the group {ranks:?}");
            assert!(error.to_string().ends_with(&place), "{error}");
        }
    }

    /// The program has seen the error of the death, and continues with a group that the dead rank is not a member of.
    #[test]
    fn those_who_know_of_a_death_and_go_on_meet() {
        let paired = Arc::new(Barrier::new(3));
        let told = |paired: Arc<Barrier>| {
            move |tcp: &Tcp| {
                let (config, meeting, members) = tcp.rendezvous(&[0, 1])?;
                let pair = Tcp::join(&config, meeting, members, None)?;
                paired.wait();
                let error = tcp.run(Operation::Barrier).unwrap_err();
                assert!(matches!(error, Error::PeerDied { rank: 2, .. }), "{error}");
                pair.rendezvous(&[0, 1]).map(drop)
            }
        };
        let mut parts: Vec<Part> = vec![Box::new(told(paired.clone())), Box::new(told(paired.clone()))];
        parts.push(Box::new(move |_| {
            paired.wait();
            resume_unwind(Box::new("it dies"))
        }));
        let outcomes = outcomes(LONG, parts);
        assert!(outcomes.iter().all(Option::is_none), "{outcomes:?}");
    }
}
