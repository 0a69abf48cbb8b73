//! Newcomers: ranks that join a running group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::member::hello;
use super::super::{BackOff, Own, check_secret, meeting_file};
use super::message::{Knock, NOBODY};
use super::search::{is_lost, knock};
use super::{Attempt, Hall, Lobby, Miss, Regrouped};
use crate::{Elastic, Error, Result, TcpConfig};

/// Enough for a handshake.
const SHORT: Duration = Duration::from_millis(100);

/// Asks the group that the file names to admit this rank, and waits until it does.
pub(crate) fn join(config: &TcpConfig, elastic: &Elastic) -> Result<(Arc<Lobby>, Regrouped)> {
    let Some(file) = &elastic.file else {
        let help = "a rank that comes later finds the group through the file that was given to the others";
        return Err(Error::invalid("the group's file (GIRANDOLE_ELASTIC_FILE)", "nothing", help));
    };
    config.validate()?;
    check_secret(config, config.bind)?;
    let started = Instant::now();
    let deadline = started + config.bounded_timeout();
    let mut pause = BackOff::new();
    let mut lobby: Option<Arc<Lobby>> = None;
    let mut last: Option<String> = None;
    loop {
        let began = Instant::now();
        if let Some(lobby) = lobby.as_ref().filter(|lobby| lobby.state().history.is_known()) {
            // This rank has agreed to a group, and the others may have met with it.
            return lobby.regroup(&[], 0).map(|regrouped| (lobby.clone(), regrouped));
        }
        let miss = match meeting_file::read(file, config.secret.is_none()) {
            Ok((door, nonce)) => {
                // The file may have been that of another group at first.
                let lobby = match lobby.take().filter(|lobby| lobby.nonce == nonce) {
                    Some(known) => lobby.insert(known),
                    None => {
                        let (listener, _) = Lobby::listen(config)?;
                        lobby.insert(Lobby::open(listener, config, elastic, config.rank, nonce)?)
                    }
                };
                match lobby.ask_at(door, deadline) {
                    Ok(regrouped) => return Ok((lobby.clone(), regrouped)),
                    Err(Miss::Final(error)) => return Err(error),
                    Err(Miss::Again(why)) => why,
                }
            }
            Err(reason) => format!("{}: {reason}", file.display()),
        };
        // An attempt that the deadline cuts short says less than the one before it.
        let miss = last.filter(|_| began + SHORT >= deadline).unwrap_or(miss);
        if Instant::now() >= deadline {
            return Err(Error::Regroup { rank: config.rank, waited: started.elapsed(), detail: miss });
        }
        last = Some(miss);
        pause.pause(deadline);
    }
}

impl Hall {
    fn ask_at(&self, door: std::net::SocketAddr, deadline: Instant) -> Attempt<Regrouped> {
        self.state().doors.clear();
        let config = self.config_as(0, 1);
        let plan = self.plan(&config, &[self.card()], Own::new(config.transport), deadline);
        plan.check_secret(door.ip())?;
        let (listener, port) = plan.listen_for_data()?;
        let join = Knock::Join { card: self.card(), hello: hello(&plan, port) };
        let (until, own) = (plan.deadline, plan.own);
        let caller = (&self.credentials, NOBODY);
        let mut wire = knock(door, None, caller, &join, until)
            .map_err(|fault| Miss::Again(format!("nobody of the group is at {door}: {fault}")))?;
        let probe = Knock::Probe { number: self.own, generation: 0 };
        let mut still_there = || {
            let until = deadline.min(Instant::now() + self.silence());
            Ok(!knock(door, None, caller, &probe, until).is_err_and(|fault| is_lost(&fault)))
        };
        let first = format!("the first rank of the group, at {door},");
        match self.await_seat(&mut wire, &first, deadline, &mut still_there)? {
            Some(seat) => self.take_seat(seat, wire, own, listener, deadline),
            None => Err(Miss::Again(format!("{first} does not lead"))),
        }
    }
}
