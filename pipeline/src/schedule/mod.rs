//! Schedules as data: for each rank a list of actions, created by pure functions and verified before anything runs.

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

/// Which rank performs which actions, in which order. Tables can be written by hand; [`Schedule::new`] verifies them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The rank of each stage, by stage.
    pub owners: Vec<usize>,
    /// Number of micro-batches in a batch.
    pub micro_batches: usize,
    /// Actions of each rank, by rank.
    pub actions: Vec<Vec<Action>>,
}

/// Maximum number of ranks times stages per rank times micro-batches.
const MOST_PASSES: usize = 1 << 20;

impl Table {
    /// Creates the table of a built-in schedule, with the messages between ranks.
    ///
    /// # Errors
    /// A count of 0, a number of stages per rank that the schedule does not support, or counts whose product exceeds 2^20.
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

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.actions.len()
    }

    /// Returns the number of stages, over all ranks.
    pub fn stages(&self) -> usize {
        self.owners.len()
    }

    /// Returns the table without backward.
    pub(crate) fn forward_only(&self) -> Self {
        let is_forward = |action: &&Action| {
            let kinds = [ActionKind::Forward, ActionKind::SendActivation, ActionKind::RecvActivation];
            kinds.contains(&action.kind)
        };
        let actions = self.actions.iter().map(|actions| actions.iter().filter(is_forward).copied().collect());
        Self { actions: actions.collect(), ..self.clone() }
    }

    /// Returns the previous stage, if it is on another rank.
    pub(crate) fn sender_before(&self, stage: usize) -> Option<usize> {
        let before = stage.checked_sub(1)?;
        (self.owners[before] != self.owners[stage]).then_some(before)
    }

    /// Returns the next stage, if it is on another rank.
    pub(crate) fn sender_after(&self, stage: usize) -> Option<usize> {
        let after = stage + 1;
        (after < self.stages() && self.owners[after] != self.owners[stage]).then_some(after)
    }
}

/// A verified [`Table`]: every micro-batch runs forward and backward through every stage once, in an order that respects data
/// dependencies, and no rank waits indefinitely.
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
    /// Verifies a table.
    ///
    /// # Errors
    /// [`Error::BadTable`]: an action that is missing, duplicated or on the wrong rank; ranks that deadlock, or wait for a
    /// message that is never sent.
    pub fn new(table: Table) -> Result<Self> {
        check::complete(&table)?;
        let live = check::live(&table);
        // Termination does not depend on the durations.
        plan::simulate(&table, &Durations::default())?;
        Ok(Self { table, live })
    }

    /// Creates a built-in schedule.
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

    /// Returns the table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the largest number of activations that are alive at once, by rank: pairs of stage and micro-batch that have
    /// run forward and whose backward is not complete.
    pub fn live(&self) -> &[usize] {
        &self.live
    }

    /// Computes the times of all actions, given their durations.
    pub fn plan(&self, durations: &Durations) -> Plan {
        // It has been verified that it terminates.
        plan::simulate(&self.table, durations).unwrap_or_default()
    }
}
