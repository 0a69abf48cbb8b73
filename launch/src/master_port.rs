//! Who opens the port at which the ranks meet.

/// Who opens the port at which the ranks meet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MasterPort {
    /// The launcher listens, and rank 0 inherits the socket as its standard input: nobody else can take the port. For
    /// programs that join with [`Tcp::connect`](comm::Tcp::connect).
    #[default]
    Inherited,
    /// Rank 0 listens; until then the launcher only keeps the system from giving the port to somebody else. For other
    /// programs, PyTorch's among them.
    Reserved,
}
