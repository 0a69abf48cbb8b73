//! What the ranks of a group that changes tell each other: how far they are, and what they hold.

use std::collections::BTreeMap;

use comm::{Communicator, Operation, all_gather_object};
use sampler::SamplerState;
use serde::{Deserialize, Serialize};

use crate::far::Notice;
use crate::trainer::StepReport;
use crate::trainer::origin::Origin;
use crate::{Error, Layout, Result};

/// Progress of a rank, and what it holds of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Progress {
    pub(super) step: usize,
    /// Position in the data. May differ between ranks at the same step: some may have skipped rows without targets.
    pub(super) order: SamplerState,
    /// With `far`: the seat of its group, the step of the last average, and what ranks have told each other in it.
    pub(super) seat: usize,
    pub(super) averaged: usize,
    pub(super) notice: Notice,
    pub(super) evaluated: usize,
    pub(super) written: usize,
    /// With `far`: step of the last checkpoint that all groups have written.
    pub(super) of_all_groups: usize,
    pub(super) report: Option<StepReport>,
    pub(super) layout: Layout,
    /// The layout of the job with all its ranks.
    pub(super) whole: Layout,
    /// Rows of a batch, and micro-batches of a rank.
    pub(super) batch: (usize, usize),
    /// Number of times that the model has been built again in another layout.
    pub(super) rebuilds: usize,
    pub(super) keeps_checkpoints: bool,
    /// Where the run began.
    pub(super) origin: Origin,
    /// Whether new ranks may join.
    pub(super) grows: bool,
    /// Its ranks along `pp`, `shard`, `ep` and `tp`; `None` while it has no state.
    pub(super) place: Option<[usize; 4]>,
}

impl Progress {
    /// Returns the layout of so many ranks.
    fn layout(&self, ranks: usize) -> Option<Layout> {
        let of = if self.grows { Layout::for_all } else { Layout::for_fewer };
        of(&self.whole, ranks, self.batch.0, self.batch.1)
    }
}

/// The progress of all ranks of a group that has lost ranks or was joined by new ones, in their order; `None` of a new
/// rank, which has done nothing yet.
pub(super) struct RanksProgress(Vec<Option<Progress>>);

impl RanksProgress {
    pub(super) fn of(world: &dyn Communicator, own: Option<Progress>) -> Result<Self> {
        Ok(Self(all_gather_object(world, &own)?))
    }

    pub(super) fn has_new_ranks(&self) -> bool {
        self.0.contains(&None)
    }

    /// The first rank that is not new.
    pub(super) fn first_with_progress(&self) -> Option<usize> {
        self.0.iter().position(Option::is_some)
    }

    /// Returns the progress of the first rank that is not new.
    fn first(&self) -> Result<&Progress> {
        let help = "all ranks that had it are lost: start the job again, from a checkpoint";
        let known = self.0.iter().flatten().next();
        known.ok_or_else(|| Error::invalid("the state of the run", "new ranks only", help))
    }

    /// Where the run began.
    pub(super) fn origin(&self) -> Result<&Origin> {
        Ok(&self.first()?.origin)
    }

    /// Whether groups train on their own.
    pub(super) fn are_far(&self) -> Result<bool> {
        Ok(self.first()?.whole.far > 1)
    }

