//! Control connections, by which ranks detect each other's death, report what they do, and agree on one cause.
//!
//! They form a star around rank 0: every rank but 0 has one connection, rank 0 has P - 1. Each rank has one thread that
//! serves those of all its groups. So a rank that computes, or whose data connections are quiet, still answers, and a stopped process
//! does not.
//!
//! The connections are quiet until something happens. Then P messages to and from rank 0 collect what all ranks are
//! doing, however many ranks ask, and P more send the cause to all.
//!
//! A rank may wait in a subgroup for one that waits in another group, and so on. Only the group of all ranks sees the
//! end of such a chain, so it is asked first at a time-out. A group that is closed because another one has failed sends
//! that cause with its goodbye: the ranks left in it report that cause, not the rank before them in the chain.

mod connections;
mod coordinator;
pub(crate) mod failure_state;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod member;
#[cfg(test)]
mod simulation;
mod wire;

use std::sync::Arc;

use crate::Result;
use crate::connection::poll_thread::{Polled, Served};
use crate::connection::stream::Stream;
use crate::failure::control::failure_state::FailureState;

/// Lets the job's thread serve this rank's control connections, until the group is closed.
pub(crate) fn serve(
    failure_state: Arc<FailureState>,
    connections: Vec<Option<Arc<Stream>>>,
) -> Result<Served> {
    let wires: Vec<Option<wire::Wire>> = connections.into_iter().map(|c| c.map(wire::Wire::new)).collect();
    let job = failure_state.job().clone();
    let polled: Box<dyn Polled> = match failure_state.rank() {
        0 => Box::new(coordinator::Coordinator::of_wires(failure_state, wires)?),
        _ => Box::new(member::Member::new(failure_state, wires.into_iter().flatten().next())),
    };
    job.thread().serve(polled)
}
