//! Sharded checkpoints that can be read in any layout, whichever layout wrote them.
//!
//! Each rank writes its pieces to its own file; the manifest records which elements of which tensor each piece holds. A
//! rank of another layout, or a single process, reads the elements that it needs from the files that hold them.

mod load;
mod manifest;
mod read;
mod save;
mod snapshot;
mod source;
mod together;
mod transfer;

pub(crate) use load::load;
pub use load::{MODEL, OPTIMIZER, extra, read_whole};
pub(crate) use manifest::{NamedPart, Part};
pub use read::CheckpointReader;
pub use snapshot::{DeferredSnapshot, Snapshot, SpareTensors, reserve};
pub use transfer::{Receiver, transfer};

/// Prefix of the names of files that hold a rank's pieces.
pub(crate) const RANK_FILE: &str = "rank-";
