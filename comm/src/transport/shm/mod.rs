//! Shared memory between ranks of one host: each ordered pair of ranks has a ring through which bytes flow, and each rank a
//! bell that wakes it.
//!
//! Two ranks use it when they run on the same kernel (its boot id, not its name), one can hand the other a piece of memory
//! through a unix socket, and the other finds the token in it that it was told of; all others, ranks in containers with
//! networks of their own for example, talk over TCP. All that is known when the ranks meet ([`crate::rendezvous::site`]) but for surprises; the
//! memory itself is made with the connection between the two, when that is first needed ([`share`]). The connection stays
//! open beside the memory: its end tells that the other is gone.
//!
//! What differs between systems is in `platform`: how memory is made that has no name in the file system, so that nothing is left of it
//! when the ranks are gone, whatever ended them; the socket; and the bell.

mod agreement;
mod handover;
mod host;
mod links;
mod region;
mod ring;

pub(crate) use agreement::share;
pub(crate) use host::{Host, Pair};
pub(crate) use links::join;

use crate::platform::bell;

/// The name of a rank's socket.
type Name = [u8; 16];
/// What tells the memory of one ring from all others, and nobody can guess.
type Token = [u8; 32];

#[cfg(test)]
mod tests;
