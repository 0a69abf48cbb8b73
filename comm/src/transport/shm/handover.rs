//! Giving memory to another process of this host, and taking it: by file descriptors over a unix socket.
//!
//! The socket's name and the token that a giver shows have gone over the connection between the two ranks before, which
//! has proved on both sides that they belong to the job.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::io::{Errno, FdFlags, Result, fcntl_setfd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, SendAncillaryBuffer, SendAncillaryMessage, recvmsg, sendmsg,
};

use super::{Name, Token};
use crate::platform::local::{Listener, NOT_INHERITED, connect, is_of_this_user};
use crate::platform::socket::NO_SIGNAL;
use crate::rendezvous::obstacle::Obstacle;

/// Connections that are accepted and have not said anything yet; further ones are closed.
const MAX_PENDING: usize = 256;
const PAUSE: Duration = Duration::from_millis(1);

/// What one process gives another: the memory of a ring, and its bell.
type Gift = [OwnedFd; 2];

/// Where this rank takes what others give.
pub(super) struct Handover {
    listener: Listener,
    /// Givers that have not shown anything yet.
    pending: Vec<OwnedFd>,
    arrived: Vec<(Token, Gift)>,
    /// Connections over which something was given, open until it was taken: one that has ended before it was accepted is not
    /// everywhere what it was.
    given: Vec<OwnedFd>,
}

impl Handover {
    pub(super) fn open(name: &Name) -> Result<Self> {
        let listener = Listener::open(name)?;
        Ok(Self { listener, pending: Vec::new(), arrived: Vec::new(), given: Vec::new() })
    }

    /// Gives to the process that listens under `name`. Meanwhile takes what comes, so that two that give to each other do
    /// not wait for each other.
    pub(super) fn give(
        &mut self,
        name: &Name,
        token: &Token,
        gift: [BorrowedFd<'_>; 2],
        deadline: Instant,
    ) -> std::result::Result<(), Obstacle> {
        loop {
            match try_give(name, token, &gift) {
                Ok(Some(connection)) => {
                    self.given.push(connection);
                    return Ok(());
                }
                Ok(None) => return Err(Obstacle::OtherUser),
                // Its queue is full, or too many descriptors are on their way.
                Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::INTR) if Instant::now() < deadline => {}
                Err(_) => return Err(Obstacle::Unreachable),
            }
            self.accept_all();
            std::thread::sleep(PAUSE);
        }
    }

    /// Takes what the holder of `token` says that it has given.
    pub(super) fn take(&mut self, token: &Token, deadline: Instant) -> std::result::Result<Gift, Obstacle> {
        loop {
            self.accept_all();
            if let Some(index) = self.arrived.iter().position(|(shown, _)| shown == token) {
                return Ok(self.arrived.swap_remove(index).1);
            }
            if Instant::now() >= deadline {
                return Err(Obstacle::NotHandedOver);
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn accept_all(&mut self) {
        while let Ok(giver) = self.listener.accept() {
            if is_of_this_user(giver.as_fd()) && self.pending.len() < MAX_PENDING {
                self.pending.push(giver);
            }
        }
        let arrived = &mut self.arrived;
        self.pending.retain(|giver| match receive(giver.as_fd()) {
            Ok(gift) => {
                arrived.extend(gift);
                false
            }
            Err(error) => error == Errno::AGAIN || error == Errno::INTR,
        });
    }
}

/// The connection over which it goes; None where another user listens there.
fn try_give(name: &Name, token: &Token, gift: &[BorrowedFd<'_>]) -> Result<Option<OwnedFd>> {
    let taker = connect(name)?;
    if !is_of_this_user(taker.as_fd()) {
        return Ok(None);
    }
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    rights.push(SendAncillaryMessage::ScmRights(gift));
    sendmsg(&taker, &[IoSlice::new(token)], &mut rights, NO_SIGNAL)?;
    Ok(Some(taker))
}

/// None where it is nothing that a rank gives.
fn receive(giver: BorrowedFd<'_>) -> Result<Option<(Token, Gift)>> {
    let mut token = Token::default();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(giver, &mut [IoSliceMut::new(&mut token)], &mut rights, NOT_INHERITED)?;
    let mut fds = Vec::new();
    for part in rights.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = part {
            fds.extend(some);
        }
    }
    // Where no flag has done it.
    fds.iter().try_for_each(|fd| fcntl_setfd(fd, FdFlags::CLOEXEC))?;
    let gift = <[OwnedFd; 2]>::try_from(fds).ok().filter(|_| message.bytes == token.len());
    Ok(gift.map(|gift| (token, gift)))
}
