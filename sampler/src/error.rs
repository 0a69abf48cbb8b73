//! Everything that can go wrong here, in one enum.

/// What a data set or a collate function may fail with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Everything that samplers, random numbers and the data loader can fail with.
///
/// Numbers of batches and samples count from 0. A cause is part of the message, so that one line tells all.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// A distributed sampler for no ranks.
    #[error("num_replicas is 0: a data set is dealt out to at least 1 rank; give the world size")]
    NoReplicas,

    /// A rank that the group does not have.
    #[error(
        "rank {rank} is out of range: {num_replicas} ranks are numbered 0 to {}; give each process its own rank",
        num_replicas - 1
    )]
    RankOutOfRange {
        /// The rank that was asked for.
        rank: usize,
        /// How many ranks there are.
        num_replicas: usize,
    },

    /// The padded epoch has more positions than a `usize` counts.
    #[error(
        "{dataset_len} samples padded for {num_replicas} ranks are more than this machine can count; \
         use Tail::Drop or Tail::Uneven"
    )]
    EpochTooLong {
        /// Samples in the data set.
        dataset_len: usize,
        /// How many ranks there are.
        num_replicas: usize,
    },

    /// A batch size of 0.
    #[error("batch_size is 0: a batch has at least 1 sample; set batch_size to 1 or more")]
    ZeroBatchSize,

    /// An order of no rows.
    #[error("the data set has no rows: give 1 or more")]
    NoRows,

    /// Workers that may not load anything ahead.
    #[error(
        "prefetch_factor is 0 with {num_workers} workers, which could then never load anything; \
         set it to 1 or more, or num_workers to 0"
    )]
    ZeroPrefetch {
        /// How many workers were asked for.
        num_workers: usize,
    },

    /// Memory that could not be had.
    #[error("no memory for {len} elements of {what}; make it smaller, or do not shuffle so large a set")]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// How many elements.
        len: usize,
    },

    /// Dimensions whose product no `usize` holds.
    #[error("dimensions {dims:?} have more elements than this machine can count; make the layer smaller")]
    TooManyElements {
        /// The dimensions.
        dims: Vec<usize>,
    },

    /// Convolution channels that the groups do not divide.
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

    /// Bounds between which no real number can be drawn, or a normal distribution that does not exist.
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
        /// The least integer.
        low: i64,
        /// One more than the largest.
        high: i64,
    },

    /// A saved state of another epoch order.
    #[error(
        "the saved state is of another run: its {field} is {got}, this sampler's is {expected}; \
         resume with the same data set, seed and shuffle, or start the epoch afresh"
    )]
    StateMismatch {
        /// What differs.
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
        /// Every index of the sampler is below this.
        bound: usize,
        /// Samples in the data set.
        dataset_len: usize,
    },

    /// A worker thread that could not be started.
    #[error("cannot start data-loading worker {worker} of {num_workers}: {cause}; lower num_workers")]
    SpawnWorker {
        /// Which worker.
        worker: usize,
        /// How many were asked for.
        num_workers: usize,
        /// What the system said.
        cause: std::io::Error,
    },

    /// The data set failed to give a sample.
    #[error("batch {batch}: loading sample {index} failed: {cause}")]
    LoadSample {
        /// The batch in this epoch.
        batch: usize,
        /// The sample's index in the data set.
        index: usize,
        /// What the data set said.
        cause: BoxError,
    },

    /// The collate function failed.
    #[error("batch {batch}: putting its samples together failed: {cause}")]
    Collate {
        /// The batch in this epoch.
        batch: usize,
        /// What the collate function said.
        cause: BoxError,
    },

    /// The data set panicked on a sample.
    #[error("batch {batch}: loading sample {index} panicked: {message}; this is a bug in the data set")]
    SamplePanicked {
        /// The batch in this epoch.
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
        /// The batch in this epoch.
        batch: usize,
        /// The panic's message.
        message: String,
    },

    /// The sampler panicked. The epoch ends here.
    #[error("batch {batch}: choosing its samples panicked: {message}; this is a bug in the sampler")]
    SamplerPanicked {
        /// The batch in this epoch.
        batch: usize,
        /// The panic's message.
        message: String,
    },
}
