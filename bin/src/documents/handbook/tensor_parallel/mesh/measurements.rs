//! Measurements of a rank: memory by kind, bytes sent, time.

use cli::error::Result;
use comm::{Communicator, all_gather_object};
use report::metrics::MemoryUse;
use serde::{Deserialize, Serialize};

/// Figures of the comparison table, each the largest over all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurements {
    /// Bytes of model state held, and bytes sent.
    pub held: MemoryUse,
    /// Peak memory of the process, in bytes, where known.
    pub peak_rss: Option<u64>,
    /// Seconds per step.
    pub step_s: f64,
}

impl Measurements {
    /// Returns the largest of each figure over all ranks, on every rank.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn largest(self, comm: &dyn Communicator) -> Result<Self> {
        let all = all_gather_object(comm, &self)?;
        Ok(all.into_iter().fold(Measurements::default(), |a, b| Measurements {
            held: a.held.largest(b.held),
            peak_rss: a.peak_rss.max(b.peak_rss),
            step_s: a.step_s.max(b.step_s),
        }))
    }
}
