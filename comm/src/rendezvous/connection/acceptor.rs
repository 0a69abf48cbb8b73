//! Takes connections while ranks meet, and later those for data, and keeps strangers from doing harm. One that has not proved that it
//! belongs to the job costs a file descriptor, and what it has sent of its proof: one thread goes on with all of them, each as far as
//! it comes. There are few that are silent and few that speak, none outlives the meeting or the group, and where there are too many, those
//! of one address make room for those of another. Who has proved it is no stranger any more, counts no longer, and gets a thread of its own.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle, Scope};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvFlags, recv};

use super::fault::{Fault, Try};
use super::handshake::{Admission, Credentials};
use super::wire::{Step, Wire};
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

/// Connections that may wait to be accepted; the system has a limit of its own.
const BACKLOG: i32 = 4096;

/// What a listener is for.
pub(crate) trait Greet: Send + Sync {
    /// What all who come must hold.
    fn credentials(&self) -> &Credentials;

    /// What to do with one who holds it, in a thread of its own; `until` is when a stranger's time would end.
    fn greet(&self, wire: Wire, admission: Admission<'_>, until: Instant) -> Try<()>;

    /// One that has spoken, and not proved that it belongs to the job.
    fn turned_away(&self) {}
}

/// A listener that is being served. It closes when this is dropped, and all that was under way there ends.
#[derive(Debug)]
pub(crate) struct Acceptor {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    pub(crate) fn start(listener: TcpListener, limits: Limits, greet: Arc<dyn Greet>) -> Result<Self> {
        let failed = |reason| Error::system("accepting connections", Fault::from(reason));
        listener.set_nonblocking(true).map_err(failed)?;
        widen(&listener);
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        let serve = Serve { listener, limits, greet, stopped: Arc::new(stopped) };
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
    greet: Arc<dyn Greet>,
    stopped: Arc<UnixStream>,
}

/// One that has connected, and since when.
struct Newcomer {
    wire: Wire,
    from: SocketAddr,
    since: Instant,
}

/// One at its proof, since when, and what its next word needs.
struct Speaker {
    newcomer: Newcomer,
    spoke: Instant,
    waits: PollFlags,
}

/// Connections of which nobody has proved yet that it belongs to the job, the oldest first.
#[derive(Default)]
struct Strangers {
    /// They have said nothing yet, or not enough to know that they were told the job's secret.
    silent: VecDeque<Newcomer>,
    speaking: VecDeque<Speaker>,
}

/// The oldest of the address of which there are most, where they are more than would then be of the newcomer's.
fn oldest_of_most<'a>(all: impl Iterator<Item = &'a Newcomer>, newcomer: &Newcomer) -> Option<usize> {
    let mut by_address: BTreeMap<IpAddr, (usize, usize)> = BTreeMap::new();
    for (at, stranger) in all.enumerate() {
        by_address.entry(stranger.from.ip()).or_insert((0, at)).0 += 1;
    }
    let own = by_address.get(&newcomer.from.ip()).map_or(0, |&(count, _)| count);
    let (most, oldest) = by_address.into_values().max_by_key(|&(count, _)| count)?;
    (most > own + 1).then_some(oldest)
}

impl Strangers {
    fn all(&self) -> impl Iterator<Item = &Newcomer> {
        self.silent.iter().chain(self.speaking.iter().map(|speaker| &speaker.newcomer))
    }
}

impl Serve {
    fn run(&self) {
        let (mut strangers, mut complained) = (Strangers::default(), None::<Instant>);
        thread::scope(|scope| {
            while let Some(comes) = self.wait(scope, &mut strangers) {
                match comes.then(|| self.listener.accept()) {
                    None => {}
                    Some(Ok((stream, from))) => {
                        let Ok(wire) = Wire::new(stream, Some(self.stopped.clone())) else { continue };
                        let newcomer = Newcomer { wire, from, since: Instant::now() };
                        match newcomer.wire.has_news() {
                            true => self.hear(scope, &mut strangers, newcomer),
                            false => self.let_wait(&mut strangers.silent, newcomer),
                        }
                    }
                    Some(Err(error)) if is_momentary(&error) => {}
                    Some(Err(error)) => {
                        if complained.is_none_or(|at| at.elapsed() >= COMPLAIN_EVERY) {
                            tracing::warn!("cannot accept connections for the moment: {error}");
                            complained = Some(Instant::now());
                        }
                        self.pause(&mut strangers);
                    }
                }
            }
        });
    }

