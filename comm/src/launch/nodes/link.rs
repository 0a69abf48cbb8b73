//! Connections between launchers, and the threads that listen to them.

use std::net::TcpStream;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::Builder;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

use serde::Serialize;

use super::council::Council;
use super::message::{LIMIT, Order, Verdict, Word};
use crate::engine::lock;
use crate::launch::NodeName;
use crate::launch::supervise::Event;
use crate::tcp::Wire;
use crate::{Error, Result};

/// How long a message may wait for room.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longer than any job.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// A machine that is silent for so long is asked whether it is there, and how often.
const SILENCE: Duration = Duration::from_secs(10);
const ASK_EVERY: Duration = Duration::from_secs(5);
const ASK: u32 = 3;

/// A machine that vanishes without a word is missed within half a minute.
pub(super) fn keep_alive(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let keep = TcpKeepalive::new().with_time(SILENCE).with_interval(ASK_EVERY);
    #[cfg(target_os = "linux")]
    let keep = keep.with_retries(ASK);
    // Without it the job still ends when the ranks miss each other.
    let _ = socket.set_tcp_keepalive(&keep);
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_user_timeout(Some(SILENCE + ASK * ASK_EVERY));
}

pub(super) fn send(wire: &mut Wire, message: &impl Serialize) {
    match Wire::frame(message) {
        // Where it cannot be sent, the other side is gone, which its reader finds out.
        Ok(frame) => drop(wire.write(&frame, Instant::now() + PATIENCE)),
        // Nobody is to wait for what cannot be said: both sides find the other one gone.
        Err(fault) => {
            tracing::warn!("what the launchers say to each other cannot be written: {fault}");
            wire.cut();
        }
    }
}

/// The council, and the ways to all nodes.
pub(super) struct Chair {
    council: Council,
    own: Sender<Event>,
    /// Of the nodes from 1.
    others: Vec<Wire>,
}

impl Chair {
    pub(super) fn start(
        council: Council,
        others: Vec<Wire>,
        own: &Sender<Event>,
    ) -> Result<Arc<Mutex<Self>>> {
        let readers = others.iter().map(Wire::again).collect::<Vec<_>>();
        let chair = Arc::new(Mutex::new(Self { council, own: own.clone(), others }));
        for (at, mut wire) in readers.into_iter().enumerate() {
            let chair = Arc::clone(&chair);
            let listen = move || {
                loop {
                    let word = wire.receive(LIMIT, Instant::now() + FOR_EVER).unwrap_or(Word::Gone);
                    let is_last = word == Word::Gone;
                    lock(&chair).hear(at + 1, word);
                    if is_last {
                        return;
                    }
                }
            };
            spawn(listen)?;
        }
        Ok(chair)
    }

    pub(super) fn hear(&mut self, node: usize, word: Word) {
        for (to, order) in self.council.hear(node, word, Instant::now()) {
            match to.checked_sub(1) {
                // Nobody listens any more where this launcher is about to return.
                None => drop(self.own.send(Event::Order(order))),
                Some(at) => send(&mut self.others[at], &order),
            }
        }
    }

    /// Nothing more will be said.
    pub(super) fn close(&mut self) {
        self.others.iter_mut().for_each(Wire::hang_up);
    }
}

/// Listens to the first node; gives the handle to write to it.
pub(super) fn follow(wire: Wire, events: &Sender<Event>) -> Result<Wire> {
    let mut ear = wire.again();
    let host = wire.peer().map_or_else(|_| "?".into(), |peer| peer.ip().to_string());
    let events = events.clone();
    let listen = move || {
        loop {
            let heard = ear.receive::<Order>(LIMIT, Instant::now() + FOR_EVER);
            let gone = |_| Order::Over(Verdict::Gone(NodeName { node: 0, host: host.clone() }));
            let order = heard.unwrap_or_else(gone);
            let is_last = matches!(order, Order::Over(_));
            // See above.
            if events.send(Event::Order(order)).is_err() || is_last {
                return;
            }
        }
    };
    spawn(listen)?;
    Ok(wire)
}

/// They end with the connection, which ends when either side has closed it.
fn spawn(listen: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = Builder::new().name("node".into()).spawn(listen);
    thread.map(drop).map_err(|reason| Error::system("cannot listen to the other nodes", reason))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::net::TcpListener;

    use super::*;
    use crate::tcp::Fault;

    #[test]
    fn what_cannot_be_said_ends_the_connection_for_both_sides() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let [mut one, mut other] =
            [one, listener.accept().unwrap().0].map(|end| Wire::new(end, None).unwrap());
        send(&mut one, &Word::Failing);
        // JSON has no such keys.
        send(&mut one, &BTreeMap::from([((1, 2), 3)]));
        let limit = Instant::now() + Duration::from_secs(60);
        assert_eq!(other.receive::<Word>(LIMIT, limit).unwrap(), Word::Failing);
        for wire in [&mut one, &mut other] {
            let heard = wire.receive::<Word>(LIMIT, limit);
            assert!(matches!(heard, Err(Fault::Closed)), "{heard:?}");
        }
    }
}
