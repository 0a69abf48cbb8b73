//! Starting ranks as processes.

/// A worker process that failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("rank {rank} failed: {status}")]
pub struct WorkerFailure {
    /// Its rank.
    pub rank: usize,
    /// How it ended.
    pub status: String,
}
