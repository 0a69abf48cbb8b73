//! Newcomers: ranks that join a running group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::member::hello;
use super::super::{BackOff, OwnInfo, check_secret, meeting_file};
use super::findings::is_lost;
use super::message::{NO_NUMBER, RegroupRequest};
use super::search::connect;
use super::{Attempt, AttemptError, RegroupEndpoint, RegroupState, Regrouped};
use crate::{Elastic, Error, Result, TcpConfig};

/// Enough for a handshake.
const MIN_ATTEMPT: Duration = Duration::from_millis(100);

/// Asks the group that the file names to admit this rank, and waits until it does.
pub(crate) fn join(config: &TcpConfig, elastic: &Elastic) -> Result<(Arc<RegroupEndpoint>, Regrouped)> {
    let Some(file) = &elastic.file else {
        let help = "a rank that comes later finds the group through the file that was given to the others";
        return Err(Error::invalid("the group's file (GIRANDOLE_ELASTIC_FILE)", "nothing", help));
    };
    config.validate()?;
    check_secret(config, config.bind)?;
    let started = Instant::now();
    let deadline = started + config.bounded_timeout();
    let mut pause = BackOff::new();
    let mut endpoint: Option<Arc<RegroupEndpoint>> = None;
    let mut last: Option<String> = None;
    loop {
        let began = Instant::now();
        if let Some(endpoint) = endpoint.as_ref().filter(|endpoint| endpoint.state().history().is_known()) {
            // This rank has agreed to a group, and the others may have met with it.
            match endpoint.regroup(&[], 0) {
                // They have not: a newer group has met without this rank, which may ask that one.
                Err(Error::Excluded { .. }) if !endpoint.has_met() => endpoint.forget_groups(),
                outcome => return outcome.map(|regrouped| (endpoint.clone(), regrouped)),
            }
        }
        let miss = match meeting_file::read(file, config.secret.is_none()) {
            Ok((address, nonce)) => {
                // The file may have been that of another group at first.
                let endpoint = match endpoint.take().filter(|endpoint| endpoint.nonce == nonce) {
                    Some(known) => endpoint.insert(known),
                    None => {
                        let (listener, _) = RegroupEndpoint::listen(config)?;
                        endpoint.insert(RegroupEndpoint::open(listener, config, elastic, config.rank, nonce)?)
                    }
                };
                match endpoint.request_admission(address, deadline) {
                    Ok(regrouped) => return Ok((endpoint.clone(), regrouped)),
                    Err(AttemptError::Final(error)) => return Err(error),
                    Err(AttemptError::Again(why)) => why,
                }
            }
            Err(reason) => format!("{}: {reason}", file.display()),
        };
        // An attempt that the deadline cuts short says less than the one before it.
        let miss = last.filter(|_| began + MIN_ATTEMPT >= deadline).unwrap_or(miss);
        if Instant::now() >= deadline {
            return Err(Error::Regroup { rank: config.rank, waited: started.elapsed(), detail: miss });
        }
        last = Some(miss);
        pause.pause(deadline);
    }
}

impl RegroupState {
    pub(super) fn request_admission(
        &self,
        address: std::net::SocketAddr,
        deadline: Instant,
    ) -> Attempt<Regrouped> {
        self.state().forget_addresses();
        if address == self.address {
            // The system has given this rank the port of the one that wrote the file, which has ended.
            return Err(AttemptError::Again(format!("the rank that listened at {address} has ended")));
        }
        let config = self.config_as(0, 1);
        let plan = self.plan(&config, &[self.contact()], OwnInfo::new(config.transport), deadline);
        plan.check_secret(address.ip())?;
        let port = plan.reserve_data_port()?;
        let join = RegroupRequest::Join { contact: self.contact(), hello: hello(&plan, port.number()) };
        let (until, own) = (plan.deadline, plan.own);
        let caller = (&self.credentials, NO_NUMBER);
        let mut wire = connect(address, None, caller, &join, until)
            .map_err(|fault| AttemptError::Again(format!("nobody of the group is at {address}: {fault}")))?;
        let probe = RegroupRequest::Probe { number: self.own, generation: 0 };
        let mut still_there = || {
            let until = deadline.min(Instant::now() + self.silence());
            Ok(!connect(address, None, caller, &probe, until).is_err_and(|fault| is_lost(&fault)))
        };
        let first = format!("the first rank of the group, at {address},");
        match self.await_offer(&mut wire, &first, deadline, &mut still_there)? {
            Some(offer) => self.accept_offer(offer, wire, own, port, deadline),
            None => Err(AttemptError::Again(format!("{first} does not lead"))),
        }
    }
}
