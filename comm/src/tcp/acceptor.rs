//! Takes connections while ranks meet, and later those for data, and keeps strangers from doing harm: each gets a thread of
//! its own for a short time, there are few at once, and none outlives the meeting or the group.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Scope};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::fault::{Fault, Try};
use super::wire::Wire;
use crate::engine::lock;
use crate::{Error, Result};

const STACK: usize = 256 * 1024;
/// How long to leave a listener alone that cannot accept, for example because there are too many open files.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// How often that is told.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

/// How much of this process strangers may use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// How long one may take to prove that it belongs to the job.
    pub(crate) handshake: Duration,
    /// How many may try at once. One more is sent away, and comes again if it is a rank.
    pub(crate) at_once: usize,
    /// From when on one that still tries has to make room for one more: a rank is done sooner, those who stay are strangers.
    pub(crate) patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { handshake: Duration::from_secs(5), at_once: 64, patience: Duration::from_millis(250) }
    }
}

/// What to do with a connection, and until when; it counts as a stranger's as long as its place is held.
pub(crate) type Greet = dyn Fn(Wire, Instant, Place<'_>) -> Try<()> + Send + Sync;
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

/// Connections that have not proved yet that they belong to the job, the oldest first.
#[derive(Debug, Default)]
struct Guests {
    waiting: VecDeque<Guest>,
    next: u64,
}

impl Guests {
    /// Lets one in, unless there are too many and none of them has outstayed its welcome.
    fn enter(&mut self, stream: TcpStream, limits: Limits) -> Option<u64> {
        if self.waiting.len() >= limits.at_once {
            let oldest = self.waiting.front().filter(|oldest| oldest.since.elapsed() >= limits.patience)?;
            // Its thread sees the end of the stream.
            let _ = oldest.stream.shutdown(Shutdown::Both);
            self.waiting.pop_front();
        }
        self.next += 1;
        self.waiting.push_back(Guest { number: self.next, stream, since: Instant::now() });
        Some(self.next)
    }

    fn leave(&mut self, number: u64) {
        self.waiting.retain(|guest| guest.number != number);
    }
}

#[derive(Debug)]
struct Guest {
    number: u64,
    stream: TcpStream,
    since: Instant,
}

/// One connection that counts; it ceases to when this is dropped, whatever happens.
pub(crate) struct Place<'a>(&'a Mutex<Guests>, u64);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        lock(self.0).leave(self.1);
    }
}

impl Serve {
    fn run(&self) {
        let mut complained: Option<Instant> = None;
        thread::scope(|scope| {
            while self.wait() {
                match self.listener.accept() {
                    Ok((stream, from)) => {
                        let Ok(handle) = stream.try_clone() else { continue };
                        let Some(number) = lock(&self.guests).enter(handle, self.limits) else {
                            tracing::debug!(%from, "too many connections at once: one was closed");
                            continue;
                        };
                        let place = Place(&self.guests, number);
                        let Ok(wire) = Wire::new(stream, Some(self.stopped.clone())) else { continue };
                        self.greet_in_thread(scope, wire, place, from);
                    }
                    Err(error) if is_momentary(&error) => {}
                    Err(error) => {
                        if complained.is_none_or(|at| at.elapsed() >= COMPLAIN_EVERY) {
                            tracing::warn!("cannot accept connections for the moment: {error}");
                            complained = Some(Instant::now());
                        }
                        let _ = poll(&mut [PollFd::new(&self.stopped, PollFlags::IN)], Some(&PAUSE));
                    }
                }
            }
        });
    }

    /// False when there is nothing more to do.
    fn wait(&self) -> bool {
        let (listener, stopped) = (self.listener.as_fd(), self.stopped.as_fd());
        let mut fds = [PollFd::new(&listener, PollFlags::IN), PollFd::new(&stopped, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) => fds[1].revents().is_empty(),
            Err(error) => error == rustix::io::Errno::INTR,
        }
    }

