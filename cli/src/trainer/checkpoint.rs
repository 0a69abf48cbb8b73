//! Saving a trainer to a checkpoint and restoring it.

use std::collections::{BTreeMap, HashMap};

use candle_core::{Device, Tensor};
use comm::{Communicator, broadcast_object};
use girandole::trainer::ObserverState;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strategy::checkpoint::extra;
use training::{Checkpoint, Checkpoints, Contents, load_tensors};

use crate::error::{Error, Result};
use crate::options::{CheckpointOptions, with_fallback_hint};
use crate::rank::Rank;
use crate::run_log::{LogState, RunLog};

use super::schedule::INIT;
use super::{CheckpointSchedule, Observer, Position, RunIdentity, Source, Strategy, Trainer};

const LOG: &str = "log";
const LOSSES: &str = "losses";

/// The part of a checkpoint's state that is not stored as tensors.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Extra {
    /// Identity of the run that wrote it.
    #[serde(rename = "settings")]
    pub(super) run: RunIdentity,
    #[serde(default)]
    batch: usize,
    #[serde(default)]
    observer: Value,
    log: LogState,
}

impl Extra {
    fn of(extra: Option<&Value>) -> Result<Self> {
        serde_json::from_value(extra.cloned().unwrap_or_default())
            .map_err(|reason| checkpoint_mismatch(format!("it was not written by this program: {reason}")))
    }
}

/// Reads what a checkpoint holds besides the model and its optimizer.
pub(super) fn without_model(contents: &Contents) -> Result<Checkpoint> {
    let Contents { epoch, step, sampler, .. } = contents.clone();
    let mut tensors = BTreeMap::new();
    if contents.files.contains_key(LOG) {
        contents.check(LOG).map_err(with_fallback_hint)?;
        tensors.insert(LOG.to_string(), load_tensors(&contents.path(LOG), &Device::Cpu)?);
    }
    Ok(Checkpoint { epoch, step, sampler, extra: extra(contents).cloned().unwrap_or_default(), tensors })
}

/// Returns what rank `root` has besides its model, on every rank; `None` if it gives nothing. Every rank must call it.
pub(super) fn broadcast(
    comm: &dyn Communicator,
    own: Option<Checkpoint>,
    root: usize,
) -> Result<Option<Checkpoint>> {
    let unreadable =
        |reason: serde_json::Error| checkpoint_mismatch(format!("its state cannot be sent: {reason}"));
    let mut of_log = HashMap::new();
    let own = own.map(|Checkpoint { epoch, step, sampler, extra, mut tensors }| {
        of_log = tensors.remove(LOG).unwrap_or_default();
        (epoch, step, sampler, extra)
    });
    let values = serde_json::to_value(own).map_err(unreadable)?;
    let ObserverState { values, tensors } =
        ObserverState { values, tensors: of_log }.broadcast(comm, root)?;
    let shared: Option<(u64, u64, Value, Value)> = serde_json::from_value(values).map_err(unreadable)?;
    let tensors = [(LOG.to_string(), tensors)].into();
    Ok(shared.map(|(epoch, step, sampler, extra)| Checkpoint { epoch, step, sampler, extra, tensors }))
}

impl<S: Strategy, D: Source<Batch = S::Batch>> Trainer<S, D> {
    /// Writes a checkpoint; `taken` is the number of samples that this rank has taken since the epoch began or was
    /// resumed.
    pub(super) fn save(
        &mut self,
        taken: usize,
        log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Some(schedule) = self.schedule.take() else { return Ok(()) };
        let _span = tracing::info_span!("checkpoint").entered();
        let checkpoint = self.snapshot(&schedule.run, taken, log, observer)?;
        self.strategy.save(&schedule.checkpoints, checkpoint)?;
        self.schedule = Some(CheckpointSchedule { last: Some(self.at.step), ..schedule });
        Ok(())
    }

