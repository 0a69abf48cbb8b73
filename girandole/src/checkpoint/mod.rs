//! Sharded checkpoints that can be read in any layout, whichever layout wrote them.
//!
//! Each rank writes its parts to its own file; the manifest records which elements of which tensor each part holds. A
//! rank of another layout, or a single process, reads the elements that it needs from the files that hold them.

mod keep_alive;
mod manifest;
mod read;
mod save;
mod snapshot;
mod source;
mod transfer;

pub use crate::region::Region;
pub(crate) use keep_alive::with_keep_alive;
pub use read::CheckpointReader;
pub use snapshot::{DeferredSnapshot, Snapshot};
pub(crate) use snapshot::{SpareTensors, reserve};
pub(crate) use transfer::{Receiver, transfer};
