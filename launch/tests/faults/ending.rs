//! How a rank has ended, with assertions about it.

use std::time::Duration;

use launch::EXIT_PEER_FAILED;
use serde_json::Value;

/// How a rank has ended.
#[derive(Debug)]
pub(crate) struct Ending {
    pub(crate) rank: usize,
    /// When it had ended, on the clock of [`crate::worker::now`].
    pub(crate) at: u64,
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) failure: Option<Failure>,
    /// How long it took to drop the group.
    pub(crate) closed: Option<Duration>,
    pub(crate) stderr: String,
    done: bool,
    threads: Option<String>,
}

/// The error that a rank has reported.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) at: u64,
    pub(crate) kind: String,
    pub(crate) culprit: Option<usize>,
    pub(crate) text: String,
    /// The error of later calls, and how long they took together.
    later: Option<(String, Duration)>,
}

impl Ending {
    pub(crate) fn new(
        rank: usize,
        at: u64,
        (code, signal): (Option<i32>, Option<i32>),
        lines: &[String],
        stderr: String,
    ) -> Self {
        let after = |mark: &str| lines.iter().find_map(|line| line.strip_prefix(mark));
        let object = |mark: &str| after(mark).map(|text| serde_json::from_str::<Value>(text).unwrap());
        let text = |value: &Value| value.as_str().unwrap_or("no error at all").to_string();
        let failure = object("@failed ").map(|failed| Failure {
            at: failed["at"].as_u64().unwrap(),
            kind: text(&failed["kind"]),
            culprit: failed["culprit"].as_u64().map(|rank| rank as usize),
            text: text(&failed["text"]),
            later: object("@again ")
                .map(|again| (text(&again["text"]), Duration::from_millis(again["ms"].as_u64().unwrap()))),
        });
        let closed = after("@closed ").map(|time| Duration::from_millis(time.parse().unwrap()));
        let (threads, done) = (after("@threads ").map(String::from), after("@done").is_some());
        Self { rank, at, code, signal, failure, closed, stderr, done, threads }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done && self.code == Some(0)
    }

    /// Asserts that it has completed its script and closed its group in time, without a panic.
    pub(crate) fn assert_done(&self) {
        assert!(self.is_done(), "{self:#?}");
        assert!(!self.stderr.contains("panicked"), "{self:#?}");
        self.assert_closed(Duration::from_secs(5));
    }

    /// Asserts that it reports this kind of error about this rank, that every later call fails with the same error at
    /// once, and that it ends with the exit code for a failed peer. Returns the error's text.
    pub(crate) fn assert_failed(&self, kind: &str, culprit: usize) -> &str {
        let failure = self.failure.as_ref().unwrap_or_else(|| panic!("{self:#?}"));
        assert_eq!((failure.kind.as_str(), failure.culprit), (kind, Some(culprit)), "{self:#?}");
        assert_eq!(self.code, Some(EXIT_PEER_FAILED), "{self:#?}");
        let (later, time) = failure.later.as_ref().unwrap_or_else(|| panic!("{self:#?}"));
        assert_eq!(later, &failure.text, "{self:#?}");
        assert!(*time < Duration::from_secs(2), "{self:#?}");
        assert!(!self.stderr.contains("panicked"), "{self:#?}");
        self.assert_closed(Duration::from_secs(5));
        &failure.text
    }

    /// Asserts that it has aborted its group, with that error.
    pub(crate) fn assert_aborted(&self) {
        let failure = self.failure.as_ref().unwrap_or_else(|| panic!("{self:#?}"));
        assert_eq!(
            (failure.kind.as_str(), failure.culprit, self.code),
            ("Aborted", None, Some(1)),
            "{self:#?}"
        );
        assert!(!self.stderr.contains("panicked"), "{self:#?}");
        self.assert_closed(Duration::from_secs(5));
    }

    /// Like [`Ending::assert_failed`]; the message must also name the rank, its host and the operation.
    pub(crate) fn assert_blames(&self, kind: &str, culprit: usize, operation: &str) {
        let text = self.assert_failed(kind, culprit);
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        assert!(text.starts_with(&format!("rank {culprit} (host {host}) ")), "{text}");
        assert!(text.contains(operation), "{text}");
    }

    fn assert_closed(&self, limit: Duration) {
        if let Some(closed) = self.closed {
            assert!(closed < limit, "{self:#?}");
            assert_eq!(self.threads.as_deref(), Some("0"), "{self:#?}");
        }
    }

    /// Returns the time from `since` to the error, in milliseconds.
    pub(crate) fn delay(&self, since: u64) -> f64 {
        let at = self.failure.as_ref().unwrap_or_else(|| panic!("{self:#?}")).at;
        at.saturating_sub(since) as f64 / 1e6
    }
}

/// Summarizes the durations of several events, in milliseconds, in one line.
pub(crate) fn summary(what: &str, delays: &[f64]) -> String {
    let mut sorted = delays.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (median, max) = (sorted[sorted.len() / 2], sorted[sorted.len() - 1]);
    format!("{what}: {} times, median {median:.1} ms, longest {max:.1} ms", sorted.len())
}
