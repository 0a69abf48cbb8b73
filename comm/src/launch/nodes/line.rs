//! The connection to another launcher, and how long nothing has come over it.
//!
//! A launcher that stands still (SIGSTOP, a suspended machine) keeps its connections: the kernel answers for it. So launchers
//! send each other signs of life, `null` in place of a message. Each is sent only once something has come since the last one:
//! no pile of them waits for a launcher that stands still.

use std::time::{Duration, Instant};

use super::link::send;
use crate::tcp::Wire;

/// Between two signs of life, and between two looks at those of the others.
const PERIOD: Duration = Duration::from_secs(1);
/// How many of them there are at least before a launcher is given up.
const SIGNS: u32 = 4;
/// Less says nothing on a busy machine.
const SHORTEST: Duration = Duration::from_secs(1);
/// How long a launcher may be silent before a warning says so, as with ranks.
const WARN_AFTER: Duration = Duration::from_secs(30);

/// How long a launcher may be silent while another one waits for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit(Duration);

impl Limit {
    pub(super) fn new(timeout: Duration) -> Self {
        Self(timeout.max(SHORTEST))
    }

    pub(super) fn period(self) -> Duration {
        PERIOD.min(self.0 / SIGNS)
    }
}

/// The way to one launcher.
pub(super) struct Line {
    pub(super) wire: Wire,
    heard: Instant,
    /// Something has come since the last sign of life was sent.
    is_answered: bool,
    is_warned_of: bool,
}

impl Line {
    pub(super) fn new(wire: Wire, now: Instant) -> Self {
        Self { wire, heard: now, is_answered: true, is_warned_of: false }
    }

    /// Something has come.
    pub(super) fn hear(&mut self, now: Instant) {
        self.heard = now;
        self.is_answered = true;
        self.is_warned_of = false;
    }

    pub(super) fn give_sign(&mut self) {
        if std::mem::take(&mut self.is_answered) {
            send(&mut self.wire, &None::<()>);
        }
    }

    /// True where it is time to warn of its silence, once.
    pub(super) fn begins_to_worry(&mut self, now: Instant) -> bool {
        let worries = !self.is_warned_of && now.saturating_duration_since(self.heard) >= WARN_AFTER;
        self.is_warned_of |= worries;
        worries
    }

    /// How long it has been silent, where that is too long for one who has waited for it since then.
    pub(super) fn is_missed(&self, waits_since: Instant, now: Instant, limit: Limit) -> Option<Duration> {
        let waited = now.saturating_duration_since(self.heard.max(waits_since));
        (waited >= limit.0).then(|| now.saturating_duration_since(self.heard))
    }
}

/// The warning.
pub(super) fn say_that_it_is_silent(node: &impl std::fmt::Display) {
    let seconds = WARN_AFTER.as_secs();
    tracing::warn!(
        "{node}: nothing was heard of its launcher for {seconds} s; it stands still, or cannot be reached"
    );
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn line(now: Instant) -> (Line, Wire) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let [one, other] = [one, listener.accept().unwrap().0].map(|end| Wire::new(end, None).unwrap());
        (Line::new(one, now), other)
    }

    #[test]
    fn a_silent_launcher_is_warned_of_once_and_missed_by_those_who_wait() {
        let began = Instant::now();
        let after = |seconds: u64| began + Duration::from_secs(seconds);
        let (mut line, _other) = line(began);
        let limit = Limit::new(Duration::from_secs(60));
        let warned: Vec<_> = [29, 30, 31].map(|seconds| line.begins_to_worry(after(seconds))).into();
        assert_eq!(warned, [false, true, false]);
        assert_eq!(line.is_missed(began, after(59), limit), None);
        assert_eq!(line.is_missed(began, after(60), limit), Some(Duration::from_secs(60)));
        // Who has only just begun to wait gives it the whole time.
        assert_eq!(line.is_missed(after(50), after(109), limit), None);
        assert_eq!(line.is_missed(after(50), after(110), limit), Some(Duration::from_secs(110)));
        line.hear(after(111));
        assert_eq!(line.is_missed(began, after(112), limit), None);
        assert!(line.begins_to_worry(after(141)));
    }

    #[test]
    fn one_sign_of_life_is_sent_for_each_that_comes() {
        let (mut line, mut other) = line(Instant::now());
        (0..3).for_each(|_| line.give_sign());
        line.hear(Instant::now());
        line.give_sign();
        line.wire.cut();
        let limit = Instant::now() + Duration::from_secs(60);
        let mut signs = || other.receive::<Option<u8>>(100, limit);
        assert_eq!((signs().unwrap(), signs().unwrap()), (None, None));
        assert!(signs().is_err());
    }

    #[test]
    fn the_time_out_is_that_of_the_configuration_but_for_very_short_ones() {
        assert_eq!(Limit::new(Duration::ZERO).period(), Duration::from_millis(250));
        assert_eq!(Limit::new(Duration::from_secs(300)).period(), PERIOD);
    }
}
