//! The outcome of a round: the reports of its ranks, or the first cause of its failure.

use std::time::Instant;

use comm::EXIT_PEER_FAILED;

use super::{SIGNAL_TIME, Supervisor};
use crate::event::Event;
use crate::failure::{Ended, first_cause};
use crate::forward::Captured;
use crate::signals::{STOP_SIGNALS, StopSignal};
use crate::{Error, ExitKind, Result, WorkerFailure};

impl Supervisor<'_> {
    /// Returns the rank that is the first cause of the job's failure, and how many others failed. A rank that only names a
    /// peer is no cause where others have stopped with a checkpoint.
    pub(super) fn cause(&self) -> Option<(Ended, usize)> {
        let is_checkpointed = self.ended.iter().any(Ended::is_checkpointed);
        let cause = first_cause(&self.ended, self.stopped_by());
        cause.filter(|(cause, _)| !is_checkpointed || cause.status != ExitKind::Code(EXIT_PEER_FAILED))
    }

    pub(super) fn outcome(mut self, captured: Captured) -> Result<Vec<Option<String>>> {
        // A signal that arrives at the very end was meant for the job as well. A signal sent to all processes may reach
        // the ranks first.
        let is_theirs = |end: &Ended| STOP_SIGNALS.iter().any(|signal| end.is_of(*signal));
        let until = self.ended.iter().any(is_theirs).then(|| Instant::now() + SIGNAL_TIME);
        while let Some(event) = match until.filter(|_| self.signal.is_none()) {
            Some(until) => self.inbox.next(Some(until)),
            None => self.inbox.now(),
        } {
            match event {
                Event::Signal(number) => drop(self.signal.get_or_insert_with(|| StopSignal::new(number))),
                Event::Order(order) => self.ordered(order),
                _ => {}
            }
        }
        if self.is_left_to_coordinator() {
            self.tell_last_lines(captured.tails);
            return Ok(captured.results);
        }
        if let Some((cause, also_failed)) = self.cause() {
            let Captured { mut tails, .. } = captured;
            let tail = tails.get_mut(self.local_rank(cause.rank)).map(std::mem::take);
            let stderr_tail = tail.unwrap_or_default().into();
            let failure = WorkerFailure { stderr_tail, also_failed, ..self.failure(cause) };
            return Err(Box::new(failure).into());
        }
        if self.ended.iter().any(Ended::is_checkpointed) {
            return Err(Error::Checkpointed);
        }
        if let Some(signal) = self.stopped_by() {
            return Err(Error::Interrupted { signal });
        }
        match self.output_error {
            Some(error) => Err(Error::system("cannot write the workers' output", error)),
            None => Ok(captured.results),
        }
    }
}
