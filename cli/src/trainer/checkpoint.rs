//! Saving a trainer to a checkpoint and restoring it.

use std::collections::HashMap;

use candle_core::Tensor;
use comm::Communicator;
use girandole::trainer::{CheckpointExtra, ObserverState, observer_state};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use training::{Checkpoint, Checkpoints, Contents};

use crate::error::{Error, Result};
use crate::options::{CheckpointOptions, with_fallback_hint};
use crate::resume::agree_on_command;
use crate::same_options::RunningJob;

use super::schedule::INIT;
use super::{CheckpointSchedule, Observer, Position, RunIdentity, Source, Strategy, Trainer};

/// What a run has besides its model and optimizer.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RunState {
    at: Position,
    sampler: Value,
    /// Identity of the run.
    run: RunIdentity,
    /// How the ranks of the job were started, for those that join it.
    pub(super) job: Option<RunningJob>,
    values: Value,
    /// Tensors of the observer.
    #[serde(skip)]
    tensors: HashMap<String, Tensor>,
}

/// The position in an epoch and the observer's values, which a checkpoint stores together.
#[derive(Serialize, Deserialize)]
struct Saved {
    batch: usize,
    values: Value,
}

impl RunState {
    /// Reads it from a checkpoint, without the observer's tensors.
    fn of(contents: &Contents) -> Result<Self> {
        let CheckpointExtra { settings, observer, .. } = CheckpointExtra::of(contents)?;
        let Saved { batch, values } = serde_json::from_value(observer)
            .map_err(|reason| checkpoint_mismatch(format!("it was not written by this program: {reason}")))?;
        let at = Position { epoch: contents.epoch as usize, batch, step: contents.step as usize };
        let (sampler, run) = (contents.sampler.clone(), RunIdentity::of_settings(settings));
        Ok(Self { at, sampler, run, values, ..Self::default() })
    }

    /// Reads all of it from a checkpoint.
    pub(super) fn read(contents: &Contents) -> Result<Self> {
        let ObserverState { tensors, .. } = observer_state(contents).map_err(with_fallback_hint)?;
        Ok(Self { tensors, ..Self::of(contents)? })
    }

    fn into_checkpoint(self) -> Result<Checkpoint> {
        let Self { at: Position { epoch, batch, step }, sampler, run, values, tensors, .. } = self;
        let observer = json!(Saved { batch, values });
        let extra = CheckpointExtra { settings: run.into_settings(), observer, ..CheckpointExtra::default() };
        Ok(extra.at(epoch as u64, step as u64, sampler, tensors)?)
    }

    /// Returns what rank `root` has, on every rank; `None` if it gives nothing. Every rank must call it.
    pub(super) fn broadcast(
        comm: &dyn Communicator,
        mut own: Option<Self>,
        root: usize,
    ) -> Result<Option<Self>> {
        let tensors = own.as_mut().map(|own| std::mem::take(&mut own.tensors)).unwrap_or_default();
        let state = ObserverState { values: json!(own), tensors };
        let ObserverState { values, tensors } = state.broadcast(comm, root)?;
        let shared: Option<Self> = serde_json::from_value(values)
            .map_err(|reason| checkpoint_mismatch(format!("the ranks have sent another state: {reason}")))?;
        Ok(shared.map(|shared| Self { tensors, ..shared }))
    }
}

impl<S: Strategy, D: Source<Batch = S::Batch>> Trainer<S, D> {
    /// Writes a checkpoint.
    pub(super) fn save(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let Some(schedule) = self.schedule.take() else { return Ok(()) };
        let _span = tracing::info_span!("checkpoint").entered();
        let checkpoint = self.state(&schedule.run, observer)?.into_checkpoint()?;
        self.strategy.save(&schedule.checkpoints, checkpoint)?;
        self.schedule = Some(CheckpointSchedule { last: Some(self.at.step), ..schedule });
        Ok(())
    }

    /// Returns the current state.
    pub(super) fn state(&self, run: &RunIdentity, observer: &mut dyn Observer) -> Result<RunState> {
        let ObserverState { values, tensors } = observer.state()?;
        let (at, sampler) = (self.at, self.source.state(self.at)?);
        Ok(RunState { at, sampler, run: run.clone(), job: None, values, tensors })
    }

    /// Restores model, optimizer, position in the data and observer from a checkpoint. Every rank must call it before
    /// training. Returns the number of data-parallel ranks of the run that wrote the checkpoint.
    ///
    /// # Errors
    /// A checkpoint of another model, optimizer or data set.
    pub fn restore(&mut self, contents: &Contents, observer: &mut dyn Observer) -> Result<usize> {
        self.strategy.load(contents)?;
        self.set_state(RunState::read(contents)?, observer)
    }

    /// Restores all but the model and its optimizer; see [`restore`](Self::restore).
    pub(super) fn set_state(&mut self, state: RunState, observer: &mut dyn Observer) -> Result<usize> {
        let RunState { at, sampler, run, values, tensors, .. } = state;
        self.source.resume(&sampler, at)?;
        self.at = at;
        observer.load_state(at.step, ObserverState { values, tensors })?;
        Ok(run.world_size)
    }

    /// Gives the ranks what rank `root` has, and returns it without the model, which those get that `receive`. `None` if it
    /// gives nothing. Every rank must call it.
    pub(super) fn share(
        &mut self,
        comm: &dyn Communicator,
        own: Option<RunState>,
        root: usize,
        receives: bool,
    ) -> Result<Option<RunState>> {
        if comm.world_size() == 1 {
            return Ok(own);
        }
        let shared = RunState::broadcast(comm, own, root)?;
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
        let RunState { run: saved, at, .. } = RunState::of(contents)?;
        check_options(run, &saved, at, options)?;
    }
    Ok(found)
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
    use candle_core::Device;
    use comm::Local;

    use super::*;

    #[test]
    fn every_rank_gets_what_one_rank_has() {
        let own = || {
            let tensors = [("losses".to_string(), Tensor::new(&[2f32, 1.0], &Device::Cpu).unwrap())].into();
            let (at, values) = (Position { epoch: 1, batch: 2, step: 3 }, "x".into());
            RunState { at, sampler: 4.into(), values, tensors, ..RunState::default() }
        };
        for root in 0..3 {
            let shared = Local::run(3, |comm| {
                let shared = RunState::broadcast(comm, (comm.rank() == root).then(own), root);
                let shared = shared.map_err(|error| candle_core::Error::msg(error.to_string()))?.unwrap();
                assert_eq!((shared.at, shared.sampler, shared.values), (own().at, 4.into(), "x".into()));
                Ok(shared.tensors["losses"].to_vec1::<f32>()?)
            });
            assert_eq!(shared.unwrap(), vec![vec![2.0, 1.0]; 3]);
        }
        let none =
            Local::run(2, |comm| Ok(RunState::broadcast(comm, None, 0).is_ok_and(|shared| shared.is_none())));
        assert_eq!(none.unwrap(), [true; 2]);
    }
}
