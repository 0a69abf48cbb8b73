//! How the ranks of a job find each other: all go to rank 0 at the meeting point, each says where it listens, rank 0
//! answers with the table of all, and each rank connects to all lower ones.
//!
//! ```text
//! rank r                      rank 0
//!   handshake (control)  ->
//!   Hello                ->   waits until all are here
//!                        <-   Table | Refused | Failed
//!   handshake (data) with ranks 0..r
//!   Connected | Failed   ->   waits until all are connected
//!                        <-   Complete | Failed
//! ```

mod desk;
mod leader;
mod meeting_file;
mod member;
mod message;
mod place;
mod roster;
mod store;

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use self::message::{Failure, MAX_HOST, tidy};
use self::place::Place;
use super::acceptor::Limits;
use super::handshake::{Caller, Credentials, Purpose};
use super::{InitMethod, TcpConfig};
use crate::launch::inherited_listener;
use crate::{Error, Result};

/// What is known of a rank's process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    pub(crate) host: String,
    pub(crate) pid: u32,
}

impl PeerInfo {
    fn own() -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { host: tidy(&host, MAX_HOST), pid: std::process::id() }
    }
}

/// Ranks that have found each other. All sockets are blocking, with TCP_NODELAY.
#[derive(Debug)]
pub(crate) struct Meeting {
    /// By rank, this one included.
    pub(crate) peers: Vec<PeerInfo>,
    /// By rank: on rank 0 one for each other rank, on the others one to rank 0.
    pub(crate) control: Vec<Option<TcpStream>>,
    /// By rank: one for each other rank.
    pub(crate) data: Vec<Option<TcpStream>>,
}

/// Finds the other ranks. Returns on all of them, once each is connected to each, or on none.
pub(crate) fn meet(config: &TcpConfig) -> Result<Meeting> {
    meet_with(config, Options::default())
}

/// What tests want otherwise.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// The meeting point, already bound; rank 0 only.
    pub(crate) listener: Option<TcpListener>,
    pub(crate) limits: Limits,
}

pub(crate) fn meet_with(config: &TcpConfig, options: Options) -> Result<Meeting> {
    config.validate()?;
    if config.world_size == 1 {
        return Ok(Meeting { peers: vec![PeerInfo::own()], control: vec![None], data: vec![None] });
    }
    let place = Place::of(&config.init_method)?;
    let listener = match (options.listener, &config.init_method) {
        (None, InitMethod::Env) if config.rank == 0 => inherited_listener(),
        (given, _) => given,
    };
    let started = Instant::now();
    let plan = Plan {
        config,
        place,
        limits: options.limits,
        started,
        deadline: started + config.bounded_timeout(),
        own: PeerInfo::own(),
    };
    plan.check_secret(config.bind)?;
    match config.rank {
        0 => leader::lead(&plan, listener),
        _ => member::join(&plan),
    }
}

/// One rank's part in a meeting.
struct Plan<'a> {
    config: &'a TcpConfig,
    place: Place,
    limits: Limits,
    started: Instant,
    deadline: Instant,
    own: PeerInfo,
}

impl Plan<'_> {
    /// Off loopback a job needs a secret.
    fn check_secret(&self, ip: IpAddr) -> Result<()> {
        match self.config.secret.is_some() || ip.to_canonical().is_loopback() {
            true => Ok(()),
            false => Err(Error::NoSecret { address: ip.to_string() }),
        }
    }

    fn credentials(&self) -> Credentials {
        Credentials::new(self.config.secret.as_ref(), &self.config.job_id)
    }

    /// The number of ranks is at most 4096.
    fn world_size(&self) -> u32 {
        self.config.world_size as u32
    }

    fn rank(&self) -> u32 {
        self.config.rank as u32
    }

    fn caller(&self, purpose: Purpose) -> Caller {
        Caller { rank: self.rank(), world_size: self.world_size(), purpose }
    }

    /// Where this rank waits for the data connections of higher ranks.
    fn listen_for_data(&self) -> Result<(TcpListener, u16)> {
        let address = SocketAddr::new(self.config.bind, 0);
        let listener = TcpListener::bind(address).map_err(|reason| cannot_listen(address, &reason))?;
        let port =
            listener.local_addr().map_err(|reason| Error::system("a listener's address", reason))?.port();
        Ok((listener, port))
    }

    /// The address that others should use; none where this rank listens on all of its host's.
    fn published_ip(&self) -> Option<IpAddr> {
        Some(self.config.bind).filter(|ip| !ip.is_unspecified())
    }

    /// The meeting failed, for a reason that is neither this rank's nor another's alone.
    fn failed(&self, detail: impl Into<String>) -> Error {
        Error::Rendezvous {
            rank: self.config.rank,
            world_size: self.config.world_size,
            address: self.place.to_string(),
            waited: self.started.elapsed(),
            detail: detail.into(),
        }
    }

    /// The meeting failed for what another rank reports.
    fn failed_elsewhere(&self, failure: Failure) -> Error {
        match failure.died {
            Some((rank, host)) => died(rank, host),
            None => self.failed(failure.detail),
        }
    }
}

fn died(rank: usize, host: impl Into<String>) -> Error {
    Error::PeerDied { rank, host: host.into(), operation: "rendezvous".into() }
}

fn cannot_listen(address: SocketAddr, reason: &std::io::Error) -> Error {
    Error::Listen { address: address.to_string(), reason: reason.to_string() }
}

fn random_nonce() -> Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|reason| Error::system("random numbers for a nonce", reason))?;
    Ok(nonce)
}

/// Waits longer and longer between tries.
struct BackOff(Duration);

impl BackOff {
    fn new() -> Self {
        Self(Duration::from_millis(1))
    }

    fn pause(&mut self, deadline: Instant) {
        std::thread::sleep(self.0.min(deadline.saturating_duration_since(Instant::now())));
        self.0 = (self.0 * 2).min(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests;
