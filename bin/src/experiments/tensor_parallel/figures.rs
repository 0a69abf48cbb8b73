//! What a rank measures: memory by kind, bytes sent, time.

use comm::{Communicator, all_gather_object};
use report::metrics::Held;
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// The figures of row 21, of the rank that has the most of each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// What it holds of the model, and sends.
    pub held: Held,
    /// The most memory that its process has held, in bytes, where known.
    pub peak_rss: Option<u64>,
    /// Seconds of a step.
    pub step_s: f64,
}

impl Figures {
    /// The largest of each over all ranks, on every rank.
    pub(super) fn largest(self, comm: &dyn Communicator) -> Result<Self> {
        let all = all_gather_object(comm, &self)?;
        Ok(all.into_iter().fold(Figures::default(), |a, b| Figures {
            held: a.held.largest(b.held),
            peak_rss: a.peak_rss.max(b.peak_rss),
            step_s: a.step_s.max(b.step_s),
        }))
    }
}
