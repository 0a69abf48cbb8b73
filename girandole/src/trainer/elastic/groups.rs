//! Groups that train on their own (`far`), of which some are lost or new: those that are whole go on, each with its own state.

use comm::Operation;
use strategy::DistributedModel;
use strategy::checkpoint::{Receiver, transfer};
use training::Checkpoints;
use training::build::Model;

use super::Trainer;
use super::progress::{RanksProgress, state_lost};
use crate::agreement::all_agree;
use crate::parallel::FarGroups;
use crate::trainer::optimizer::RunOptimizer;
use crate::trainer::{Notice, Observer};
use crate::{Layout, Parallel, Result};

impl<M: Model> Trainer<'_, M> {
    /// Returns the number of ranks with those that wait as the last average has told, if these make further groups.
    pub(super) fn groups_with_new_ranks(&mut self) -> Option<usize> {
        let waiting = if self.is_after_average() { std::mem::take(&mut self.done.notice.waiting) } else { 0 };
        self.larger(waiting as usize)
    }

    /// Returns the number of ranks with those that wait to join, if more of them can continue than now.
    pub(super) fn larger(&self, waiting: usize) -> Option<usize> {
        if self.job.whole.far > 1 {
            return self.larger_by_groups(waiting);
        }
        let (now, micro_batches) = (self.job.world.world_size(), self.model.config().micro_batches);
        let with_new = now.saturating_add(waiting).min(self.job.whole.ranks());
        let larger = self.job.whole.for_all(with_new, self.config.batch_size, micro_batches)?;
        Some(larger.ranks()).filter(|ranks| *ranks > now)
    }

    /// As [`larger`](Self::larger), by whole groups.
    fn larger_by_groups(&self, waiting: usize) -> Option<usize> {
        let (now, size) = (self.job.world.world_size(), self.job.whole.of_group().ranks());
        let groups = (now / size + waiting / size).min(self.job.whole.far);
        Some(groups * size).filter(|ranks| *ranks > now)
    }

    /// Continues in groups of other ranks: each that is whole with its own state, wherever it is in its steps, and new ones with what the
    /// first of the others had after the last average. The model of a new rank `is_built` in its group already.
    pub(super) fn take_state_in_groups(
        &mut self,
        layout: &Layout,
        is_built: bool,
        ranks: &RanksProgress,
        lost: Option<&comm::Error>,
        observer: &mut dyn Observer<M>,
    ) -> Result<()> {
        let (world, is_new) = (self.job.world.clone(), self.job.is_new());
        let (averaged, notice) = ranks.last_round();
        if self.done.averaged < averaged && !is_new {
            // All ranks have received what that round was of, or none would have completed it.
            self.apply_round()?;
        }
        let groups = ranks.groups()?;
        let first = groups.first().ok_or_else(|| state_lost(lost))?;
        let own = groups.iter().find(|group| group.contains(&world.rank())).unwrap_or(first);
        let of_own = ranks.of_ranks(own);
        let holders = of_own.holders().ok_or_else(|| state_lost(lost))?;
        let (is_holder, offers) = (holders.is_holder[world.rank()], holders.first.contains(&world.rank()));
        let reports = ranks.first_with_progress() == Some(world.rank());
        let build = || self.rebuilt_in_groups(layout, holders.progress.step, reports, lost);
        let rebuilt = (!is_built).then(build).transpose()?;
        let held = (is_holder && !is_new).then(|| self.model.snapshot_as_only_copy(&self.optimizer));
        let held = all_agree(&*world, held.transpose())?;
        let of = |model| RunOptimizer::new(model, &self.config.optimizer, &self.config.far);
        let mut optimizer = rebuilt.as_ref().map(of).transpose()?;
        let model = rebuilt.as_ref().unwrap_or(self.model);
        let mut receiver = Some(Receiver {
            pieces: model.pieces()?,
            optimizer: optimizer.as_mut().unwrap_or(&mut self.optimizer),
        });
        let mut loss_scale = None;
        if !is_new {
            loss_scale = transfer(&**model.mesh().world(), held.as_ref(), offers, receiver.take())?;
        }
        if ranks.has_new_ranks() {
            let gives = first.contains(&world.rank());
            let given = transfer(&*world, held.as_ref().filter(|_| gives), offers && gives, receiver)?;
            loss_scale = if is_new { given } else { loss_scale };
        }
        // Groups have other numbers now, and other folders: nobody writes into the old one when another group begins to.
        self.checkpoints.wait_for_abandoned();
        // Only when all ranks have their state does any of them give up its communication in the groups before.
        world.run(Operation::Barrier)?;
        if let (Some(model), Some(optimizer)) = (rebuilt, optimizer) {
            (*self.model, self.optimizer) = (model, optimizer);
        }
        self.model.set_loss_scale(loss_scale);
        if let (true, Some(far)) = (is_new, self.optimizer.far()) {
            far.begin_anew()?;
        }
        self.checkpoints.of_all_groups = ranks.of_all_groups();
        // The first group's folder is that of the run.
        self.open_checkpoints()?.map_or(Ok(()), Checkpoints::share_claim)?;
        self.batches.resume(&holders.progress.order)?;
        self.job.set_loaded();
        // Whether new ranks wait is told again by the next round, to all groups.
        (self.done.averaged, self.done.notice) = (averaged, Notice { waiting: 0, ..notice });
        self.done.evaluated = of_own.least(|progress| progress.evaluated).min(holders.progress.step);
        // Of all groups, so that all write at the same steps.
        self.checkpoints.written = ranks.least(|progress| progress.written).min(holders.progress.step);
        self.checkpoints.begun = self.checkpoints.written;
        self.go_on_from(holders.progress, observer)
    }

    /// Builds the model again in the groups that are there now; one rank `reports` those that are lost or new.
    fn rebuilt_in_groups(
        &self,
        layout: &Layout,
        step: usize,
        reports: bool,
        lost: Option<&comm::Error>,
    ) -> Result<Parallel<M>> {
        let before = self.model.far().ok_or_else(|| state_lost(lost))?;
        let now = before.regrouped(self.job.world.clone(), layout)?;
        if reports {
            report(before, &now, step, lost);
        }
        self.model.rebuilt_in(now)
    }
}

/// Names the groups that are lost or new.
fn report(before: &FarGroups, now: &FarGroups, step: usize, lost: Option<&comm::Error>) {
    let (count, all) = (now.count(), now.share_of_batch().1);
    let without = |one: &FarGroups, other: &FarGroups| {
        let seats: Vec<usize> =
            one.seats().iter().copied().filter(|seat| !other.seats().contains(seat)).collect();
        seats
    };
    for group in without(before, now) {
        let because = lost.map_or_else(String::new, |lost| format!(" ({lost})"));
        tracing::warn!(
            "group {group} of far is left out after step {step}{because}; {count} of {all} groups go on"
        );
    }
    for group in without(now, before) {
        tracing::info!("group {group} of far joins after step {step}; {count} of {all} groups go on");
    }
}
