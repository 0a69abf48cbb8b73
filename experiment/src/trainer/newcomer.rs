//! Loss of ranks before a rank has the run's state: before the first step, or before a newcomer has received the state.

use comm::all_gather_object;

use crate::console::note;
use crate::error::{Error, Result};
use crate::options::ElasticRanks;
use crate::rank::{Rank, RankPhase};

use super::share;

/// Returns the first rank with the most completed steps, if the ranks differ. `None` in `steps` marks a rank without
/// state, which is ignored.
pub(super) fn ahead(steps: &[Option<usize>]) -> Option<usize> {
    let most = steps.iter().flatten().max()?;
    let differ = steps.iter().flatten().any(|step| step != most);
    steps.iter().position(|step| step.as_ref() == Some(most)).filter(|_| differ)
}

/// Handles the loss of a rank before the first step: the remaining ranks, if enough, form a group again and start
/// from the beginning. Any other error is returned.
pub(crate) fn restart_before_first_step(
    rank: &mut Rank,
    elastic: Option<ElasticRanks>,
    mut error: Error,
) -> Result<()> {
    if rank.stage == RankPhase::New {
        return join_again(rank, elastic, error);
    }
    loop {
        if matches!(error, Error::RestartFromBeginning) {
            // Some rank had not begun training; all ranks learned that in the same all-gather.
            rank.stage = RankPhase::Told;
            return Ok(());
        }
        if rank.newcomer || rank.stage >= RankPhase::AtWork {
            return Err(error);
        }
        let lost = rank.shrink(elastic, error)?;
        error = match rank.exchange_phases() {
            Ok(stages) => {
                rank.stage = stages.into_iter().max().unwrap_or(rank.stage).min(RankPhase::Told);
                if rank.is_first() {
                    let left = rank.comm.world_size();
                    note(format_args!("{lost}; {left} of the ranks start again, before the first step"));
                }
                return Ok(());
            }
            Err(error) => error,
        };
    }
}

impl Rank {
    /// Runs `join` on a rank that joins a running job, after an exchange of phases: in the current group, and again in
    /// that of the ranks that are left each time that one is lost meanwhile.
    ///
    /// # Errors
    /// Too few ranks are left; any other error of `join`.
    pub fn join_running<T>(
        &mut self,
        elastic: Option<ElasticRanks>,
        mut join: impl FnMut(&Self) -> Result<T>,
    ) -> Result<T> {
        loop {
            match self.exchange_phases().and_then(|_| join(self)) {
                Err(error) => drop(self.shrink(elastic, error)?),
                joined => return joined,
            }
        }
    }
}

/// Joins the remaining ranks after the loss of a rank, as a newcomer that still has to receive the state.
fn join_again(rank: &mut Rank, elastic: Option<ElasticRanks>, mut error: Error) -> Result<()> {
    loop {
        let lost = rank.shrink(elastic, error)?;
        error = match join_state_exchange(rank) {
            Ok(true) => return Ok(()),
            // All ranks that had the state are lost.
            Ok(false) => return Err(lost.into()),
            Err(error) => error,
        };
    }
}

/// Takes part in the collectives that precede sending the state to newcomers; returns whether any rank has the state.
fn join_state_exchange(rank: &mut Rank) -> Result<bool> {
    if rank.exchange_phases()?.iter().all(|stage| *stage == RankPhase::New) {
        return Ok(false);
    }
    let steps: Vec<Option<usize>> = all_gather_object(&*rank.comm, &None)?;
    if let Some(ahead) = ahead(&steps) {
        share::share(&*rank.comm, None, ahead)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use comm::{Communicator, Local, Operation};
    use training::Checkpoint;

    use super::*;

    const RANGE: ElasticRanks = ElasticRanks { min: 1, max: 4 };

    /// Does what a rank with the state does, after `step` steps.
    fn hand_over(comm: &dyn Communicator, step: usize) -> Result<()> {
        all_gather_object(comm, &RankPhase::AtWork)?;
        let steps = all_gather_object(comm, &Some(step))?;
        let root = ahead(&steps).unwrap_or_default();
        let tensors = [("model".to_string(), Default::default())].into();
        let (epoch, sampler, extra) = (0, 0.into(), 0.into());
        let checkpoint = Checkpoint { epoch, step: step as u64, sampler, extra, tensors };
        share::share(comm, (comm.rank() == root).then_some(checkpoint), root).map(drop)
    }

    #[test]
    fn a_newcomer_that_has_no_state_goes_on_with_those_that_have_it() {
        for with_state in [2, 0] {
            // The last rank is lost after the first barrier.
            let outcomes = Local::run_shared(4, |mut comm| {
                if comm.rank() == 3 {
                    return comm.run(Operation::Barrier).map(|()| None);
                }
                // Even the first barrier may fail here, if another rank has already found the loss in its second one.
                let lost = loop {
                    if let Err(error) = comm.run(Operation::Barrier) {
                        break error;
                    }
                };
                if comm.rank() < with_state {
                    comm = comm.elastic()?.shrink()?;
                    hand_over(&*comm, 7 + comm.rank()).map_err(|e| candle_core::Error::msg(e.to_string()))?;
                } else {
                    let mut rank = Rank::from_comm(comm, &candle_core::Device::Cpu);
                    rank.stage = RankPhase::New;
                    if let Err(error) = join_again(&mut rank, Some(RANGE), lost.into()) {
                        return Ok(Some(Err(error.to_string())));
                    }
                    comm = rank.comm;
                }
                // All ranks have made the same calls, so a collective works.
                comm.run(Operation::Barrier)?;
                Ok(Some(Ok(comm.world_ranks().to_vec())))
            });
            for outcome in outcomes.unwrap().into_iter().flatten() {
                match with_state {
                    0 => assert!(outcome.unwrap_err().contains("rank 3")),
                    _ => assert_eq!(outcome.unwrap(), [0, 1, 2]),
                }
            }
        }
    }

    #[test]
    fn one_that_has_no_state_is_not_behind() {
        assert_eq!(ahead(&[Some(3), None, Some(3)]), None);
        assert_eq!(ahead(&[Some(3), None, Some(4), Some(4)]), Some(2));
        assert_eq!(ahead(&[None, None]), None);
    }
}
