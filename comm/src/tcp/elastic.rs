//! Groups that change while they run: smaller when ranks are lost, larger when new ones come.

use std::path::PathBuf;
use std::sync::Arc;

use crate::launch;
use crate::members::Members;
use crate::supervisor::Supervisor;
use crate::verdict::Cause;
use crate::{Communicator, Error, Result, all_gather_object, broadcast_object};

use super::rendezvous::{Lobby, Regrouped, join, meet, random_nonce};
use super::{Tcp, TcpConfig};

/// How a group may change while it runs: [`TcpConfig::elastic`].
///
/// Each rank then listens at one more address, at which the others find it again. On a host with several addresses
/// [`TcpConfig::bind`] must name one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Elastic {
    /// A file that the first rank writes, and whoever takes its place: where ranks that come later find the group. It belongs
    /// to its owner alone. Default: `None`, and nobody comes later.
    pub file: Option<PathBuf>,
    /// This process comes later: it waits until the group that the file names lets it in ([`Communicator::grow`]).
    /// [`TcpConfig::rank`] is then the number by which it is told from all others, one that no rank of the job has had, and
    /// [`TcpConfig::world_size`] is of no account. Default: false.
    pub newcomer: bool,
}

/// A group that can change.
pub(super) fn connect(config: &TcpConfig, elastic: &Elastic) -> Result<Tcp> {
    if elastic.newcomer {
        let (lobby, regrouped) = join(config, elastic)?;
        let group = of_regrouped(lobby, regrouped)?;
        launch::tell_met(&[]);
        return Ok(group);
    }
    let mut group = Tcp::join(config, meet(config)?, Members::world(config.world_size), None)?;
    let nonce = broadcast_object(&group, &random_nonce()?, 0)?;
    let lobby = Lobby::open(config, elastic, config.rank, nonce)?;
    let people = all_gather_object(&group, &lobby.card())?;
    lobby.settle(0, &people)?;
    group.lobby = Some(lobby);
    launch::tell_met(&[]);
    Ok(group)
}

fn of_regrouped(lobby: Arc<Lobby>, regrouped: Regrouped) -> Result<Tcp> {
    let Regrouped { config, meeting, numbers } = regrouped;
    let mut group = Tcp::join(&config, meeting, Members::some(numbers), None)?;
    group.lobby = Some(lobby);
    Ok(group)
}

impl Tcp {
    /// A group of those who are left, and of those who wait, up to `room` ranks.
    pub(super) fn regroup(&self, what: &str, room: usize) -> Result<Arc<dyn Communicator>> {
        let Some(lobby) = &self.lobby else {
            let help = "set TcpConfig::elastic (GIRANDOLE_ELASTIC=1) on every rank; groups made by new_group or split do not \
                        change: change the one of all ranks, and make them anew";
            return Err(Error::invalid(what, "a group that cannot change", help));
        };
        let bureau: &dyn Supervisor = &*self.bureau;
        let blamed = match bureau.failure() {
            // Not the loss of a rank: the next group would fail in the same way.
            Some(cause @ (Cause::Mismatch { .. } | Cause::Failed { .. } | Cause::Hung)) => {
                return Err(bureau.error(&cause, what.into()));
            }
            Some(
                Cause::Stalled { rank, .. } | Cause::Protocol { rank, .. } | Cause::Unreachable { rank, .. },
            ) => Some(self.members.world_rank(rank)),
            Some(Cause::Died { .. } | Cause::Left { .. } | Cause::InJob { .. }) | None => None,
        };
        let own = self.members.world_rank(self.rank);
        if blamed == Some(own) {
            return Err(Error::Excluded { rank: own });
        }
        let group = of_regrouped(lobby.clone(), lobby.regroup(blamed.as_slice(), room)?)?;
        let is_gone = |rank: &usize| !group.members.world_ranks().contains(rank);
        let gone: Vec<usize> = self.members.world_ranks().iter().copied().filter(is_gone).collect();
        launch::tell_met(&gone);
        Ok(Arc::new(group))
    }

    /// Processes that wait to be let in.
    pub(super) fn waiting_ranks(&self) -> usize {
        self.lobby.as_ref().map_or(0, |lobby| lobby.waiting())
    }
}
