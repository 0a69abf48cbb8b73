//! A thread beside each communicator: it notices what NCCL says while no operation is under way, and ends an operation whose
//! own thread cannot, because a call of the driver waits for the very device that is stuck.

use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::base::lock::lock;
use crate::blame::supervisor::Supervisor;
use crate::blame::verdict::Question;
use crate::{Error, Result};

use super::handle::Handle;

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(200);
/// How much longer than the time-out an operation may take until this thread ends it: its own thread knows better whom to
/// blame.
const GRACE: Duration = Duration::from_secs(5);

/// What the thread of a communicator's operations shares with the one that watches.
#[derive(Debug, Default)]
pub(super) struct WatchedHandle {
    /// Once all ranks have one. Locked for calls that do not wait for the device.
    pub(super) handle: Mutex<Option<Handle>>,
    watched: Mutex<Watched>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct Watched {
    /// The operation under way, and when it is overdue.
    current: Option<(&'static str, Instant)>,
    failure: Option<Error>,
    closing: bool,
}

impl WatchedHandle {
    /// An operation begins, which may take so long.
    pub(super) fn begin(&self, call: &'static str, timeout: Duration) {
        lock(&self.watched).current = Instant::now().checked_add(timeout + GRACE).map(|end| (call, end));
    }

    pub(super) fn end(&self) {
        lock(&self.watched).current = None;
    }

    /// Why the communicator was given up, if it was.
    pub(super) fn check(&self) -> Result<()> {
        lock(&self.watched).failure.clone().map_or(Ok(()), Err)
    }

    fn overdue(&self) -> Option<&'static str> {
        let now = Instant::now();
        lock(&self.watched).current.filter(|(_, end)| now >= *end).map(|(call, _)| call)
    }

    /// Why the communicator is to be given up, where it has failed, or its operation is overdue.
    fn look(&self) -> Option<Error> {
        self.check().ok()?;
        let mut handle = match self.handle.try_lock() {
            Ok(handle) => handle,
            Err(TryLockError::Poisoned(handle)) => handle.into_inner(),
            // Another thread asks NCCL at this moment.
            Err(TryLockError::WouldBlock) => return None,
        };
        let handle = handle.as_mut().filter(|handle| handle.is_open())?;
        let error = match (handle.is_ready("ncclCommGetAsyncError"), self.overdue()) {
            (Err(error), _) => error,
            (Ok(_), Some(call)) => {
                Error::system(call, "it did not end in time, and neither did a call of the driver")
            }
            (Ok(_), None) => return None,
        };
        lock(&self.watched).failure.get_or_insert(error.clone());
        Some(error)
    }

    fn give_up(&self) {
        lock(&self.handle).as_mut().and_then(Handle::abort);
    }

    /// False when it is time to end.
    fn pause(&self) -> bool {
        let watched = lock(&self.watched);
        let closing = |watched: &mut Watched| !watched.closing;
        let waited = self.bell.wait_timeout_while(watched, PAUSE, closing);
        !waited.unwrap_or_else(PoisonError::into_inner).0.closing
    }
}

/// Dropping it ends the thread.
pub(super) struct Watchdog {
    shared: Arc<WatchedHandle>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// All ranks hear of a failure through `supervisor`.
    pub(super) fn start(
        shared: Arc<WatchedHandle>,
        supervisor: Arc<dyn Supervisor>,
        rank: usize,
    ) -> Result<Self> {
        let own = shared.clone();
        let watch = move || {
            while own.pause() {
                if let Some(error) = own.look() {
                    // First of all: they are to give it up, too.
                    supervisor.ask(Question::Failed { rank, detail: error.to_string() });
                    own.give_up();
                }
            }
        };
        let thread = std::thread::Builder::new().name("nccl-watch".into()).spawn(watch);
        let thread = thread.map_err(|reason| Error::system("starting a thread that watches NCCL", reason))?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        lock(&self.shared.watched).closing = true;
        self.shared.bell.notify_all();
        if let Some(thread) = self.thread.take() {
            // It never panics.
            let _ = thread.join();
        }
    }
}
