//! What the threads that run operations tell the failure state, and ask it.

use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::base::cause::Cause;
use crate::base::fingerprint::Fingerprint;
use crate::base::last_message;
use crate::base::lock;
use crate::base::members::Members;
use crate::failure::diagnosis::Question;
use crate::failure::supervisor::Supervisor;
use crate::transport::links::Wait;

use super::FailureState;

impl Supervisor for FailureState {
    fn on_program_call(&self) {
        self.job.clear_reported_failure();
    }

    fn begin(&self, call: Fingerprint) {
        lock(&self.activity).begin(call);
    }

    fn wait_for(&self, waits: &[Wait]) {
        lock(&self.activity).wait_for(&mut waits.iter().map(|wait| wait.peer));
    }

    fn end(&self) {
        lock(&self.activity).end();
    }

    fn announce(&self, reason: &str) {
        self.announce_failure(reason);
    }

    fn failure(&self) -> Option<Cause> {
        if !self.has_failed() {
            return None;
        }
        self.is_known.store(true, Ordering::Release);
        lock(&self.reports).failure.clone()
    }

    fn ask(&self, question: Question) -> Option<Cause> {
        let question = match question {
            Question::Lost { peer, because: Some(cause), .. } => {
                Question::Known { peer, cause: self.converted_from_group(cause) }
            }
            question => question,
        };
        match self.ask_world(&question) {
            Some(cause) if question.is_fatal() => {
                self.ask_here(Question::Known { peer: question.peer(), cause })
            }
            Some(cause) => Some(cause),
            None => self.ask_here(question),
        }
    }

    fn close_streams(&self, part: &mut dyn FnMut() -> Vec<usize>) {
        if !self.alone.load(Ordering::Acquire) {
            return;
        }
        if let Some(words) = self.failure().as_ref().and_then(last_message::encode_failure) {
            self.data_connections.send_last_message(&part(), &words);
        }
        self.data_connections.shutdown(Shutdown::Both, None);
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &Members {
        &self.members
    }

    fn host(&self, rank: usize) -> String {
        self.data_connections.peers().get(rank).map(|peer| peer.host.clone()).unwrap_or_default()
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn slow_warning(&self) -> Duration {
        self.slow_warning
    }
}
