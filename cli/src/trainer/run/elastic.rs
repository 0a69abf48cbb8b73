//! Elastic training: continuing when ranks are lost, and admitting newcomers.

use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;
use comm::{Communicator, all_gather_object};
use girandole::trainer::{size_with_new_ranks, wait_for_new_ranks};

use crate::console::note;
use crate::error::{Error, Result};
use crate::options::ElasticRanks;
use crate::rank::{Rank, RankPhase, have_come};
use crate::same_options::RunningJob;

use super::Run;
use crate::trainer::newcomer::ahead;
use crate::trainer::{Position, RunIdentity, Source, Strategy, Trainer, Whole};

/// Checks for newcomers between steps.
pub(in crate::trainer) struct NewcomerCheck {
    comm: Arc<dyn Communicator>,
    max: usize,
    /// Whether a newcomer is waiting: all ranks pause before the next step.
    is_waiting: bool,
}

/// Returns the number of ranks with those that wait, if there are any and `max` is not reached.
fn larger(comm: &dyn Communicator, max: usize) -> impl Fn(usize) -> Option<usize> {
    let now = comm.world_size();
    move |waiting| Some(now.saturating_add(waiting).min(max)).filter(|ranks| *ranks > now)
}

impl<S: Strategy, D: Source<Batch = S::Batch>> Trainer<S, D> {
    /// Starts checking for newcomers, if the run is elastic.
    pub(super) fn enable_newcomers(&mut self, rank: &Rank, elastic: Option<ElasticRanks>) {
        self.newcomers = elastic.map(|ElasticRanks { max, .. }| NewcomerCheck {
            comm: rank.comm.clone(),
            max,
            is_waiting: false,
        });
    }

    /// Returns the model if each rank holds all of it; a divided model cannot be elastic.
    pub(in crate::trainer) fn whole(&mut self) -> Result<&mut dyn Whole> {
        self.strategy.whole().ok_or_else(|| Error::Unavailable {
            wanted: "--elastic".into(),
            help: "each rank has a part of the model only".into(),
        })
    }

    /// Returns whether a newcomer is waiting; the same on every rank.
    pub(in crate::trainer) fn is_newcomer_waiting(&mut self) -> Result<bool> {
        let Some(NewcomerCheck { comm, max, is_waiting }) = &mut self.newcomers else { return Ok(false) };
        *is_waiting = size_with_new_ranks(&**comm, larger(&**comm, *max))?.is_some();
        // All ranks have passed the all-reduce, so the reporter has logged every step up to here.
        self.logged = self.at.step;
        Ok(*is_waiting)
    }

    /// Whether training is paused to admit newcomers.
    pub(in crate::trainer) fn is_paused(&self) -> bool {
        self.newcomers.as_ref().is_some_and(|check| check.is_waiting)
    }

    /// Continues with the remaining ranks after the loss of a rank, if they are enough. Any other error is returned.
    /// If a rank that is left knows that all have completed the run, nothing is done; this one is then
    /// [`RankPhase::Trained`].
    pub(super) fn recover(&mut self, rank: &mut Rank, run: &mut Run<'_, '_>, error: Error) -> Result<()> {
        let began = Instant::now();
        rank.after_loss(run.config.elastic, error, |rank, before, lost| {
            let left = rank.comm.world_size();
            self.continue_in_group(before, rank, run)?;
            self.wait_for_replacements(rank, run, lost)?;
            if rank.is_first() && rank.phase == RankPhase::AtWork {
                let Position { epoch, batch, step } = self.at;
                let ranks = if left == 1 { "1 rank".to_string() } else { format!("{left} ranks") };
                note(format_args!(
                    "{lost}; {ranks} of {} go on at epoch {epoch}, batch {batch} (step {step}), after {:.3} s",
                    before.world_size(),
                    began.elapsed().as_secs_f64()
                ));
            }
            Ok(())
        })
    }

    /// If too few ranks are left, waits for replacements that are starting, and admits them.
    fn wait_for_replacements(
        &mut self,
        rank: &mut Rank,
        run: &mut Run<'_, '_>,
        lost: &comm::Error,
    ) -> Result<()> {
        let within = rank.newcomers_within.filter(|_| rank.phase == RankPhase::AtWork);
        let Some(ElasticRanks { min, max }) = run.config.elastic else { return Ok(()) };
        while wait_for_new_ranks(&*rank.comm, min, within, Some(lost), larger(&*rank.comm, max))?.is_some() {
            self.logged = self.at.step;
            self.admit_newcomers(rank, run)?;
        }
        Ok(())
    }

    /// Admits the waiting newcomers.
    pub(super) fn admit_newcomers(&mut self, rank: &mut Rank, run: &mut Run<'_, '_>) -> Result<()> {
        let max = run.config.elastic.map_or(0, |elastic| elastic.max);
        let comm = rank.comm.elastic()?.grow(max)?;
        let before = std::mem::replace(&mut rank.comm, comm);
        self.continue_in_group(&*before, rank, run)
    }

