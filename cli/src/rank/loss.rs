//! Joining a running job.

use super::{Rank, RankPhase};
use crate::error::{Error, Result};
use crate::options::ElasticRanks;

impl Rank {
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
