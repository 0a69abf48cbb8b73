//! The connection to another launcher, with heartbeats and a measure of its silence.
//!
//! A stopped launcher (SIGSTOP, a suspended machine) keeps its connections, because the kernel answers for it. So
//! launchers send each other heartbeats: `null` in place of a message. A heartbeat is only sent once something was
//! received since the last one, so that heartbeats do not pile up for a stopped launcher.

use std::time::{Duration, Instant};

use comm::launcher::Connection;
use serde::Serialize;

/// Heartbeat period, and the longest time between two checks of the others' heartbeats.
const PERIOD: Duration = Duration::from_secs(1);
/// Minimum number of periods in the time limit after which a launcher is given up.
const MIN_HEARTBEATS: u32 = 4;
/// Shortest time limit. Less is not conclusive on a busy machine.
const MIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Silence of a launcher after which a warning is logged; the same as for ranks.
const WARN_AFTER: Duration = Duration::from_secs(30);

/// How long a send may wait for buffer space.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a launcher may be silent while another one waits for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit(Duration);

impl Limit {
    pub(super) fn new(timeout: Duration) -> Self {
        Self(timeout.max(MIN_TIMEOUT))
    }

    pub(super) fn period(self) -> Duration {
        PERIOD.min(self.0 / MIN_HEARTBEATS)
    }
}

/// The connection to one launcher.
pub(super) struct NodeConnection {
    pub(super) connection: Connection,
    /// For how long nothing was received. Each check adds one period, so the time does not grow while this launcher
    /// itself is stopped.
    silence: Duration,
    /// Something was received since the last heartbeat was sent.
    is_answered: bool,
}

impl NodeConnection {
    pub(super) fn new(connection: Connection) -> Self {
        Self { connection, silence: Duration::ZERO, is_answered: true }
    }

    /// Records that something was received.
    pub(super) fn received(&mut self) {
        self.silence = Duration::ZERO;
        self.is_answered = true;
    }

    /// Sends a heartbeat if one is due, and adds a period to the silence. Returns true, once, when it is time for a
    /// warning.
    pub(super) fn heartbeat(&mut self, limit: Limit) -> bool {
        if std::mem::take(&mut self.is_answered) {
            send(&mut self.connection, &None::<()>);
        }
        let before = self.silence;
        self.silence += limit.period();
        before < WARN_AFTER && self.silence >= WARN_AFTER
    }

    /// Returns the length of the silence if it exceeds the limit, and this launcher has waited at least as long.
    pub(super) fn exceeded_silence(&self, waited: Duration, limit: Limit) -> Option<Duration> {
        (self.silence.min(waited) >= limit.0).then_some(self.silence)
    }
}

/// Sends a message to another launcher.
pub(super) fn send(connection: &mut Connection, message: &impl Serialize) {
    match Connection::frame(message) {
        // If it cannot be sent, the other side is gone, which the reading thread finds out.
        Ok(frame) => drop(connection.write(&frame, Instant::now() + SEND_TIMEOUT)),
        // A message that cannot be serialized must not leave the other side waiting: the connection is closed for both.
        Err(reason) => {
            tracing::warn!("what the launchers say to each other cannot be written: {reason}");
            connection.cut();
        }
    }
}

/// Logs the warning.
pub(super) fn warn_silent(node: &impl std::fmt::Display) {
    let seconds = WARN_AFTER.as_secs();
    tracing::warn!(
        "{node}: nothing was heard of its launcher for {seconds} s; it stands still, or cannot be reached"
    );
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    use super::*;

    fn line() -> (NodeConnection, Connection) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let [one, other] = [one, listener.accept().unwrap().0].map(|end| Connection::new(end).unwrap());
        (NodeConnection::new(one), other)
    }

    #[test]
    fn a_silent_launcher_is_warned_of_once_and_missed_by_those_who_wait() {
        let (mut line, _other) = line();
        let seconds = Duration::from_secs;
        let limit = Limit::new(seconds(60));
        let mut warned: Vec<u64> = (1..60).filter(|_| line.heartbeat(limit)).collect();
        assert_eq!(warned, [30]);
        assert_eq!(line.exceeded_silence(seconds(100), limit), None);
        line.heartbeat(limit);
        assert_eq!(line.exceeded_silence(seconds(60), limit), Some(seconds(60)));
        // A launcher that has only just begun to wait grants the whole time.
        assert_eq!(line.exceeded_silence(seconds(59), limit), None);
        line.received();
        assert_eq!(line.exceeded_silence(seconds(100), limit), None);
        warned = (1..60).filter(|_| line.heartbeat(limit)).collect();
        assert_eq!(warned, [30]);
    }

    #[test]
    fn one_sign_of_life_is_sent_for_each_that_comes() {
        let (mut line, mut other) = line();
        let limit = Limit::new(Duration::from_secs(60));
        for _ in 0..3 {
            line.heartbeat(limit);
        }
        line.received();
        line.heartbeat(limit);
        line.connection.cut();
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut heartbeats = || other.receive::<Option<u8>>(100, deadline);
        assert_eq!((heartbeats().unwrap(), heartbeats().unwrap()), (None, None));
        assert!(heartbeats().is_err());
    }

    #[test]
    fn the_time_out_is_that_of_the_configuration_but_for_very_short_ones() {
        assert_eq!(Limit::new(Duration::ZERO).period(), Duration::from_millis(250));
        assert_eq!(Limit::new(Duration::from_secs(300)).period(), PERIOD);
    }
}
