//! Which process opens the rendezvous port of the ranks.

/// Which process opens the rendezvous port of the ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MasterPort {
    /// The launcher listens, and rank 0 inherits the socket as its standard input: no other process can take the port.
    /// For programs that join with [`Tcp::connect`](comm::Tcp::connect).
    #[default]
    Inherited,
    /// Rank 0 listens; until then the launcher keeps the system from giving the port to another process. For other
    /// programs, including PyTorch programs.
    Reserved,
}
