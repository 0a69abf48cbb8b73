//! Elastic TCP groups: they shrink when ranks are lost, and grow when new ones join.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::base::cause::Cause;
use crate::base::members::Members;
use crate::config::launcher_interface::report_met;
use crate::failure::peer_failures;
use crate::failure::supervisor::Supervisor;
use crate::rendezvous::regroup::{RankAddress, RegroupEndpoint, Regrouped, join};
use crate::rendezvous::{Options, meet_with};
use crate::transport::peer::PeerInfo;
use crate::{Communicator, Elastic, ElasticGroup, Error, Result, TcpConfig};

use super::Tcp;

/// Joins the job's first group, or, as a newcomer, the current one. Either can change later.
pub(super) fn connect(config: &TcpConfig, elastic: &Elastic) -> Result<Tcp> {
    if elastic.newcomer {
        let (endpoint, regrouped) = join(config, elastic)?;
        let group = of_regrouped(endpoint, regrouped)?;
        report_met(&[]);
        return Ok(group);
    }
    config.validate()?;
    // The others reach this rank's listener at the same address.
    let config = &TcpConfig { bind_by_route: false, ..config.clone() };
    let (listener, regroup_port) = RegroupEndpoint::listen(config)?;
    let meeting = meet_with(config, Options { regroup_port, ..Options::default() })?;
    // From here on nothing is needed from the other ranks: if one is lost now, the others continue without it.
    let session = meeting.lines.session;
    // If a later step fails, dropping the group tells the others that this rank leaves.
    let mut group = Tcp::join(config, meeting, Members::world(config.world_size), None)?;
    let endpoint = RegroupEndpoint::open(listener, config, elastic, config.rank, session)?;
    endpoint.set_first_group(&member_cards(&endpoint, group.lines.data_connections.peers())?)?;
    group.endpoint = Some(endpoint);
    report_met(&[]);
    Ok(group)
}

/// Returns every rank's number in the job and the address of its listener, the listener at which ranks regroup.
fn member_cards(endpoint: &RegroupEndpoint, peers: &[PeerInfo]) -> Result<Vec<RankAddress>> {
    let own = endpoint.contact();
    let contact = |(number, peer): (usize, &PeerInfo)| match peer.regroup_port {
        _ if number == own.number => Ok(own.clone()),
        0 => {
            let help = "whether the group may change is the same for all ranks: set it alike on every rank";
            let got = format!("nothing on rank {number} (host {})", peer.host);
            Err(Error::invalid("TcpConfig::elastic (GIRANDOLE_ELASTIC)", got, help))
        }
        port => Ok(RankAddress { number, address: SocketAddr::new(peer.address.ip(), port) }),
    };
    peers.iter().enumerate().map(contact).collect()
}

fn of_regrouped(endpoint: Arc<RegroupEndpoint>, regrouped: Regrouped) -> Result<Tcp> {
    let Regrouped { config, meeting, numbers } = regrouped;
    let mut group = Tcp::join(&config, meeting, Members::subgroup(numbers), None)?;
    group.endpoint = Some(endpoint);
    Ok(group)
}

impl Tcp {
    /// Makes a new group of the remaining ranks, and of waiting newcomers as long as the group has at most `room` ranks.
    /// `what` is the method's name, for errors.
    fn regroup(&self, what: &str, room: usize) -> Result<Arc<dyn Communicator>> {
        self.remaining(what, room).inspect_err(peer_failures::record)
    }

    fn remaining(&self, what: &str, room: usize) -> Result<Arc<dyn Communicator>> {
        let Some(endpoint) = &self.endpoint else {
            let help = "set TcpConfig::elastic (GIRANDOLE_ELASTIC=1) on every rank; groups made by new_group or split do not \
                        change: change the one of all ranks, and create them again";
            return Err(Error::invalid(what, "a group that cannot change", help));
        };
        let failure_state: &dyn Supervisor = &*self.failure_state;
        let blamed = match failure_state.failure() {
            // The cause is not the loss of a rank: the next group would fail in the same way.
            Some(cause @ (Cause::Mismatch { .. } | Cause::Failed { .. } | Cause::Hung)) => {
                return Err(failure_state.error(&cause, what.into()));
            }
            Some(Cause::Died { .. } | Cause::Left { .. } | Cause::Program { .. }) => None,
            // Those that wait for a rank in a group made from this one blame it there.
            None | Some(Cause::InJob { .. }) => self.failure_state.blamed_in_job(),
            Some(cause) => cause.blamed().map(|rank| self.members.world_rank(rank)),
        };
        let own = self.members.world_rank(self.rank);
        if blamed == Some(own) {
            return Err(Error::Excluded { rank: own });
        }
        let group = of_regrouped(endpoint.clone(), endpoint.regroup(blamed.as_slice(), room)?)?;
        let is_gone = |rank: &usize| !group.members.world_ranks().contains(rank);
        let gone: Vec<usize> = self.members.world_ranks().iter().copied().filter(is_gone).collect();
        report_met(&gone);
        Ok(Arc::new(group))
    }
}

