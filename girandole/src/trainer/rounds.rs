//! Averages of groups that train on their own (`far`), after several steps of each.
//!
//! In an elastic run the groups that are left go on without one that is lost. They may be at different steps then, but none is more than a
//! round ahead: an average is the only thing that all groups do together. All that they have to agree upon is exchanged in it, or comes
//! after it in each group by itself, so that a loss never leaves some groups in another exchange than the others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use comm::{Communicator, Operation, Stats};
use training::build::Model;

use super::{Observer, StepReport, Trainer};
use crate::Result;
use crate::far::Notice;
use crate::parallel::sum;

/// How long a rank waits to hear of a loss that another one of its group has heard of.
const HEARSAY: Duration = Duration::from_secs(10);

impl<M: Model> Trainer<'_, M> {
    /// Whether the groups are to average now.
    pub(super) fn is_round_due(&self) -> bool {
        let is_due = self.done.step == self.config.steps || self.config.far.is_due(self.done.step);
        self.model.far().is_some() && self.done.averaged < self.done.step && is_due
    }

    /// Averages the groups if that is due after a step, and counts the time that it takes.
    pub(super) fn average_after(
        &mut self,
        report: &mut StepReport,
        observer: &mut dyn Observer<M>,
    ) -> Result<()> {
        if !self.is_round_due() {
            let step = self.done.step;
            return self.optimizer.far().map_or(Ok(()), |far| far.send(step));
        }
        let before = self.model.stats();
        // What groups tell each other is of this step.
        self.done.latest = Some(*report);
        let averaged = self.average_groups(observer);
        let Stats { busy_ns, waited_ns, .. } = self.model.stats();
        let seconds = |after: u64, before: u64| after.saturating_sub(before) as f64 * 1e-9;
        report.communication_seconds += seconds(busy_ns, before.busy_ns);
        report.waiting_seconds += seconds(waited_ns, before.waited_ns);
        averaged
    }

    /// Averages the groups. Every rank must call it.
    pub(super) fn average_groups(&mut self, observer: &mut dyn Observer<M>) -> Result<()> {
        let _span = tracing::info_span!("average of groups").entered();
        self.wait_for_copies();
        let (step, is_last) = (self.done.step, self.done.step == self.config.steps);
        if self.has_elastic_groups() {
            // When a group writes its next checkpoint, all others have written the one before.
            self.finish(observer)?;
            let own = self.notice()?;
            self.optimizer.far().map_or(Ok(()), |far| far.receive(step, is_last, own))?;
            self.apply_round()?;
        } else {
            self.optimizer.far().map_or(Ok(()), |far| far.average(step, is_last))?;
            self.done.averaged = step;
        }
        Ok(())
    }

    /// Steps by what the round has received, if it has.
    pub(super) fn apply_round(&mut self) -> Result<()> {
        let received = self.optimizer.far().map_or(Ok(None), |far| far.apply())?;
        if let Some(notice) = received {
            (self.done.averaged, self.done.notice) = (self.done.step, notice);
            self.checkpoints.groups_have_averaged();
        }
        Ok(())
    }

    /// What this rank tells the others in a round.
    fn notice(&self) -> Result<Notice> {
        let stop = self.config.stop.as_ref().map_or(0, |flag| flag.cause());
        let waiting = match self.job.world.rank() {
            0 if self.config.replacement.is_some() => self.job.world.elastic()?.waiting(),
            _ => 0,
        };
        let diverged = u32::from(!self.has_finite_loss());
        Ok(Notice { stop, waiting: u32::try_from(waiting).unwrap_or(u32::MAX), diverged })
    }

    /// What a rank hears of losses in other groups, in an elastic run.
    pub(super) fn losses_of_groups(&self) -> Option<LossesOfGroups> {
        let far = self.model.far().filter(|_| self.has_elastic_groups())?;
        Some(LossesOfGroups { world: self.job.world.clone(), group: far.group.clone() })
    }
}

/// What a rank of an elastic run hears of losses in other groups.
pub(super) struct LossesOfGroups {
    world: Arc<dyn Communicator>,
    group: Arc<dyn Communicator>,
}

impl LossesOfGroups {
    /// Between two steps, or two batches of an evaluation: fails on all ranks of the group if one of them has heard that a rank of any
    /// group is lost. So all of the group are at the same step, and others that wait for them to go on wait no longer than a step.
    pub(super) fn check(&self) -> Result<()> {
        let world = self.world.elastic()?;
        if sum(&*self.group, f64::from(u8::from(world.lost().is_some())))? == 0.0 {
            return Ok(());
        }
        let began = Instant::now();
        loop {
            match world.lost() {
                Some(lost) => return Err(lost.into()),
                None if began.elapsed() > HEARSAY => return Ok(self.world.run(Operation::Barrier)?),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}