    /// With `far`: the ranks of each group that has lost none, in the order of their first ranks.
    pub(super) fn groups(&self) -> Result<Vec<Vec<usize>>> {
        let size = self.first()?.whole.of_group().ranks();
        let mut groups: Vec<(usize, Vec<usize>)> = Vec::new();
        for (rank, progress) in self.0.iter().enumerate() {
            let Some(Progress { seat, .. }) = progress else { continue };
            match groups.iter_mut().find(|(of, _)| of == seat) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((*seat, vec![rank])),
            }
        }
        let is_whole = |ranks: &Vec<usize>| ranks.len() == size && self.of_ranks(ranks).holders().is_some();
        Ok(groups.into_iter().map(|(_, ranks)| ranks).filter(is_whole).collect())
    }

    /// Returns the progress of these ranks, without that of the others.
    pub(super) fn of_ranks(&self, ranks: &[usize]) -> Self {
        let all = self.0.iter().enumerate();
        Self(all.map(|(rank, progress)| progress.clone().filter(|_| ranks.contains(&rank))).collect())
    }

    /// With `far`: the ranks that stay, those of whole groups and as many new ones as make further groups.
    fn staying_in_groups(&self) -> Result<Vec<usize>> {
        let (whole, groups) = (self.first()?.whole, self.groups()?);
        let new = (0..self.0.len()).filter(|rank| self.0[*rank].is_none()).collect::<Vec<_>>();
        let size = whole.of_group().ranks();
        let further = (new.len() / size).min(whole.far.saturating_sub(groups.len()));
        Ok(groups.into_iter().flatten().chain(new.into_iter().take(further * size)).collect())
    }

    /// Returns the layout in which the ranks continue. `lost` is the loss that made them fewer.
    pub(super) fn layout(&self, lost: Option<&comm::Error>) -> Result<Layout> {
        let (mut ranks, known) = (self.0.len(), self.first()?);
        let mut fewest = Layout { dp: 1, shard: 1, ..known.whole }.ranks();
        let mut layout = known.layout(ranks);
        if self.are_far()? {
            fewest = known.whole.of_group().ranks();
            ranks = self.staying_in_groups()?.len();
            let is_any = !self.groups()?.is_empty();
            layout = is_any.then_some(Layout { far: ranks / fewest, ..known.whole });
        }
        layout.ok_or_else(|| match lost {
            Some(lost) => Error::TooFewRanks { left: ranks, fewest, lost: lost.clone() },
            None => Error::invalid("the ranks", ranks, format!("at least {fewest} are needed")),
        })
    }

    /// Returns the error if what the lost rank held is nowhere else.
    pub(super) fn check_state(&self, lost: Option<&comm::Error>) -> Result<()> {
        if self.holders().is_some() || self.0.iter().flatten().any(|known| known.keeps_checkpoints) {
            return Ok(());
        }
        Err(state_lost(lost))
    }

    /// Returns the ranks that together hold the model after the latest step of which that is so. A collective that loses
    /// a rank may succeed on some of the others and fail on the rest, so some may have done one step more.
    pub(super) fn holders(&self) -> Option<Holders<'_>> {
        let known = || self.0.iter().enumerate().filter_map(|(rank, of)| Some((rank, of.as_ref()?)));
        let key = |progress: &Progress| (progress.step, progress.rebuilds);
        let mut keys: Vec<_> = known().map(|(_, progress)| key(progress)).collect();
        keys.sort_unstable();
        keys.dedup();
        keys.into_iter().rev().find_map(|wanted| {
            let holders = || known().filter(|(_, of)| key(of) == wanted && of.place.is_some());
            let mut is_holder = vec![false; self.0.len()];
            let mut first = BTreeMap::new();
            for (rank, place) in holders().filter_map(|(rank, progress)| Some((rank, progress.place?))) {
                is_holder[rank] = true;
                first.entry(place).or_insert(rank);
            }
            let place = |progress: &Progress| (progress.order.epoch, progress.order.consumed);
            let furthest = |(_, one): &(usize, &Progress), (_, other): &(usize, &Progress)| {
                place(one).cmp(&place(other))
            };
            let (_, progress) = holders().collect::<Vec<_>>().into_iter().rev().max_by(furthest)?;
            let parts = Layout { dp: 1, ..progress.layout.of_group().of_parameters() }.ranks();
            let first: Vec<usize> = first.into_values().collect();
            (first.len() == parts).then_some(Holders { is_holder, first, progress })
        })
    }

    /// Returns the largest number of times that a rank has built the model again.
    pub(super) fn rebuilds(&self) -> usize {
        self.0.iter().flatten().map(|progress| progress.rebuilds).max().unwrap_or(0)
    }

    /// With `far`: returns the step of the last average that a rank has completed, and what ranks have told each other in it.
    pub(super) fn last_round(&self) -> (usize, Notice) {
        let rounds = self.0.iter().flatten().map(|progress| (progress.averaged, progress.notice));
        rounds.max_by_key(|(averaged, _)| *averaged).unwrap_or_default()
    }

    /// With `far`: returns the step of the last checkpoint that all groups have written, as far as any rank knows.
    pub(super) fn of_all_groups(&self) -> usize {
        self.0.iter().flatten().map(|progress| progress.of_all_groups).max().unwrap_or(0)
    }

    /// Returns what all ranks that are not new have done, at least.
    pub(super) fn least(&self, done: fn(&Progress) -> usize) -> usize {
        self.0.iter().flatten().map(done).min().unwrap_or(0)
    }
}

/// The ranks that together hold the model after one step.
pub(super) struct Holders<'a> {
    /// Whether a rank is at that step, in the same layout.
    pub(super) is_holder: Vec<bool>,
    /// One for each part of the model.
    pub(super) first: Vec<usize>,
    /// The progress of the one that is furthest in the data.
    pub(super) progress: &'a Progress,
}

/// What a rank that joins a running job learns from the others, before it builds its model with
/// [`Parallel::joining`](crate::Parallel::joining).
pub struct Joining {
    pub(super) ranks: RanksProgress,
    layout: Layout,
    /// The loss of a rank while this one joined.
    pub(super) lost: Option<comm::Error>,
}

impl Joining {
    /// Gathers the progress of the other ranks, after their [`Observer::regrouping`](crate::trainer::Observer::regrouping). `lost` is the loss
    /// of a rank in the group that this one had joined before, if there was one.
    ///
    /// # Errors
    /// No rank that knows the state; [`Error::NotNeeded`]; failures of communication.
    pub fn gather(world: &dyn Communicator, lost: Option<&comm::Error>) -> Result<Self> {
        let ranks = RanksProgress::of(world, None)?;
        let layout = ranks.layout(lost)?;
        if layout.ranks() < ranks.0.len() {
            if staying(&ranks, &layout)?.contains(&world.rank()) {
                // It fails when the ranks that are not needed leave.
                world.run(Operation::Barrier)?;
            }
            return Err(Error::NotNeeded { layout });
        }
        // Before it builds its model, which the others do not if the state is lost.
        ranks.check_state(lost)?;
        Ok(Self { ranks, layout, lost: lost.cloned() })
    }

    /// Returns the layout of all ranks.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the layout of the job with all its ranks.
    pub(in crate::trainer) fn whole(&self) -> Result<Layout> {
        self.ranks.first().map(|known| known.whole)
    }
}

/// Returns the error when what a lost rank held is nowhere else.
pub(super) fn state_lost(lost: Option<&comm::Error>) -> Error {
    match lost {
        Some(lost) => Error::StateLost { lost: lost.clone() },
        None => Error::invalid("the state of the run", "new ranks only", "no other rank has it"),
    }
}

/// Returns the ranks that stay in a layout for fewer: those that are the only holders of a part, and the first others; with `far`, those of
/// whole groups.
pub(super) fn staying(ranks: &RanksProgress, layout: &Layout) -> Result<Vec<usize>> {
    if ranks.are_far()? {
        return ranks.staying_in_groups();
    }
    let first = ranks.holders().map_or_else(Vec::new, |holders| holders.first);
    let others: Vec<usize> = (0..ranks.0.len()).filter(|rank| !first.contains(rank)).collect();
    Ok(first.into_iter().chain(others).take(layout.ranks()).collect())
}
