//! What rank 0 sends and expects once all ranks have registered, until all are connected. Without sockets.

use std::borrow::Cow;

use super::message::{Table, TableSource, ToMember};
use super::table::PASSES;
use crate::base::tree;
use crate::connection::connect_error::ConnectResult;
use crate::connection::wire::HandshakeStream;

/// Which ranks have reported that they are connected.
#[derive(Debug)]
pub(super) struct Assembly {
    /// From rank 1 on.
    connected: Vec<bool>,
    missing: usize,
}

impl Assembly {
    pub(super) fn new(world_size: usize) -> Self {
        Self { connected: vec![false; world_size - 1], missing: world_size - 1 }
    }

    /// Records that a rank other than 0 is connected. Returns false if it was before.
    pub(super) fn connect(&mut self, rank: usize) -> bool {
        let is_new = !std::mem::replace(&mut self.connected[rank - 1], true);
        self.missing -= usize::from(is_new);
        is_new
    }

    pub(super) fn is_connected(&self, rank: usize) -> bool {
        rank == 0 || self.connected[rank - 1]
    }

    /// Returns of how many ranks nothing was heard.
    pub(super) fn missing(&self) -> usize {
        self.missing
    }

    pub(super) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Returns the ranks of which nothing was heard, without those that wait for one of them: a rank waits for the one before
    /// it, and for the one that passes the table on.
    pub(super) fn late(&self) -> Vec<usize> {
        let is_late = |rank: &usize| !self.is_connected(*rank);
        let waits = |rank: &usize| is_late(&(rank - 1)) || is_late(&tree::parent(*rank, PASSES));
        (1..=self.connected.len()).filter(|rank| is_late(rank) && !waits(rank)).collect()
    }
}

/// The table of ranks, as messages.
pub(super) struct TableMessages {
    table: Table,
    whole: Vec<u8>,
}

impl TableMessages {
    /// # Errors
    /// A table that is too long for a message.
    pub(super) fn new(table: Table) -> ConnectResult<Self> {
        let whole = HandshakeStream::frame(&ToMember::Table(table.clone()))?;
        Ok(Self { table, whole })
    }

    /// Returns what rank 0 sends to another rank: the table, or which rank has it.
    ///
    /// # Errors
    /// A name that is too long for a message.
    pub(super) fn to(&self, rank: usize) -> ConnectResult<Cow<'_, [u8]>> {
        let source = match tree::parent(rank, PASSES) {
            0 => return Ok(Cow::Borrowed(&self.whole)),
            source => source,
        };
        let Table { session, timeout_ms, ranks } = &self.table;
        let (host, address) = (ranks[source].host.clone(), ranks[source].address);
        let source = TableSource { session: *session, timeout_ms: *timeout_ms, rank: source, host, address };
        HandshakeStream::frame(&ToMember::TableAt(source)).map(Cow::Owned)
    }
}
