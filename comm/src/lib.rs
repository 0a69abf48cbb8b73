//! Ranks that talk: the [`Communicator`] trait, its backends, how ranks find each other and how they are started.
#![forbid(unsafe_code)]

mod communicator;
mod engine;
mod error;
pub mod launch;
mod operation;
mod work;

pub use communicator::{Communicator, Stats};
pub use error::{Error, Result};
pub use operation::{Operation, ReduceOp};
pub use work::Work;
