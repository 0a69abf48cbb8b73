//! What an experiment gives to its [`Trainer`](crate::trainer::Trainer), beside what every command gives.

use training::Contents;

use crate::command::Command;
use crate::error::Result;
use crate::live_page::LivePage;
use crate::options::{keeps_losses, with_fallback_hint};
use crate::rank::Rank;
use crate::trainer::{RunConfig, RunEnd, RunIdentity, find};

/// A command that trains with [`Trainer`](crate::trainer::Trainer), such as the experiment of a document.
pub trait Experiment: Command {
    /// Returns when its training ends.
    fn end(&self) -> RunEnd;

    /// Returns how many of the ranks have different data (the number of data-parallel replicas).
    fn copies(&self, world_size: usize) -> usize {
        world_size
    }

    /// Checks whether a run can resume from a checkpoint with this number of ranks, given the remaining data.
    ///
    /// # Errors
    /// It cannot.
    fn check_left(&self, contents: &Contents, world_size: usize) -> Result<()> {
        let _ = (contents, world_size);
        Ok(())
    }

    /// Returns everything that must be unchanged when a run is resumed from a checkpoint.
    fn identity(&self, world_size: usize) -> RunIdentity {
        let settings = self.common().settings(self.checkpoints()).into_iter();
        let settings = settings.chain(self.settings(world_size));
        RunIdentity {
            end: Some(self.end()),
            ..RunIdentity::new(Self::NAME, self.copies(world_size), settings)
        }
    }

    /// Returns the trainer's configuration for this rank.
    fn run_config(&self, rank: &Rank) -> RunConfig<'_> {
        let world_size = rank.comm.world_size();
        let checkpoints = self.checkpoints().cloned().unwrap_or_default();
        RunConfig {
            name: None,
            end: self.end(),
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

    /// Checks the checkpoint to resume from, if resuming is requested and one exists: that it is undamaged and of
    /// this run.
    ///
    /// # Errors
    /// A damaged checkpoint, or one of another run.
    fn check_found(&self, world_size: usize) -> Result<()> {
        let Some(contents) = self.find_checkpoint(&self.identity(world_size), world_size)? else {
            return Ok(());
        };
        contents.check_all().map_err(with_fallback_hint)
    }
}
