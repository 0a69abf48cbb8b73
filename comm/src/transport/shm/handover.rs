//! Passing shared memory to another process of this host, and receiving it: file descriptors over a unix socket.
//!
//! The socket's name and the token that the sender shows are exchanged beforehand over the connection between the two
//! ranks, on which both sides have proved that they belong to the job.

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
use crate::connection::obstacle::Obstacle;
use crate::platform::local::{Listener, NOT_INHERITED, connect, is_of_this_user};
use crate::platform::socket::NO_SIGNAL;

/// Limit of accepted connections that have not sent anything yet; further ones are closed.
const MAX_PENDING: usize = 256;
const PAUSE: Duration = Duration::from_millis(1);

/// What one process passes to another: the memory of a ring, and its own wake-up.
type SharedDescriptors = [OwnedFd; 2];

/// Receiving end: where other ranks deliver their descriptors to this one.
pub(super) struct DescriptorExchange {
    listener: Listener,
    /// Connections that have not delivered anything yet.
    pending: Vec<OwnedFd>,
    arrived: Vec<(Token, SharedDescriptors)>,
    /// Connections over which this rank has delivered something. They stay open until the exchange is over: on some
    /// systems a connection that is closed before it is accepted behaves differently.
    given: Vec<OwnedFd>,
}

impl DescriptorExchange {
    pub(super) fn open(name: &Name) -> Result<Self> {
        let listener = Listener::open(name)?;
        Ok(Self { listener, pending: Vec::new(), arrived: Vec::new(), given: Vec::new() })
    }

    /// Delivers `gift` to the process that listens under `name`. Accepts deliveries meanwhile, so that two processes that
    /// deliver to each other do not wait for each other.
    pub(super) fn send(
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
                // The other process's queue is full, or too many descriptors are in flight.
                Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::INTR) if Instant::now() < deadline => {}
                Err(_) => return Err(Obstacle::Unreachable),
            }
            self.accept_all();
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits for the delivery that shows `token`.
    pub(super) fn receive(
        &mut self,
        token: &Token,
        deadline: Instant,
    ) -> std::result::Result<SharedDescriptors, Obstacle> {
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

/// Returns the connection over which the descriptors were sent; None where another user's process listens there.
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

/// Returns the token and the descriptors; None where the message is not a rank's delivery.
fn receive(giver: BorrowedFd<'_>) -> Result<Option<(Token, SharedDescriptors)>> {
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
    // Close-on-exec, where the receive flag did not set it.
    fds.iter().try_for_each(|fd| fcntl_setfd(fd, FdFlags::CLOEXEC))?;
    let gift = <[OwnedFd; 2]>::try_from(fds).ok().filter(|_| message.bytes == token.len());
    Ok(gift.map(|gift| (token, gift)))
}
