//! Starting ranks as processes.

/// The exit code of a process that ends only because another rank failed.
pub const EXIT_PEER_FAILED: i32 = 75;

/// A worker process that failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("rank {rank} failed: {status}")]
pub struct WorkerFailure {
    /// Its rank.
    pub rank: usize,
    /// How it ended.
    pub status: String,
}
