//! Shrinking a group of threads: the remaining ranks form a new group.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use crate::base::lock;
use crate::base::members::Members;
use crate::failure::diagnosis::Question;
use crate::{Communicator, ElasticGroup, Error, Result, Topology};

use super::Local;
use super::shared::LocalGroup;

impl ElasticGroup for Local {
    fn shrink(&self) -> Result<Arc<dyn Communicator>> {
        self.subgroups.abort();
        let (shared, started) = (&self.shared, Instant::now());
        let timeout = shared.config().timeout;
        let mut gathering = lock(&shared.gathering);
        gathering.here.insert(self.rank);
        loop {
            // Ranks that wait in this group for one that is here, and not for the lost one, continue in the next, too.
            let _ = self.lost();
            if let Some((group, ranks)) = &gathering.made {
                let Some(place) = ranks.iter().position(|rank| *rank == self.rank) else {
                    return Err(Error::Excluded { rank: self.members.world_rank(self.rank) });
                };
                let members = Members::subgroup(ranks.iter().map(|rank| self.members.world_rank(*rank)));
                return Ok(Arc::new(Self::member(place, group, members, Topology::one_host(ranks.len()))));
            }
            let missing = shared.present().find(|rank| !gathering.here.contains(rank));
            let Some(missing) = missing else {
                let ranks: Vec<usize> = shared.present().collect();
                let group = Arc::new(LocalGroup::new(ranks.len(), shared.config()));
                gathering.made = Some((group, ranks));
                shared.gathered.notify_all();
                continue;
            };
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                let detail = format!("rank {missing} is there, and does not come to meet the others");
                let (rank, waited) = (self.members.world_rank(self.rank), started.elapsed());
                gathering.here.remove(&self.rank);
                return Err(Error::Regroup { rank, waited, detail });
            }
            gathering =
                shared.gathered.wait_timeout(gathering, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lost(&self) -> Option<Error> {
        let supervisor = self.shared.supervisor(self.rank, self.members.clone());
        let gone = || {
            let is_present = |rank: &usize| self.shared.present().any(|other| other == *rank);
            let peer = (0..self.shared.world_size()).find(|rank| !is_present(rank))?;
            // The group fails with the cause, on all ranks.
            supervisor.ask(Question::Lost { peer, left: true, because: None })
        };
        let cause = supervisor.failure().or_else(gone)?;
        Some(supervisor.error(&cause, "lost".into())).filter(Error::is_loss)
    }

    /// Always 0: no thread can join later.
    fn waiting(&self) -> usize {
        0
    }

    fn grow(&self, _: usize) -> Result<Arc<dyn Communicator>> {
        Err(Error::not_elastic("grow", self.backend()))
    }
}
