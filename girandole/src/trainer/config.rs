//! Configuration of a training run.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use training::GradientCheckConfig;

use super::{LearningRate, OptimizerConfig, StopFlag};
use crate::{Error, FarConfig, Layout, Result};

/// How a model is trained. Must be the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainConfig {
    /// Total number of steps, including those before a resume. Default: 100.
    pub steps: usize,
    /// Rows per step, over all ranks. Default: 8.
    pub batch_size: usize,
    /// The peak learning rate. Default: 3e-4.
    pub learning_rate: f64,
    /// Schedule of the learning rate. Default: constant.
    pub schedule: LearningRate,
    /// The optimizer; the learning rate in it is replaced by the one above. Weight decay applies to matrices only. Default:
    /// AdamW with betas of 0.9 and 0.95, and weight decay of 0.1.
    pub optimizer: OptimizerConfig,
    /// Maximum norm of all gradients, for clipping. Default: 1.
    pub clip: Option<f64>,
    /// Whether each epoch has its own random order. Default: true.
    pub shuffle: bool,
    /// Seed of that order. Default: 0.
    pub seed: u64,
    /// Steps between evaluations, if there is evaluation data. Default: `None`, only one at the end.
    pub evaluate_every: Option<usize>,
    /// Number of rows in an evaluation, from the beginning, or all if there are fewer. Default: 64.
    pub evaluation_rows: usize,
    /// Where and when checkpoints are written. Default: none are.
    pub checkpoints: Option<CheckpointPlan>,
    /// Minimum number of ranks with which an elastic run continues after ranks are lost, in a group that can shrink
    /// (`comm::TcpConfig::elastic`). `pp`, `cp`, `ep` and `tp` keep their sizes, and `dp` and `shard` become smaller. What a lost
    /// rank held comes from a rank that holds the same, or if there is none, the run goes back to the last checkpoint that it has
    /// written, or to the one that it has resumed from. The
    /// rows of a batch are then distributed unevenly if they are not a multiple of the ranks; with `pp`, ranks are left
    /// over instead. With `far`, a group is lost with any of its ranks, and the other groups go on: its rows and its part of the averages
    /// are left out. Groups then write checkpoints after averages only, and are asked to stop there. A rank that is not needed ends with [`Error::NotNeeded`]. Default: `None`, a loss ends the run.
    pub fewest_ranks: Option<usize>,
    /// How lost ranks of an elastic run are replaced by new ones. Default: `None`, they are not.
    pub replacement: Option<Replacement>,
    /// How gradients are checked in the first step of a new run ([`Parallel::check_gradient`](crate::Parallel)), if that costs
    /// little. Default: an error names the parameters of whose gradient backward has lost a part.
    pub gradient_check: GradientCheckConfig,
    /// They are checked if the product of the model's parameters and a rank's targets in a step is at most this, the
    /// multiplications of a forward pass: `u64::MAX` always, 0 never. Default: 100 million, which is less than a few seconds.
    pub gradient_check_work: u64,
    /// How groups of a layout with `far` average. Default: every 100 steps, with a learning rate of 0.7 and momentum of 0.9.
    pub far: FarConfig,
    /// Request to stop early: all ranks stop after the step in work, and an evaluation or a checkpoint that is due then, and
    /// write a checkpoint if there is none of that step. [`Trainer::run`](super::Trainer::run) then returns
    /// [`Error::Stopped`], without the work after the last step. All ranks need a flag, or none; one rank's request stops all.
    /// In an elastic run, if it has not reached all within a second, the ranks that it has reached leave, and the others go on
    /// if they are enough. Default: `None`.
    pub stop: Option<StopFlag>,
    /// The program's settings by name: stored in checkpoints, so that [`check_resume`](super::check_resume) can list
    /// the settings that differ in a resumed run. Default: none.
    pub settings: BTreeMap<String, String>,
}

/// Replacement of lost ranks, in a group that admits new ones (`comm::Elastic::file`). They join between two steps
/// ([`Trainer::joining`](super::Trainer::joining)), as soon as a larger layout has a place for them. Each step then has
/// one more all-reduce, of 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replacement {
    /// The layout of the job with all its ranks.
    pub layout: Layout,
    /// How long too few ranks wait for new ones.
    pub within: Duration,
}

