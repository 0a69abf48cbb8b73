//! The end of a communicator, on a thread of its own: NCCL returns from it only when the other ranks of this host have ended
//! theirs, too, and a rank that stands still, or keeps its group, does not.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::base::lock::lock;

/// An end that is under way, or done.
#[derive(Clone)]
pub(super) struct Farewell {
    shared: Arc<Pending>,
    /// Until then it is waited for.
    until: Instant,
}

#[derive(Default)]
struct Pending {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    /// What the device may still be at.
    kept: Vec<Box<dyn Send>>,
    /// Whether the device is done with all that it was asked for, once that is known.
    outcome: Option<bool>,
}

impl Farewell {
    /// Begins it; `end` tells whether the device is done with all that it was asked for. It is waited for no longer than
    /// `patience`, and then left to its thread, also when the process ends.
    pub(super) fn begin(patience: Duration, end: impl FnOnce() -> bool + Send + 'static) -> Self {
        let now = Instant::now();
        let farewell = Self { shared: Arc::default(), until: now.checked_add(patience).unwrap_or(now) };
        let shared = farewell.shared.clone();
        let thread = std::thread::Builder::new().name("nccl-end".into());
        if let Err(reason) = thread.spawn(move || shared.finish(end())) {
            // Here, it could last for ever.
            tracing::warn!("cannot start a thread, an NCCL communicator stays as it is: {reason}");
            farewell.shared.finish(false);
        }
        farewell
    }

    /// Frees `cargo` when the device is done with it; leaks it where that does not become known.
    pub(super) fn keep(&self, cargo: impl Send + 'static) {
        let mut state = lock(&self.shared.state);
        match state.outcome {
            None => state.kept.push(Box::new(cargo)),
            outcome => {
                drop(state);
                release(outcome, cargo);
            }
        }
    }

    /// Whether it is done, or not waited for any longer.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.shared.state).outcome.is_some() || Instant::now() >= self.until
    }

    pub(super) fn wait(&self) {
        let rest = self.until.saturating_duration_since(Instant::now());
        let under_way = |state: &mut State| state.outcome.is_none();
        let waited = self.shared.bell.wait_timeout_while(lock(&self.shared.state), rest, under_way);
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
        self.bell.notify_all();
    }
}

fn release(outcome: Option<bool>, cargo: impl Send) {
    if outcome == Some(true) {
        drop(cargo);
    } else {
        std::mem::forget(cargo);
    }
}

impl fmt::Debug for Farewell {
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
        let farewell = Farewell::begin(Duration::from_millis(1), move || ended.recv().unwrap());
        farewell.wait();
        assert!(farewell.is_over() && format!("{farewell:?}") == "under way");
        let kept = Arc::new(());
        farewell.keep(kept.clone());
        assert_eq!(Arc::strong_count(&kept), 2);
        end.send(true).unwrap();
        while Arc::strong_count(&kept) > 1 {
            std::thread::yield_now();
        }
        farewell.keep(kept.clone());
        assert_eq!((Arc::strong_count(&kept), format!("{farewell:?}").as_str()), (1, "done"));
    }

    #[test]
    fn what_the_device_may_still_be_at_is_never_freed() {
        let farewell = Farewell::begin(Duration::from_secs(60), || false);
        let kept = Arc::new(());
        farewell.keep(kept.clone());
        farewell.wait();
        farewell.keep(kept.clone());
        assert_eq!(Arc::strong_count(&kept), 3);
    }
}
