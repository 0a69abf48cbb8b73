//! Checkpoints of which each rank writes and reads a part of its own: what runs that keep them have in common.

use candle_core::{Device, Tensor};
use comm::broadcast_object;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::{Checkpoint, Checkpoints, Contents};

use crate::console::note;
use crate::error::{Error, Result};
use crate::options::{CheckpointOptions, offer};
use crate::rank::Rank;
use crate::run_log::{LogState, RunLog};

use super::{Position, RunIdentity, agree, agree_on_command};

const LOG: &str = "log";
const LOSSES: &str = "losses";

/// What a checkpoint keeps beside tensors; `own` is the experiment's.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Kept<T> {
    /// The run that wrote it.
    pub(crate) run: RunIdentity,
    log: LogState,
    #[serde(flatten)]
    pub(crate) own: T,
}

impl<T: DeserializeOwned> Kept<T> {
    /// Reads back what [`Keeping::checkpoint`] has made.
    pub(crate) fn of(value: &Value) -> Result<Self> {
        serde_json::from_value(value.clone())
            .map_err(|reason| misfit(format!("it was not written by this program: {reason}")))
    }
}

/// The checkpoint that a run is to go on from, if it is to and there is one.
///
/// # Errors
/// One that is damaged, or of another run.
pub(crate) fn find(options: &CheckpointOptions, run: &RunIdentity) -> Result<Option<Contents>> {
    let found = options.choose(Checkpoints::latest, |checkpoints, folder| checkpoints.contents(folder))?;
    if let Some(contents) = &found {
        agree_on_command(&run.command, &contents.extra, options)?;
        let none = || misfit("its parts are not those of several ranks".into());
        let kept: Kept<Value> = Kept::of(contents.extra.get("extra").ok_or_else(none)?)?;
        let batch = kept.own.get("batch").and_then(Value::as_u64).unwrap_or_default() as usize;
        let at = Position { epoch: contents.epoch as usize, batch, step: contents.step as usize };
        agree(run, (&kept.run, at), options)?;
    }
    Ok(found)
}

/// Whether the checkpoint that a run is to go on from can be trusted, all files of it: to be asked before any rank is started. Gives
/// that checkpoint.
///
/// # Errors
/// One that is damaged, or of another run.
pub(crate) fn check(options: &CheckpointOptions, run: &RunIdentity) -> Result<Option<Contents>> {
    let found = find(options, run)?;
    if let Some(contents) = &found {
        contents.files.keys().try_for_each(|name| contents.check(name).map_err(offer))?;
    }
    Ok(found)
}

/// A run and its checkpoints, on every rank.
pub(crate) struct Keeping<'a> {
    options: &'a CheckpointOptions,
    run: RunIdentity,
    /// The step of the last checkpoint.
    kept: Option<usize>,
}

impl<'a> Keeping<'a> {
    pub(crate) fn new(options: &'a CheckpointOptions, run: RunIdentity) -> Self {
        Self { options, run, kept: None }
    }

    /// The checkpoint to go on from, if that is asked for and there is one: rank 0's choice, so that all take the same.
    pub(crate) fn choose(&self, rank: &Rank, log: Option<&mut RunLog<'_>>) -> Result<Option<Contents>> {
        let (true, Some(checkpoints)) = (self.options.resumes(), self.options.open()?) else {
            return Ok(None);
        };
        let own = if rank.is_first() { find(self.options, &self.run)? } else { None };
        let place = own.map(|contents| self.options.place(&contents.folder));
        match broadcast_object(&*rank.comm, &place, 0)? {
            Some(place) => Ok(Some(checkpoints.contents(&self.options.at(&place)).map_err(offer)?)),
            None => {
                if let Some(log) = log {
                    let dir = self.options.dir().display();
                    note(format_args!("no checkpoint in {dir} yet: starting from the beginning"));
                    log.cut(0, 0)?;
                }
                Ok(None)
            }
        }
    }

    /// The run goes on after a checkpoint, with this epoch and batch: its log does, and the user is told `place`, and `dealt`
    /// where the number of ranks is another one, given that of then.
    pub(crate) fn resumed<T>(
        &mut self,
        (contents, kept): (&Contents, &Kept<T>),
        (epoch, batch): (usize, usize),
        log: Option<&mut RunLog<'_>>,
        place: &str,
        dealt: impl FnOnce(usize) -> String,
    ) -> Result<()> {
        let step = contents.step as usize;
        self.kept = Some(step);
        let Some(log) = log else { return Ok(()) };
        contents.check(LOG).map_err(offer)?;
        let losses = training::load_tensors(&contents.path(LOG), &Device::Cpu)?;
        let losses = losses.get(LOSSES).map(Tensor::to_vec1::<f32>).transpose()?;
        log.resume(step, kept.log, losses.unwrap_or_default());
        log.cut(epoch, batch)?;
        let (dir, then) = (self.options.dir().display(), kept.run.world_size);
        let dealt = if then == self.run.world_size { String::new() } else { dealt(then) };
        note(format_args!("going on from {dir} at {place}{dealt}"));
        Ok(())
    }

    /// Where to write a checkpoint after so many steps, if one is due: by `--checkpoint-every`, or as the run itself says.
    pub(crate) fn due(
        &self,
        step: usize,
        says: impl FnOnce(Option<usize>) -> bool,
    ) -> Result<Option<Checkpoints>> {
        let every = self.options.checkpoint_every;
        let is_due = every.is_some_and(|every| step.is_multiple_of(every)) || says(every);
        if self.kept == Some(step) || !is_due { Ok(None) } else { self.options.open() }
    }

    /// A checkpoint with what the run keeps: `own` is the experiment's, and rank 0 has the log. It counts as written.
    pub(crate) fn checkpoint<T: Serialize>(
        &mut self,
        step: usize,
        log: Option<&mut RunLog<'_>>,
        own: T,
    ) -> Result<Checkpoint> {
        let mut kept = Kept { run: self.run.clone(), log: LogState::default(), own };
        let mut checkpoint = Checkpoint { step: step as u64, ..Checkpoint::default() };
        if let Some(log) = log {
            // The metrics must not lack a step that will not be done again.
            log.flush()?;
            let (state, losses) = log.state();
            kept.log = state;
            let losses = [(LOSSES.to_string(), Tensor::new(losses, &Device::Cpu)?)].into();
            checkpoint.tensors.insert(LOG.to_string(), losses);
        }
        checkpoint.extra = serde_json::to_value(kept)
            .map_err(|reason| misfit(format!("its state cannot be written: {reason}")))?;
        self.kept = Some(step);
        Ok(checkpoint)
    }
}

fn misfit(problem: String) -> Error {
    Error::Checkpoint { problem }
}