    /// Waits for news of strangers, goes on with those, and tells whether there is one to accept. None when there is nothing
    /// more to do.
    fn wait<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        strangers: &mut Strangers,
    ) -> Option<bool> {
        let left = |newcomer: &Newcomer| self.limits.handshake.saturating_sub(newcomer.since.elapsed());
        let left = strangers.all().map(left).min();
        let mut fds =
            vec![PollFd::new(&self.listener, PollFlags::IN), PollFd::new(&self.stopped, PollFlags::IN)];
        let of = PollFd::from_borrowed_fd;
        fds.extend(strangers.silent.iter().map(|newcomer| of(newcomer.wire.fd(), PollFlags::IN)));
        fds.extend(strangers.speaking.iter().map(|speaker| of(speaker.newcomer.wire.fd(), speaker.waits)));
        match poll(&mut fds, left.map(timespec).as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Some(false),
            Err(_) => return self.pause(strangers).then_some(false),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[1] {
            return None;
        }
        let (comes, mut ready) = (ready[0], ready.into_iter().skip(2));
        let mut spoken = Vec::new();
        for newcomer in std::mem::take(&mut strangers.silent) {
            if newcomer.since.elapsed() >= self.limits.handshake {
                self.close(&newcomer);
            } else if ready.next().unwrap_or(false) {
                spoken.push(newcomer);
            } else {
                strangers.silent.push_back(newcomer);
            }
        }
        for speaker in std::mem::take(&mut strangers.speaking) {
            if ready.next().unwrap_or(false) {
                strangers.speaking.extend(self.go_on(scope, speaker));
            } else if speaker.newcomer.since.elapsed() < self.limits.handshake {
                strangers.speaking.push_back(speaker);
            } else {
                self.close(&speaker.newcomer);
            }
        }
        spoken.into_iter().for_each(|newcomer| self.hear(scope, strangers, newcomer));
        Some(comes)
    }

    /// Leaves the listener alone for a while, where the system has no room for what it brings; false when there is nothing more
    /// to do.
    fn pause(&self, strangers: &mut Strangers) -> bool {
        // What they hold may be what is missing.
        strangers.silent.clear();
        if poll(&mut [PollFd::new(&self.stopped, PollFlags::IN)], Some(&timespec(PAUSE))).is_err() {
            thread::sleep(PAUSE);
        }
        // Nothing ever comes there but its end.
        recv(&*self.stopped, &mut [0], RecvFlags::DONTWAIT).is_err()
    }

    /// One that has not knocked yet.
    fn let_wait(&self, silent: &mut VecDeque<Newcomer>, newcomer: Newcomer) {
        if silent.len() >= self.limits.at_once {
            let may_go = |oldest: &Newcomer| oldest.since.elapsed() >= self.limits.silence;
            let place = oldest_of_most(silent.iter(), &newcomer);
            let place = place.or_else(|| silent.front().is_some_and(may_go).then_some(0));
            match place.and_then(|at| silent.remove(at)) {
                Some(other) => self.close(&other),
                None => return self.send_away(&newcomer),
            }
        }
        let at = silent.partition_point(|other| other.since <= newcomer.since);
        silent.insert(at, newcomer);
    }

    /// One of which something has come for the first time, or more of its knock.
    fn hear<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        strangers: &mut Strangers,
        newcomer: Newcomer,
    ) {
        if !newcomer.wire.is_open() {
            return;
        }
        let speaker = Speaker { newcomer, spoke: Instant::now(), waits: PollFlags::IN };
        match self.go_on(scope, speaker) {
            None => {}
            Some(speaker) if speaker.newcomer.wire.has_knocked() => {
                self.let_speak(&mut strangers.speaking, speaker)
            }
            Some(speaker) => self.let_wait(&mut strangers.silent, speaker.newcomer),
        }
    }

    /// One that has knocked.
    fn let_speak(&self, speaking: &mut VecDeque<Speaker>, speaker: Speaker) {
        let knock = speaker.newcomer.wire.knock();
        if knock.is_some() && speaking.iter().any(|other| other.newcomer.wire.knock() == knock) {
            return self.turn_away(speaker.newcomer.from, &Fault::BadProof);
        }
        if speaking.len() >= self.limits.at_once {
            let may_go = |oldest: &Speaker| oldest.spoke.elapsed() >= self.limits.patience;
            let place = oldest_of_most(speaking.iter().map(|speaker| &speaker.newcomer), &speaker.newcomer);
            let place = place.or_else(|| speaking.front().is_some_and(may_go).then_some(0));
            match place.and_then(|at| speaking.remove(at)) {
                Some(other) => self.close(&other.newcomer),
                None => return self.send_away(&speaker.newcomer),
            }
        }
        speaking.push_back(speaker);
    }

    /// One that comes too many.
    fn send_away(&self, newcomer: &Newcomer) {
        tracing::debug!(from = %newcomer.from, "too many connections at once: one was closed");
    }

    /// One whose time is over.
    fn close(&self, newcomer: &Newcomer) {
        if newcomer.wire.has_spoken() {
            self.turn_away(newcomer.from, &Fault::TimedOut);
        }
    }

    /// One of which something has come; none where it is no stranger any more, or was turned away.
    fn go_on<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        mut speaker: Speaker,
    ) -> Option<Speaker> {
        let from = speaker.newcomer.from;
        match speaker.newcomer.wire.step(self.greet.credentials()) {
            Ok(Step::Waits(flags)) => return Some(Speaker { waits: flags, ..speaker }),
            Ok(Step::Proved(admission)) => self.let_in(scope, speaker.newcomer, admission),
            Err(fault) => self.turn_away(from, &fault),
        }
        None
    }

    fn turn_away(&self, from: SocketAddr, fault: &Fault) {
        tracing::debug!(%from, reason = %fault, "a connection was turned away");
        self.greet.turned_away();
    }

    /// One that has proved that it belongs to the job.
    fn let_in<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        newcomer: Newcomer,
        admission: Admission<'scope>,
    ) {
        let Newcomer { wire, from, since } = newcomer;
        let work = move || {
            if let Err(fault) = self.greet.greet(wire, admission, since + self.limits.handshake) {
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
