//! What a command that trains on ranks gives to its runner.

use std::ffi::OsString;

use girandole::settings::Setting;
use report::Report;
use report::metrics::MetricsWriter;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Result;
use crate::options::{CheckpointOptions, CommonOptions, ElasticOptions, ElasticRanks};
use crate::rank::{Outcome, Rank};

/// A command that trains on ranks. [`run`](crate::run()) calls the methods in the order in which they are declared.
pub trait Command: Sized {
    /// The command's name.
    const NAME: &'static str;
    /// Default number of ranks on the CPU.
    const WORLD_SIZE: usize;
    /// Whether [`prepare`](Self::prepare) computes on the device. If not, the launcher runs it on the CPU and leaves GPUs to
    /// its ranks.
    const PREPARES_ON_DEVICE: bool = false;
    /// Options for files that all ranks take part in writing, without dashes: all ranks must have them, or none.
    const JOINT: &'static [&'static str] = &[];
    /// What each process creates at the start, identical in all of them: data and initial weights.
    type Setup;
    /// Result of training on a rank; rank 0's is kept.
    type Trained: Serialize + DeserializeOwned;

    /// Returns the options common to all commands that train.
    fn common(&self) -> &CommonOptions;

    /// Returns a copy of the command with other common options.
    fn with_common(&self, common: CommonOptions) -> Self;

    /// Returns its checkpoint options; `None` if it has no checkpoints.
    fn checkpoints(&self) -> Option<&CheckpointOptions> {
        None
    }

    /// Returns its elasticity options, if it has any.
    fn elastic_options(&self) -> Option<ElasticOptions> {
        None
    }

    /// Returns the allowed numbers of ranks, if the number may change during the run.
    fn elastic(&self) -> Option<ElasticRanks> {
        self.elastic_options().and_then(|options| options.ranks())
    }

    /// Returns the command's own options, with their values, that must be the same on all ranks, and unchanged when a run is
    /// resumed from a checkpoint.
    fn settings(&self, world_size: usize) -> Vec<(String, String)> {
        let _ = world_size;
        Vec::new()
    }

    /// Returns the rank that prints and writes `--metrics`.
    fn reporter(&self, _world_size: usize) -> usize {
        0
    }

    /// Checks the command's own options, as far as possible without doing any work.
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

    /// Checks the checkpoint to resume from, if resuming is requested and one exists. Called in the launcher alone: ranks
    /// check it when they read it.
    ///
    /// # Errors
    /// A damaged checkpoint, or one of another run.
    fn check_checkpoint(&self, world_size: usize) -> Result<()> {
        let _ = world_size;
        Ok(())
    }

    /// Does what one process does before the ranks train: the last checks, and what is printed first.
    ///
    /// # Errors
    /// Whatever goes wrong.
    fn prepare(
        &self,
        setup: &Self::Setup,
        world_size: usize,
        metrics: Option<&mut MetricsWriter>,
    ) -> Result<()> {
        let _ = (setup, world_size, metrics);
        Ok(())
    }

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

    /// Prints the final lines. Called in the process that has [prepared](Self::prepare), or in the rank that replaces it.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    fn conclude(&self, outcome: &Outcome<Self::Trained>) -> Result<()> {
        let _ = outcome;
        Ok(())
    }

    /// Returns the command's part of `--report`: runs, speed-up, and facts beyond those common to all commands.
    fn report(&self, outcome: Outcome<Self::Trained>) -> Report;
}
