//! How fast a step was and what it held, and what checkpoints took.

use serde::Serialize;

/// Of one step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepSpeed {
    /// Operations a second of the model's products, of all ranks.
    pub model_flops_per_second: f64,
    /// The same as a part of what all ranks together have reached in a product alone, before the first step.
    pub mfu: f64,
    /// Time of the step, in seconds.
    pub seconds: f64,
    /// Of these, those that this rank was not in collectives.
    pub compute_seconds: f64,
    /// Time that this rank was in collectives, waiting for others included; the two overlap where gradients leave during backward.
    pub communication_seconds: f64,
    /// Of these, those in which a rank that this one was to receive from had not begun the same collective.
    pub waiting_seconds: f64,
    /// The most memory that this rank has held so far, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_rss_bytes: Option<u64>,
}

/// Of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CheckpointTimes {
    /// Checkpoints that were begun.
    pub count: usize,
    /// For which training stood still, all together.
    pub stood_still_seconds: f64,
    /// For which the run waited at its end for the last one to be written.
    pub at_end_seconds: f64,
}