impl ElasticGroup for Tcp {
    fn shrink(&self) -> Result<Arc<dyn Communicator>> {
        if self.endpoint.is_some() {
            self.subgroups.abort();
        }
        self.regroup("shrink", 0)
    }

    fn lost(&self) -> Option<Error> {
        let failure_state: &dyn Supervisor = &*self.failure_state;
        let error = failure_state.error(&failure_state.failure()?, "lost".into());
        Some(error).filter(Error::is_loss)
    }

    fn waiting(&self) -> usize {
        self.endpoint.as_ref().map_or(0, |endpoint| endpoint.waiting())
    }

    fn grow(&self, world_size: usize) -> Result<Arc<dyn Communicator>> {
        self.regroup("grow", world_size)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::thread::spawn;
    use std::time::Duration;

    use super::*;
    use crate::Operation;

    fn config(folder: &Path, rank: usize, world_size: usize) -> TcpConfig {
        TcpConfig {
            rank,
            world_size,
            init_method: format!("file://{}", folder.join("meeting").display()).parse().unwrap(),
            timeout: Duration::from_secs(60),
            elastic: Some(Elastic::default()),
            ..TcpConfig::default()
        }
    }

    #[test]
    fn one_that_refuses_the_group_leaves_it() {
        let folder = tempfile::tempdir().unwrap();
        let unchanging = TcpConfig { elastic: None, ..config(folder.path(), 1, 2) };
        let other = spawn(move || Tcp::connect(&unchanging)?.run(Operation::Barrier));
        let refused = Tcp::connect(&config(folder.path(), 0, 2)).unwrap_err();
        assert!(refused.to_string().contains("nothing on rank 1"), "{refused}");
        let error = other.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::PeerLeft { rank: 0, .. }), "{error}");
    }

    /// Rank 2 leaves. Rank 0 hears of it, and rank 1 waits for rank 0 in a group of these two.
    fn shrinks_out_of_a_subgroup(group: Arc<dyn Communicator>) -> Result<Vec<usize>> {
        let pair = group.split((group.rank() < 2).then_some(0), 0)?;
        // Rank 2 must not leave before the others have formed their group.
        group.run(Operation::Barrier)?;
        if group.rank() == 0 {
            while group.run(Operation::Barrier).is_ok() {}
        }
        let Some(pair) = pair else { return Ok(Vec::new()) };
        if group.rank() == 1 {
            let error = pair.run(Operation::Barrier).unwrap_err();
            assert!(error.is_loss(), "{error}");
        }
        let group = group.elastic()?.shrink()?;
        group.run(Operation::Barrier)?;
        Ok(group.world_ranks().to_vec())
    }

    #[test]
    fn no_rank_waits_in_a_subgroup_for_one_that_has_gone_on() {
        let folder = tempfile::tempdir().unwrap();
        let ranks = [0, 1, 2].map(|rank| {
            let config = config(folder.path(), rank, 3);
            spawn(move || shrinks_out_of_a_subgroup(Arc::new(Tcp::connect(&config)?)))
        });
        let left = ranks.map(|rank| rank.join().unwrap().unwrap());
        assert_eq!(left, [vec![0, 1], vec![0, 1], vec![]]);
        let left = crate::Local::run_shared(3, shrinks_out_of_a_subgroup).unwrap();
        assert_eq!(left, [vec![0, 1], vec![0, 1], vec![]]);
    }

    #[test]
    fn one_that_dies_right_after_the_meeting_is_lost_like_any_other() {
        let folder = tempfile::tempdir().unwrap();
        let config = |rank| config(folder.path(), rank, 3);
        let others = [0, 1].map(|rank| {
            let config = config(rank);
            spawn(move || {
                let group = Tcp::connect(&config)?;
                let error = group.run(Operation::Barrier).unwrap_err();
                assert!(error.is_loss(), "{error}");
                let group = group.shrink()?;
                group.run(Operation::Barrier)?;
                Ok::<_, Error>(group.world_ranks().to_vec())
            })
        });
        // Rank 2 takes the first steps of `connect`, up to the rendezvous, and then ends.
        let (listener, regroup_port) = RegroupEndpoint::listen(&config(2)).unwrap();
        drop(meet_with(&config(2), Options { regroup_port, ..Options::default() }).unwrap());
        drop(listener);
        for other in others {
            assert_eq!(other.join().unwrap().unwrap(), [0, 1]);
        }
    }
}
