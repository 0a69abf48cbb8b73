//! The action that a program sets for signals.
#![allow(clippy::unwrap_used, reason = "all of it is test")]

use std::sync::mpsc::channel;
use std::time::Duration;

use signal_hook::consts::SIGTERM;

/// Generous: a failure is a wait that never ends.
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn an_action_may_set_the_next_one() {
    let (sender, received) = channel();
    let first = move |_| {
        let next = sender.clone();
        launch::on_signal(move |_| next.send("second").unwrap()).unwrap();
        sender.send("first").unwrap();
    };
    launch::on_signal(first).unwrap();
    for expected in ["first", "second", "second"] {
        signal_hook::low_level::raise(SIGTERM).unwrap();
        assert_eq!(received.recv_timeout(TIMEOUT).unwrap(), expected);
    }
}
