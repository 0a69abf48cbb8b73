//! Loss of ranks before a rank has the run's state: before the first step, or before a newcomer has received the state.

use comm::{Communicator, all_gather_object};

use crate::console::note;
use crate::error::{Error, Result};
use crate::options::ElasticRanks;
use crate::rank::{Rank, RankPhase};
use strategy::checkpoint::transfer;

use super::checkpoint::RunState;

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
    if rank.phase == RankPhase::New && !matches!(error, Error::RestartFromBeginning) {
        let lost = rank.shrink(elastic, error)?;
        match rank.join_running(elastic, Some(lost), |rank, _| take_part(&*rank.comm)) {
            Err(restart @ Error::RestartFromBeginning) => error = restart,
            joined => return joined,
        }
    }
    if matches!(error, Error::RestartFromBeginning) {
        // Some rank had not begun training, or no rank has the state; all ranks learned that in the same all-gather.
        (rank.phase, rank.newcomer) = (RankPhase::Prepared, false);
        return Ok(());
    }
    if rank.newcomer || rank.phase >= RankPhase::AtWork {
        return Err(error);
    }
    rank.after_loss(elastic, error, |rank, _, lost| {
        let phases = rank.exchange_phases()?;
        rank.phase = phases.into_iter().max().unwrap_or(rank.phase).min(RankPhase::Prepared);
        if rank.is_first() {
            let left = rank.comm.world_size();
            note(format_args!("{lost}; {left} of the ranks start again, before the first step"));
        }
        Ok(())
    })
}

/// Takes part in the collectives that precede sending the state to newcomers.
fn take_part(comm: &dyn Communicator) -> Result<()> {
    let steps: Vec<Option<usize>> = all_gather_object(comm, &None)?;
    let Some(ahead) = ahead(&steps) else { return Ok(()) };
    if RunState::broadcast(comm, None, ahead)?.is_some() {
        transfer(comm, None, false, None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use comm::{Local, Operation};

    use super::*;

    const RANGE: ElasticRanks = ElasticRanks { min: 1, max: 4 };

    /// Does what a rank with the state does, after `step` steps.
    fn hand_over(comm: &dyn Communicator, step: usize) -> Result<()> {
        all_gather_object(comm, &RankPhase::AtWork)?;
        let steps = all_gather_object(comm, &Some(step))?;
        let root = ahead(&steps).unwrap_or_default();
        RunState::broadcast(comm, (comm.rank() == root).then(RunState::default), root)?;
        transfer(comm, None, false, None)?;
        Ok(())
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
                    rank.phase = RankPhase::New;
                    if let Err(error) = restart_before_first_step(&mut rank, Some(RANGE), lost.into()) {
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
