//! Schedules as data: for each rank a list of actions, made by pure functions and proved before anything runs.

mod action;
mod check;
mod communication;
mod gpipe;
mod grid;
mod interleaved;
mod kind;
mod looped_bfs;
mod naive;
mod one_f_one_b;
mod plan;
mod zb_h1;
mod zb_v;

pub use action::{Action, ActionKind};
pub use kind::ScheduleKind;
pub use plan::{Durations, Plan, Span};

use crate::{Error, Result};

/// Who does what in which order. Anybody can write one; [`Schedule::new`] finds out whether it is any good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The rank that has each stage, by stage.
    pub owners: Vec<usize>,
    /// Parts of a batch.
    pub micro_batches: usize,
    /// What each rank does, by rank.
    pub actions: Vec<Vec<Action>>,
}

/// Of micro-batches through stages: no more are planned, action by action.
const MOST_PASSES: usize = 1 << 20;

impl Table {
    /// A table of one of the known kinds, with the messages between ranks.
    ///
    /// # Errors
    /// A count of 0, stages per rank that the kind does not have, or counts whose product is more than a million.
    ///
    /// ```
    /// use pipeline::{ScheduleKind, Table};
    ///
    /// let table = Table::of(ScheduleKind::OneFOneB, 2, 1, 2)?;
    /// let first: Vec<_> = table.actions[0].iter().map(|action| action.kind.letters()).collect();
    /// assert_eq!(first, ["F", "SA", "F", "SA", "RG", "B", "RG", "B"]);
    /// # Ok::<(), pipeline::Error>(())
    /// ```
    pub fn of(
        kind: ScheduleKind,
        ranks: usize,
        stages_per_rank: usize,
        micro_batches: usize,
    ) -> Result<Self> {
        let counts =
            [("ranks", ranks), ("stages per rank", stages_per_rank), ("micro-batches", micro_batches)];
        for (what, got) in counts {
            if got == 0 {
                let (what, got) = (format!("{what} of a schedule"), got.to_string());
                return Err(Error::InvalidArgument { what, got, help: "give 1 or more".into() });
            }
        }
        kind.check_stages_per_rank(stages_per_rank)?;
        let passes = counts.iter().try_fold(1, |product: usize, (_, count)| product.checked_mul(*count));
        if passes.is_none_or(|passes| passes > MOST_PASSES) {
            let got = counts.map(|(what, count)| format!("{count} {what}")).join(", ");
            let help = format!("give less, so that their product is {MOST_PASSES} at the most");
            return Err(Error::InvalidArgument { what: "the size of a schedule".into(), got, help });
        }
        let actions = (0..ranks).map(|rank| match kind {
            ScheduleKind::Naive => naive::actions(rank, micro_batches),
            ScheduleKind::GPipe => gpipe::actions(rank, micro_batches),
            ScheduleKind::OneFOneB => one_f_one_b::actions(rank, ranks, micro_batches),
            ScheduleKind::Interleaved => interleaved::actions(rank, ranks, stages_per_rank, micro_batches),
            ScheduleKind::LoopedBfs => looped_bfs::actions(rank, ranks, stages_per_rank, micro_batches),
            ScheduleKind::ZbH1 => zb_h1::actions(rank, ranks, micro_batches),
            ScheduleKind::ZbV => zb_v::actions(rank, ranks, micro_batches),
        });
        let actions = actions.collect();
        let owners =
            (0..ranks * stages_per_rank).map(|stage| kind.owner(stage, ranks, stages_per_rank)).collect();
        Ok(Self { owners, micro_batches, actions }.with_messages())
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.actions.len()
    }

    /// Stages, over all ranks.
    pub fn stages(&self) -> usize {
        self.owners.len()
    }

    /// The same without backward.
    pub(crate) fn forward_only(&self) -> Self {
        let is_forward = |action: &&Action| {
            let kinds = [ActionKind::Forward, ActionKind::SendActivation, ActionKind::RecvActivation];
            kinds.contains(&action.kind)
        };
        let actions = self.actions.iter().map(|actions| actions.iter().filter(is_forward).copied().collect());
        Self { actions: actions.collect(), ..self.clone() }
    }

    /// The stage before this one, where it is on another rank.
    pub(crate) fn sender_before(&self, stage: usize) -> Option<usize> {
        let before = stage.checked_sub(1)?;
        (self.owners[before] != self.owners[stage]).then_some(before)
    }

    /// The stage after this one, where it is on another rank.
    pub(crate) fn sender_after(&self, stage: usize) -> Option<usize> {
        let after = stage + 1;
        (after < self.stages() && self.owners[after] != self.owners[stage]).then_some(after)
    }
}

/// A [`Table`] that was proved: every micro-batch goes forward and backward through every stage once, in an order that its
/// data allow, and no rank waits for ever.
///
/// ```
/// use pipeline::{Durations, Schedule, ScheduleKind};
///
/// let schedule = Schedule::of(ScheduleKind::OneFOneB, 4, 1, 8)?;
/// let plan = schedule.plan(&Durations::default());
/// assert!((plan.bubble_fraction() - 3.0 / 11.0).abs() < 1e-12); // (P-1)/(M+P-1)
/// assert_eq!(schedule.live(), [4, 3, 2, 1]); // GPipe would have 8 on every rank
/// # Ok::<(), pipeline::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    table: Table,
    live: Vec<usize>,
}

impl Schedule {
    /// Proves a table.
    ///
    /// # Errors
    /// [`Error::BadTable`]: an action that is missing, there twice or on the wrong rank; ranks that wait for each other, or for
    /// what never comes.
    pub fn new(table: Table) -> Result<Self> {
        check::complete(&table)?;
        let live = check::live(&table);
        // Whether it comes to an end does not depend on how long things take.
        plan::simulate(&table, &Durations::default())?;
        Ok(Self { table, live })
    }

    /// A schedule of one of the known kinds.
    ///
    /// # Errors
    /// Those of [`Table::of`].
    pub fn of(
        kind: ScheduleKind,
        ranks: usize,
        stages_per_rank: usize,
        micro_batches: usize,
    ) -> Result<Self> {
        Self::new(Table::of(kind, ranks, stages_per_rank, micro_batches)?)
    }

    /// The table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// The most activations that are alive at once, by rank: pairs of stage and micro-batch that have gone forward and not yet
    /// all the way backward.
    pub fn live(&self) -> &[usize] {
        &self.live
    }

    /// What happens when, if actions take so long.
    pub fn plan(&self, durations: &Durations) -> Plan {
        // It was proved to come to its end.
        plan::simulate(&self.table, durations).unwrap_or_default()
    }
}
