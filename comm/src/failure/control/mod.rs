//! Control connections, by which ranks detect each other's death, report what they do, and agree on one cause.
//!
//! They form a star around rank 0: every rank but 0 has one connection, rank 0 has P - 1. Each rank has a thread that
//! only serves them. So a rank that computes, or whose data connections are quiet, still answers, and a stopped process
//! does not.
//!
//! The connections are quiet until something happens. Then P messages to and from rank 0 collect what all ranks are
//! doing, however many ranks ask, and P more send the cause to all.
//!
//! A rank may wait in a subgroup for one that waits in another group, and so on. Only the group of all ranks sees the
//! end of such a chain, so it is asked first at a time-out. A group that is closed because another one has failed sends
//! that cause with its goodbye: the ranks left in it report that cause, not the rank before them in the chain.

mod coordinator;
pub(crate) mod failure_state;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod member;
mod wire;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::connection::stream::Stream;
use crate::failure::control::failure_state::FailureState;
use crate::{Error, Result};

/// Starts the thread that serves this rank's control connections.
pub(crate) fn serve(
    failure_state: Arc<FailureState>,
    wake_receiver: UnixStream,
    connections: Vec<Option<Arc<Stream>>>,
) -> Result<JoinHandle<()>> {
    let wires: Vec<Option<wire::Wire>> = connections.into_iter().map(|c| c.map(wire::Wire::new)).collect();
    let thread = std::thread::Builder::new().name("comm-control".into());
    let body = move || match failure_state.rank() {
        0 => coordinator::Coordinator::new(&failure_state, &wake_receiver, wires).serve(),
        _ => member::serve(&failure_state, &wake_receiver, wires.into_iter().flatten().next()),
    };
    thread.spawn(body).map_err(|reason| Error::system("starting a thread", reason))
}
