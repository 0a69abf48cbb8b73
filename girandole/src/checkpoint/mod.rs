//! Checkpoints that any layout reads, whichever layout wrote them.
//!
//! Each rank writes the parts that it has, in a file of its own; the manifest says which elements of which tensor each part is. A rank of
//! another layout, or a single process, reads the elements that it needs from whatever files have them.

mod read;
mod region;
mod save;
mod snapshot;
mod waiting;

pub use read::Saved;
pub use region::Region;
pub use save::Snapshot;
pub(crate) use save::agreed;
pub use snapshot::SnapshotLater;
pub(crate) use waiting::while_others_wait;
