//! Recording when a rank's own thread is blocked in communication, with a clock that all processes of a machine share.

use std::cell::RefCell;

use rustix::time::{ClockId, clock_gettime};
use tracing::span::Id;
use tracing_subscriber::filter::{FilterExt, LevelFilter, filter_fn};
use tracing_subscriber::layer::Context;
use tracing_subscriber::prelude::*;
use tracing_subscriber::registry::LookupSpan;

/// Names of spans in which a thread communicates, or waits for communication.
const BLOCKED: [&str; 4] = ["collective", "wait", "wait for input gradient", "message"];

/// Returns the monotonic time in nanoseconds, comparable between processes of a machine.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Start and end, in nanoseconds of [`now`].
pub(crate) type Interval = (u64, u64);

#[derive(Default)]
struct Recording {
    depth: usize,
    began: u64,
    intervals: Vec<Interval>,
}

thread_local! {
    /// `Some` in a thread that records.
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Installs the subscriber that watches spans. Takes effect once per process.
pub(crate) fn install() {
    let blocked = filter_fn(|metadata| metadata.is_span() && BLOCKED.contains(&metadata.name()));
    let layer = Watch.with_filter(blocked.and(LevelFilter::INFO));
    // Fails if another subscriber is installed; then no blocked time is recorded.
    let _ = tracing_subscriber::registry().with(layer).try_init();
}

/// Starts recording the blocked intervals of this thread.
pub(crate) fn record() {
    RECORDING.set(Some(Recording::default()));
}

/// Ends recording; returns the intervals, disjoint and in order.
pub(crate) fn recorded() -> Vec<Interval> {
    RECORDING.take().map(|recording| recording.intervals).unwrap_or_default()
}

struct Watch;

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> tracing_subscriber::Layer<S> for Watch {
    fn on_enter(&self, _: &Id, _: Context<'_, S>) {
        RECORDING.with_borrow_mut(|recording| {
            let Some(recording) = recording else { return };
            if recording.depth == 0 {
                recording.began = now();
            }
            recording.depth += 1;
        });
    }

    fn on_exit(&self, _: &Id, _: Context<'_, S>) {
        RECORDING.with_borrow_mut(|recording| {
            let Some(recording) = recording.as_mut().filter(|recording| recording.depth > 0) else { return };
            recording.depth -= 1;
            if recording.depth == 0 {
                recording.intervals.push((recording.began, now()));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_within_spans_count_once_and_other_threads_not_at_all() {
        install();
        record();
        let began = now();
        tracing::info_span!("wait").in_scope(|| {
            tracing::info_span!("collective").in_scope(|| ());
        });
        tracing::info_span!("forward").in_scope(|| ());
        std::thread::spawn(|| tracing::info_span!("collective").in_scope(|| ())).join().unwrap();
        tracing::info_span!("collective").in_scope(|| ());
        let intervals = recorded();
        assert_eq!(intervals.len(), 2, "{intervals:?}");
        assert!(began <= intervals[0].0 && intervals[0].1 <= intervals[1].0 && intervals[1].1 <= now());
        assert!(recorded().is_empty());
    }
}
