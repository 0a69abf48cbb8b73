//! Error type of this crate.

/// Error of a data set or a collate function.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Errors of samplers, random numbers and the data loader.
///
/// Batches and samples count from 0. The message includes the cause, so that one line is complete.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// A distributed sampler with 0 ranks.
    #[error("num_replicas is 0: a data set is dealt out to at least 1 rank; give the world size")]
    NoReplicas,

    /// A rank that is out of range.
    #[error(
        "rank {rank} is out of range: {num_replicas} ranks are numbered 0 to {}; give each process its own rank",
        num_replicas - 1
    )]
    RankOutOfRange {
        /// The given rank.
        rank: usize,
        /// Number of ranks.
        num_replicas: usize,
    },

    /// The padded epoch has more positions than a `usize` can count.
    #[error(
        "{dataset_len} samples padded for {num_replicas} ranks are more than this machine can count; \
         use Tail::Drop or Tail::Uneven"
    )]
    EpochTooLong {
        /// Samples in the data set.
        dataset_len: usize,
        /// Number of ranks.
        num_replicas: usize,
    },

    /// A batch size of 0.
    #[error("batch_size is 0: a batch has at least 1 sample; set batch_size to 1 or more")]
    ZeroBatchSize,

    /// A data set without rows.
    #[error("the data set has no rows: give 1 or more")]
    NoRows,

    /// A prefetch factor of 0 with workers.
    #[error(
        "prefetch_factor is 0 with {num_workers} workers, which could then never load anything; \
         set it to 1 or more, or num_workers to 0"
    )]
    ZeroPrefetch {
        /// Number of workers requested.
        num_workers: usize,
    },

    /// An allocation failed.
    #[error("no memory for {len} elements of {what}; make it smaller, or do not shuffle so large a set")]
    OutOfMemory {
        /// What the memory is for.
        what: &'static str,
        /// Number of elements.
        len: usize,
    },

    /// Dimensions whose product overflows a `usize`.
    #[error("dimensions {dims:?} have more elements than this machine can count; make the layer smaller")]
    TooManyElements {
        /// The dimensions.
        dims: Vec<usize>,
    },

    /// Convolution channels that are not divisible by the groups.
    #[error(
        "{groups} groups do not divide {in_channels} input and {out_channels} output channels; \
         choose 1 or more groups that divide both"
    )]
    Groups {
        /// Input channels.
        in_channels: usize,
        /// Output channels.
        out_channels: usize,
        /// Groups.
        groups: usize,
    },

    /// Invalid parameters of a distribution of real numbers.
    #[error("cannot draw {distribution}({a}, {b}): {need}")]
    Distribution {
        /// Which distribution.
        distribution: &'static str,
        /// Its first parameter.
        a: f64,
        /// Its second parameter.
        b: f64,
        /// What its parameters must satisfy.
        need: &'static str,
    },

    /// An empty range of integers.
    #[error("cannot draw an integer from {low} up to but not including {high}; give high > low")]
    EmptyRange {
        /// The smallest integer.
        low: i64,
        /// Exclusive upper bound.
        high: i64,
    },

    /// A saved state that belongs to another order of the epoch.
    #[error(
        "the saved state is of another run: its {field} is {got}, this sampler's is {expected}; \
         resume with the same data set, seed and shuffle, or start the epoch afresh"
    )]
    StateMismatch {
        /// The field that differs.
        field: &'static str,
        /// This sampler's value.
        expected: String,
        /// The state's value.
        got: String,
    },

    /// A sampler for a longer data set than the loader's.
    #[error(
        "the sampler gives indices up to {bound} (exclusive), but the data set has {dataset_len} samples; \
         make the sampler with the data set's length"
    )]
    SamplerExceedsDataset {
        /// Exclusive upper bound of the sampler's indices.
        bound: usize,
        /// Samples in the data set.
        dataset_len: usize,
    },

    /// A worker thread that could not be started.
    #[error("cannot start data-loading worker {worker} of {num_workers}: {cause}; lower num_workers")]
    SpawnWorker {
        /// Index of the worker.
        worker: usize,
        /// Number of workers requested.
        num_workers: usize,
        /// The operating system's error.
        cause: std::io::Error,
    },

    /// The data set failed to return a sample.
    #[error("batch {batch}: loading sample {index} failed: {cause}")]
    LoadSample {
        /// Index of the batch in this epoch.
        batch: usize,
        /// The sample's index in the data set.
        index: usize,
        /// The data set's error.
        cause: BoxError,
    },

    /// The collate function failed.
    #[error("batch {batch}: putting its samples together failed: {cause}")]
    Collate {
        /// Index of the batch in this epoch.
        batch: usize,
        /// The collate function's error.
        cause: BoxError,
    },

    /// The data set panicked on a sample.
    #[error("batch {batch}: loading sample {index} panicked: {message}; this is a bug in the data set")]
    SamplePanicked {
        /// Index of the batch in this epoch.
        batch: usize,
        /// The sample's index in the data set.
        index: usize,
        /// The panic's message.
        message: String,
    },

    /// The collate function panicked.
    #[error(
        "batch {batch}: putting its samples together panicked: {message}; this is a bug in the collate function"
    )]
    CollatePanicked {
        /// Index of the batch in this epoch.
        batch: usize,
        /// The panic's message.
        message: String,
    },

    /// The sampler panicked. The epoch ends here.
    #[error("batch {batch}: choosing its samples panicked: {message}; this is a bug in the sampler")]
    SamplerPanicked {
        /// Index of the batch in this epoch.
        batch: usize,
        /// The panic's message.
        message: String,
    },
}
