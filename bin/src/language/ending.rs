//! Going on from a checkpoint, and what follows the last step.

use comm::broadcast_object;
use girandole::Parallel;
use girandole::trainer::Trainer;
use models::{CausalLm, FolderConfig};
use training::{Checkpoints, Contents};

use crate::console::note;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::run_log::RunLog;
use crate::trainer::{CheckpointOptions, offer};

use super::job::{Job, Subject};

/// How a job goes on from a checkpoint, and what it does at its end; beside the trait, so that nobody else calls it.
pub(super) trait Ending: Job {
    fn check_steps(&self, done: usize) -> Result<()> {
        let steps = self.options().steps();
        if done <= steps {
            return Ok(());
        }
        let help =
            format!("the checkpoint is at step {done} already; give more, or another --checkpoint-dir");
        Err(Error::Option { option: "--steps", got: steps.to_string(), help })
    }

    /// Goes on from a checkpoint, where that is asked for and there is one.
    fn resume(
        &self,
        trainer: &mut Trainer<'_, CausalLm>,
        mut log: Option<&mut RunLog<'_>>,
        rank: &Rank,
    ) -> Result<()> {
        let Some(contents) = found(&self.options().checkpoints, rank)? else { return Ok(()) };
        trainer.resume(&contents)?;
        self.check_steps(trainer.step())?;
        if let Some(log) = &mut log {
            log.begin_at(trainer.step());
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
    let (true, Some(checkpoints)) = (options.resumes(), options.open()?) else { return Ok(None) };
    let own = if rank.is_first() { choose(options)? } else { None };
    let place = own.map(|contents| options.place(&contents.folder));
    let Some(place) = broadcast_object(&*rank.comm, &place, 0)? else {
        if rank.is_first() {
            note(format_args!(
                "no checkpoint in {} yet: starting from the beginning",
                options.dir().display()
            ));
        }
        return Ok(None);
    };
    Ok(Some(checkpoints.contents(&options.at(&place)).map_err(offer)?))
}
