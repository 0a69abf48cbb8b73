//! What a checkpoint keeps of a trainer, and how a trainer goes on from it.

use candle_core::{Device, Tensor};
use comm::broadcast_object;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::{Checkpoint, Checkpoints, Contents};

use crate::error::{Error, Result};
use crate::options::{CheckpointOptions, offer};
use crate::rank::Rank;
use crate::run_log::{LogState, RunLog};

use super::keeper::INIT;
use super::{Keeper, Kept, Observer, Position, RunConfig, RunIdentity, Source, Strategy, Trainer, share};

const LOG: &str = "log";
const LOSSES: &str = "losses";

/// What is no tensor.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Extra {
    /// The run that wrote it.
    pub(super) run: RunIdentity,
    #[serde(default)]
    batch: usize,
    #[serde(default)]
    observer: Value,
    log: LogState,
}

impl Extra {
    /// Reads it back. Where each rank writes a part, it is below what the parts are.
    fn of(extra: &Value) -> Result<Self> {
        serde_json::from_value(extra.get("extra").unwrap_or(extra).clone())
            .map_err(|reason| misfit(format!("it was not written by this program: {reason}")))
    }
}

/// A checkpoint to go on from.
pub enum Saved {
    /// All of it, on every rank.
    Whole(Checkpoint),
    /// Each rank reads its part.
    Parts(Contents),
}

impl Saved {
    fn losses(&self) -> Result<Vec<f32>> {
        let losses = match self {
            Self::Whole(checkpoint) => checkpoint.tensors.get(LOG).and_then(|log| log.get(LOSSES)).cloned(),
            Self::Parts(contents) => {
                contents.check(LOG).map_err(offer)?;
                training::load_tensors(&contents.path(LOG), &Device::Cpu)?.remove(LOSSES)
            }
        };
        Ok(losses.map(|losses| losses.to_vec1()).transpose()?.unwrap_or_default())
    }
}

impl<S: Strategy, D: Source<Batch = S::Batch>> Trainer<S, D> {
    /// Writes a checkpoint, this rank having taken so many samples since the epoch began or was resumed.
    pub(super) fn save(
        &mut self,
        taken: usize,
        log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Some(keeper) = self.keeper.take() else { return Ok(()) };
        let _span = tracing::info_span!("checkpoint").entered();
        let checkpoint = self.snapshot(&keeper.run, taken, log, observer)?;
        match self.strategy.kept() {
            Kept::Parts(model) => model.save(&keeper.checkpoints, checkpoint)?,
            _ => drop(keeper.checkpoints.save(&checkpoint)?),
        }
        self.keeper = Some(Keeper { kept: Some(self.at.step), ..keeper });
        Ok(())
    }

    /// What a checkpoint keeps, of now; the tensors are the variables themselves, not copies.
    pub(super) fn snapshot(
        &mut self,
        run: &RunIdentity,
        taken: usize,
        log: Option<&mut RunLog<'_>>,
        observer: &dyn Observer,
    ) -> Result<Checkpoint> {
        let mut tensors = match self.strategy.kept() {
            Kept::Whole(model) => model.tensors()?,
            _ => Default::default(),
        };
        let mut state = LogState::default();
        if let Some(log) = log {
            // The metrics must not lack a step that will not be done again.
            log.flush()?;
            let (of_log, losses) = log.state();
            state = of_log;
            tensors
                .insert(LOG.to_string(), [(LOSSES.to_string(), Tensor::new(losses, &Device::Cpu)?)].into());
        }
        let Position { epoch, batch, step } = self.at;
        let extra = Extra { run: run.clone(), batch, observer: observer.state(), log: state };
        let extra = serde_json::to_value(extra)
            .map_err(|reason| misfit(format!("its state cannot be written: {reason}")))?;
        let sampler = self.source.state(self.at, taken)?;
        Ok(Checkpoint { epoch: epoch as u64, step: step as u64, sampler, extra, tensors })
    }

