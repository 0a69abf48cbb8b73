//! Fuzz target for control connections: arbitrary bytes in pieces of any length, and rank 0's handling of the messages.

use std::time::Duration;

use super::wire::{ControlMessage, LineBuffer};
use crate::base::cause::Cause;
use crate::base::members::Members;
use crate::failure::diagnosis::{Status, choose_cause, may_change};

const RANKS: usize = 4;

/// Entry point. The first byte is the length of the pieces.
pub(crate) fn hear(data: &[u8]) {
    let Some((piece, rest)) = data.split_first() else { return };
    let whole = read(rest.chunks(rest.len().max(1)));
    let pieces = read(rest.chunks(usize::from(*piece).max(1)));
    assert_eq!(whole, pieces, "split otherwise, other messages");
    let statuses: Vec<Status> = (0..RANKS).map(|rank| status(&whole.0, rank)).collect();
    for message in &whole.0 {
        match message {
            ControlMessage::Ask { question, .. } if question.peer() < RANKS => {
                for asker in 0..RANKS {
                    choose_cause(asker, question, &statuses).iter().for_each(|cause| tell(cause, &statuses));
                }
            }
            ControlMessage::Verdict(cause) => tell(cause, &statuses),
            _ => {}
        }
    }
}

/// Returns the messages, and whether all bytes could be parsed.
fn read<'a>(mut pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<ControlMessage>, bool) {
    let (mut inbox, mut messages) = (LineBuffer::default(), Vec::new());
    let good = pieces.all(|piece| inbox.take(piece, &mut messages).is_ok());
    (messages, good)
}

/// Status of one rank, taken from the messages.
fn status(messages: &[ControlMessage], rank: usize) -> Status {
    let mut activities = messages.iter().filter_map(|message| match message {
        ControlMessage::Doing { activity, .. } => Some(activity),
        _ => None,
    });
    match activities.nth(rank) {
        Some(activity) => Status::Active(activity.clone()),
        None if rank == 0 => Status::Left,
        None => Status::Silent,
    }
}

fn tell(cause: &Cause, statuses: &[Status]) {
    may_change(cause, statuses);
    let members = Members::world(RANKS);
    for own in 0..RANKS {
        let error = cause.to_error(own, "barrier".into(), Duration::ZERO, &members, |_| String::new());
        assert!(!error.to_string().is_empty());
    }
}
