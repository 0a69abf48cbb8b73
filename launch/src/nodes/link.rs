//! Connections between launchers, and the threads that read them.

use std::net::TcpStream;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::Builder;
use std::time::{Duration, Instant};

use comm::launcher::{Connection, lock};
use comm::{Error, Result};
use socket2::{SockRef, TcpKeepalive};

use super::connection::{Limit, NodeConnection, send, warn_silent};
use super::coordinator::Coordinator;
use crate::NodeName;
use crate::event::Event;
use crate::message::{JobOutcome, MAX_MESSAGE, NodeMessage, Order};
use crate::platform::socket::end_when_unconfirmed;

/// Receive timeout that is longer than any job.
const NO_TIMEOUT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// TCP keepalive: idle time before the first probe, then the interval and the number of probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// Sets up detection of a machine that vanishes without closing its connections: within 25 s.
pub(super) fn keep_alive(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let keep = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_PROBES);
    // If this fails, the job still ends when the ranks detect the loss.
    let _ = socket.set_tcp_keepalive(&keep);
    end_when_unconfirmed(stream, KEEPALIVE_IDLE + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL);
}

/// The first node's end: the coordinator and the connections to all other nodes.
pub(super) struct CoordinatorLinks {
    coordinator: Coordinator,
    own: Sender<Event>,
    /// Connections to the nodes from 1 on.
    others: Vec<NodeConnection>,
}

impl CoordinatorLinks {
    pub(super) fn start(
        coordinator: Coordinator,
        others: Vec<Connection>,
        own: &Sender<Event>,
    ) -> Result<Arc<Mutex<Self>>> {
        let readers = others.iter().map(Connection::again).collect::<Vec<_>>();
        let others = others.into_iter().map(NodeConnection::new).collect();
        let links = Arc::new(Mutex::new(Self { coordinator, own: own.clone(), others }));
        for (at, mut connection) in readers.into_iter().enumerate() {
            let links = Arc::clone(&links);
            let listen = move || {
                loop {
                    let received = connection.receive(MAX_MESSAGE, Instant::now() + NO_TIMEOUT);
                    let mut links = lock(&links);
                    links.others[at].received();
                    // `None` is a heartbeat.
                    let Some(message) = received.unwrap_or(Some(NodeMessage::Gone)) else { continue };
                    let is_last = message == NodeMessage::Gone;
                    links.handle(at + 1, message);
                    if is_last {
                        return;
                    }
                }
            };
            spawn(listen)?;
        }
        Ok(links)
    }

    pub(super) fn handle(&mut self, node: usize, message: NodeMessage) {
        for (to, order) in self.coordinator.handle(node, message, Instant::now()) {
            match to.checked_sub(1) {
                // The receiver is gone if this launcher is about to return.
                None => drop(self.own.send(Event::Order(order))),
                Some(at) => send(&mut self.others[at].connection, &order),
            }
        }
    }

    /// Gives up nodes that have been silent for longer than the limit while this launcher waited for them.
    pub(super) fn give_up(&mut self, waited: Duration, limit: Limit) {
        for at in 0..self.others.len() {
            let Some(silence) = self.others[at].exceeded_silence(waited, limit) else { continue };
            // If that launcher resumes later, it finds its connection closed.
            self.others[at].connection.cut();
            self.handle(at + 1, NodeMessage::Silent { ms: milliseconds(silence) });
        }
    }

    /// Closes the sending side of all connections; nothing more will be sent.
    pub(super) fn close(&mut self) {
        self.others.iter_mut().for_each(|line| line.connection.hang_up());
    }
}

impl Heartbeats for CoordinatorLinks {
    fn send_heartbeats(&mut self, limit: Limit) {
        for (at, line) in self.others.iter_mut().enumerate() {
            if line.heartbeat(limit) && !self.coordinator.is_gone(at + 1) {
                warn_silent(self.coordinator.name(at + 1));
            }
        }
    }
}