    /// Goes on from a checkpoint: model, optimizer, place in the data, observer and log become what they were. To be called on every
    /// rank, before training. Gives the number of ranks with data of their own that there were.
    ///
    /// # Errors
    /// A checkpoint of another model, optimizer or data set; with the model's variables unchanged where these do not fit.
    pub fn restore(
        &mut self,
        saved: &Saved,
        log: Option<&mut RunLog<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<usize> {
        let (epoch, step, sampler, extra) = match saved {
            Saved::Whole(Checkpoint { epoch, step, sampler, extra, .. })
            | Saved::Parts(Contents { epoch, step, sampler, extra, .. }) => (*epoch, *step, sampler, extra),
        };
        let Extra { run, batch, observer: observed, log: logged } = Extra::of(extra)?;
        let at = Position { epoch: epoch as usize, batch, step: step as usize };
        self.source.resume(sampler, at)?;
        match (self.strategy.kept(), saved) {
            (Kept::Whole(model), Saved::Whole(checkpoint)) => model.set(&checkpoint.tensors)?,
            (Kept::Parts(model), Saved::Parts(contents)) => model.load(contents)?,
            _ => return Err(misfit("its parts are not those of several ranks".into())),
        }
        self.at = at;
        observer.load_state(&observed);
        if let Some(log) = log {
            log.resume(at.step, logged, saved.losses()?);
        }
        Ok(run.world_size)
    }

    /// The checkpoint that the run is to go on from, if it is to and there is one: the first rank's choice, so that all take the same.
    /// To be called on every rank.
    pub(super) fn found(&mut self, rank: &Rank, config: &RunConfig<'_>) -> Result<Option<Saved>> {
        let options = &config.checkpoints;
        let own = || if rank.is_first() { (config.find)(&config.run) } else { Ok(None) };
        match self.strategy.kept() {
            Kept::Not => Ok(None),
            Kept::Whole(_) => {
                // The folder need not be on every host.
                let read = |contents: Contents| match options.open()? {
                    Some(checkpoints) => {
                        checkpoints.load(&contents.folder, &Device::Cpu).map_err(offer).map(Some)
                    }
                    None => Ok(None),
                };
                let own = own()?.map_or(Ok(None), read)?;
                Ok(share::share(&*rank.comm, own, 0)?.map(Saved::Whole))
            }
            Kept::Parts(_) => Ok(first_choice(options, rank, own)?.map(Saved::Parts)),
        }
    }
}

/// The checkpoint that a run is to go on from, if it is to and there is one: without its tensors.
///
/// # Errors
/// One whose manifest is damaged, or of another run.
pub(crate) fn find(options: &CheckpointOptions, run: &RunIdentity) -> Result<Option<Contents>> {
    let found = options.choose(Checkpoints::latest, |checkpoints, folder| checkpoints.contents(folder))?;
    if let Some(contents) = &found {
        agree_on_command(&run.command, &contents.extra, options)?;
        let Extra { run: saved, batch, .. } = Extra::of(&contents.extra)?;
        let at = Position { epoch: contents.epoch as usize, batch, step: contents.step as usize };
        agree(run, (&saved, at), options)?;
    }
    Ok(found)
}

/// What the first rank finds to go on from, on every rank: for each to read a part of it.
///
/// # Errors
/// Those of `find`; a checkpoint that not all ranks see.
pub(crate) fn first_choice(
    options: &CheckpointOptions,
    rank: &Rank,
    find: impl FnOnce() -> Result<Option<Contents>>,
) -> Result<Option<Contents>> {
    let (true, Some(checkpoints)) = (options.resumes(), options.open()?) else { return Ok(None) };
    let own = if rank.is_first() { find()? } else { None };
    let place = own.map(|contents| options.place(&contents.folder));
    let place = broadcast_object(&*rank.comm, &place, 0)?;
    place.map(|place| checkpoints.contents(&options.at(&place)).map_err(offer)).transpose()
}

/// Refuses a checkpoint of another of this program's commands, whatever else that keeps.
pub(crate) fn agree_on_command(own: &str, extra: &Value, options: &CheckpointOptions) -> Result<()> {
    // Where each rank writes a part, what the run keeps is below what the parts are.
    // Language models keep it among their settings.
    let places = ["/run/command", "/extra/run/command", "/extra/settings/command"];
    let command = places.iter().find_map(|at| extra.pointer(at)?.as_str());
    let Some(command) = command.filter(|command| *command != own) else { return Ok(()) };
    let (option, got) = options.source();
    let help = format!("that is of the command {command}, and this is {own}");
    Err(Error::Contradiction { option: option.into(), got: got.display().to_string(), help })
}

/// Refuses a checkpoint of another run, and one that is further than this run is to go.
fn agree(
    own: &RunIdentity,
    (saved, at): (&RunIdentity, Position),
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

pub(crate) fn misfit(problem: String) -> Error {
    Error::Checkpoint { problem }
}
