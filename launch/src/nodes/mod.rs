//! Cooperation between the launchers of a job on several nodes.
//!
//! The launchers connect through the same rendezvous as ranks, each proving that it has the secret. The coordinator of the
//! first node receives all messages and decides; the others keep a connection to it for as long as the job lasts. With
//! one node the coordinator exists, too, and decides alone.

mod connection;
mod coordinator;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod link;
mod losses;

use std::net::IpAddr;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use comm::internal::host_name;
use comm::launcher::{self, Connection, addresses, local_address_towards, lock, without_brackets};
use comm::{InitMethod, TcpConfig, Tls, Transport};

use super::environment::BIND;
use super::event::Event;
use super::message::{NodeMessage, Round};
use super::random::random_hex;
use crate::{Error, NodeName, Result, SpawnConfig};

use connection::Limit;
use coordinator::Coordinator;
use link::{CoordinatorLink, CoordinatorLinks};

#[cfg(any(test, fuzzing))]
pub use fuzz::fuzz_coordinator;

/// Upper bound for timeouts, so that adding one to an `Instant` does not overflow.
pub(super) const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// This launcher's connections to the other launchers of the job.
pub(super) struct Nodes {
    link: Link,
    /// Address at which other nodes reach this node's ranks; `None` for one node.
    pub(super) address: Option<IpAddr>,
    /// On the first node: the address at which the ranks meet, where `master_addr` is not that address alone.
    pub(super) host: Option<String>,
    /// How long the others may be silent.
    limit: Limit,
    /// Keeps the heartbeat thread running; `None` without other nodes.
    heartbeats: Option<Sender<()>>,
}

enum Link {
    First(Arc<Mutex<CoordinatorLinks>>),
    Other(Arc<Mutex<CoordinatorLink>>),
}

impl Nodes {
    /// Connects to the launchers of the other nodes. Orders then arrive as [`Event::Order`].
    pub(super) fn join(config: &SpawnConfig, events: &Sender<Event>) -> Result<Self> {
        let secret = match &config.secret {
            Some(_) => None,
            None => Some(random_hex::<32>()?),
        };
        let mut round = Round {
            run_id: random_hex::<16>()?,
            secret,
            host: None,
            port: 0,
            restart: 0,
            max_restarts: config.max_restarts,
        };
        let limit = Limit::new(config.join_timeout.min(MAX_TIMEOUT));
        if config.nodes == 1 {
            let coordinator = Coordinator::new(vec![host_name()], round);
            let link = Link::First(CoordinatorLinks::start(coordinator, Vec::new(), events)?);
            return Ok(Self { link, address: None, host: None, limit, heartbeats: None });
        }
        let connections = meet_others(config, bind(config)?)?;
        let (address, host) = reached(config, &connections)?;
        round.host.clone_from(&host);
        let (link, heartbeats) = match connections {
            Connections::OfAll(connections) => {
                let peer = |connection: &Connection| {
                    connection.peer().map_or_else(|_| "?".into(), |peer| peer.ip().to_string())
                };
                let hosts = std::iter::once(host_name()).chain(connections.iter().map(peer)).collect();
                let links = CoordinatorLinks::start(Coordinator::new(hosts, round), connections, events)?;
                let heartbeats = link::keep_up(&links, limit)?;
                (Link::First(links), heartbeats)
            }
            Connections::ToFirst(connection) => {
                let link = CoordinatorLink::start(connection, events)?;
                let heartbeats = link::keep_up(&link, limit)?;
                (Link::Other(link), heartbeats)
            }
        };
        Ok(Self { link, address: Some(address), host, limit, heartbeats: Some(heartbeats) })
    }

    /// How often to check for silent launchers; `None` without other nodes.
    pub(super) fn period(&self) -> Option<Duration> {
        self.heartbeats.as_ref().map(|_| self.limit.period())
    }

