//! What comes before the first step and after the last one.

use girandole::Parallel;
use girandole::trainer::{self, Summary, Trainer};
use models::tokens::Rows;
use models::{CausalLm, FolderConfig};
use report::metrics::MetricsWriter;
use training::{Checkpoints, Contents};

use crate::console::{note, say};
use crate::error::{Error, Result};
use crate::experiment::Experiment;
use crate::options::{CheckpointOptions, keeps_losses, offer};
use crate::rank::Rank;
use crate::run_log::{LogConfig, RunLog};
use crate::trainer::first_choice;

use super::job::{Job, Subject};
use super::kept;
use super::speed::Speed;
use super::trained;

/// How a job begins and goes on from a checkpoint, and what it does at its end; beside the trait, so that nobody else calls it.
pub(super) trait Ending: Experiment + Job {
    fn check_steps(&self, done: usize) -> Result<()> {
        let steps = self.options().steps();
        if done <= steps {
            return Ok(());
        }
        let help =
            format!("the checkpoint is at step {done} already; give more, or another --checkpoint-dir");
        Err(Error::Option { option: "--steps", got: steps.to_string(), help })
    }

    /// Operations of a step, over all ranks.
    fn step_flops(&self, subject: &Subject, rows: &Rows) -> Result<f64> {
        let planned = plan::language::Subject::new(subject.weights.config().clone(), subject.lora.clone());
        Ok(planned.training_flops(rows.row_len())? * self.options().batch_size as f64)
    }

    /// Where a rank's losses go: where the first one may be lost, each of the others can take its place.
    fn log<'a>(
        &self,
        is_first: bool,
        is_elastic: bool,
        metrics: Option<&'a mut MetricsWriter>,
    ) -> Option<RunLog<'a>> {
        let config = LogConfig {
            keep: keeps_losses(self.common(), &self.options().checkpoints),
            steps: self.options().steps(),
            muted: !is_first,
            at_once: is_elastic,
            ..LogConfig::default()
        };
        (is_first || is_elastic).then(|| RunLog::new(&config, metrics))
    }

    /// Says how it was.
    fn tell_end(&self, summary: &Summary, speed: &Speed) -> Result<()> {
        if summary.steps > 0 {
            say(format_args!("{}", trained::line(summary, speed)))?;
        }
        say(format_args!("saved in {}", self.options().out.display()))
    }

    /// Goes on from a checkpoint, where that is asked for and there is one.
    fn resume(
        &self,
        trainer: &mut Trainer<'_, CausalLm>,
        mut log: Option<&mut RunLog<'_>>,
        rank: &Rank,
    ) -> Result<()> {
        let Some(contents) = found(&self.options().checkpoints, rank)? else { return Ok(()) };
        trainer.resume(&contents).map_err(offer)?;
        self.check_steps(trainer.step())?;
        if let Some(log) = &mut log {
            kept::resume(log, trainer.step(), trainer::observer_state(&contents).map_err(offer)?)?;
        }
        if let (Some(log), true) = (log, rank.is_first()) {
            log.cut(trainer.epoch() as usize, trainer.step())?;
            note(format_args!("going on after step {}, from {}", trainer.step(), contents.folder.display()));
        }
        Ok(())
    }

    /// Writes the model. To be called on every rank.
    fn save(&self, model: &Parallel<CausalLm>, subject: &Subject) -> girandole::Result<()> {
        let out = &self.options().out;
        // One that was made for the text, where no folder has one: before the configuration, which comes last.
        if let (Some(tokenizer), None, 0) = (&subject.tokenizer, self.folder(), model.mesh().world().rank()) {
            tokenizer.save(out)?;
        }
        let how = FolderConfig { tokenizer_of: self.folder().map(Into::into), ..FolderConfig::default() };
        match &subject.lora {
            Some(lora) if !self.merges() => model.save_adapters(out, lora),
            lora => model.save_folder(out, &subject.weights, &how, lora.as_ref()),
        }
    }
}

impl<J: Job> Ending for J {}

/// The checkpoint to go on from, if that is asked for and there is one.
pub(super) fn choose(options: &CheckpointOptions) -> Result<Option<Contents>> {
    options.choose(Checkpoints::latest, |checkpoints, folder| checkpoints.contents(folder))
}

/// The same as rank 0 chooses it, on every rank.
fn found(options: &CheckpointOptions, rank: &Rank) -> Result<Option<Contents>> {
    let found = first_choice(options, rank, || choose(options))?;
    if found.is_none() && options.resumes() && rank.is_first() {
        note(format_args!("no checkpoint in {} yet: starting from the beginning", options.dir().display()));
    }
    Ok(found)
}
