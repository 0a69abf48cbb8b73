//! The built-in schedules.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Durations;
use crate::{Error, Result};

/// A built-in schedule. Each is in a separate file, with its cost and its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ScheduleKind {
    /// One micro-batch at a time.
    Naive,
    /// All micro-batches forward, then all backward.
    GPipe,
    /// Alternates forward and backward; bounded memory.
    OneFOneB,
    /// 1F1B with several stages per rank.
    Interleaved,
    /// Several stages per rank; all micro-batches run through one before the next.
    LoopedBfs,
    /// 1F1B with backward in two parts: a third of the bubble.
    ZbH1,
    /// Two stages per rank and backward in two parts: no rank is idle between its first action and its last.
    ZbV,
}

impl ScheduleKind {
    /// All built-in schedules.
    pub const ALL: [Self; 7] =
        [Self::Naive, Self::GPipe, Self::OneFOneB, Self::Interleaved, Self::LoopedBfs, Self::ZbH1, Self::ZbV];

    /// Returns its name, which [`FromStr`] parses.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved-1f1b",
            Self::LoopedBfs => "looped-bfs",
            Self::ZbH1 => "zb-h1",
            Self::ZbV => "zb-v",
        }
    }

    /// Returns the default number of stages per rank: 2 if the schedule uses several, else 1.
    pub fn stages_per_rank(self) -> usize {
        match self {
            Self::Interleaved | Self::LoopedBfs | Self::ZbV => 2,
            Self::Naive | Self::GPipe | Self::OneFOneB | Self::ZbH1 => 1,
        }
    }

    pub(super) fn check_stages_per_rank(self, got: usize) -> Result<()> {
        let only = match self {
            Self::Interleaved | Self::LoopedBfs => return Ok(()),
            Self::Naive | Self::GPipe | Self::OneFOneB | Self::ZbH1 | Self::ZbV => self.stages_per_rank(),
        };
        if got == only {
            return Ok(());
        }
        let (what, got) = (format!("stages per rank of {self}"), got.to_string());
        let several = [Self::Interleaved, Self::LoopedBfs].map(Self::name).join(" and ");
        let help = format!("it has {only}; {several} have as many as you like");
        Err(Error::InvalidArgument { what, got, help })
    }

    /// Returns the rank that has a stage: round-robin; for ZB-V in ascending, then descending order.
    pub(super) fn owner(self, stage: usize, ranks: usize, stages_per_rank: usize) -> usize {
        match self {
            Self::ZbV if stage >= ranks => ranks * stages_per_rank - 1 - stage,
            _ => stage % ranks,
        }
    }

    /// Returns the bubble according to the literature ([`Plan::bubble`](crate::Plan::bubble)): how long a rank is idle
    /// between its first action and its last, given the durations of actions, if messages take no time. `None` if the
    /// literature states none: for the number of micro-batches that each schedule requires, see its file.
    ///
    /// ```
    /// use pipeline::{Durations, ScheduleKind};
    ///
    /// let durations = Durations { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, ..Durations::default() };
    /// assert_eq!(ScheduleKind::OneFOneB.bubble(4, 1, 8, &durations), Some(9.0));
    /// assert_eq!(ScheduleKind::ZbH1.bubble(4, 1, 8, &durations), Some(3.0));
    /// ```
    pub fn bubble(
        self,
        ranks: usize,
        stages_per_rank: usize,
        micro_batches: usize,
        durations: &Durations,
    ) -> Option<f64> {
        let &Durations { forward, backward_input: input, backward_weight: weight, message } = durations;
        let (others, both) = ((ranks - 1) as f64, forward + input + weight);
        let even = forward == input && input == weight;
        match self {
            _ if message != 0.0 && ranks > 1 => None,
            Self::Naive => Some(others * micro_batches as f64 * both),
            Self::GPipe | Self::OneFOneB => Some(others * both),
            Self::Interleaved if stages_per_rank == 1 || micro_batches.is_multiple_of(ranks) => {
                Some(others * both)
            }
            Self::LoopedBfs if stages_per_rank == 1 || micro_batches >= ranks => Some(others * both),
            Self::ZbH1 if micro_batches >= ranks && even => Some(others * (forward + input - weight)),
            Self::ZbV if micro_batches >= 2 * ranks - 1 && even => Some(0.0),
            _ => None,
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ScheduleKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let (what, names) = ("the schedule".to_string(), Self::ALL.map(Self::name).join(", "));
            Error::InvalidArgument { what, got: name.into(), help: format!("give one of {names}") }
        })
    }
}
