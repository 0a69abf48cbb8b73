//! Opening the meeting point on rank 0, and finding it on the other ranks.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

use super::meeting_file::{self, MeetingFile};
use super::meeting_point::{HOST, MeetingPoint};
use super::params::MeetingParams;
use super::store::{PublishedAddress, Store};
use super::{cannot_listen, random_nonce};
use crate::config::scheduler::{self, without_loopback};
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::Credentials;
use crate::{Error, InitMethod, Result, TcpConfig};

/// The meeting point, opened by rank 0.
pub(super) struct OpenMeetingPoint {
    pub(super) listener: TcpListener,
    pub(super) credentials: Credentials,
    /// Removes the file on drop, where there is one.
    pub(super) _file: Option<MeetingFile>,
}

impl MeetingParams<'_> {
    /// Opens the meeting point, on rank 0. `given`: a listener that is already bound.
    pub(super) fn open_meeting_point(&self, given: Option<TcpListener>) -> Result<OpenMeetingPoint> {
        let credentials = self.credentials();
        match &self.place {
            MeetingPoint::Address { host, port } => {
                let addresses = own_addresses(host, *port, self.deadline)?;
                // A rank that is to be reached from other hosts must not listen on loopback here.
                let addresses = match self.config.bind.to_canonical().is_loopback() {
                    true => addresses,
                    false => without_loopback(host, addresses.clone()).unwrap_or(addresses),
                };
                addresses.iter().try_for_each(|address| self.check_secret(address.ip()))?;
                let listener = match given {
                    Some(listener) => {
                        let address = listener
                            .local_addr()
                            .map_err(|reason| Error::system("the meeting point", reason))?;
                        self.check_secret(address.ip())?;
                        listener
                    }
                    None => listen_on_first(&addresses)?,
                };
                Ok(OpenMeetingPoint { listener, credentials, _file: None })
            }
            MeetingPoint::File(path) => {
                self.open_and_publish(|address, nonce| MeetingFile::write(path, address, nonce).map(Some))
            }
            MeetingPoint::Store { host, port, key } => self.open_and_publish(|address, nonce| {
                let found = resolve(host, *port, self.deadline).map_err(ConnectError::Resolve);
                let left = found.and_then(|addresses| {
                    Store::connect(&addresses, self.deadline)?
                        .publish(key, &PublishedAddress { address, nonce })
                });
                left.map(|()| None)
                    .map_err(|fault| self.failed(format!("nothing can be left there: {fault}")))
            }),
        }
    }

    /// Opens a meeting point at any free port; `tell` publishes its address and nonce.
    fn open_and_publish(
        &self,
        tell: impl FnOnce(SocketAddr, [u8; 32]) -> Result<Option<MeetingFile>>,
    ) -> Result<OpenMeetingPoint> {
        check_specific_address(self.config)?;
        let (listener, port) = self.listen_for_data()?;
        let nonce = random_nonce()?;
        let file = tell(SocketAddr::new(self.config.bind, port), nonce)?;
        Ok(OpenMeetingPoint { listener, credentials: self.credentials().bound_to(&nonce), _file: file })
    }

    /// Looks up where rank 0 may be, on another rank; called for each attempt.
    pub(super) fn find_meeting_point(&self) -> ConnectResult<(Vec<SocketAddr>, Credentials)> {
        let credentials = self.credentials();
        match &self.place {
            MeetingPoint::Address { host, port } => {
                Ok((resolve(host, *port, self.deadline).map_err(ConnectError::Resolve)?, credentials))
            }
            MeetingPoint::File(path) => {
                let (address, nonce) =
                    meeting_file::read(path, self.config.secret.is_none()).map_err(ConnectError::File)?;
                Ok((vec![address], credentials.bound_to(&nonce)))
            }
            MeetingPoint::Store { host, port, key } => {
                let addresses = resolve(host, *port, self.deadline).map_err(ConnectError::Resolve)?;
                let until = self.deadline.min(Instant::now() + self.limits.handshake);
                let word = Store::connect(&addresses, until)?.lookup(key)?;
                let nothing = || ConnectError::File("rank 0 has not left word there yet".into());
                let PublishedAddress { address, nonce } = word.ok_or_else(nothing)?;
                Ok((vec![address], credentials.bound_to(&nonce)))
            }
        }
    }
}

/// Opens what rank 0 of a configuration will open, except what its launcher opens, and closes it again.
pub(crate) fn check_can_open(config: &TcpConfig) -> Result<()> {
    let address = SocketAddr::new(config.bind, 0);
    TcpListener::bind(address).map_err(|reason| cannot_listen(address, reason))?;
    match &config.init_method {
        InitMethod::Env => Ok(()),
        InitMethod::Tcp { host, port } => {
            let deadline = Instant::now() + config.bounded_timeout();
            listen_on_first(&own_addresses(host, *port, deadline)?).map(drop)
        }
        InitMethod::File(path) => {
            check_specific_address(config)?;
            MeetingFile::write(path, address, random_nonce()?).map(drop)
        }
    }
}

/// Fails where this rank listens on all addresses of its host: only one can be published.
fn check_specific_address(config: &TcpConfig) -> Result<()> {
    match config.bind.is_unspecified() {
        false => Ok(()),
        true => {
            let help = "give the one address by which the other ranks reach this host";
            Err(Error::invalid("bind (GIRANDOLE_BIND)", config.bind, help))
        }
    }
}

/// Returns the addresses of the meeting point's host, which is this one.
fn own_addresses(host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>> {
    resolve(host, port, deadline)
        .map_err(|reason| Error::invalid(HOST, host, format!("{reason}; give an address of this host")))
}

fn resolve(host: &str, port: u16, deadline: Instant) -> std::result::Result<Vec<SocketAddr>, String> {
    match scheduler::addresses(host, port, deadline) {
        Ok(addresses) if !addresses.is_empty() => Ok(addresses),
        Ok(_) => Err(format!("the name {host} has no address")),
        Err(reason) => Err(format!("the name {host} has no address ({reason})")),
    }
}

/// Listens on the first address that belongs to this host. A port in use is an error, since the others would connect
/// there.
fn listen_on_first(addresses: &[SocketAddr]) -> Result<TcpListener> {
    for &address in addresses {
        match TcpListener::bind(address) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {}
            other => return other.map_err(|reason| cannot_listen(address, reason)),
        }
    }
    let names: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
    // Another port would not help.
    let help = "this host has no such address; give an address of the host of rank 0";
    Err(Error::invalid(HOST, names.join(", "), help))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_not_this_hosts_is_skipped() {
        let foreign: SocketAddr = "192.0.2.1:0".parse().unwrap();
        let own: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let message = listen_on_first(&[foreign]).unwrap_err().to_string();
        assert!(message.contains("got 192.0.2.1:0; this host has no such address"), "{message}");
        assert!(!message.contains("another port"), "{message}");
        assert!(listen_on_first(&[foreign, own]).unwrap().local_addr().unwrap().ip().is_loopback());
    }

    #[test]
    fn a_port_in_use_is_an_error_at_once() {
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = listen_on_first(&[holder.local_addr().unwrap()]).unwrap_err();
        assert!(matches!(error, Error::Listen { .. }), "{error}");
    }
}
