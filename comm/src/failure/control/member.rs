//! Control connection of every rank but 0: answers rank 0's queries, and forwards questions to it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::PollFd;

use crate::base::cause::Cause;
use crate::connection::poll_thread::Polled;
use crate::failure::diagnosis::{Question, Status};

use super::connections::ControlLink;
use super::failure_state::FailureState;
use super::wire::{ControlMessage, Wire};

/// The control connection of a rank, without sockets where it is no [`Wire`]. Once rank 0 is gone, the rank answers its questions
/// by itself.
pub(super) struct Member<L = Wire> {
    failure_state: Arc<FailureState>,
    /// To rank 0.
    center: Option<L>,
    /// The questions that rank 0 has not answered.
    asked: Vec<(u64, Question)>,
    gone_center: RankZeroLeft,
}

impl Polled for Member<Wire> {
    fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        let wires = self.center.iter();
        fds.extend(wires.map(|wire| PollFd::from_borrowed_fd(wire.stream().as_fd(), wire.events())));
    }

    fn due(&self) -> Option<Instant> {
        self.failure_state.death_log_at()
    }

    /// Serves until the group is closed.
    fn act(&mut self, ready: &[bool]) -> bool {
        if let Some(closing) = self.failure_state.closing() {
            if let Some(wire) = self.center.as_mut().filter(|_| closing.goodbye) {
                let progress = self.failure_state.progress();
                let because = self.failure_state.reason_to_leave();
                wire.write(&ControlMessage::Goodbye { progress, because });
            }
            return false;
        }
        self.failure_state.log_death();
        for (id, question) in self.failure_state.take_questions() {
            match &mut self.center {
                Some(wire) => {
                    wire.write(&ControlMessage::Ask { id, question: question.clone() });
                    self.asked.push((id, question));
                }
                None => decide_alone(&self.failure_state, &self.gone_center, id, &question),
            }
        }
        if ready.contains(&true) {
            self.listen();
        }
        true
    }
}

impl Member<Wire> {
    /// Reads what rank 0 has sent.
    fn listen(&mut self) {
        if let Some(wire) = &mut self.center {
            let (messages, ended) = wire.read();
            self.receive(messages, ended.is_err());
        }
    }
}

impl<L: ControlLink> Member<L> {
    pub(super) fn new(failure_state: Arc<FailureState>, center: Option<L>) -> Self {
        Self { failure_state, center, asked: Vec::new(), gone_center: RankZeroLeft::default() }
    }

    /// Receives what rank 0 has sent; `gone`: the connection has ended after that.
    pub(super) fn receive(&mut self, messages: Vec<ControlMessage>, mut gone: bool) {
        let Some(wire) = &mut self.center else { return };
        let failure_state = &self.failure_state;
        if !messages.is_empty() {
            failure_state.note_message_from_rank_0();
        }
        for message in messages {
            match message {
                ControlMessage::Probe { inquiry } => {
                    wire.write(&ControlMessage::Doing { inquiry, activity: failure_state.activity() })
                }
                ControlMessage::Answer { id, cause } => {
                    self.asked.retain(|(known, _)| *known != id);
                    failure_state.answer(id, cause);
                }
                ControlMessage::Verdict(cause) => drop(failure_state.fail(cause)),
                ControlMessage::Goodbye { progress, because } => {
                    let because = because.map(|cause| failure_state.converted_from_group(cause));
                    self.gone_center = RankZeroLeft { done: progress, because };
                    self.center = None;
                    for (id, question) in self.asked.drain(..) {
                        decide_alone(failure_state, &self.gone_center, id, &question);
                    }
                    return;
                }
                ControlMessage::Ask { .. } | ControlMessage::Doing { .. } => gone = true,
            }
        }
        if gone {
            failure_state.fail(Cause::Died { rank: 0 });
            self.center = None;
        }
    }
}

/// What rank 0 reported when it left.
#[derive(Default)]
struct RankZeroLeft {
    /// Number of collectives that it has taken part in.
    done: u64,
    /// Why it left, if its program has said so, or another group of the job has failed.
    because: Option<Cause>,
}

/// Answers a question with this rank's own knowledge, because rank 0 has left and nobody can be asked.
fn decide_alone(failure_state: &FailureState, gone: &RankZeroLeft, id: u64, question: &Question) {
    // In a collective in which rank 0 did not take part, all others wait for rank 0.
    let activity = failure_state.activity();
    let missed = activity.current().is_some_and(|call| !call.is_message() && call.sequence > gone.done);
    let own = match missed && question.is_fatal() && !matches!(question, Question::Known { .. }) {
        true => Some(Cause::Left { rank: 0 }),
        false => failure_state.judge_alone(question, Status::Left),
    };
    // For these questions, the reason why rank 0 has left also explains why others are waited for in vain.
    let waits = matches!(
        question,
        Question::Stuck { last: true, .. }
            | Question::Elsewhere { lost: false, .. }
            | Question::Suspect { .. }
    );
    let cause = match (&gone.because, own) {
        (Some(because), _) if waits => Some(because.clone()),
        (Some(because), Some(Cause::Left { rank: 0 })) => Some(because.clone()),
        (because, own) => own.map(|own| own.with_reason(because)),
    };
    match cause {
        Some(cause) if question.is_fatal() => failure_state.fail_alone(cause),
        cause => failure_state.answer(id, cause),
    }
}
