//! Takes connections while ranks meet, and later those for data, and keeps strangers from doing harm. One that says nothing
//! costs a file descriptor; one that speaks gets a thread of its own until it has proved that it belongs to the job. There are
//! few of both, and none outlives the meeting or the group. Who has proved it is no stranger any more, and counts no longer.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Scope};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, recv};

use super::fault::{Fault, Try};
use super::wire::Wire;
use crate::base::lock::lock;
use crate::base::timespec::timespec;
use crate::{Error, Result};

const STACK: usize = 256 * 1024;
/// How long to leave a listener alone that cannot accept, for example because there are too many open files.
const PAUSE: Duration = Duration::from_millis(50);
/// How often that is told.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

/// How much of this process strangers may use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// How long one may take to prove that it belongs to the job.
    pub(crate) handshake: Duration,
    /// How many may be silent at once, and how many may be at their proof. One more is sent away, and comes again if it is a
    /// rank.
    pub(crate) at_once: usize,
    /// From when on one that is silent has to make room for one more: a rank speaks as soon as it is connected.
    pub(crate) silence: Duration,
    /// From when on one that is at its proof has to make room for one more. A rank needs two or three times as long as
    /// a message takes to the other side and back.
    pub(crate) patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            at_once: 64,
            silence: Duration::from_millis(250),
            patience: Duration::from_secs(1),
        }
    }
}

