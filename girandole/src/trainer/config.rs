//! What a run can be told.

use std::collections::BTreeMap;
use std::path::PathBuf;

use training::AdamConfig;

use super::LearningRate;
use crate::{Error, Result};

/// How a model is trained. The same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainConfig {
    /// Steps in all, those before a resume counted. Default: 100.
    pub steps: usize,
    /// Rows of a step, over all ranks. Default: 8.
    pub batch_size: usize,
    /// The highest learning rate. Default: 3e-4.
    pub learning_rate: f64,
    /// How it changes from step to step. Default: constant.
    pub schedule: LearningRate,
    /// AdamW; its learning rate is the one above. Weight decay is of matrices alone. Default: betas of 0.9 and 0.95, weight decay of 0.1.
    pub adam: AdamConfig,
    /// The largest norm of all gradients. Default: 1.
    pub clip: Option<f64>,
    /// Whether each epoch has a random order of its own. Default: true.
    pub shuffle: bool,
    /// Of that order. Default: 0.
    pub seed: u64,
    /// Steps between evaluations, where there is data for that. Default: none, there is one at the end.
    pub evaluate_every: Option<usize>,
    /// Rows that an evaluation takes at most, the first ones; those of one batch at least. Default: 64.
    pub evaluation_rows: usize,
    /// Where checkpoints are, if any are kept. Default: none.
    pub checkpoints: Option<CheckpointPlan>,
    /// How few ranks may be left for the run to go on without those that are lost; for copies (`dp`) in a group that can shrink
    /// (`comm::TcpConfig::elastic`). Rows of a batch that the ranks do not divide are dealt out unevenly then. Default: none, a loss is the end.
    pub fewest_ranks: Option<usize>,
    /// What the program calls its settings, with their values: checkpoints keep them, and
    /// [`check_resume`](super::check_resume) tells which a run that goes on has otherwise. Default: none.
    pub settings: BTreeMap<String, String>,
}

/// Where checkpoints are, and when they are written.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointPlan {
    /// The folder, which all ranks see.
    pub dir: PathBuf,
    /// Steps from one to the next; there is one at the end as well.
    pub every: usize,
    /// How many are kept.
    pub keep: usize,
    /// Whether files are written while training goes on. It takes the memory of a copy.
    pub in_background: bool,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 100,
            batch_size: 8,
            learning_rate: 3e-4,
            schedule: LearningRate::default(),
            adam: AdamConfig { beta2: 0.95, weight_decay: 0.1, ..AdamConfig::adamw() },
            clip: Some(1.0),
            shuffle: true,
            seed: 0,
            evaluate_every: None,
            evaluation_rows: 64,
            checkpoints: None,
            fewest_ranks: None,
            settings: BTreeMap::new(),
        }
    }
}

impl TrainConfig {
    pub(super) fn check(&self, data_ranks: usize, micro_batches: usize) -> Result<()> {
        let parts = data_ranks * micro_batches;
        // Those that are left of more ranks may begin anew.
        let is_uneven = self.fewest_ranks.is_none() && !self.batch_size.is_multiple_of(parts);
        if self.batch_size < parts || is_uneven {
            let help = format!(
                "give a multiple of {parts}: {data_ranks} ranks have different rows, each in {micro_batches} micro-batches"
            );
            return Err(Error::invalid("the batch size", self.batch_size, help));
        }
        let rate = self.learning_rate;
        if !(rate.is_finite() && rate >= 0.0) {
            return Err(Error::invalid("the learning rate", rate, "give a finite number, 0 or more"));
        }
        self.schedule.check(self.steps)?;
        if let Some(clip) = self.clip.filter(|clip| clip.is_nan() || *clip < 0.0) {
            return Err(Error::invalid(
                "the largest norm of the gradients",
                clip,
                "give a number, 0 or more",
            ));
        }
        for (what, every) in [
            ("steps between evaluations", self.evaluate_every),
            ("steps between checkpoints", self.checkpoints.as_ref().map(|plan| plan.every)),
            ("checkpoints that are kept", self.checkpoints.as_ref().map(|plan| plan.keep)),
        ] {
            if every == Some(0) {
                return Err(Error::invalid(what, 0, "give 1 or more"));
            }
        }
        Ok(self.adam.validate()?)
    }
}
