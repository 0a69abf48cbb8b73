//! One thread that waits for the sockets of many owners: a rank has one, however many groups it is in. It serves their control
//! connections and their listeners.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::connect_error::ConnectError;
use crate::base::lock;
use crate::base::timespec::timespec;
use crate::{Error, Result};

/// How long to wait before the next try where the system lacks the resources to poll.
const PAUSE: Duration = Duration::from_millis(50);

/// Owner of sockets that a [`PollThread`] serves. It must not block.
pub(crate) trait Polled: Send {
    /// Appends what to wait for.
    fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>);

    /// When to act even if nothing is ready.
    fn due(&self) -> Option<Instant>;

    /// Acts, after something of any owner was ready or due. `ready`: by place among what [`Polled::watch`] has appended.
    /// Returns false when it is done, and is to be dropped.
    fn act(&mut self, ready: &[bool]) -> bool;

    /// The system lacks the resources to poll: it is to close what it can do without.
    fn save_resources(&mut self) {}
}

/// Handle of the thread, which runs while there is something to serve.
#[derive(Clone, Default)]
pub(crate) struct PollThread(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when something is no longer served.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    /// Both ends of a pair: a byte written to the first wakes the thread, which polls the second.
    wake: Option<(UnixStream, Arc<UnixStream>)>,
    arriving: Vec<(u64, Box<dyn Polled>)>,
    /// What is served, or about to be, by number.
    open: Vec<u64>,
    next: u64,
    running: bool,
    thread: Option<JoinHandle<()>>,
}

/// Something that a [`PollThread`] serves.
#[derive(Debug)]
pub(crate) struct Served {
    thread: PollThread,
    number: u64,
}

impl PollThread {
    /// Serves `polled` until it is done.
    ///
    /// # Errors
    /// If the system cannot create a socket pair or the thread.
    pub(crate) fn serve(&self, polled: Box<dyn Polled>) -> Result<Served> {
        let mut state = lock(&self.0.state);
        let receiver = match &state.wake {
            Some((_, receiver)) => receiver.clone(),
            None => {
                let pair = wake_up_pair()
                    .map_err(|reason| Error::system("making a socket pair", ConnectError::from(reason)))?;
                state.wake.insert((pair.0, Arc::new(pair.1))).1.clone()
            }
        };
        if !state.running {
            let shared = self.0.clone();
            let builder = std::thread::Builder::new().name("comm-control".into());
            let thread = builder.spawn(move || shared.run(&receiver));
            state.thread = Some(thread.map_err(|reason| Error::system("starting a thread", reason))?);
            state.running = true;
        }
        let number = state.next;
        state.next += 1;
        state.open.push(number);
        state.arriving.push((number, polled));
        drop(state);
        self.wake();
        Ok(Served { thread: self.clone(), number })
    }

    /// Lets everything that is served act.
    pub(crate) fn wake(&self) {
        if let Some((sender, _)) = &lock(&self.0.state).wake {
            // If the socket buffer is full, the thread is going to wake anyway.
            let _ = (&*sender).write(&[0]);
        }
    }
}

impl Served {
    /// Waits until it is done and dropped. To be called on another thread than the one that serves it.
    pub(crate) fn wait(self) {
        let shared = &self.thread.0;
        let mut state = lock(&shared.state);
        while state.open.contains(&self.number) {
            state = shared.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        // The last one waits for the thread itself, so that nothing of it is left.
        let thread = if state.running { None } else { state.thread.take() };
        drop(state);
        if let Some(thread) = thread {
            // Whatever became of it, nothing is served any more.
            let _ = thread.join();
        }
    }
}

fn wake_up_pair() -> std::io::Result<(UnixStream, UnixStream)> {
    let pair = UnixStream::pair()?;
    pair.0.set_nonblocking(true)?;
    pair.1.set_nonblocking(true)?;
    Ok(pair)
}

impl Shared {
    fn run(&self, receiver: &UnixStream) {
        // The first, so that it is dropped after what was served.
        let _release = ReleaseOnPanic(self);
        let (mut served, mut done) = (Vec::new(), Vec::new());
        while let Some(are_new) = self.exchange(&mut served, &mut done) {
            let ready = wait(receiver, &served, are_new);
            if ready.as_ref().is_none_or(|ready| ready[0]) {
                while matches!((&*receiver).read(&mut [0; 64]), Ok(got) if got > 0) {}
            }
            if ready.is_none() {
                served.iter_mut().for_each(|(_, polled)| polled.save_resources());
                std::thread::sleep(PAUSE);
            }
            let mut ready = ready.unwrap_or_default().into_iter().skip(1);
            served.retain_mut(|(number, polled)| {
                let mut watched = Vec::new();
                polled.watch(&mut watched);
                let count = watched.len();
                // Where `poll` has failed, anything may be ready.
                let own: Vec<bool> = (0..count).map(|_| ready.next().unwrap_or(true)).collect();
                let goes_on = polled.act(&own);
                if !goes_on {
                    done.push(*number);
                }
                goes_on
            });
        }
    }

