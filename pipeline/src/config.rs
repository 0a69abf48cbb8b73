//! What a pipeline can be told.

use std::sync::Arc;

use comm::Communicator;

use crate::{ScheduleKind, Split};

/// How a [`Pipeline`](crate::Pipeline) cuts a model and a batch, and in which order it works.
///
/// ```
/// use pipeline::{PipelineConfig, ScheduleKind, Split};
///
/// let config = PipelineConfig {
///     schedule: ScheduleKind::ZbH1,
///     micro_batches: 8,
///     split: Split::at(["layers.1"]),
///     ..PipelineConfig::default()
/// };
/// assert_eq!(config.stages_per_rank(), 1);
/// ```
#[derive(Debug, Clone)]
pub struct PipelineConfig {
    /// The order of work. Default: 1F1B.
    pub schedule: ScheduleKind,
    /// Stages on each rank. Default (`None`): 2 where the schedule lives by several, else 1.
    pub stages_per_rank: Option<usize>,
    /// Equal parts of a batch, along its first dimension. Default: 1.
    pub micro_batches: usize,
    /// Where the model is cut. Default: so that the stage with most parameters has as few as possible.
    pub split: Split,
    /// The ranks that have the same stages as this one and other data: gradients are averaged over them, once a step, each as soon
    /// as it is complete, while the last micro-batch's others are computed. Default: none.
    pub data_parallel: Option<Arc<dyn Communicator>>,
    /// Gradients are averaged together until they are so large, in bytes. Default: 1 MiB.
    pub bucket_bytes: usize,
    /// The ranks that divide this rank's layers among them: they choose the same cuts. What the layers say to each other is their
    /// own business; of which variables each has a part, [`Pipeline::set_divided`](crate::Pipeline::set_divided) is told.
    /// Default: none.
    pub tensor_parallel: Option<Arc<dyn Communicator>>,
    /// Pairs of variables that are one parameter, in whatever stages: they start with the values of the first, and their gradients
    /// are added. Those that several pairs connect are one parameter, too, with the values of the one that is named first.
    /// Default: none.
    pub tied: Vec<(String, String)>,
}

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            schedule: ScheduleKind::OneFOneB,
            stages_per_rank: None,
            micro_batches: 1,
            split: Split::default(),
            data_parallel: None,
            bucket_bytes: 1 << 20,
            tensor_parallel: None,
            tied: Vec::new(),
        }
    }
}

impl PipelineConfig {
    /// Stages on each rank.
    pub fn stages_per_rank(&self) -> usize {
        self.stages_per_rank.unwrap_or(self.schedule.stages_per_rank())
    }
}