/// Another node's end: the connection to the first node's launcher.
pub(super) struct CoordinatorLink {
    pub(super) line: NodeConnection,
    own: Sender<Event>,
    first: NodeName,
}

impl CoordinatorLink {
    /// Starts the thread that reads the orders of the first node.
    pub(super) fn start(connection: Connection, events: &Sender<Event>) -> Result<Arc<Mutex<Self>>> {
        let mut reader = connection.again();
        let host = connection.peer().map_or_else(|_| "?".into(), |peer| peer.ip().to_string());
        let first = NodeName { node: 0, host };
        let line = NodeConnection::new(connection);
        let link = Arc::new(Mutex::new(Self { line, own: events.clone(), first: first.clone() }));
        let (events, here) = (events.clone(), Arc::clone(&link));
        let listen = move || {
            loop {
                let received = reader.receive(MAX_MESSAGE, Instant::now() + NO_TIMEOUT);
                lock(&here).line.received();
                let gone = |_| Some(Order::Over(JobOutcome::Gone(first.clone())));
                // `None` is a heartbeat.
                let Some(order) = received.unwrap_or_else(gone) else { continue };
                let is_last = matches!(order, Order::Over(_));
                // The receiver is gone if this launcher is about to return.
                if events.send(Event::Order(order)).is_err() || is_last {
                    return;
                }
            }
        };
        spawn(listen)?;
        Ok(link)
    }

    /// Gives up the first node if it has been silent for longer than the limit while this launcher waited for it.
    pub(super) fn give_up(&mut self, waited: Duration, limit: Limit) {
        let Some(silence) = self.line.exceeded_silence(waited, limit) else { return };
        self.line.connection.cut();
        let outcome = JobOutcome::Silent { node: self.first.clone(), ms: milliseconds(silence) };
        // The receiver is gone if this launcher is about to return.
        let _ = self.own.send(Event::Order(Order::Over(outcome)));
    }
}

impl Heartbeats for CoordinatorLink {
    fn send_heartbeats(&mut self, limit: Limit) {
        if self.line.heartbeat(limit) {
            warn_silent(&self.first);
        }
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Starts a thread that sends heartbeats, until the returned sender is dropped.
pub(super) fn keep_up<T: Heartbeats>(link: &Arc<Mutex<T>>, limit: Limit) -> Result<Sender<()>> {
    let (end, ended) = channel();
    let link = Arc::clone(link);
    spawn(move || {
        while ended.recv_timeout(limit.period()) == Err(RecvTimeoutError::Timeout) {
            lock(&link).send_heartbeats(limit);
        }
    })?;
    Ok(end)
}

/// A connection end that needs heartbeats.
pub(super) trait Heartbeats: Send + 'static {
    /// Sends heartbeats that are due, and checks the silence of the other side.
    fn send_heartbeats(&mut self, limit: Limit);
}

/// Starts a detached thread. It ends with the connection, which either side can close.
fn spawn(listen: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = Builder::new().name("node".into()).spawn(listen);
    thread.map(drop).map_err(|reason| Error::system("cannot listen to the other nodes", reason))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::TcpListener;

    use super::*;
    use comm::launcher::Broken;

    #[test]
    fn what_cannot_be_said_ends_the_connection_for_both_sides() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let [mut one, mut other] =
            [one, listener.accept().unwrap().0].map(|end| Connection::new(end).unwrap());
        let message = NodeMessage::HasEnded(7);
        send(&mut one, &message);
        // JSON has no such keys, so this cannot be serialized.
        send(&mut one, &BTreeMap::from([((1, 2), 3)]));
        let limit = Instant::now() + Duration::from_secs(60);
        assert_eq!(other.receive::<NodeMessage>(MAX_MESSAGE, limit).unwrap(), message);
        for connection in [&mut one, &mut other] {
            let received = connection.receive::<NodeMessage>(MAX_MESSAGE, limit);
            assert!(received.as_ref().is_err_and(Broken::is_end), "{received:?}");
        }
    }
}
