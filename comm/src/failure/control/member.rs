//! Control thread of every rank but 0: answers rank 0's queries, and forwards questions to it.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::base::cause::Cause;
use crate::base::timespec::timespec;
use crate::failure::diagnosis::{Question, Status};

use super::failure_state::FailureState;
use super::wire::{ControlMessage, Wire};

/// Serves until the group is closed. Once rank 0 is gone, it answers questions by itself.
pub(super) fn serve(failure_state: &FailureState, wake_receiver: &UnixStream, center: Option<Wire>) {
    let mut center = center;
    let mut asked: Vec<(u64, Question)> = Vec::new();
    let mut gone_center = RankZeroLeft::default();
    let closing = loop {
        if let Some(closing) = failure_state.closing() {
            break closing;
        }
        if !sleep(failure_state, wake_receiver, center.as_ref()) {
            continue;
        }
        failure_state.log_death();
        drain(wake_receiver);
        for (id, question) in failure_state.take_questions() {
            match &mut center {
                Some(wire) => {
                    wire.write(&ControlMessage::Ask { id, question: question.clone() });
                    asked.push((id, question));
                }
                None => decide_alone(failure_state, &gone_center, id, &question),
            }
        }
        let Some(wire) = &mut center else { continue };
        let (messages, ended) = wire.read();
        let mut gone = ended.is_err();
        if !messages.is_empty() {
            failure_state.note_message_from_rank_0();
        }
        for message in messages {
            match message {
                ControlMessage::Probe { inquiry } => {
                    wire.write(&ControlMessage::Doing { inquiry, activity: failure_state.activity() })
                }
                ControlMessage::Answer { id, cause } => {
                    asked.retain(|(known, _)| *known != id);
                    failure_state.answer(id, cause);
                }
                ControlMessage::Verdict(cause) => drop(failure_state.fail(cause)),
                ControlMessage::Goodbye { progress, because } => {
                    (center, gone) = (None, false);
                    let because = because.map(|cause| failure_state.converted_from_group(cause));
                    gone_center = RankZeroLeft { done: progress, because };
                    asked
                        .drain(..)
                        .for_each(|(id, question)| decide_alone(failure_state, &gone_center, id, &question));
                    break;
                }
                ControlMessage::Ask { .. } | ControlMessage::Doing { .. } => gone = true,
            }
        }
        if gone {
            failure_state.fail(Cause::Died { rank: 0 });
            center = None;
        }
    };
    if let Some(mut wire) = center.filter(|_| closing.goodbye) {
        let (progress, because) = (failure_state.progress(), failure_state.failure_of_other_group());
        wire.write(&ControlMessage::Goodbye { progress, because });
    }
}

/// Sleeps until there may be something to do. Returns false if `poll` failed.
fn sleep(failure_state: &FailureState, wake_receiver: &UnixStream, center: Option<&Wire>) -> bool {
    let mut polled = vec![PollFd::from_borrowed_fd(wake_receiver.as_fd(), PollFlags::IN)];
    polled.extend(center.map(|wire| PollFd::from_borrowed_fd(wire.stream().as_fd(), wire.events())));
    let timeout = failure_state
        .death_log_at()
        .map(|at| timespec(at.saturating_duration_since(Instant::now()) + Duration::from_millis(1)));
    poll(&mut polled, timeout.as_ref()).is_ok()
}

/// What rank 0 reported when it left.
#[derive(Default)]
struct RankZeroLeft {
    /// Number of collectives that it has taken part in.
    done: u64,
    /// Why it left, if another group of the job has failed.
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
        (_, own) => own,
    };
    match cause {
        Some(cause) if question.is_fatal() => failure_state.fail_alone(cause),
        cause => failure_state.answer(id, cause),
    }
}

/// Empties the wake-up socket.
pub(super) fn drain(mut wake_receiver: &UnixStream) {
    let mut bytes = [0; 64];
    while matches!(wake_receiver.read(&mut bytes), Ok(got) if got > 0) {}
}