    fn greet_in_thread<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        wire: Wire,
        place: Place<'scope>,
        from: std::net::SocketAddr,
    ) {
        let work = move || {
            if let Err(fault) = (self.greet)(wire, Instant::now() + self.limits.handshake, place) {
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
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpStream;
    use std::sync::mpsc;

    const HOUR: Duration = Duration::from_secs(3600);

    fn listener() -> (TcpListener, std::net::SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    #[test]
    fn the_silent_are_sent_away_when_it_stops() {
        let (listener, address) = listener();
        let limits = Limits { handshake: HOUR, at_once: 8, patience: HOUR };
        let (here, came) = mpsc::channel();
        let greet = move |mut wire: Wire, deadline, _place: Place<'_>| {
            here.send(()).unwrap();
            wire.read::<1>(deadline).map(drop)
        };
        let acceptor = Acceptor::start(listener, limits, Arc::new(greet)).unwrap();
        let mut silent = TcpStream::connect(address).unwrap();
        came.recv().unwrap();
        drop(acceptor);
        assert_eq!(silent.read(&mut [0]).unwrap(), 0);
        assert!(TcpStream::connect(address).is_err(), "the listener is closed");
    }

    #[test]
    fn one_too_many_takes_the_place_of_the_oldest() {
        let (listener, address) = listener();
        let limits = Limits { handshake: HOUR, at_once: 2, patience: Duration::ZERO };
        let (here, came) = mpsc::channel();
        let greet = move |mut wire: Wire, deadline, _place: Place<'_>| {
            let [name] = wire.read::<1>(deadline)?;
            here.send(name).unwrap();
            wire.read::<1>(deadline).map(drop)
        };
        let _acceptor = Acceptor::start(listener, limits, Arc::new(greet)).unwrap();
        let connect = |name: u8| {
            let mut stream = TcpStream::connect(address).unwrap();
            std::io::Write::write_all(&mut stream, &[name]).unwrap();
            assert_eq!(came.recv().unwrap(), name);
            stream
        };
        let (mut first, mut second, mut third) = (connect(1), connect(2), connect(3));
        assert_eq!(first.read(&mut [0]).unwrap(), 0, "the first was sent away");
        let _fourth = connect(4);
        assert_eq!(second.read(&mut [0]).unwrap(), 0, "then the second");
        third.set_nonblocking(true).unwrap();
        assert_eq!(
            third.read(&mut [0]).unwrap_err().kind(),
            io::ErrorKind::WouldBlock,
            "the third is still there"
        );
    }

    #[test]
    fn one_too_many_is_sent_away_while_all_are_new() {
        let (listener, address) = listener();
        let limits = Limits { handshake: HOUR, at_once: 1, patience: HOUR };
        let (here, came) = mpsc::channel();
        let greet = move |mut wire: Wire, deadline, _place: Place<'_>| {
            here.send(()).unwrap();
            wire.read::<1>(deadline).map(drop)
        };
        let _acceptor = Acceptor::start(listener, limits, Arc::new(greet)).unwrap();
        let first = TcpStream::connect(address).unwrap();
        came.recv().unwrap();
        assert_eq!(TcpStream::connect(address).unwrap().read(&mut [0]).unwrap(), 0);
        drop(first);
        // Its place becomes free some time after it is gone.
        while came.try_recv().is_err() {
            let mut again = TcpStream::connect(address).unwrap();
            again.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            let _ = again.read(&mut [0]);
        }
    }

    #[test]
    fn who_drips_is_cut_off_at_the_deadline() {
        let (listener, address) = listener();
        let limits = Limits { handshake: Duration::from_millis(100), at_once: 2, patience: HOUR };
        let (end, ended) = mpsc::channel();
        let greet = move |mut wire: Wire, deadline, _place: Place<'_>| {
            let fault = wire.read::<1000>(deadline).map(drop);
            end.send(format!("{fault:?}")).unwrap();
            fault
        };
        let _acceptor = Acceptor::start(listener, limits, Arc::new(greet)).unwrap();
        let mut dripping = TcpStream::connect(address).unwrap();
        let outcome = loop {
            let _ = std::io::Write::write(&mut dripping, &[7]);
            if let Ok(outcome) = ended.recv_timeout(Duration::from_millis(5)) {
                break outcome;
            }
        };
        assert_eq!(outcome, "Err(TimedOut)");
    }
}
