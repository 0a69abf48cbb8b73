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