    /// Returns the current state for a checkpoint, without the model and its optimizer.
    pub(super) fn snapshot(
        &mut self,
        run: &RunIdentity,
        taken: usize,
        log: Option<&mut RunLog<'_>>,
        observer: &dyn Observer,
    ) -> Result<Checkpoint> {
        let (mut state, mut tensors) = (LogState::default(), BTreeMap::new());
        if let Some(log) = log {
            // The metrics must include all steps that will not be repeated.
            log.flush()?;
            let (of_log, losses) = log.state();
            state = of_log;
            tensors
                .insert(LOG.to_string(), [(LOSSES.to_string(), Tensor::new(losses, &Device::Cpu)?)].into());
        }
        let Position { epoch, batch, step } = self.at;
        let extra = Extra { run: run.clone(), batch, observer: observer.state(), log: state };
        let extra = serde_json::to_value(extra)
            .map_err(|reason| checkpoint_mismatch(format!("its state cannot be written: {reason}")))?;
        let sampler = self.source.state(self.at, taken)?;
        Ok(Checkpoint { epoch: epoch as u64, step: step as u64, sampler, extra, tensors })
    }

    /// Restores model, optimizer, position in the data, observer and log from a checkpoint. Every rank must call it
    /// before training. Returns the number of data-parallel ranks of the run that wrote the checkpoint.
    ///
    /// # Errors
    /// A checkpoint of another model, optimizer or data set.
    pub fn restore(
        &mut self,
        contents: &Contents,
        log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<usize> {
        self.strategy.load(contents)?;
        self.set_state(&without_model(contents)?, log, observer)
    }

    /// Restores all but the model and its optimizer; see [`restore`](Self::restore).
    pub(super) fn set_state(
        &mut self,
        Checkpoint { epoch, step, sampler, extra, tensors }: &Checkpoint,
        log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<usize> {
        let Extra { run, batch, observer: observed, log: logged } = Extra::of(Some(extra))?;
        let at = Position { epoch: *epoch as usize, batch, step: *step as usize };
        self.source.resume(sampler, at)?;
        self.at = at;
        observer.load_state(&observed);
        if let Some(log) = log {
            let losses = tensors.get(LOG).and_then(|of_log| of_log.get(LOSSES));
            log.resume(
                at.step,
                logged,
                losses.map(|losses| losses.to_vec1()).transpose()?.unwrap_or_default(),
            );
        }
        Ok(run.world_size)
    }

    /// Gives the ranks what rank `root` has, and returns it without the model, which those get that `receive`. `None` if it
    /// gives nothing. Every rank must call it.
    pub(super) fn share(
        &mut self,
        comm: &dyn Communicator,
        own: Option<Checkpoint>,
        root: usize,
        receives: bool,
    ) -> Result<Option<Checkpoint>> {
        if comm.world_size() == 1 {
            return Ok(own);
        }
        let shared = broadcast(comm, own, root)?;
        if shared.is_some() {
            self.whole()?.share(comm, root, receives)?;
        }
        Ok(shared)
    }
}

/// Returns the checkpoint to resume from, without its tensors, if resuming is requested and one exists.
///
/// # Errors
/// A checkpoint with a damaged manifest, or of another run.
pub(crate) fn find(options: &CheckpointOptions, run: &RunIdentity) -> Result<Option<Contents>> {
    let found = options.choose(Checkpoints::latest, |checkpoints, folder| checkpoints.contents(folder))?;
    if let Some(contents) = &found {
        agree_on_command(&run.command, contents, options)?;
        let Extra { run: saved, batch, .. } = Extra::of(extra(contents))?;
        let at = Position { epoch: contents.epoch as usize, batch, step: contents.step as usize };
        check_options(run, &saved, at, options)?;
    }
    Ok(found)
}

/// Opens the checkpoint that rank 0 chose, on every rank, for each to read a part of it.
///
/// # Errors
/// Those of `find`; a checkpoint that some rank cannot see.
pub fn first_choice(
    options: &CheckpointOptions,
    rank: &Rank,
    find: impl FnOnce() -> Result<Option<Contents>>,
) -> Result<Option<Contents>> {
    let (true, Some(checkpoints)) = (options.resumes(), options.open()?) else { return Ok(None) };
    let own = if rank.is_first() { find()? } else { None };
    let place = own.map(|contents| options.to_ref(&contents.folder));
    let place = broadcast_object(&*rank.comm, &place, 0)?;
    place
        .map(|place| checkpoints.contents(&options.folder_of(&place)).map_err(with_fallback_hint))
        .transpose()
}

/// Rejects a checkpoint of another command of this program, whatever its other contents.
///
/// # Errors
/// It is of another command.
pub fn agree_on_command(own: &str, contents: &Contents, options: &CheckpointOptions) -> Result<()> {
    let command = extra(contents).and_then(|extra| extra["settings"]["command"].as_str());
    let Some(command) = command.filter(|command| *command != own) else { return Ok(()) };
    let (option, got) = options.source();
    let help = format!("that is of the command {command}, and this is {own}");
    Err(Error::Contradiction { option: option.into(), got: got.display().to_string(), help })
}

/// Rejects a checkpoint of another run, and one beyond the end of this run.
fn check_options(
    own: &RunIdentity,
    saved: &RunIdentity,
    at: Position,
    options: &CheckpointOptions,
) -> Result<()> {
    let dir = options.dir().display();
    if let Some((option, got, then)) = own.difference(saved) {
        let help = match option {
            INIT => format!(
                "the run in {dir} began with {then}, and goes on with the weights of its checkpoint; leave it out, or give \
                 another --checkpoint-dir"
            ),
            _ => {
                format!("the run in {dir} began with {then}; give that to go on, or another --checkpoint-dir")
            }
        };
        return Err(Error::Contradiction { option: option.into(), got: got.into(), help });
    }
    let Some((option, end)) = own.end.and_then(|end| end.passed(at)) else { return Ok(()) };
    let Position { epoch, batch, step } = at;
    let place = match option {
        "--steps" => format!("step {step}"),
        _ => format!("epoch {epoch}, batch {batch} (step {step})"),
    };
    let help = format!(
        "the checkpoint in {dir} is at {place} already; give more, --resume=CHECKPOINT with an earlier one, or another \
         --checkpoint-dir"
    );
    Err(Error::Contradiction { option: option.into(), got: end.to_string(), help })
}

/// Returns the error of a checkpoint that does not fit.
pub(crate) fn checkpoint_mismatch(problem: String) -> Error {
    Error::Checkpoint { problem }
}

#[cfg(test)]
mod tests {
    use comm::Local;

    use super::*;

    #[test]
    fn every_rank_gets_what_one_rank_has() {
        let own = || {
            let losses = Tensor::new(&[2f32, 1.0], &Device::Cpu).unwrap();
            let tensors = [(LOG.to_string(), [(LOSSES.to_string(), losses)].into())].into();
            Checkpoint { epoch: 1, step: 2, sampler: 3.into(), extra: "x".into(), tensors }
        };
        for root in 0..3 {
            let shared = Local::run(3, |comm| {
                let shared = broadcast(comm, (comm.rank() == root).then(own), root);
                let shared = shared.map_err(|error| candle_core::Error::msg(error.to_string()))?.unwrap();
                let Checkpoint { epoch, step, sampler, extra, tensors } = shared;
                assert_eq!((epoch, step, sampler, extra), (1, 2, 3.into(), "x".into()));
                Ok(tensors[LOG][LOSSES].to_vec1::<f32>()?)
            });
            assert_eq!(shared.unwrap(), vec![vec![2.0, 1.0]; 3]);
        }
        let none = Local::run(2, |comm| Ok(broadcast(comm, None, 0).is_ok_and(|shared| shared.is_none())));
        assert_eq!(none.unwrap(), [true; 2]);
    }
}
