//! Takes connections while ranks meet, and keeps strangers from doing harm: each gets a thread of its own for a short
//! time, there are few at once, and none outlives the meeting.

use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, Scope};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::fault::Try;
use super::wire::Wire;
use crate::{Error, Result};

const STACK: usize = 256 * 1024;
/// How long to leave a listener alone that cannot accept, for example because there are too many open files.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// How much of this process strangers may use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// How long one may take to prove that it belongs to the job.
    pub(crate) handshake: Duration,
    /// How many may try at once; further ones are sent away, and come again if they are ranks.
    pub(crate) at_once: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { handshake: Duration::from_secs(5), at_once: 64 }
    }
}

/// What to do with a connection, and until when.
pub(crate) type Greet = dyn Fn(Wire, Instant) -> Try<()> + Send + Sync;

/// A listener that is being served. It closes when this is dropped, and all that was under way there ends.
#[derive(Debug)]
pub(crate) struct Acceptor {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    pub(crate) fn start(listener: TcpListener, limits: Limits, greet: Arc<Greet>) -> Result<Self> {
        let failed = |reason| Error::system("accepting connections", reason);
        listener.set_nonblocking(true).map_err(failed)?;
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        let serve =
            Serve { listener, limits, greet, stopped: Arc::new(stopped), active: AtomicUsize::new(0) };
        let thread = thread::Builder::new()
            .name("girandole-accept".into())
            .spawn(move || serve.run())
            .map_err(failed)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
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
    active: AtomicUsize,
}

/// One connection that counts; it ceases to when this is dropped, whatever happens.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Serve {
    fn run(&self) {
        thread::scope(|scope| {
            while self.wait() {
                match self.listener.accept() {
                    Ok((stream, from)) => {
                        let Ok(wire) = Wire::new(stream, Some(self.stopped.clone())) else { continue };
                        self.greet_in_thread(scope, wire, from);
                    }
                    Err(error) if is_momentary(&error) => {}
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept connections for the moment");
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
        from: std::net::SocketAddr,
    ) {
        if self.active.fetch_add(1, Ordering::AcqRel) >= self.limits.at_once {
            drop(Place(&self.active));
            tracing::debug!(%from, "too many connections at once: one was closed");
            return;
        }
        let place = Place(&self.active);
        let work = move || {
            let _place = place;
            if let Err(fault) = (self.greet)(wire, Instant::now() + self.limits.handshake) {
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

    fn listener() -> (TcpListener, std::net::SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    #[test]
    fn the_silent_are_sent_away_when_it_stops() {
        let (listener, address) = listener();
        let limits = Limits { handshake: Duration::from_secs(3600), at_once: 8 };
        let (here, came) = mpsc::channel();
        let greet = move |mut wire: Wire, deadline| {
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
    fn those_who_are_too_many_are_closed_at_once() {
        let (listener, address) = listener();
        let limits = Limits { handshake: Duration::from_secs(3600), at_once: 2 };
        let (here, came) = mpsc::channel();
        let greet = move |mut wire: Wire, deadline| {
            here.send(()).unwrap();
            wire.read::<1>(deadline).map(drop)
        };
        let _acceptor = Acceptor::start(listener, limits, Arc::new(greet)).unwrap();
        let held: Vec<_> = (0..2).map(|_| TcpStream::connect(address).unwrap()).collect();
        held.iter().for_each(|_| came.recv().unwrap());
        let mut third = TcpStream::connect(address).unwrap();
        assert_eq!(third.read(&mut [0]).unwrap(), 0);
        drop(held);
        // Their places become free some time after they are gone.
        while came.try_recv().is_err() {
            third = TcpStream::connect(address).unwrap();
            third.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            let _ = third.read(&mut [0]);
        }
    }

    #[test]
    fn who_drips_is_cut_off_at_the_deadline() {
        let (listener, address) = listener();
        let limits = Limits { handshake: Duration::from_millis(100), at_once: 2 };
        let (end, ended) = mpsc::channel();
        let greet = move |mut wire: Wire, deadline| {
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
