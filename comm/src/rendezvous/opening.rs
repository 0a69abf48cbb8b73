//! Opening the meeting point on rank 0, and finding it on the other ranks.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Instant;

use super::meeting_file::{self, MeetingFile};
use super::meeting_point::{HOST, MeetingPoint};
use super::params::MeetingParams;
use super::store::{PublishedAddress, Store};
use super::{cannot_listen, listen, random_nonce};
use crate::config::scheduler::{self, check_loopback, without_loopback};
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::Credentials;
use crate::{Error, InitMethod, Result, TcpConfig};

/// The meeting point, opened by rank 0.
pub(super) struct OpenMeetingPoint {
    /// One for each address of the meeting point that is this host's.
    pub(super) listeners: Vec<TcpListener>,
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
                let listeners = match given {
                    Some(listener) => {
                        let address = listener
                            .local_addr()
                            .map_err(|reason| Error::system("the meeting point", reason))?;
                        self.check_secret(address.ip())?;
                        vec![listener]
                    }
                    None => listen_on_own(&addresses, forwarded_to(self.config))?,
                };
                Ok(OpenMeetingPoint { listeners, credentials, _file: None })
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
        Ok(OpenMeetingPoint {
            listeners: vec![listener],
            credentials: self.credentials().bound_to(&nonce),
            _file: file,
        })
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
    listen(address)?;
    check_loopback(config.bind)?;
    match &config.init_method {
        InitMethod::Env => Ok(()),
        InitMethod::Tcp { host, port } => {
            let deadline = Instant::now() + config.bounded_timeout();
            listen_on_own(&own_addresses(host, *port, deadline)?, forwarded_to(config)).map(drop)
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

/// Returns the address on which rank 0 listens where the meeting point's is that of a service or router, which forwards
/// connections to this host: the one that the user has chosen.
fn forwarded_to(config: &TcpConfig) -> Option<IpAddr> {
    Some(config.bind).filter(|ip| !config.bind_by_route && !ip.to_canonical().is_loopback())
}

/// Listens on each address that belongs to this host; if none does, on `forwarded_to`. A port in use is an error, since the
/// others would connect there.
fn listen_on_own(addresses: &[SocketAddr], forwarded_to: Option<IpAddr>) -> Result<Vec<TcpListener>> {
    let mut listeners = Vec::new();
    for (at, &address) in addresses.iter().enumerate() {
        if addresses[..at].contains(&address) {
            continue;
        }
        match TcpListener::bind(address) {
            Err(error) if is_of_another_host(&error) => {}
            Err(reason) => return Err(cannot_listen(address, reason)),
            Ok(listener) => listeners.push(listener),
        }
    }
    match (forwarded_to, addresses.first()) {
        _ if !listeners.is_empty() => Ok(listeners),
        (Some(ip), Some(address)) => Ok(vec![listen(SocketAddr::new(ip, address.port()))?]),
        _ => {
            let names: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
            // Another port would not help.
            let help = "this host has no such address; give an address of the host of rank 0, or, where a service or router \
                        forwards connections to it, set GIRANDOLE_BIND there to the address to listen on";
            Err(Error::invalid(HOST, names.join(", "), help))
        }
    }
}

/// Whether an address cannot be listened on because this host does not have it, or no address of its kind.
fn is_of_another_host(error: &std::io::Error) -> bool {
    let unsupported = rustix::io::Errno::AFNOSUPPORT.raw_os_error();
    error.kind() == ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(unsupported)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listen_on(addresses: &[SocketAddr]) -> Result<Vec<SocketAddr>> {
        let listeners = listen_on_own(addresses, None)?;
        Ok(listeners.iter().map(|listener| listener.local_addr().unwrap()).collect())
    }

    #[test]
    fn all_addresses_that_are_this_hosts_are_listened_on() {
        let foreign: SocketAddr = "192.0.2.1:0".parse().unwrap();
        let own = ["127.0.0.1:0", "127.0.0.2:0"].map(|text| text.parse::<SocketAddr>().unwrap());
        let message = listen_on(&[foreign]).unwrap_err().to_string();
        assert!(message.contains("got 192.0.2.1:0; this host has no such address"), "{message}");
        assert!(!message.contains("another port"), "{message}");
        let listening = listen_on(&[foreign, own[0], own[1], own[0]]).unwrap();
        let ips: Vec<_> = listening.iter().map(SocketAddr::ip).collect();
        assert_eq!(ips, own.map(|address| address.ip()));
    }

    #[test]
    fn connections_that_are_forwarded_come_to_the_chosen_address() {
        let service: SocketAddr = "192.0.2.1:0".parse().unwrap();
        let chosen: IpAddr = "127.0.0.2".parse().unwrap();
        let listening = listen_on_own(&[service], Some(chosen)).unwrap();
        assert_eq!(listening.len(), 1);
        assert_eq!(listening[0].local_addr().unwrap().ip(), chosen);
        // Loopback is the default, and what a route suggests is not chosen either.
        let config = |bind, bind_by_route| TcpConfig { bind, bind_by_route, ..TcpConfig::default() };
        let other: IpAddr = "192.0.2.7".parse().unwrap();
        assert_eq!(forwarded_to(&config(other, false)), Some(other));
        assert_eq!(forwarded_to(&config(other, true)), None);
        assert_eq!(forwarded_to(&TcpConfig::default()), None);
    }

    #[test]
    fn a_port_in_use_is_an_error_at_once() {
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = listen_on(&[holder.local_addr().unwrap()]).unwrap_err();
        assert!(matches!(error, Error::Listen { .. }), "{error}");
    }
}
