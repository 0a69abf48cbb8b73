//! What a lost rank means to a rank of a command: whether it goes on with those that are left, and what all of them do then. Until
//! training begins, `trainer/newcomer.rs` starts again; a language model being trained decides in `girandole::trainer`.

use comm::{Communicator, all_gather_object};

use super::{Rank, RankPhase};
use crate::error::{Error, Result};
use crate::options::ElasticRanks;

impl Rank {
    /// Continues in a group of the ranks that are left after a loss, if they are enough, and returns the loss. Any other
    /// error is returned as it is.
    pub(crate) fn shrink(&mut self, elastic: Option<ElasticRanks>, error: Error) -> Result<comm::Error> {
        let (Some(ElasticRanks { min, .. }), Some(lost)) = (elastic, error.rank_loss().cloned()) else {
            return Err(error);
        };
        self.comm = self.comm.elastic()?.shrink()?;
        let left = self.comm.world_size();
        // Before the first step no rank is admitted.
        let is_open =
            self.newcomers_within.is_some() && !matches!(self.phase, RankPhase::Joined | RankPhase::Prepared);
        if left < min && !is_open {
            return Err(Error::TooFewRanks { left, min, lost });
        }
        Ok(lost)
    }

    /// Goes on after the loss of a rank: calls `go_on` in the group of the ranks that are left, with the group before and the
    /// loss, and again each time that a rank is lost in it.
    ///
    /// # Errors
    /// Those of `shrink`: too few ranks are left, or an error that is no loss, of `go_on` too.
    pub(crate) fn after_loss<T>(
        &mut self,
        elastic: Option<ElasticRanks>,
        mut error: Error,
        mut go_on: impl FnMut(&mut Self, &dyn Communicator, &comm::Error) -> Result<T>,
    ) -> Result<T> {
        loop {
            let before = self.comm.clone();
            let lost = self.shrink(elastic, error)?;
            match go_on(self, &*before, &lost) {
                Err(next) => error = next,
                outcome => return outcome,
            }
        }
    }

    /// Exchanges the phases of all ranks after a loss, and takes the furthest one if training is over.
    pub(crate) fn exchange_phases(&mut self) -> Result<Vec<RankPhase>> {
        let phases: Vec<RankPhase> = all_gather_object(&*self.comm, &self.phase)?;
        let over = phases.iter().copied().filter(|phase| *phase >= RankPhase::Trained);
        self.phase = over.max().unwrap_or(self.phase);
        Ok(phases)
    }

    /// Runs `join` on a rank that joins a running job, after an exchange of phases: in the current group, and again in
    /// that of the ranks that are left each time that one is lost meanwhile. `join` is given the latest loss, which is
    /// `lost` at first.
    ///
    /// # Errors
    /// Too few ranks are left, or none that has the state; [`Error::RestartFromBeginning`] if some rank begins the
    /// training anew; any other error of `join`.
    pub fn join_running<T>(
        &mut self,
        elastic: Option<ElasticRanks>,
        mut lost: Option<comm::Error>,
        mut join: impl FnMut(&Self, Option<&comm::Error>) -> Result<T>,
    ) -> Result<T> {
        loop {
            let joined = match (self.exchange_phases(), &lost) {
                (Ok(phases), _) if phases.iter().any(|phase| phase.is_before_training()) => {
                    return Err(Error::RestartFromBeginning);
                }
                (Ok(phases), Some(lost)) if phases.iter().all(|phase| *phase == RankPhase::New) => {
                    return Err(lost.clone().into());
                }
                (Ok(_), lost) => join(self, lost.as_ref()),
                (Err(error), _) => Err(error),
            };
            match joined {
                Err(error) => lost = Some(self.shrink(elastic, error)?),
                joined => return joined,
            }
        }
    }
}