/// What to do with a connection, and until when; it counts as a stranger's as long as its place is held.
pub(crate) type Greet = dyn Fn(Wire, Instant, GuestSlot<'_>) -> Try<()> + Send + Sync;
/// Connections that may wait to be accepted; the system has a limit of its own.
const BACKLOG: i32 = 4096;

/// A listener that is being served. It closes when this is dropped, and all that was under way there ends.
#[derive(Debug)]
pub(crate) struct Acceptor {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    pub(crate) fn start(listener: TcpListener, limits: Limits, greet: Arc<Greet>) -> Result<Self> {
        let failed = |reason| Error::system("accepting connections", Fault::from(reason));
        listener.set_nonblocking(true).map_err(failed)?;
        widen(&listener);
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        let serve = Serve { listener, limits, greet, stopped: Arc::new(stopped), guests: Mutex::default() };
        let thread = thread::Builder::new()
            .name("girandole-accept".into())
            .spawn(move || serve.run())
            .map_err(failed)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

/// Lets many connections wait: ranks may come all at once, and strangers before them. Where that cannot be had, ranks come
/// again.
pub(crate) fn widen(listener: &TcpListener) {
    let _ = rustix::net::listen(listener, BACKLOG);
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        // The other end of a closed pair is readable for all who wait on it.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Serve {
    listener: TcpListener,
    limits: Limits,
    greet: Arc<Greet>,
    stopped: Arc<UnixStream>,
    guests: Mutex<Guests>,
}

/// One that has connected, and since when.
struct Newcomer {
    wire: Wire,
    from: SocketAddr,
    since: Instant,
}

/// Connections that have spoken and not proved yet that they belong to the job, the oldest first.
#[derive(Debug, Default)]
struct Guests {
    proving: VecDeque<Guest>,
    /// Those that were sent away and whose threads have not ended yet.
    leaving: usize,
    next: u64,
}

impl Guests {
    /// Lets one in, unless there are too many and none of them has had its time.
    fn enter(&mut self, wire: Wire, limits: Limits) -> Option<u64> {
        if self.proving.len() >= limits.at_once {
            let oldest = self.proving.front().filter(|oldest| oldest.since.elapsed() >= limits.patience)?;
            if self.leaving >= limits.at_once {
                return None;
            }
            // Its thread sees the end of the stream.
            oldest.wire.cut();
            self.proving.pop_front();
            self.leaving += 1;
        }
        self.next += 1;
        self.proving.push_back(Guest { number: self.next, wire, since: Instant::now() });
        Some(self.next)
    }

    fn leave(&mut self, number: u64) {
        match self.proving.iter().position(|guest| guest.number == number) {
            Some(index) => drop(self.proving.remove(index)),
            None => self.leaving = self.leaving.saturating_sub(1),
        }
    }
}

#[derive(Debug)]
struct Guest {
    number: u64,
    wire: Wire,
    since: Instant,
}

/// One connection that counts; it ceases to when this is dropped, whatever happens.
pub(crate) struct GuestSlot<'a>(&'a Mutex<Guests>, u64);

impl Drop for GuestSlot<'_> {
    fn drop(&mut self) {
        lock(self.0).leave(self.1);
    }
}

impl Serve {
    fn run(&self) {
        let (mut silent, mut complained) = (VecDeque::new(), None::<Instant>);
        thread::scope(|scope| {
            while let Some((spoken, comes)) = self.wait(&mut silent) {
                spoken.into_iter().for_each(|newcomer| self.let_in(scope, newcomer));
                match comes.then(|| self.listener.accept()) {
                    None => {}
                    Some(Ok((stream, from))) => {
                        let Ok(wire) = Wire::new(stream, Some(self.stopped.clone())) else { continue };
                        let newcomer = Newcomer { wire, from, since: Instant::now() };
                        match newcomer.wire.has_news() {
                            true => self.let_in(scope, newcomer),
                            false => self.let_wait(&mut silent, newcomer),
                        }
                    }
                    Some(Err(error)) if is_momentary(&error) => {}
                    Some(Err(error)) => {
                        if complained.is_none_or(|at| at.elapsed() >= COMPLAIN_EVERY) {
                            tracing::warn!("cannot accept connections for the moment: {error}");
                            complained = Some(Instant::now());
                        }
                        self.pause(&mut silent);
                    }
                }
            }
        });
    }

    /// Those that were silent and have spoken, or left, and whether there is one to accept. None when there is nothing more to
    /// do.
    fn wait(&self, silent: &mut VecDeque<Newcomer>) -> Option<(Vec<Newcomer>, bool)> {
        let left = silent.front().map(|oldest| self.limits.handshake.saturating_sub(oldest.since.elapsed()));
        let mut fds =
            vec![PollFd::new(&self.listener, PollFlags::IN), PollFd::new(&self.stopped, PollFlags::IN)];
        fds.extend(silent.iter().map(|newcomer| PollFd::from_borrowed_fd(newcomer.wire.fd(), PollFlags::IN)));
        match poll(&mut fds, left.map(timespec).as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Some((Vec::new(), false)),
            Err(_) => return self.pause(silent).then(|| (Vec::new(), false)),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[1] {
            return None;
        }
        let mut spoken = Vec::new();
        for (newcomer, ready) in std::mem::take(silent).into_iter().zip(&ready[2..]) {
            if *ready {
                spoken.push(newcomer);
            } else if newcomer.since.elapsed() < self.limits.handshake {
                silent.push_back(newcomer);
            }
        }
        Some((spoken, ready[0]))
    }

    /// Leaves the listener alone for a while, where the system has no room for what it brings; false when there is nothing more
    /// to do.
    fn pause(&self, silent: &mut VecDeque<Newcomer>) -> bool {
        // What they hold may be what is missing.
        silent.clear();
        if poll(&mut [PollFd::new(&self.stopped, PollFlags::IN)], Some(&timespec(PAUSE))).is_err() {
            thread::sleep(PAUSE);
        }
        // Nothing ever comes there but its end.
        recv(&*self.stopped, &mut [0], RecvFlags::DONTWAIT).is_err()
    }

    /// One that has said nothing yet.
    fn let_wait(&self, silent: &mut VecDeque<Newcomer>, newcomer: Newcomer) {
        if silent.len() >= self.limits.at_once {
            if silent.front().is_some_and(|oldest| oldest.since.elapsed() < self.limits.silence) {
                tracing::debug!(from = %newcomer.from, "too many connections at once: one was closed");
                return;
            }
            silent.pop_front();
        }
        silent.push_back(newcomer);
    }

    /// One that has spoken, or left again.
    fn let_in<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, newcomer: Newcomer) {
        let Newcomer { wire, from, since } = newcomer;
        if !wire.is_open() {
            return;
        }
        let Some(number) = lock(&self.guests).enter(wire.again(), self.limits) else {
            tracing::debug!(%from, "too many connections at once: one was closed");
            return;
        };
        let slot = GuestSlot(&self.guests, number);
        let work = move || {
            if let Err(fault) = (self.greet)(wire, since + self.limits.handshake, slot) {
                tracing::debug!(%from, reason = %fault, "a connection was turned away");
            }
        };
        let builder = thread::Builder::new().name("girandole-greet".into()).stack_size(STACK);
        if let Err(error) = builder.spawn_scoped(scope, work) {
            tracing::debug!(%from, %error, "no thread for a connection: it was closed");
        }
    }
}

fn is_momentary(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | WouldBlock)
}

#[cfg(test)]
mod tests;
