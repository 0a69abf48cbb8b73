//! NCCL watchdog: a thread for each communicator. It detects errors that NCCL reports while no operation is under way,
//! and aborts an operation whose own thread cannot, because a driver call waits for the very device that is stuck.

use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::base::lock;
use crate::failure::diagnosis::Question;
use crate::failure::supervisor::Supervisor;
use crate::{Error, Result};

use super::handle::NcclHandle;

/// Between two checks.
const PAUSE: Duration = Duration::from_millis(200);
/// How much longer than the time-out an operation may take until this thread aborts it: the operation's own thread knows
/// better which rank to blame, and goes first.
const GRACE: Duration = Duration::from_secs(5);

/// State shared by the thread that runs a communicator's operations and its watchdog.
#[derive(Debug, Default)]
pub(super) struct WatchedHandle {
    /// Some once all ranks have created the communicator. Locked only for calls that do not wait for the device.
    pub(super) handle: Mutex<Option<NcclHandle>>,
    watched: Mutex<Watched>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Watched {
    /// The operation under way, and when the watchdog is to abort it.
    current: Option<(&'static str, Instant)>,
    failure: Option<Error>,
    closing: bool,
}

impl WatchedHandle {
    /// Records that an operation begins, which may take as long as `timeout`.
    pub(super) fn begin(&self, call: &'static str, timeout: Duration) {
        lock(&self.watched).current = Instant::now().checked_add(timeout + GRACE).map(|end| (call, end));
    }

    pub(super) fn end(&self) {
        lock(&self.watched).current = None;
    }

    /// Returns an error if the watchdog has given up the communicator.
    pub(super) fn check(&self) -> Result<()> {
        lock(&self.watched).failure.clone().map_or(Ok(()), Err)
    }

    fn overdue(&self) -> Option<&'static str> {
        let now = Instant::now();
        lock(&self.watched).current.filter(|(_, end)| now >= *end).map(|(call, _)| call)
    }

    /// Returns why the communicator is to be given up, if it has failed or its operation is overdue.
    fn check_communicator(&self) -> Option<Error> {
        self.check().ok()?;
        let mut handle = match self.handle.try_lock() {
            Ok(handle) => handle,
            Err(TryLockError::Poisoned(handle)) => handle.into_inner(),
            // Another thread is calling NCCL at this moment.
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
        lock(&self.handle).as_mut().and_then(NcclHandle::abort);
    }

    /// Waits until the next check. Returns false when the thread is to end.
    fn pause(&self) -> bool {
        let watched = lock(&self.watched);
        let closing = |watched: &mut Watched| !watched.closing;
        let waited = self.changed.wait_timeout_while(watched, PAUSE, closing);
        !waited.unwrap_or_else(PoisonError::into_inner).0.closing
    }
}

/// The watchdog thread; dropping this ends it.
pub(super) struct Watchdog {
    shared: Arc<WatchedHandle>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the thread. It reports failures to all ranks through `supervisor`.
    pub(super) fn start(
        shared: Arc<WatchedHandle>,
        supervisor: Arc<dyn Supervisor>,
        rank: usize,
    ) -> Result<Self> {
        let own = shared.clone();
        let watch = move || {
            while own.pause() {
                if let Some(error) = own.check_communicator() {
                    // Before giving up here: the other ranks are to give it up, too.
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
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread never panics.
            let _ = thread.join();
        }
    }
}
