//! Shared memory between ranks of one host: each ordered pair of ranks has a ring through which bytes flow, and each rank a
//! bell that wakes it.
//!
//! Two ranks use it when they run on the same kernel (its boot id, not its name), one can hand the other a piece of memory
//! through a unix socket, and the other finds the token in it that it was told of; all others, ranks in containers with
//! networks of their own for example, talk over TCP. All that is known when the ranks meet ([`crate::rendezvous::site`]) but for surprises; the
//! memory itself is made with the connection between the two, when that is first needed ([`share`]). The connection stays
//! open beside the memory: its end tells that the other is gone.
//!
//! Nothing here has a name in the file system, so nothing is left of it when the ranks are gone, whatever ended them.

mod agreement;
#[cfg(all(target_os = "linux", not(portable)))]
mod bell;
#[cfg(all(target_os = "linux", not(portable)))]
mod handover;
#[cfg_attr(not(all(target_os = "linux", not(portable))), path = "nowhere/host.rs")]
mod host;
#[cfg_attr(not(all(target_os = "linux", not(portable))), path = "nowhere/links.rs")]
mod links;
#[cfg(all(target_os = "linux", not(portable)))]
mod region;
#[cfg(all(target_os = "linux", not(portable)))]
mod ring;
#[cfg(all(target_os = "linux", not(portable)))]
mod user;

pub(crate) use agreement::share;
pub(crate) use host::{Host, Pair};
pub(crate) use links::join;

/// The name of a rank's socket.
type Name = [u8; 16];
/// What tells the memory of one ring from all others, and nobody can guess.
type Token = [u8; 32];

#[cfg(all(target_os = "linux", not(portable)))]
#[cfg(test)]
mod tests;