    /// Takes what has arrived, and tells who waits what is done. Returns whether anything has arrived; `None` if nothing is
    /// served any more, and the thread must end.
    fn exchange(&self, served: &mut Vec<(u64, Box<dyn Polled>)>, done: &mut Vec<u64>) -> Option<bool> {
        let mut state = lock(&self.state);
        let are_new = !state.arriving.is_empty();
        served.append(&mut state.arriving);
        state.running = !served.is_empty();
        if !done.is_empty() {
            state.open.retain(|number| !done.contains(number));
            done.clear();
            self.ended.notify_all();
        }
        state.running.then_some(are_new)
    }
}

/// Where the thread panics, nothing is served any more: whoever waits goes on, and what comes later gets a thread of its own.
struct ReleaseOnPanic<'a>(&'a Shared);

impl Drop for ReleaseOnPanic<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let mut state = lock(&self.0.state);
        state.running = false;
        state.open.clear();
        let arriving = std::mem::take(&mut state.arriving);
        drop(state);
        drop(arriving);
        self.0.ended.notify_all();
    }
}

/// Waits until something is ready or due; at most for a moment if `are_new`. Returns what is ready, `receiver` first; `None` if the
/// system lacks the resources to poll.
fn wait(receiver: &UnixStream, served: &[(u64, Box<dyn Polled>)], are_new: bool) -> Option<Vec<bool>> {
    let mut fds = vec![PollFd::from_borrowed_fd(receiver.as_fd(), PollFlags::IN)];
    served.iter().for_each(|(_, polled)| polled.watch(&mut fds));
    let due = served.iter().filter_map(|(_, polled)| polled.due()).min();
    let left = due.map(|due| due.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
    let timeout = if are_new { Some(Duration::ZERO) } else { left };
    match poll(&mut fds, timeout.map(timespec).as_ref()) {
        Ok(_) => Some(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
        Err(rustix::io::Errno::INTR) => Some(vec![false; fds.len()]),
        Err(_) => None,
    }
}

impl std::fmt::Debug for PollThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PollThread({} served)", lock(&self.0.state).open.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Echoes each byte, until the other end is closed.
    struct Echo(UnixStream);

    impl Polled for Echo {
        fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
            fds.push(PollFd::new(&self.0, PollFlags::IN));
        }

        fn due(&self) -> Option<Instant> {
            None
        }

        fn act(&mut self, ready: &[bool]) -> bool {
            let mut byte = [0];
            !ready[0] || matches!(self.0.read(&mut byte), Ok(1)) && self.0.write_all(&byte).is_ok()
        }
    }

    #[test]
    fn one_thread_serves_all_and_ends_with_the_last() {
        let thread = PollThread::default();
        for count in [1, 50] {
            let pairs: Vec<_> = (0..count).map(|_| UnixStream::pair().unwrap()).collect();
            let (mine, served): (Vec<UnixStream>, Vec<Served>) = pairs
                .into_iter()
                .map(|(mine, theirs)| (mine, thread.serve(Box::new(Echo(theirs))).unwrap()))
                .unzip();
            for (byte, mut stream) in (0..).zip(&mine) {
                stream.write_all(&[byte]).unwrap();
                let mut back = [0];
                stream.read_exact(&mut back).unwrap();
                assert_eq!(back, [byte]);
            }
            drop(mine);
            served.into_iter().for_each(Served::wait);
            assert!(lock(&thread.0.state).thread.is_none());
        }
    }

    /// Panics when it acts.
    struct Panics;

    impl Polled for Panics {
        fn watch<'a>(&'a self, _: &mut Vec<PollFd<'a>>) {}

        fn due(&self) -> Option<Instant> {
            None
        }

        fn act(&mut self, _: &[bool]) -> bool {
            panic!("for the test")
        }
    }

    #[test]
    fn nobody_waits_for_a_thread_that_has_panicked() {
        let thread = PollThread::default();
        let (_mine, theirs) = UnixStream::pair().unwrap();
        let served = thread.serve(Box::new(Echo(theirs))).unwrap();
        thread.serve(Box::new(Panics)).unwrap().wait();
        served.wait();

        let (mut mine, theirs) = UnixStream::pair().unwrap();
        let served = thread.serve(Box::new(Echo(theirs))).unwrap();
        mine.write_all(&[7]).unwrap();
        let mut back = [0];
        mine.read_exact(&mut back).unwrap();
        assert_eq!(back, [7]);
        drop(mine);
        served.wait();
    }
}
