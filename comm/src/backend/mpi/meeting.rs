//! Rendezvous of an MPI job's ranks: through MPI, each rank sends its host to all others, and rank 0 also its TCP address
//! and the job's secret.

use std::net::{SocketAddr, TcpListener};
use std::time::Instant;

use crate::platform::host_name;
use crate::{Error, InitMethod, Result, Secret, TcpConfig};

use super::handle::MpiHandle;

/// Bytes of a rank's record: longer than any content.
const RECORD: usize = 512;

/// Returns the configuration for the TCP rendezvous, and on rank 0 the listener for it. Every rank must call it.
pub(super) fn arrange(
    config: TcpConfig,
    comm: &MpiHandle,
    deadline: Instant,
) -> Result<(TcpConfig, Option<TcpListener>)> {
    let (listener, invitation) = match config.rank {
        0 => open(&config)?,
        _ => (None, String::new()),
    };
    let reach = if config.bind.to_canonical().is_loopback() { "loopback" } else { "network" };
    let host: String = host_name().chars().filter(|c| !c.is_whitespace()).take(128).collect();
    let mut record = format!("{host} {reach} {invitation}").into_bytes();
    record.resize(RECORD, b' ');
    let records = comm.all_gather(&record, config.world_size, deadline)?;
    let records: Vec<String> =
        records.iter().map(|record| String::from_utf8_lossy(record).into_owned()).collect();
    check_hosts(&records)?;
    Ok((accept(config, &records[0])?, listener))
}

/// Opens the listener on rank 0, and returns the invitation to it; an empty one if that fails, so that the others learn
/// of it.
fn open(config: &TcpConfig) -> Result<(Option<TcpListener>, String)> {
    let opened = TcpListener::bind((config.bind, 0)).and_then(|listener| {
        let port = listener.local_addr()?.port();
        Ok((listener, port))
    });
    let Ok((listener, port)) = opened else { return Ok((None, String::new())) };
    let mut name = [0u8; 8];
    getrandom::fill(&mut name).map_err(|reason| Error::system("random numbers for a name", reason))?;
    let (address, name) = (SocketAddr::new(config.bind, port), u64::from_le_bytes(name));
    Ok((Some(listener), format!("{address} {} mpi-{name:016x}", Secret::random()?.to_hex())))
}

/// Checks that ranks on several hosts do not listen on loopback.
fn check_hosts(records: &[String]) -> Result<()> {
    let field = |record: &String, index| record.split_whitespace().nth(index).unwrap_or_default().to_string();
    let first = records.first().map(|record| field(record, 0)).unwrap_or_default();
    let Some(other) = records.iter().find(|record| field(record, 0) != first) else { return Ok(()) };
    match records.iter().find(|record| field(record, 1) == "loopback") {
        None => Ok(()),
        Some(record) => {
            let got = format!("nothing on host {}", field(record, 0));
            let help = format!(
                "ranks are on several hosts ({first}, {}): set it on each to that host's address in the network that connects them",
                field(other, 0)
            );
            Err(Error::invalid("GIRANDOLE_BIND", got, help))
        }
    }
}

fn accept(config: TcpConfig, record: &str) -> Result<TcpConfig> {
    let words: Vec<&str> = record.split_whitespace().skip(2).collect();
    let [address, secret, job_id] = words[..] else {
        return Err(Error::Listen {
            address: config.bind.to_string(),
            reason: "rank 0 cannot open a meeting point there".into(),
        });
    };
    let address: SocketAddr =
        address.parse().map_err(|_| Error::system("meeting through MPI", "rank 0 sent no address"))?;
    let (host, port) = (address.ip().to_string(), address.port());
    Ok(TcpConfig {
        init_method: InitMethod::Tcp { host, port },
        secret: Some(Secret::from_hex(secret)?),
        job_id: job_id.into(),
        ..config
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_hosts_need_addresses() {
        let told = |records: &[&str]| check_hosts(&records.iter().map(|r| r.to_string()).collect::<Vec<_>>());
        assert!(told(&["a loopback x y z", "a loopback"]).is_ok());
        assert!(told(&["a network x y z", "b network"]).is_ok());
        let message = told(&["a network x y z", "b loopback"]).unwrap_err().to_string();
        assert!(message.contains("GIRANDOLE_BIND: got nothing on host b") && message.contains("(a, b)"));
    }

    #[test]
    fn what_rank_0_tells_is_understood() {
        let (listener, invitation) = open(&TcpConfig::default()).unwrap();
        let config = accept(TcpConfig::default(), &format!("host loopback {invitation}   ")).unwrap();
        let port = listener.unwrap().local_addr().unwrap().port();
        assert_eq!(config.init_method, InitMethod::Tcp { host: "127.0.0.1".into(), port });
        assert!(config.secret.is_some() && config.job_id.starts_with("mpi-"));
        assert!(matches!(accept(TcpConfig::default(), "host loopback  "), Err(Error::Listen { .. })));
    }
}