/// Where checkpoints are, and when they are written.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointPlan {
    /// The folder, which all ranks must see.
    pub dir: PathBuf,
    /// Steps between checkpoints; there is one at the end as well.
    pub every: usize,
    /// How many checkpoints are kept; with groups of `far` that may be lost also others, until all groups have written a later one.
    pub keep: usize,
    /// Whether files are written while training continues. Takes the memory of a copy.
    pub in_background: bool,
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 100,
            batch_size: 8,
            learning_rate: 3e-4,
            schedule: LearningRate::default(),
            optimizer: OptimizerConfig::default(),
            clip: Some(1.0),
            shuffle: true,
            seed: 0,
            evaluate_every: None,
            evaluation_rows: 64,
            checkpoints: None,
            fewest_ranks: None,
            replacement: None,
            gradient_check: GradientCheckConfig::default(),
            gradient_check_work: 100_000_000,
            far: FarConfig::default(),
            stop: None,
            settings: BTreeMap::new(),
        }
    }
}

impl TrainConfig {
    /// Returns the layout with all ranks of a run that begins in this one.
    pub(super) fn whole(&self, begins: &Layout) -> Layout {
        self.replacement.map_or(*begins, |replacement| replacement.layout)
    }

    /// Checks that an elastic run that begins in this layout can continue with fewer ranks.
    pub(super) fn check_elastic(&self, begins: &Layout) -> Result<()> {
        let layout = self.whole(begins);
        if self.fewest_ranks.is_none() || layout.survives_loss(self.checkpoints.is_some()) {
            return Ok(());
        }
        let help = match layout.shard {
            1 => {
                "pp, cp, ep and tp keep their sizes: only a layout with dp or shard can go on with fewer ranks"
            }
            _ => "a rank's part is lost with it: give copies (dp), or checkpoints to go on from",
        };
        Err(Error::invalid("the layout of a model that goes on", layout, help))
    }

    /// Checks that groups of `far` keep enough checkpoints: one may have written one more than another.
    pub(super) fn check_far(&self, layout: &Layout) -> Result<()> {
        match &self.checkpoints {
            Some(plan) if layout.far > 1 && plan.keep < 2 => {
                Err(Error::invalid("checkpoints that are kept, with far", plan.keep, "give 2 or more"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that lost ranks can be replaced in a run that begins in this layout, with so many ranks.
    pub(super) fn check_replacement(&self, begins: &Layout, ranks: usize) -> Result<()> {
        let Some(Replacement { layout, .. }) = self.replacement else { return Ok(()) };
        let refuse = |help: String| Err(Error::invalid("the layout with all ranks", layout, help));
        if self.fewest_ranks.is_none() {
            return refuse("lost ranks are replaced in elastic runs only: give fewest_ranks, too".into());
        }
        if (Layout { dp: 1, shard: 1, ..layout }) != (Layout { dp: 1, shard: 1, ..*begins })
            || layout.ranks() < ranks
        {
            return refuse(format!(
                "the run begins in {begins}: give one with the same pp, cp, ep and tp, and no fewer ranks"
            ));
        }
        Ok(())
    }

    pub(super) fn check(&self, data_ranks: usize, micro_batches: usize) -> Result<()> {
        let parts = data_ranks * micro_batches;
        // In an elastic run the number of ranks may change, also before a restart, so divisibility is not required.
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
        self.far.check()?;
        if let Some(clip) = self.clip.filter(|clip| clip.is_nan() || *clip < 0.0) {
            return Err(Error::invalid(
                "the largest norm of the gradients", clip, "give a number, 0 or more",
            ));
        }
        for (what, every) in [
            ("steps between evaluations", self.evaluate_every),
            ("rows of an evaluation", Some(self.evaluation_rows)),
            ("steps between checkpoints", self.checkpoints.as_ref().map(|plan| plan.every)),
            ("checkpoints that are kept", self.checkpoints.as_ref().map(|plan| plan.keep)),
        ] {
            if every == Some(0) {
                return Err(Error::invalid(what, 0, "give 1 or more"));
            }
        }
        self.optimizer.check()
    }
}
