//! The control thread of every rank but 0: it answers rank 0, and passes questions on to it.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, poll};

use crate::verdict::{Activity, Cause, Question, Status, judge};

use super::bureau::Bureau;
use super::wire::{Message, Wire};

/// Serves until the group is closed or rank 0 is gone.
pub(super) fn serve(bureau: &Bureau, ear: &UnixStream, center: Option<Wire>) {
    let mut center = center;
    let closing = loop {
        if let Some(closing) = bureau.closing() {
            break closing;
        }
        let mut polled = vec![PollFd::from_borrowed_fd(ear.as_fd(), PollFlags::IN)];
        polled.extend(
            center.as_ref().map(|wire| PollFd::from_borrowed_fd(wire.stream().as_fd(), PollFlags::IN)),
        );
        if poll(&mut polled, None).is_err() {
            continue;
        }
        drain(ear);
        for (id, question) in bureau.take_questions() {
            match &mut center {
                Some(wire) => wire.write(&Message::Ask { id, question }),
                None => decide_alone(bureau, id, &question),
            }
        }
        let Some(wire) = &mut center else { continue };
        let (messages, ended) = wire.read();
        let mut gone = ended.is_err();
        for message in messages {
            match message {
                Message::Probe { inquiry } => {
                    wire.write(&Message::Doing { inquiry, activity: bureau.activity() })
                }
                Message::Answer { id, cause } => bureau.answer(id, cause),
                Message::Verdict(cause) => drop(bureau.fail(cause)),
                Message::Goodbye => {
                    center = None;
                    gone = false;
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
        wire.write(&Message::Goodbye);
    }
}

/// Without rank 0 there is nobody to ask: what this rank sees itself must do.
fn decide_alone(bureau: &Bureau, id: u64, question: &Question) {
    let unknown = Status::Active(Activity::default());
    let statuses: Vec<Status> =
        (0..bureau.world_size()).map(|rank| if rank == 0 { Status::Left } else { unknown.clone() }).collect();
    match judge(bureau.rank(), question, &statuses) {
        Some(cause) if question.is_fatal() => drop(bureau.fail(cause)),
        cause => bureau.answer(id, cause),
    }
}

/// Empties the bell.
pub(super) fn drain(mut ear: &UnixStream) {
    let mut bytes = [0; 64];
    while matches!(ear.read(&mut bytes), Ok(got) if got > 0) {}
}
