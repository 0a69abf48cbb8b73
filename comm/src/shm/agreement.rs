//! Two ranks agree on whether they share memory, over the connection between them, in three exchanges: what each offers;
//! whether each could give; whether each could take. Whatever one of them cannot do, both know.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::tcp::{Fault, PeerInfo, TcpConfig, Transport, Try, Wire};
use crate::{Error, Result};

use super::host::{Host, Inbox, Pair, Pairs};
use super::obstacle::Obstacle;
use super::{Name, Token};

/// How long handing over may take; it is a matter of microseconds.
const PATIENCE: Duration = Duration::from_secs(10);
const OFFER: usize = 1 + size_of::<Token>() + size_of::<Name>() + size_of::<Token>();

/// What one rank tells another first.
struct Offer {
    obstacle: Option<Obstacle>,
    boot: Token,
    name: Name,
    /// In the memory of the stream from the rank that is told.
    token: Token,
}

impl Offer {
    fn encode(&self) -> [u8; OFFER] {
        let mut bytes = [0; OFFER];
        bytes[0] = Obstacle::to_byte(self.obstacle);
        bytes[1..33].copy_from_slice(&self.boot);
        bytes[33..49].copy_from_slice(&self.name);
        bytes[49..].copy_from_slice(&self.token);
        bytes
    }

    fn decode(bytes: &[u8; OFFER]) -> Self {
        let (mut boot, mut name, mut token) = (Token::default(), Name::default(), Token::default());
        boot.copy_from_slice(&bytes[1..33]);
        name.copy_from_slice(&bytes[33..49]);
        token.copy_from_slice(&bytes[49..]);
        Self { obstacle: Obstacle::from_byte(bytes[0]), boot, name, token }
    }
}

/// What came out of it.
pub(crate) struct Agreement {
    /// As before.
    pub(crate) connections: Vec<Option<TcpStream>>,
    /// None where memory is shared with nobody.
    pub(crate) pairs: Option<Pairs>,
    /// Every rank runs on the same host; all ranks find the same.
    pub(crate) one_host: bool,
}

/// Agrees with every other rank.
///
/// # Errors
/// A rank that dies meanwhile, and, where the configuration wants shared memory, why it cannot be had.
pub(crate) fn agree(
    config: &TcpConfig,
    peers: &[PeerInfo],
    connections: Vec<Option<TcpStream>>,
) -> Result<Agreement> {
    let started = Instant::now();
    let clock = Clock { peers, started, deadline: started + config.bounded_timeout() };
    let host = match config.transport {
        Transport::Tcp => Err(Obstacle::Unwanted),
        Transport::Auto | Transport::Shm => Host::open(),
    };
    let mut partners = Vec::new();
    for (rank, stream) in connections.into_iter().enumerate() {
        let Some(stream) = stream else { continue };
        partners.push(clock.check(rank, Partner::new(rank, stream))?);
    }
    let boot = Host::boot();
    exchange_offers(&mut partners, &host, boot, &clock)?;
    let one_host =
        boot.is_some() && partners.iter().all(|partner| partner.theirs.boot == boot.unwrap_or_default());
    let host = share(&mut partners, host, &clock)?;

    let (mut pairs, mut connections): (Vec<_>, Vec<_>) = peers.iter().map(|_| (None, None)).unzip();
    for Partner { rank, wire, obstacle, pair, .. } in partners {
        connections[rank] = Some(clock.check(rank, wire.into_stream())?);
        pairs[rank] = pair.filter(|_| obstacle.is_none());
        if let Some(obstacle) = obstacle {
            tracing::debug!("rank {} talks to rank {rank} over TCP: {obstacle}", config.rank);
            if config.transport == Transport::Shm {
                return Err(impossible(config.rank, rank, &peers[rank].host, obstacle));
            }
        }
    }
    let shared = pairs.iter().any(Option::is_some);
    let pairs = host.ok().filter(|_| shared).map(|host| host.into_pairs(pairs));
    Ok(Agreement { connections, pairs, one_host })
}

fn impossible(own: usize, rank: usize, host: &str, obstacle: Obstacle) -> Error {
    let help = format!(
        "rank {own} and rank {rank} (host {host}) cannot share memory, because {obstacle}; choose auto or tcp"
    );
    Error::invalid("the transport", Transport::Shm, help)
}

/// How far one rank has come with another.
struct Partner {
    rank: usize,
    wire: Wire,
    /// In the memory of the stream from the other rank to this one.
    token: Token,
    theirs: Offer,
    obstacle: Option<Obstacle>,
    inbox: Option<Inbox>,
    pair: Option<Pair>,
}

