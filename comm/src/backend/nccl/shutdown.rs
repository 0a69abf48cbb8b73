//! Ending an NCCL communicator on a separate thread: NCCL's call returns only when the other ranks of this host have
//! ended theirs, too, which a rank that is stuck, or keeps its group, does not do.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::base::lock;

/// The end of a communicator, under way or done.
#[derive(Clone)]
pub(super) struct CommShutdown {
    shared: Arc<Pending>,
    /// When to stop waiting for it.
    until: Instant,
}

#[derive(Default)]
struct Pending {
    state: Mutex<ShutdownState>,
    changed: Condvar,
}

#[derive(Default)]
struct ShutdownState {
    /// Memory that the device may still be using.
    kept: Vec<Box<dyn Send>>,
    /// Whether the device has finished all work that was submitted to it; None while unknown.
    outcome: Option<bool>,
}

impl CommShutdown {
    /// Starts `end`, which returns whether the device has finished all submitted work, on a thread. It is waited for no
    /// longer than `time_limit`, and after that left to its thread, which does not keep the process from exiting.
    pub(super) fn begin(time_limit: Duration, end: impl FnOnce() -> bool + Send + 'static) -> Self {
        let now = Instant::now();
        let shutdown = Self { shared: Arc::default(), until: now.checked_add(time_limit).unwrap_or(now) };
        let shared = shutdown.shared.clone();
        let thread = std::thread::Builder::new().name("nccl-end".into());
        if let Err(reason) = thread.spawn(move || shared.finish(end())) {
            // Not on this thread, where it could block indefinitely.
            tracing::warn!("cannot start a thread, an NCCL communicator stays as it is: {reason}");
            shutdown.shared.finish(false);
        }
        shutdown
    }

    /// Frees `resources` when the device has finished with it; leaks it where that does not become known.
    pub(super) fn keep(&self, resources: impl Send + 'static) {
        let mut state = lock(&self.shared.state);
        match state.outcome {
            None => state.kept.push(Box::new(resources)),
            outcome => {
                drop(state);
                release(outcome, resources);
            }
        }
    }

    /// Returns whether the end is done, or is not waited for any longer.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.shared.state).outcome.is_some() || Instant::now() >= self.until
    }

    pub(super) fn wait(&self) {
        let rest = self.until.saturating_duration_since(Instant::now());
        let under_way = |state: &mut ShutdownState| state.outcome.is_none();
        let waited = self.shared.changed.wait_timeout_while(lock(&self.shared.state), rest, under_way);
        if waited.unwrap_or_else(PoisonError::into_inner).0.outcome.is_none() {
            tracing::info!(
                "NCCL still waits for other ranks of this host to end a communicator: it is left behind"
            );
        }
    }
}

impl Pending {
    fn finish(&self, done: bool) {
        let mut state = lock(&self.state);
        state.outcome = Some(done);
        let kept = std::mem::take(&mut state.kept);
        drop(state);
        release(Some(done), kept);
        self.changed.notify_all();
    }
}

fn release(outcome: Option<bool>, resources: impl Send) {
    if outcome == Some(true) {
        drop(resources);
    } else {
        std::mem::forget(resources);
    }
}

impl fmt::Debug for CommShutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if lock(&self.shared.state).outcome.is_some() { "done" } else { "under way" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn it_is_waited_for_no_longer_than_said() {
        let (end, ended) = channel::<bool>();
        let shutdown = CommShutdown::begin(Duration::from_millis(1), move || ended.recv().unwrap());
        shutdown.wait();
        assert!(shutdown.is_over() && format!("{shutdown:?}") == "under way");
        let kept = Arc::new(());
        shutdown.keep(kept.clone());
        assert_eq!(Arc::strong_count(&kept), 2);
        end.send(true).unwrap();
        while Arc::strong_count(&kept) > 1 {
            std::thread::yield_now();
        }
        shutdown.keep(kept.clone());
        assert_eq!((Arc::strong_count(&kept), format!("{shutdown:?}").as_str()), (1, "done"));
    }

    #[test]
    fn what_the_device_may_still_be_at_is_never_freed() {
        let shutdown = CommShutdown::begin(Duration::from_secs(60), || false);
        let kept = Arc::new(());
        shutdown.keep(kept.clone());
        shutdown.wait();
        shutdown.keep(kept.clone());
        assert_eq!(Arc::strong_count(&kept), 3);
    }
}
