//! The control thread of every rank but 0: it answers rank 0, and passes questions on to it.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, poll};

use crate::verdict::{Cause, Question, Status};

use super::bureau::Bureau;
use super::wire::{Message, Wire};

/// Serves until the group is closed or rank 0 is gone.
pub(super) fn serve(bureau: &Bureau, ear: &UnixStream, center: Option<Wire>) {
    let mut center = center;
    let mut asked: Vec<(u64, Question)> = Vec::new();
    // Collectives in which rank 0 has taken part, once it has left.
    let mut done = 0;
    let closing = loop {
        if let Some(closing) = bureau.closing() {
            break closing;
        }
        let mut polled = vec![PollFd::from_borrowed_fd(ear.as_fd(), PollFlags::IN)];
        polled.extend(
            center.as_ref().map(|wire| PollFd::from_borrowed_fd(wire.stream().as_fd(), wire.events())),
        );
        if poll(&mut polled, None).is_err() {
            continue;
        }
        drain(ear);
        for (id, question) in bureau.take_questions() {
            match &mut center {
                Some(wire) => {
                    wire.write(&Message::Ask { id, question: question.clone() });
                    asked.push((id, question));
                }
                None => decide_alone(bureau, done, id, &question),
            }
        }
        let Some(wire) = &mut center else { continue };
        let (messages, ended) = wire.read();
        let mut gone = ended.is_err();
        if !messages.is_empty() {
            bureau.hear_center();
        }
        for message in messages {
            match message {
                Message::Probe { inquiry } => {
                    wire.write(&Message::Doing { inquiry, activity: bureau.activity() })
                }
                Message::Answer { id, cause } => {
                    asked.retain(|(known, _)| *known != id);
                    bureau.answer(id, cause);
                }
                Message::Verdict(cause) => drop(bureau.fail(cause)),
                Message::Goodbye { progress } => {
                    (center, done) = (None, progress);
                    gone = false;
                    asked.drain(..).for_each(|(id, question)| decide_alone(bureau, done, id, &question));
                    break;
                }
                Message::Ask { .. } | Message::Doing { .. } => gone = true,
            }
        }
        if gone {
            bureau.fail(Cause::Died { rank: 0 });
            center = None;
        }
    };
    if let Some(mut wire) = center.filter(|_| closing.goodbye) {
        wire.write(&Message::Goodbye { progress: bureau.progress() });
    }
}

/// Rank 0 has left, so there is nobody to ask: what this rank sees itself must do.
fn decide_alone(bureau: &Bureau, done: u64, id: u64, question: &Question) {
    // In a collective that rank 0 has not been in, it is rank 0 that all others miss.
    let missed = bureau.activity().current().is_some_and(|call| !call.is_message() && call.sequence > done);
    let cause = match missed && question.is_fatal() {
        true => Some(Cause::Left { rank: 0 }),
        false => bureau.judge_alone(question, Status::Left),
    };
    match cause {
        Some(cause) if question.is_fatal() => bureau.fail_alone(cause),
        cause => bureau.answer(id, cause),
    }
}

/// Empties the bell.
pub(super) fn drain(mut ear: &UnixStream) {
    let mut bytes = [0; 64];
    while matches!(ear.read(&mut bytes), Ok(got) if got > 0) {}
}