impl Partner {
    fn new(rank: usize, stream: TcpStream) -> Try<Self> {
        let mut token = Token::default();
        getrandom::fill(&mut token).map_err(|_| Fault::NoRandomness)?;
        let wire = Wire::new(stream, None)?;
        let theirs = Offer::decode(&[0; OFFER]);
        Ok(Self { rank, wire, token, theirs, obstacle: None, inbox: None, pair: None })
    }
}

type Attempt = std::result::Result<Host, Obstacle>;

/// Gives and takes, with all ranks at once.
fn share(partners: &mut [Partner], mut host: Attempt, clock: &Clock<'_>) -> Result<Attempt> {
    let patience = clock.deadline.min(Instant::now() + PATIENCE);
    for partner in partners.iter_mut().filter(|partner| partner.obstacle.is_none()) {
        let Ok(means) = &mut host else { break };
        match means.give(&partner.theirs.name, &partner.token, patience) {
            Ok(inbox) => partner.inbox = Some(inbox),
            Err(obstacle) => partner.obstacle = Some(obstacle),
        }
    }
    compare(partners, clock)?;
    for partner in partners.iter_mut().filter(|partner| partner.obstacle.is_none()) {
        let (Ok(means), Some(inbox)) = (&mut host, partner.inbox.take()) else { continue };
        match means.take(inbox, &partner.theirs.token, patience) {
            Ok(pair) => partner.pair = Some(pair),
            Err(obstacle) => partner.obstacle = Some(obstacle),
        }
    }
    compare(partners, clock)?;
    Ok(host)
}

fn exchange_offers(
    partners: &mut [Partner],
    host: &Attempt,
    boot: Option<Token>,
    clock: &Clock<'_>,
) -> Result<()> {
    let own = host.as_ref().err().copied().or(boot.is_none().then_some(Obstacle::Unsupported));
    let (boot, name) = (boot.unwrap_or_default(), host.as_ref().map(Host::name).unwrap_or_default());
    for Partner { rank, wire, token, .. } in partners.iter_mut() {
        let offer = Offer { obstacle: own, boot, name, token: *token };
        clock.check(*rank, wire.write(&offer.encode(), clock.deadline))?;
    }
    for Partner { rank, wire, theirs, obstacle, .. } in partners.iter_mut() {
        *theirs = Offer::decode(&clock.check(*rank, wire.read(clock.deadline))?);
        let elsewhere = (theirs.boot != boot).then_some(Obstacle::OtherHost);
        *obstacle = own.or(theirs.obstacle).or(elsewhere);
    }
    Ok(())
}

/// Tells what stands in the way, and hears what stands in the way of the others.
fn compare(partners: &mut [Partner], clock: &Clock<'_>) -> Result<()> {
    for Partner { rank, wire, obstacle, .. } in partners.iter_mut() {
        clock.check(*rank, wire.write(&[Obstacle::to_byte(*obstacle)], clock.deadline))?;
    }
    for Partner { rank, wire, obstacle, .. } in partners.iter_mut() {
        let [theirs] = clock.check(*rank, wire.read(clock.deadline))?;
        *obstacle = obstacle.or(Obstacle::from_byte(theirs));
    }
    Ok(())
}

/// When to give up, and on whom.
struct Clock<'a> {
    peers: &'a [PeerInfo],
    started: Instant,
    deadline: Instant,
}

impl Clock<'_> {
    fn check<T>(&self, rank: usize, outcome: Try<T>) -> Result<T> {
        let (host, operation) = (self.peers[rank].host.clone(), String::from("rendezvous"));
        outcome.map_err(|fault| match fault {
            Fault::Closed => Error::PeerDied { rank, host, operation },
            Fault::TimedOut => {
                let detail = "it is connected, and does not say whether it can share memory".into();
                Error::Timeout { rank, host, operation, waited: self.started.elapsed(), detail }
            }
            fault => Error::system("agreeing on shared memory", fault),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_arrives_as_it_was_sent() {
        let sent = Offer { obstacle: Some(Obstacle::Unwanted), boot: [1; 32], name: [2; 16], token: [3; 32] };
        let got = Offer::decode(&sent.encode());
        assert_eq!(
            (got.obstacle, got.boot, got.name, got.token),
            (sent.obstacle, sent.boot, sent.name, sent.token)
        );
    }
}
