//! Waiting for a peer: spin shortly, then sleep, ask around, warn, and give up when the time is over.

use std::time::{Duration, Instant};

use crate::fingerprint::Fingerprint;
use crate::links::{Links, Wait};
use crate::supervisor::Supervisor;
use crate::verdict::{Cause, Question};
use crate::{Error, Result};

/// After this long without a byte the other ranks are asked for the first time whether they are in another call.
const FIRST_QUESTION: Duration = Duration::from_secs(1);
/// After this long it is told for whom a rank waits; most waits are shorter, and cost no more than they must.
const MOMENT: Duration = Duration::from_millis(20);
/// So long before the time is over they are asked once more: at its end it is known who does not answer.
const REHEARSAL: Duration = Duration::from_millis(1500);

/// How long one wait has lasted, and what has been done about it.
pub(crate) struct Patience {
    spins: u32,
    spun: u32,
    since: Option<Instant>,
    next_question: Duration,
    rehearsed: bool,
    warned: bool,
    /// It is known for whom this rank waits.
    told: bool,
}

impl Patience {
    /// `spins`: how often to return at once, for another try, before sleeping.
    pub(crate) fn new(spins: u32) -> Self {
        let (since, next_question) = (None, FIRST_QUESTION);
        Self { spins, spun: 0, since, next_question, rehearsed: false, warned: false, told: false }
    }

    /// Something has moved.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.spins);
    }

    /// Lets some time pass, at most `longest` if it comes to sleeping. `waits` is not empty.
    pub(crate) fn wait(
        &mut self,
        links: &mut dyn Links,
        waits: &[Wait],
        longest: Duration,
        supervisor: &dyn Supervisor,
        call: &Fingerprint,
    ) -> Result<()> {
        if self.spun < self.spins {
            self.spun += 1;
            std::hint::spin_loop();
            return Ok(());
        }
        let peer = waits.iter().find(|wait| wait.read).unwrap_or(&waits[0]).peer;
        let mut rest = self.consider(links, peer, supervisor, call)?;
        if !self.told {
            let waited = self.since.map_or(Duration::ZERO, |since| since.elapsed());
            self.told = waited >= MOMENT;
            match self.told {
                true => supervisor.wait_for(waits),
                false => rest = rest.min(MOMENT - waited),
            }
        }
        links.park(waits, rest.min(longest));
        Ok(())
    }

    /// Asks around, warns or gives up, where it is time to; how long there is nothing else to do than to wait for `peer`.
    pub(crate) fn consider(
        &mut self,
        links: &dyn Links,
        peer: usize,
        supervisor: &dyn Supervisor,
        call: &Fingerprint,
    ) -> Result<Duration> {
        if let Some(cause) = supervisor.failure() {
            return Err(supervisor.error(&cause, call.to_string()));
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        let waited = since.elapsed();
        if waited >= supervisor.timeout() {
            let question = match links.trouble(peer) {
                Some(detail) => Question::Unreached { peer, detail },
                None => Question::Stuck { peer, last: true, apart: false },
            };
            return Err(blame(supervisor, question, call));
        }
        if !self.warned && waited >= supervisor.slow_warning() {
            self.warned = true;
            warn(supervisor, peer, call, waited);
        }
        let rehearsal = rehearsal(supervisor.timeout());
        if waited >= self.next_question || !self.rehearsed && waited >= rehearsal {
            while self.next_question <= waited {
                self.next_question *= 2;
            }
            self.rehearsed |= waited >= rehearsal;
            let apart = links.trouble(peer).is_some();
            if let Some(cause) = supervisor.ask(Question::Stuck { peer, last: false, apart }) {
                return Err(supervisor.error(&cause, call.to_string()));
            }
        }
        let mut next = self.next_question.min(supervisor.timeout());
        if !self.rehearsed {
            next = next.min(rehearsal);
        }
        if !self.warned {
            next = next.min(supervisor.slow_warning());
        }
        // Asking has taken time as well.
        let waited = since.elapsed();
        Ok(next.saturating_sub(waited).max(Duration::from_millis(1)))
    }
}

/// How long after the beginning of a wait the others are asked for the last time but one.
fn rehearsal(timeout: Duration) -> Duration {
    timeout.saturating_sub(REHEARSAL).max(timeout / 4)
}

/// The error of a call that cannot go on; where nobody knows better, the rank that the question is about is to blame.
pub(crate) fn blame(supervisor: &dyn Supervisor, question: Question, call: &Fingerprint) -> Error {
    let known = supervisor.failure().or_else(|| supervisor.ask(question.clone()));
    let cause = known.unwrap_or_else(|| match question {
        Question::Lost { peer, .. } => Cause::Died { rank: peer },
        Question::Known { cause, .. } => cause,
        Question::Unreached { peer, .. } => Cause::Left { rank: peer },
        _ => Cause::Stalled { rank: question.peer(), detail: "nobody could say what it does".into() },
    });
    supervisor.error(&cause, call.to_string())
}

/// The library that moves a call's data has failed on this rank: all ranks are told, unless another cause explains it.
pub(crate) fn blame_library(
    supervisor: &dyn Supervisor,
    rank: usize,
    error: Error,
    call: &Fingerprint,
) -> Error {
    let question = Question::Failed { rank, detail: error.to_string() };
    let cause = supervisor.failure().or_else(|| supervisor.ask(question));
    match (cause, &error) {
        (Some(cause), Error::System { .. }) => supervisor.error(&cause, call.to_string()),
        _ => error,
    }
}

fn warn(supervisor: &dyn Supervisor, peer: usize, call: &Fingerprint, waited: Duration) {
    let members = supervisor.members();
    let (rank, host, detail) = match supervisor.ask(Question::Suspect { peer }) {
        Some(Cause::Stalled { rank, detail }) => (members.world_rank(rank), supervisor.host(rank), detail),
        // Of a rank outside of this group.
        Some(Cause::InJob { cause, host }) => match *cause {
            Cause::Stalled { rank, detail } => (rank, host, detail),
            _ => (cause.rank().unwrap_or_default(), host, "its process is gone".into()),
        },
        _ => (members.world_rank(peer), supervisor.host(peer), "nobody could say what it does".into()),
    };
    let (seconds, place) = (waited.as_secs(), members.place());
    tracing::warn!("{call}{place}: waiting for rank {rank} (host {host}) for {seconds} s: {detail}");
}
