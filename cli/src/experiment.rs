//! What an experiment gives to its runner.

use std::ffi::OsString;

use comm::Setting;
use report::Report;
use report::metrics::MetricsWriter;
use serde::Serialize;
use serde::de::DeserializeOwned;
use training::Contents;

use crate::error::Result;
use crate::live_page::LivePage;
use crate::options::{
    CheckpointOptions, CommonOptions, ElasticOptions, ElasticRanks, keeps_losses, with_fallback_hint,
};
use crate::rank::{Outcome, Rank};
use crate::trainer::{RunConfig, RunEnd, RunIdentity, find};

/// One tutorial's experiment. [`run`](crate::run()) calls the methods in the order in which they are declared.
pub trait Experiment: Sized {
    /// The command's name.
    const NAME: &'static str;
    /// Default number of ranks on the CPU.
    const WORLD_SIZE: usize;
    /// Whether [`alone`](Self::alone) computes on the device. If not, the launcher runs it on the CPU and leaves GPUs
    /// to its ranks.
    const ALONE_ON_DEVICE: bool = false;
    /// Options for files that all ranks take part in writing, without dashes: all ranks must have them, or none.
    const JOINT: &'static [&'static str] = &[];
    /// What each process creates at the start, identical in all of them: data and initial weights.
    type Setup;
    /// Result of [`alone`](Self::alone), the part that one process runs before the ranks; `()` if the tutorial has
    /// none.
    type Alone;
    /// Result of training on a rank; rank 0's is kept.
    type Trained: Serialize + DeserializeOwned;

    /// Returns the options common to all experiments.
    fn common(&self) -> &CommonOptions;

    /// Returns a copy of the experiment with other common options.
    fn with_common(&self, common: CommonOptions) -> Self;

    /// Returns its checkpoint options; `None` if it has no checkpoints.
    fn checkpoints(&self) -> Option<&CheckpointOptions> {
        None
    }

    /// Returns the allowed numbers of ranks, if the number may change during the run.
    fn elastic(&self) -> Option<ElasticRanks> {
        self.elastic_options().and_then(|options| options.ranks())
    }

    /// Returns its elasticity options, if it has any.
    fn elastic_options(&self) -> Option<ElasticOptions> {
        None
    }

    /// Returns the [`alone`](Self::alone) result used by the rank that replaces a lost rank 0. `None` if the number
    /// of ranks does not change.
    fn stand_in(&self) -> Option<Self::Alone> {
        None
    }

    /// Returns the experiment's own options, with their values, that must be unchanged when a run is resumed from a
    /// checkpoint.
    fn settings(&self, world_size: usize) -> Vec<(String, String)> {
        let _ = world_size;
        Vec::new()
    }

    /// Returns when its training ends, if it trains.
    fn end(&self) -> Option<RunEnd> {
        None
    }

    /// Returns how many of the ranks have different data (the number of data-parallel replicas).
    fn copies(&self, world_size: usize) -> usize {
        world_size
    }

    /// Returns everything that must be unchanged when a run is resumed from a checkpoint.
    fn identity(&self, world_size: usize) -> RunIdentity {
        let settings =
            self.common().settings(self.checkpoints()).into_iter().chain(self.settings(world_size));
        RunIdentity { end: self.end(), ..RunIdentity::new(Self::NAME, self.copies(world_size), settings) }
    }

    /// Returns the trainer's configuration for this rank.
    fn run_config(&self, rank: &Rank) -> RunConfig<'_> {
        let world_size = rank.comm.world_size();
        let checkpoints = self.checkpoints().cloned().unwrap_or_default();
        RunConfig {
            name: None,
            end: self.end().unwrap_or(RunEnd::Steps(0)),
            report: keeps_losses(self.common(), &checkpoints),
            checkpoints,
            run: self.identity(world_size),
            find: Box::new(move |run| self.find_checkpoint(run, world_size)),
            elastic: self.elastic(),
            reporter: self.reporter(world_size),
            page: Box::new(|run| LivePage::new(Self::NAME, self.common().report.as_deref(), run)),
        }
    }

    /// Returns the checkpoint to resume from, if resuming is requested and one exists.
    ///
    /// # Errors
    /// A checkpoint with a damaged manifest, or of another run.
    fn find_checkpoint(&self, run: &RunIdentity, world_size: usize) -> Result<Option<Contents>> {
        let found = self.checkpoints().map_or(Ok(None), |checkpoints| find(checkpoints, run))?;
        found.iter().try_for_each(|contents| self.check_left(contents, world_size))?;
        Ok(found)
    }

    /// Checks whether a run can resume from a checkpoint with this number of ranks, given the remaining data.
    ///
    /// # Errors
    /// It cannot.
    fn check_left(&self, contents: &Contents, world_size: usize) -> Result<()> {
        let _ = (contents, world_size);
        Ok(())
    }

    /// Checks the checkpoint to resume from, if resuming is requested and one exists: that it is undamaged and of
    /// this run.
    ///
    /// # Errors
    /// A damaged checkpoint, or one of another run.
    fn check_checkpoint(&self, world_size: usize) -> Result<()> {
        let Some(contents) = self.find_checkpoint(&self.identity(world_size), world_size)? else {
            return Ok(());
        };
        contents.check_all().map_err(with_fallback_hint)
    }

    /// Returns the rank that prints and writes `--metrics`.
    fn reporter(&self, _world_size: usize) -> usize {
        0
    }

    /// Checks the experiment's own options, as far as possible without doing any work.
    ///
    /// # Errors
    /// The first option that cannot be used.
    fn check(&self, world_size: usize) -> Result<()>;

    /// Creates or reads data and weights. Called before anything is printed or written.
    ///
    /// # Errors
    /// A file that cannot be used.
    fn setup(&self) -> Result<Self::Setup>;

    /// Returns the files that were read, whose contents must be the same on all ranks. Called in ranks that another launcher
    /// has started, each with options of its own.
    ///
    /// # Errors
    /// A file that cannot be read.
    fn contents(&self, setup: &Self::Setup) -> Result<Vec<Setting>> {
        let _ = setup;
        self.common().contents()
    }

    /// Runs the part that one process does before the ranks train.
    ///
    /// # Errors
    /// Whatever goes wrong.
    fn alone(
        &self,
        setup: &Self::Setup,
        world_size: usize,
        metrics: Option<&mut MetricsWriter>,
    ) -> Result<Self::Alone>;

    /// Returns environment variables for the ranks that this process starts on this machine.
    fn for_ranks(&self, setup: &Self::Setup) -> Vec<(OsString, OsString)> {
        let _ = setup;
        Vec::new()
    }

    /// Trains, on each rank.
    ///
    /// # Errors
    /// Whatever goes wrong.
    fn train(&self, setup: Self::Setup, rank: &mut Rank) -> Result<Self::Trained>;

    /// Prints the final lines.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    fn conclude(&self, alone: &Self::Alone, outcome: &Outcome<Self::Trained>) -> Result<()> {
        let _ = (alone, outcome);
        Ok(())
    }

    /// Returns the experiment's part of `--report`: runs, speed-up, and facts beyond those common to all experiments.
    fn report(&self, alone: Self::Alone, outcome: Outcome<Self::Trained>) -> Report;
}