    /// Continues in the rank's new group, with the state of a rank that has completed the most steps.
    fn continue_in_group(
        &mut self,
        before: &dyn Communicator,
        rank: &mut Rank,
        run: &mut Run<'_, '_>,
    ) -> Result<()> {
        let comm = &rank.comm.clone();
        let (at, steps) = (self.at, self.steps);
        if at.batch > 0 && at.batch == steps {
            // Some ranks may have ended the epoch already, after the last check for newcomers, and others not: all
            // move to the next epoch.
            self.begin_next_epoch();
        }
        run.watch.regroup(comm);
        self.enable_newcomers(rank, run.config.elastic);
        self.stop.iter_mut().for_each(|(check, _)| *check = check.regrouped(comm.clone()));
        let is_new = |number: &&usize| !before.world_ranks().contains(number);
        let mut new: Vec<usize> = comm.world_ranks().iter().filter(is_new).copied().collect();
        // Newcomers have no state yet. They are admitted between two steps, when all other ranks have the same state.
        if new.is_empty() {
            let phases = rank.exchange_phases()?;
            if rank.phase >= RankPhase::Trained {
                return Ok(());
            }
            if phases.iter().any(|phase| phase.is_before_training()) {
                return Err(Error::RestartFromBeginning);
            }
            self.catch_up(&**comm, run)?;
            // Newcomers that did not receive the state, because a rank was lost first.
            let of_new = comm.world_ranks().iter().zip(phases).filter(|(_, phase)| *phase == RankPhase::New);
            new = of_new.map(|(number, _)| *number).collect();
        }
        self.source.regroup(&**comm, self.at)?;
        self.whole()?.regroup(comm.clone())?;
        self.make_first_the_reporter(rank, run)?;
        if self.at.epoch > at.epoch {
            // Now that the log is the reporter's, and checkpoints have their writer.
            self.finish_epoch(at.epoch, steps, &mut run.logged)?;
        }
        if new.is_empty() { Ok(()) } else { self.send_state_to_newcomers(rank, &new, run) }
    }

    /// Sends newcomers the whole state; they receive it as if reading a checkpoint.
    fn send_state_to_newcomers(&mut self, rank: &Rank, new: &[usize], run: &mut Run<'_, '_>) -> Result<()> {
        let identity = RunIdentity { world_size: rank.comm.world_size(), ..run.config.run.clone() };
        let mut own = match rank.is_first() {
            true => Some(self.state(&identity, &mut run.logged)?),
            false => None,
        };
        own.iter_mut().for_each(|own| own.job = Some(RunningJob::of(&*rank.comm)));
        self.share(&*rank.comm, own, 0, false)?;
        self.whole()?.check()?;
        if rank.is_first() {
            let (Position { epoch, batch, step }, ranks) = (self.at, rank.comm.world_size());
            note(format_args!(
                "{}; {ranks} ranks go on at epoch {epoch}, batch {batch} (step {step})",
                have_come(new)
            ));
        }
        Ok(())
    }

    /// Synchronizes the ranks if some have completed a step that others have not: these get the state of the first
    /// rank that has.
    fn catch_up(&mut self, comm: &dyn Communicator, run: &mut Run<'_, '_>) -> Result<()> {
        let steps: Vec<Option<usize>> = all_gather_object(comm, &Some(self.at.step))?;
        let Some(ahead) = ahead(&steps) else { return Ok(()) };
        let own = match comm.rank() == ahead {
            true => Some(self.state(&run.config.run, &mut run.logged)?),
            false => None,
        };
        let is_behind = steps[comm.rank()] < steps[ahead];
        let shared = self.share(comm, own, ahead, is_behind)?;
        match shared.filter(|_| is_behind) {
            Some(state) => {
                // This rank computed the step's loss before the exchange of gradients failed, so it can still be
                // logged.
                if let Some((_, loss)) = self.whole()?.latest().cloned().filter(|(at, _)| *at == self.at) {
                    self.observe_step(Some(&loss), &mut run.logged)?;
                }
                self.set_state(state, &mut run.logged.without_log())?;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Makes the first remaining rank the one that prints, writes the metrics, and writes checkpoints.
    fn make_first_the_reporter(&mut self, rank: &Rank, run: &mut Run<'_, '_>) -> Result<()> {
        let identity = RunIdentity { world_size: rank.comm.world_size(), ..run.config.run.clone() };
        if let Some(schedule) = &mut self.schedule {
            schedule.run = identity;
            return Ok(());
        }
        if !rank.is_first() {
            return Ok(());
        }
        let (at, logged) = (self.at, self.logged);
        // The lost rank may not have logged the last step.
        let is_last = |last: &&(Position, Tensor)| logged < at.step && last.0.step + 1 == at.step;
        run.logged.take_over(at, self.whole()?.latest().filter(is_last).cloned())?;
        self.keep(run.config, identity)
    }
}