    /// Gives up launchers that have been silent for the timeout while this one has waited for them for `waited`.
    pub(super) fn give_up_the_silent(&self, waited: Duration) {
        match &self.link {
            Link::First(links) => lock(links).give_up(waited, self.limit),
            Link::Other(link) => lock(link).give_up(waited, self.limit),
        }
    }

    /// Sends a message to the coordinator.
    pub(super) fn send(&self, message: NodeMessage) {
        match &self.link {
            Link::First(links) => lock(links).handle(0, message),
            Link::Other(link) => connection::send(&mut lock(link).line.connection, &message),
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        match &self.link {
            Link::First(links) => lock(links).close(),
            Link::Other(link) => lock(link).line.connection.hang_up(),
        }
    }
}

/// Returns the address on which this launcher listens, and whether it is only likely: `GIRANDOLE_BIND`, or the source address
/// of the route to the first node.
fn bind(config: &SpawnConfig) -> Result<(IpAddr, bool)> {
    let given = config.value_of(BIND).filter(|text| !text.is_empty());
    if let Some(text) = given.map(|text| text.to_string_lossy().into_owned()) {
        let ip = without_brackets(text.trim()).parse();
        let wrong = |_| Error::invalid(BIND, text, "give an IP address of this host, without port");
        return Ok((ip.map_err(wrong)?, false));
    }
    let SpawnConfig { master_addr, master_port, join_timeout, .. } = config;
    let deadline = Instant::now() + (*join_timeout).min(MAX_TIMEOUT);
    let address = local_address_towards(master_addr, *master_port, true, deadline).map_err(|reason| {
        Error::invalid("master_addr", master_addr, format!("{reason}; give the address of node 0"))
    });
    Ok((address?, true))
}

/// Returns this node's address in the network of the first node, which is that of its connections; and on the first node
/// where the ranks meet, if that does not follow from `master_addr`: it may have several addresses, or be that of a service
/// or router that forwards connections to `master_port` only.
fn reached(config: &SpawnConfig, connections: &Connections) -> Result<(IpAddr, Option<String>)> {
    let (is_first, connections) = match connections {
        Connections::OfAll(connections) => (true, &connections[..]),
        Connections::ToFirst(connection) => (false, std::slice::from_ref(connection)),
    };
    let own = |connection: &Connection| Some(connection.socket().local_addr().ok()?.ip().to_canonical());
    let all: Vec<IpAddr> = connections.iter().filter_map(own).collect();
    let times = |ip: &&IpAddr| all.iter().filter(|other| other == ip).count();
    let most = all.iter().rev().max_by_key(times);
    let address = *most.ok_or_else(|| Error::system("the address of this node", "the others are gone"))?;
    let deadline = Instant::now() + config.join_timeout.min(MAX_TIMEOUT);
    let found = addresses(&config.master_addr, 0, deadline).unwrap_or_default();
    let follows = address.is_loopback() || found.iter().all(|found| found.ip().to_canonical() == address);
    Ok((address, (is_first && !follows).then(|| address.to_string())))
}

enum Connections {
    OfAll(Vec<Connection>),
    ToFirst(Connection),
}

fn meet_others(config: &SpawnConfig, (bind, bind_by_route): (IpAddr, bool)) -> Result<Connections> {
    let meeting = TcpConfig {
        rank: config.node_rank,
        world_size: config.nodes,
        init_method: InitMethod::Tcp { host: config.master_addr.clone(), port: config.master_port },
        bind,
        bind_by_route,
        timeout: config.join_timeout,
        secret: config.secret.clone(),
        transport: Transport::Tcp,
        // TLS keys are derived from the secret; without one all launchers are on loopback.
        tls: if config.secret.is_some() { config.tls } else { Tls::Off },
        // Keeps ranks that connect to the launchers' port from being taken for launchers.
        job_id: "launchers".into(),
        ..TcpConfig::default()
    };
    let mut connections = launcher::meet(&meeting).map_err(of_nodes)?;
    connections.iter().for_each(|connection| link::keep_alive(connection.socket()));
    match (config.node_rank, connections.pop()) {
        (0, Some(last)) => Ok(Connections::OfAll(connections.into_iter().chain([last]).collect())),
        (_, Some(first)) => Ok(Connections::ToFirst(first)),
        (_, None) => Err(Error::system("a connection between launchers", "there is none")),
    }
}

/// Converts an error about ranks into the same error about nodes.
fn of_nodes(error: comm::Error) -> Error {
    let words =
        [("WORLD_SIZE", "--nnodes"), ("world size", "--nnodes"), ("ranks", "nodes"), ("rank", "node")];
    let say = |text: String| words.iter().fold(text, |text, (rank, node)| replace_word(&text, rank, node));
    match error {
        comm::Error::Rendezvous { rank, world_size, address, waited, detail } => {
            let seconds = waited.as_secs_f64();
            let detail = format!("within {seconds:.1} s: {}", say(detail));
            Error::Nodes { node: rank, nodes: world_size, address, detail }
        }
        comm::Error::Refused { rank, address, reason } => {
            Error::NodeRefused { node: rank, address, reason: say(reason) }
        }
        comm::Error::PeerDied { rank, host, .. } => Error::NodeGone(NodeName { node: rank, host }),
        comm::Error::Timeout { rank, host, waited, .. } => {
            Error::NodeSilent { node: NodeName { node: rank, host }, silence: waited }
        }
        comm::Error::Protocol { rank, host, detail, .. } => {
            let reason = say(format!("it broke the protocol: {detail}"));
            Error::NodeStopped { node: NodeName { node: rank, host }, reason }
        }
        comm::Error::InvalidArgument { what, got, .. } if what == launcher::MEETING_HOST => Error::invalid(
            "master_addr",
            got,
            "this machine does not have that address; give one that node 0 has, or, where a service or router forwards \
             connections to it, set GIRANDOLE_BIND there to the address to listen on",
        ),
        error => error.into(),
    }
}

/// Replaces whole words only: hosts may be called `frankfurt` or `rank-3`.
fn replace_word(text: &str, word: &str, other: &str) -> String {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    let mut replaced = String::new();
    let mut from = 0;
    for (at, _) in text.match_indices(word) {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        if !before.ends_with(is_part) && !after.starts_with(is_part) {
            replaced.extend([&text[from..at], other]);
            from = at + word.len();
        }
    }
    replaced + &text[from..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_called_nodes_and_hosts_what_they_are_called() {
        let error = comm::Error::Rendezvous {
            rank: 0,
            world_size: 3,
            address: "10.0.0.1:1".into(),
            waited: Duration::from_secs(1),
            detail:
                "ranks 1 and 2 are missing; this rank (host frankfurt-2, rank-3): the world size, WORLD_SIZE"
                    .into(),
        };
        let Error::Nodes { detail, .. } = of_nodes(error) else { panic!() };
        assert_eq!(
            detail,
            "within 1.0 s: nodes 1 and 2 are missing; this node (host frankfurt-2, rank-3): the --nnodes, --nnodes"
        );
    }

    #[test]
    fn a_launcher_that_stands_still_is_a_node() {
        let (rank, host, waited) = (2, "c".to_string(), Duration::from_secs(3));
        let operation = "rendezvous".to_string();
        let error = of_nodes(comm::Error::Timeout {
            rank,
            host: host.clone(),
            operation: operation.clone(),
            waited,
            detail: "it does not answer".into(),
        });
        assert!(
            matches!(&error, Error::NodeSilent { node, silence } if node.node == 2 && *silence == waited)
        );
        assert!(error.exit_code() == 1 && !error.to_string().contains("rank 2"), "{error}");
        let error =
            of_nodes(comm::Error::Protocol { rank, host, operation, detail: "rank 2 sent nonsense".into() });
        assert!(error.to_string().contains("node 2 sent nonsense"), "{error}");
    }
}
