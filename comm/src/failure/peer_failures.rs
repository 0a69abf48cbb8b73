//! Texts of recent failures that another rank caused. A program may wrap an error of this crate in its own error type,
//! which hides the error's type but usually not its text.

use std::collections::VecDeque;
use std::sync::Mutex;

use crate::Error;
use crate::base::lock;

/// Number of texts kept: more than the number of groups that fail for different causes before a program gives up.
const MAX_TEXTS: usize = 8;

/// Error texts of failures of groups in this process that another rank caused, the latest last.
static CAUSES: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// Records the error with which a group has failed, if another rank caused it.
pub(crate) fn record(error: &Error) {
    if !error.is_peer_failure() {
        return;
    }
    let mut causes = lock(&CAUSES);
    let text = error.to_string();
    if causes.contains(&text) {
        return;
    }
    if causes.len() == MAX_TEXTS {
        causes.pop_front();
    }
    causes.push_back(text);
}

/// Returns whether `text` contains the text of a recorded error, that is, whether another rank caused it.
pub fn is_peer_failure_text(text: &str) -> bool {
    lock(&CAUSES).iter().any(|cause| text.contains(cause.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_known_in_any_wrapping_and_forgotten_after_many_others() {
        let died =
            |rank: usize| Error::PeerDied { rank, host: "blame".into(), operation: "barrier #3".into() };
        let own = Error::system("reading blame.txt", "it is gone");
        record(&died(7));
        record(&own);
        assert!(is_peer_failure_text(&format!("epoch 3: {}", died(7))));
        assert!(!is_peer_failure_text(&own.to_string()) && !is_peer_failure_text(&died(8).to_string()));
        (10..10 + MAX_TEXTS).for_each(|rank| record(&died(rank)));
        assert!(!is_peer_failure_text(&died(7).to_string()));
        assert!(is_peer_failure_text(&died(10).to_string()));
    }
}
