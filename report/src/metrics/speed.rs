//! Speed of training steps, and times of checkpoints.

use serde::Serialize;

/// Speed of one step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepSpeed {
    /// Floating-point operations per second in the matrix products of the model, of all ranks.
    pub model_flops_per_second: f64,
    /// The same as a fraction of what all ranks together reached in a matrix product alone, measured before the first
    /// step. `None` if the step was faster: what was measured then is not the peak.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Time of the step, in seconds.
    pub seconds: f64,
    /// Time in which this rank was not in collectives, in seconds.
    pub compute_seconds: f64,
    /// Time in which this rank was in collectives, including waiting for other ranks. It overlaps with computation if
    /// gradients are sent during backward.
    pub communication_seconds: f64,
    /// The part of it in which a rank from which this one was to receive had not started the same collective.
    pub waiting_seconds: f64,
    /// Peak memory of this rank so far, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_rss_bytes: Option<u64>,
}

/// Times of the checkpoints of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CheckpointTimes {
    /// Number of checkpoints that were begun.
    pub count: usize,
    /// Total time that training was blocked, in seconds.
    pub stood_still_seconds: f64,
    /// Time that the run waited at its end for the last one to be written, in seconds.
    pub at_end_seconds: f64,
}
