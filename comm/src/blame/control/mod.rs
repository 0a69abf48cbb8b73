//! The control connections, by which ranks learn of each other's death, tell what they do, and agree on one cause.
//!
//! They form a star around rank 0: each rank has a thread that does nothing but listen to them. So a rank that computes, or
//! whose data connections are quiet, answers all the same, and one that is stopped does not.
//!
//! Every rank but 0 has one of them, rank 0 has P - 1. They are quiet until something happens; then P messages to and from
//! rank 0 tell it what all are doing, however many ranks ask, and P more tell all what it has found.
//!
//! A rank may wait in a group of some of the ranks for one that waits in another group, and so on: only the group of all ranks
//! sees the end of such a chain, so that it is asked first when a time-out is over. A group that is closed because another one
//! has failed says so, and why: those who are left in it name that cause, not the rank that was before them in the chain.

pub(crate) mod bureau;
mod center;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod leaf;
mod wire;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::blame::control::bureau::Bureau;
use crate::rendezvous::connection::stream::Stream;
use crate::{Error, Result};

/// Starts the thread that serves this rank's control connections.
pub(crate) fn serve(
    bureau: Arc<Bureau>,
    ear: UnixStream,
    connections: Vec<Option<Arc<Stream>>>,
) -> Result<JoinHandle<()>> {
    let wires: Vec<Option<wire::Wire>> = connections.into_iter().map(|c| c.map(wire::Wire::new)).collect();
    let thread = std::thread::Builder::new().name("comm-control".into());
    let body = move || match bureau.rank() {
        0 => center::Center::new(&bureau, &ear, wires).serve(),
        _ => leaf::serve(&bureau, &ear, wires.into_iter().flatten().next()),
    };
    thread.spawn(body).map_err(|reason| Error::system("starting a thread", reason))
}
