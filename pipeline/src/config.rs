//! Configuration of a pipeline.

use std::sync::Arc;

use comm::Communicator;
use strategy::ParameterGroups;
use training::AuditConfig;

use crate::{ScheduleKind, Split};

/// Configuration of a [`Pipeline`](crate::Pipeline): schedule, split of the model, micro-batches, process groups.
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
    /// The schedule. Default: 1F1B.
    pub schedule: ScheduleKind,
    /// Stages per rank. Default (`None`): 2 if the schedule uses several, else 1.
    pub stages_per_rank: Option<usize>,
    /// Number of micro-batches, equal parts of a batch along its first dimension. Default: 1.
    pub micro_batches: usize,
    /// Where the model is split. Default: so that the largest number of parameters in a stage is minimal.
    pub split: Split,
    /// The ranks that have the same stages as this one and different data. Gradients are averaged over them once per step,
    /// each as soon as it is complete, while the last micro-batch's other gradients are computed. Where only some of these ranks
    /// have a parameter, such as that of an expert, checkpoints, files and the norm of the [`Pipeline`](crate::Pipeline) itself
    /// are those of the first rank's parameters alone: who divides parameters over ranks knows what each has. Default: `None`.
    pub averaged_over: Option<ParameterGroups>,
    /// Bytes of gradients that are averaged together. Default: 1 MiB.
    pub bucket_bytes: usize,
    /// The ranks that this rank's layers are divided over; they choose the same split. The layers do their own communication.
    /// Which variables are divided must be declared with [`Pipeline::set_divided`](crate::Pipeline::set_divided). Default:
    /// `None`.
    pub tp: Option<Arc<dyn Communicator>>,
    /// Pairs of variables that are one parameter, in any stages: they start with the values of the first, and their gradients
    /// are summed. Variables that are connected by several pairs are one parameter, too, with the values of the one that is
    /// named first. Default: none.
    pub tied: Vec<(String, String)>,
    /// What happens to parameters that have no gradient on any rank after the first step: one warning, of the first rank, or an
    /// error on every rank. Default: a warning.
    pub audit: AuditConfig,
}

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            schedule: ScheduleKind::OneFOneB,
            stages_per_rank: None,
            micro_batches: 1,
            split: Split::default(),
            averaged_over: None,
            bucket_bytes: 1 << 20,
            tp: None,
            tied: Vec::new(),
            audit: AuditConfig::default(),
        }
    }
}

impl PipelineConfig {
    /// Returns the number of stages per rank.
    pub fn stages_per_rank(&self) -> usize {
        self.stages_per_rank.unwrap_or(self.schedule.stages_per_rank())
    }
}
