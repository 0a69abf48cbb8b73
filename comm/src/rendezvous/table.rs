//! The table of ranks, on its way down a tree of ranks.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::message::with_margin;
use crate::base::lock;
use crate::base::tree;
use crate::connection::acceptor::ConnectionHandler;
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{Admission, ClientClaim, Credentials, HandshakeStatus, Purpose, Verdict};
use crate::connection::wire::HandshakeStream;
use crate::transport::tcp::connections::DataConnections;

/// To how many others a rank passes the table on at most.
pub(super) const PASSES: usize = 8;

/// Where other ranks come to a rank that has the table: to fetch it, while the ranks meet, and with data connections.
#[derive(Debug)]
pub(super) struct Entrance {
    data_connections: Arc<DataConnections>,
    own: ClientClaim,
    /// The message with the table; `None` where no rank fetches it from this one any more.
    table: Mutex<Option<Arc<Vec<u8>>>>,
    /// When the time for the meeting is over.
    deadline: Instant,
}

impl Entrance {
    /// `own`: this rank's claim. `table`: the message with the table, as it was received. `deadline`: when the time for the meeting
    /// is over.
    pub(super) fn new(
        own: ClientClaim,
        data_connections: Arc<DataConnections>,
        table: Vec<u8>,
        deadline: Instant,
    ) -> Self {
        let (rank, world_size) = (own.rank as usize, own.world_size as usize);
        let passes = rank > 0 && !tree::children(rank, world_size, PASSES).is_empty();
        let table = Mutex::new(passes.then(|| Arc::new(table)));
        Self { data_connections, own, table, deadline }
    }

    pub(super) fn forget_table(&self) {
        *lock(&self.table) = None;
    }

    /// Sends the table to a rank that fetches it from this one.
    fn pass_on(&self, mut wire: HandshakeStream, admission: &Admission) -> ConnectResult<()> {
        let ClientClaim { rank: caller, world_size, .. } = admission.caller;
        let ClientClaim { rank, world_size: own_size, .. } = self.own;
        let is_awaited = world_size == own_size
            && (1..world_size).contains(&caller)
            && tree::parent(caller as usize, PASSES) == rank as usize;
        let table = lock(&self.table).clone().filter(|_| is_awaited);
        let status = if table.is_some() { HandshakeStatus::Admitted } else { HandshakeStatus::NotAwaited };
        wire.write(&admission.answer(Verdict { status, rank, world_size: own_size }), self.deadline)?;
        wire.write(&table.ok_or(ConnectError::NotAwaited)?, self.deadline)?;
        wire.close_gracefully();
        Ok(())
    }
}

impl ConnectionHandler for Entrance {
    fn credentials(&self) -> &Credentials {
        self.data_connections.credentials()
    }

    fn serve(&self, wire: HandshakeStream, admission: Admission, until: Instant) -> ConnectResult<()> {
        match admission.caller.purpose {
            Purpose::Table => self.pass_on(wire, &admission),
            Purpose::Control | Purpose::Data | Purpose::Regroup => {
                self.data_connections.serve(wire, admission, until)
            }
        }
    }
}

/// What a rank waits for after it has registered, from others than rank 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The rank from which it gets the table.
    Table,
    /// The rank before it.
    Neighbour,
}

/// Returns how long this rank waits in this step, where rank 0 waits for `left`: less than rank 0, which must hear of it in
/// time, and the longer, the more ranks may be waiting before it. So a rank that stalls is named by those that wait for it, not by
/// those that wait for them.
pub(super) fn patience(left: Duration, (rank, world_size): (usize, usize), step: Step) -> Duration {
    let levels = tree::depth(world_size - 1, PASSES);
    let before = match step {
        Step::Table => tree::depth(rank, PASSES).saturating_sub(2),
        Step::Neighbour => levels.saturating_sub(1),
    };
    let (least, parts) = (with_margin(left), levels as u32 + 1);
    least + (left - least) / parts * before as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_a_rank_that_stalls_gives_up_before_those_that_wait_for_it() {
        for left in [Duration::from_millis(1), Duration::from_secs(1), Duration::from_secs(300)] {
            for world_size in [2, 9, 10, 73, 74, 1000, 100_000] {
                let patience = |rank, step| patience(left, (rank, world_size), step);
                for rank in (1..world_size).filter(|rank| tree::parent(*rank, PASSES) != 0) {
                    let from = tree::parent(rank, PASSES);
                    let own = patience(rank, Step::Table);
                    assert!(tree::parent(from, PASSES) == 0 || patience(from, Step::Table) < own);
                    assert!(own < patience(rank, Step::Neighbour));
                }
                assert!(patience(world_size - 1, Step::Neighbour) < left);
            }
            assert_eq!(
                patience(left, (8, 9), Step::Neighbour),
                with_margin(left),
                "nobody passes the table on"
            );
        }
    }
}
