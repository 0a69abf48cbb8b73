//! Sharded checkpoints that can be read in any layout, whichever layout wrote them.
//!
//! Each rank writes its pieces to its own file; an index of them (`shard_index.rs`; it is the `extra` of the manifest that
//! `training::Checkpoints` writes) records which elements of which tensor each piece holds. A
//! rank of another layout, or a single process, reads the elements that it needs from the files that hold them.

mod load;
mod read;
mod save;
mod shard_index;
mod snapshot;
mod source;
mod together;
mod transfer;

pub(crate) use load::load;
pub use load::{MODEL, OPTIMIZER, extra, read_whole};
pub use read::CheckpointReader;
pub(crate) use shard_index::{NamedPart, Part};
pub use snapshot::{DeferredSnapshot, Snapshot, SpareTensors, reserve};
pub use transfer::{Receiver, transfer};

/// Prefix of the names of files that hold a rank's pieces.
pub(crate) const RANK_FILE: &str = "rank-";
