//! Death announcements: a launcher reports to ranks that are about to meet that one of them has ended, and will not come.
//!
//! It connects to rank 0 in place of the rank that has ended, and reports that; rank 0 tells all others. Where rank 0
//! itself has ended, the launcher answers in its place.

use std::cell::Cell;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::meeting_point::MeetingPoint;
use super::member::hello;
use super::message::{Failure, HELLO_LIMIT, Hello, ToLeader, ToMember};
use super::{Limits, MeetingParams, OwnInfo};
use crate::base::members::Members;
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{Credentials, HandshakeStatus, Purpose, Verdict};
use crate::connection::poll_thread::PollThread;
use crate::connection::wire::{HandshakeStream, wait_any};
use crate::{Error, Result, TcpConfig, Transport};

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);
/// Time limit for the exchange with one rank.
const TIME_LIMIT: Duration = Duration::from_millis(300);

/// Announcement of the end of a rank.
pub struct Announcement {
    /// Configuration of the rank that has ended.
    pub config: TcpConfig,
    /// Host name of that rank.
    pub host: String,
    /// Until when to announce it.
    pub until: Instant,
    /// Becomes readable when the announcement is to stop.
    pub stop: Arc<UnixStream>,
    /// Whether rank 0 ran on this host, and has ended.
    pub leader_has_ended: Arc<AtomicBool>,
}

impl Announcement {
    /// Tells all ranks that come to the meeting point.
    ///
    /// # Errors
    /// A configuration that cannot be used. It is no error that no rank is there: they may have met long ago.
    pub fn make(&self) -> Result<()> {
        let Self { config, until, .. } = self;
        let plan = MeetingParams {
            config,
            bind: Cell::new(config.bind),
            place: MeetingPoint::of(&config.init_method)?,
            limits: Limits::default(),
            started: Instant::now(),
            deadline: *until,
            own: OwnInfo::new(Transport::Tcp),
            credentials: Credentials::of(config)?,
            members: Members::world(config.world_size),
            parent: None,
            regroup_port: 0,
            thread: PollThread::default(),
            agreed: None,
        };
        let death = plan.died(config.rank, self.host.as_str());
        let mut reported = config.rank == 0;
        while Instant::now() < *until && !self.is_stopped_after(PAUSE) {
            reported = reported || self.tell_leader(&plan, &death).is_ok();
            if self.leader_has_ended.load(Ordering::Acquire)
                && let Ok(place) = plan.open_meeting_point(None)
            {
                self.answer_all(&plan, &death, &place.listeners);
            }
        }
        Ok(())
    }

    fn is_stopped_after(&self, time: Duration) -> bool {
        let stop = [(self.stop.as_fd(), PollFlags::IN)];
        wait_any(&stop, Instant::now() + time).map_or(true, |ready| ready[0])
    }

    /// Reports to rank 0 in place of the rank that has ended. Where that rank had registered, rank 0 knows of its end
    /// already.
    fn tell_leader(&self, plan: &MeetingParams<'_>, death: &Error) -> ConnectResult<()> {
        let (addresses, credentials) = plan.find_meeting_point()?;
        let until = self.until.min(Instant::now() + TIME_LIMIT);
        let dial = |address| HandshakeStream::dial(address, Some(self.stop.clone()), until);
        let mut wire =
            addresses.into_iter().find_map(|address| dial(address).ok()).ok_or(ConnectError::Closed)?;
        let verdict = wire.authenticate(&credentials, plan.caller(Purpose::Control), until)?;
        if verdict.rank != 0 || verdict.status != HandshakeStatus::Admitted {
            return Err(ConnectError::NotAwaited);
        }
        wire.send(&hello(plan, 0), until)?;
        wire.send(&ToLeader::Failed(Failure::of(death)), until)?;
        wire.close_gracefully();
        Ok(())
    }

    /// Answers in place of rank 0, one rank after the other, until the time is over or the announcement is to stop.
    fn answer_all(&self, plan: &MeetingParams<'_>, death: &Error, listeners: &[TcpListener]) {
        let mut fds = vec![(self.stop.as_fd(), PollFlags::IN)];
        fds.extend(listeners.iter().map(|listener| (listener.as_fd(), PollFlags::IN)));
        loop {
            let Ok(ready) = wait_any(&fds, self.until) else { return };
            if ready[0] || !ready.contains(&true) {
                return;
            }
            for (listener, _) in listeners.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
                // A rank that cannot be told is no worse off than before.
                let _ = self.answer(plan, death, listener);
            }
        }
    }

    fn answer(&self, plan: &MeetingParams<'_>, death: &Error, listener: &TcpListener) -> ConnectResult<()> {
        let mut wire = HandshakeStream::new(listener.accept()?.0, Some(self.stop.clone()))?;
        let until = self.until.min(Instant::now() + TIME_LIMIT);
        let admission = wire.accept(&plan.credentials, until)?;
        let verdict = Verdict { status: HandshakeStatus::Admitted, rank: 0, world_size: plan.world_size() };
        wire.write(&admission.answer(verdict), until)?;
        wire.receive::<Hello>(HELLO_LIMIT, until)?;
        wire.send(&ToMember::Failed(Failure::of(death)), until)?;
        wire.close_gracefully();
        Ok(())
    }
}
