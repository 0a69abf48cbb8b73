//! What a rank must know to join its group over TCP.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;
use std::time::Duration;

use super::init_method::{is_host, parse_port};
use super::{InitMethod, Secret, Tls, Transport};
use crate::{Error, Result};

/// Rank 0 holds a control connection to every other rank.
const MAX_WORLD_SIZE: usize = 4096;
/// Longer than any run; keeps the arithmetic on points in time within its bounds.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// What a rank must know to join its group over TCP.
///
/// ```
/// use comm::{InitMethod, TcpConfig};
///
/// let config = TcpConfig {
///     rank: 1,
///     world_size: 2,
///     init_method: "tcp://127.0.0.1:29500".parse()?,
///     ..TcpConfig::default()
/// };
/// assert_eq!(config.timeout.as_secs(), 300);
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TcpConfig {
    /// This process's number, from 0 to `world_size - 1`. Default 0.
    pub rank: usize,
    /// Number of ranks, 1 to 4096. Default 1, which opens no connection at all.
    pub world_size: usize,
    /// Where the ranks meet. Default `env://`.
    pub init_method: InitMethod,
    /// The address on which this rank listens for the others. Default 127.0.0.1, which only ranks of the same host can
    /// reach. With ranks on several hosts: this host's address in the network that connects them.
    pub bind: IpAddr,
    /// How long meeting, and later each operation, may take. Default 300 s; more than a year counts as a year.
    pub timeout: Duration,
    /// How long to wait before a warning says for whom. Default 30 s.
    pub slow_warning: Duration,
    /// What the ranks prove to each other. Without one (the default) every user of this host may join, and addresses
    /// other than loopback are refused.
    pub secret: Option<Secret>,
    /// What carries the data between ranks. Default [`Transport::Auto`].
    pub transport: Transport,
    /// Which TCP connections are encrypted; the same on every rank. The keys come from the secret, so there must be one.
    /// Default [`Tls::Off`].
    pub tls: Tls,
    /// A name that keeps apart jobs with the same secret, or with none. Default empty.
    pub job_id: String,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            rank: 0,
            world_size: 1,
            init_method: InitMethod::Env,
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            timeout: Duration::from_secs(300),
            slow_warning: Duration::from_secs(30),
            secret: None,
            transport: Transport::Auto,
            tls: Tls::Off,
            job_id: String::new(),
        }
    }
}

impl TcpConfig {
    /// Reads the environment: `RANK` and `WORLD_SIZE`; `MASTER_ADDR` and `MASTER_PORT` (under `torchrun`: the address of its
    /// store), unless `GIRANDOLE_INIT_METHOD` names another place than `env://`; and, each only where it is set, `GIRANDOLE_SECRET` (64 hexadecimal digits) or
    /// `GIRANDOLE_SECRET_FILE`, `GIRANDOLE_JOB_ID`, `GIRANDOLE_BIND` (an IP address), `GIRANDOLE_TIMEOUT` (seconds),
    /// `GIRANDOLE_TRANSPORT` (`auto`, `tcp` or `shm`; see [`Transport`]), `GIRANDOLE_TLS` (`off`, `hosts` or `all`; see [`Tls`]).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for the first variable that is missing or wrong, with its value.
    pub fn from_env() -> Result<Self> {
        Self::from_env_at(None)
    }

    /// As [`TcpConfig::from_env`], with the ranks' meeting place given, whatever `GIRANDOLE_INIT_METHOD` says.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for the first variable that is missing or wrong, with its value.
    pub fn from_env_at(init_method: Option<InitMethod>) -> Result<Self> {
        let given = init_method.map(|method| OsString::from(method.to_string()));
        Self::from_lookup(&|name| match name {
            "GIRANDOLE_INIT_METHOD" if given.is_some() => given.clone(),
            name => std::env::var_os(name),
        })
    }

    fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Self> {
        let env = Variables(lookup);
        let mut config = Self {
            rank: env.required("RANK", "a rank's number, from 0 to WORLD_SIZE - 1")?,
            world_size: env.required("WORLD_SIZE", "the number of ranks, from 1")?,
            secret: env.secret()?,
            job_id: env.text("GIRANDOLE_JOB_ID")?.unwrap_or_default(),
            ..Self::default()
        };
        if let Some(bind) = env.optional("GIRANDOLE_BIND", "an IP address of this host, without port")? {
            config.bind = bind;
        }
        if let Some(seconds) = env.optional::<f64>("GIRANDOLE_TIMEOUT", TIMEOUT_HELP)? {
            config.timeout = Duration::try_from_secs_f64(seconds)
                .map_err(|_| Error::invalid("GIRANDOLE_TIMEOUT", seconds, give(TIMEOUT_HELP)))?;
        }
        if let Some(transport) = env.optional("GIRANDOLE_TRANSPORT", "auto, tcp or shm")? {
            config.transport = transport;
        }
        if let Some(tls) = env.optional("GIRANDOLE_TLS", "off, hosts or all")? {
            config.tls = tls;
        }
        if let Some(method) = env.text("GIRANDOLE_INIT_METHOD")? {
            config.init_method = method.parse().map_err(|error| named(error, "GIRANDOLE_INIT_METHOD"))?;
        }
        config.validate().map_err(|error| match &error {
            Error::InvalidArgument { what, .. } if what == RANK => named(error, "RANK"),
            Error::InvalidArgument { what, .. } if what == WORLD_SIZE => named(error, "WORLD_SIZE"),
            Error::InvalidArgument { what, .. } if what == TIMEOUT => named(error, "GIRANDOLE_TIMEOUT"),
            _ => error,
        })?;
        if config.world_size > 1 && config.init_method == InitMethod::Env {
            env.master()?;
        }
        Ok(config)
    }

    /// Checks what can be checked without asking the system.
    pub(crate) fn validate(&self) -> Result<()> {
        let Self { rank, world_size, .. } = *self;
        if world_size == 0 || world_size > MAX_WORLD_SIZE {
            return Err(Error::invalid(WORLD_SIZE, world_size, format!("give 1 to {MAX_WORLD_SIZE} ranks")));
        }
        if rank >= world_size {
            return Err(Error::invalid(
                RANK,
                rank,
                format!("with world size {world_size}, give 0 to {}", world_size - 1),
            ));
        }
        if self.timeout.is_zero() {
            return Err(Error::invalid(TIMEOUT, "0 s", give(TIMEOUT_HELP)));
        }
        if self.tls != Tls::Off && self.secret.is_none() && world_size > 1 {
            let help = "its keys come from the job's secret: set GIRANDOLE_SECRET_FILE or GIRANDOLE_SECRET on every rank";
            return Err(Error::invalid("TLS (GIRANDOLE_TLS)", self.tls, help));
        }
        Ok(())
    }

    /// The time-out, short enough to be added to any point in time.
    pub(crate) fn bounded_timeout(&self) -> Duration {
        self.timeout.min(MAX_TIMEOUT)
    }
}

/// Where `env://` meets: `MASTER_ADDR` and `MASTER_PORT`.
pub(crate) fn master_from_env() -> Result<(String, u16)> {
    Variables(&|name| std::env::var_os(name)).master()
}

/// Where `torchrun` keeps a store for its ranks at `MASTER_PORT`: the key under which rank 0 tells where it listens.
pub(crate) fn agent_store_from_env() -> Option<String> {
    let value = |name| std::env::var(name).unwrap_or_default();
    let names = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GIRANDOLE_JOB_ID"].map(value);
    (value("TORCHELASTIC_USE_AGENT_STORE") == "True").then(|| format!("girandole/{}", names.join("/")))
}

const RANK: &str = "the rank";
const WORLD_SIZE: &str = "the world size";
const TIMEOUT: &str = "the time-out";
const TIMEOUT_HELP: &str = "a number of seconds greater than 0, such as 300";

fn give(what: &str) -> String {
    format!("give {what}")
}

/// The same error, of the variable that held the value.
fn named(error: Error, name: &str) -> Error {
    match error {
        Error::InvalidArgument { got, help, .. } => Error::invalid(name, got, help),
        other => other,
    }
}

struct Variables<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl Variables<'_> {
    /// None where the variable is missing; an empty one counts as missing.
    fn text(&self, name: &str) -> Result<Option<String>> {
        let value = (self.0)(name).filter(|value| !value.is_empty());
        value.map(OsString::into_string).transpose().map_err(|value| {
            Error::invalid(name, format!("{} bytes that are not UTF-8", value.len()), "give plain text")
        })
    }

    fn optional<T: FromStr>(&self, name: &str, what: &str) -> Result<Option<T>> {
        let parse = |text: String| text.trim().parse().map_err(|_| Error::invalid(name, &text, give(what)));
        self.text(name)?.map(parse).transpose()
    }

    fn required<T: FromStr>(&self, name: &str, what: &str) -> Result<T> {
        self.optional(name, what)?.ok_or_else(|| missing(name, what))
    }

    fn master(&self) -> Result<(String, u16)> {
        let what = "the host of rank 0, such as 127.0.0.1";
        let host = self.text("MASTER_ADDR")?.ok_or_else(|| missing("MASTER_ADDR", what))?;
        if !is_host(&host) {
            return Err(Error::invalid("MASTER_ADDR", host, give(what)));
        }
        let what = "a port from 1 to 65535, the same on every rank";
        let port = self.text("MASTER_PORT")?.ok_or_else(|| missing("MASTER_PORT", what))?;
        match parse_port(&port) {
            Some(port) => Ok((host, port)),
            None => Err(Error::invalid("MASTER_PORT", port, give(what))),
        }
    }

    fn secret(&self) -> Result<Option<Secret>> {
        match (self.text("GIRANDOLE_SECRET")?, self.text("GIRANDOLE_SECRET_FILE")?) {
            (None, None) => Ok(None),
            (Some(digits), None) => Secret::parse(&digits, "GIRANDOLE_SECRET").map(Some),
            (None, Some(path)) => Secret::from_file(path).map(Some).map_err(|error| match error {
                Error::InvalidArgument { what, got, help } => {
                    Error::invalid(format!("GIRANDOLE_SECRET_FILE: {what}"), got, help)
                }
                other => other,
            }),
            (Some(_), Some(path)) => Err(Error::invalid(
                "GIRANDOLE_SECRET_FILE",
                path,
                "GIRANDOLE_SECRET is set too: unset one of the two",
            )),
        }
    }
}

fn missing(name: &str, what: &str) -> Error {
    Error::invalid(name, "nothing", format!("set it to {what} (a launcher does)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<TcpConfig> {
        TcpConfig::from_lookup(&|name| {
            variables.iter().rev().find(|(n, _)| *n == name).map(|(_, value)| value.into())
        })
    }

    const GOOD: [(&str, &str); 4] =
        [("RANK", "1"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")];

    #[test]
    fn a_launchers_environment_is_enough() {
        let config = read(&GOOD).unwrap();
        assert_eq!((config.rank, config.world_size, config.init_method), (1, 4, InitMethod::Env));
        assert_eq!((config.bind.to_string().as_str(), config.timeout.as_secs()), ("127.0.0.1", 300));
        assert!(config.secret.is_none() && config.job_id.is_empty());
        assert_eq!(config.transport, Transport::Auto);
        assert!(read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).is_ok(), "one rank meets nobody");
    }

    #[test]
    fn every_variable_counts() {
        let digits = "ab".repeat(32);
        let more = [
            ("GIRANDOLE_SECRET", digits.as_str()),
            ("GIRANDOLE_JOB_ID", "night run"),
            ("GIRANDOLE_INIT_METHOD", "file:///tmp/meet"),
            ("GIRANDOLE_BIND", "::1"),
            ("GIRANDOLE_TIMEOUT", "2.5"),
            ("GIRANDOLE_TRANSPORT", "shm"),
            ("GIRANDOLE_TLS", "hosts"),
        ];
        let config = read(&[&GOOD[..2], &more].concat()).unwrap();
        assert_eq!((config.secret.unwrap().to_hex(), config.transport), (digits.clone(), Transport::Shm));
        assert_eq!(
            (config.job_id.as_str(), config.init_method.to_string().as_str()),
            ("night run", "file:///tmp/meet")
        );
        assert_eq!((config.bind.to_string().as_str(), config.timeout), ("::1", Duration::from_millis(2500)));
        assert_eq!(config.tls, Tls::Hosts);
        let message = read(&[&GOOD[..], &[("GIRANDOLE_TLS", "all")]].concat()).unwrap_err().to_string();
        assert!(message.starts_with("TLS (GIRANDOLE_TLS): got all; its keys come from"), "{message}");
    }

    #[test]
    fn a_missing_variable_is_named() {
        for (name, _) in GOOD {
            let rest: Vec<_> = GOOD.into_iter().filter(|(other, _)| *other != name).collect();
            let message = read(&rest).unwrap_err().to_string();
            assert!(message.starts_with(&format!("{name}: got nothing; set it to ")), "{message}");
        }
    }

    #[test]
    fn a_wrong_variable_is_named_with_its_value() {
        for (name, value) in [
            ("RANK", "-1"),
            ("RANK", "one"),
            ("WORLD_SIZE", "4.0"),
            ("MASTER_ADDR", "not a host"),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "+80"),
            ("MASTER_PORT", "99999"),
            ("GIRANDOLE_BIND", "localhost"),
            ("GIRANDOLE_TIMEOUT", "soon"),
            ("GIRANDOLE_TIMEOUT", "-1"),
            ("GIRANDOLE_TIMEOUT", "NaN"),
            ("GIRANDOLE_TIMEOUT", "inf"),
            ("GIRANDOLE_TRANSPORT", "rdma"),
            ("GIRANDOLE_TLS", "on"),
            ("GIRANDOLE_INIT_METHOD", "etcd://x"),
            ("GIRANDOLE_SECRET_FILE", "/nowhere"),
        ] {
            let message = read(&[&GOOD[..], &[(name, value)]].concat()).unwrap_err().to_string();
            assert!(message.starts_with(name) && message.contains(value), "{message}");
            assert_eq!(message.lines().count(), 1);
        }
    }

    #[test]
    fn a_secret_is_not_repeated_and_given_once() {
        let message =
            read(&[&GOOD[..], &[("GIRANDOLE_SECRET", "hunter2")]].concat()).unwrap_err().to_string();
        assert!(message.starts_with("GIRANDOLE_SECRET") && !message.contains("hunter2"), "{message}");
        let both = [("GIRANDOLE_SECRET", "hunter2"), ("GIRANDOLE_SECRET_FILE", "/x")];
        let message = read(&[&GOOD[..], &both].concat()).unwrap_err().to_string();
        assert!(message.contains("unset one") && !message.contains("hunter2"), "{message}");
    }

    #[test]
    fn ranks_and_sizes_that_cannot_be_are_refused() {
        for (rank, world_size) in [("0", "0"), ("4", "4"), ("5", "4"), ("0", "1000000000")] {
            let message = read(&[&GOOD[..], &[("RANK", rank), ("WORLD_SIZE", world_size)]].concat())
                .unwrap_err()
                .to_string();
            assert!(message.contains("give 0 to 3") || message.contains("give 1 to 4096 ranks"), "{message}");
            let variable = if message.contains("give 0 to 3") { "RANK: got " } else { "WORLD_SIZE: got " };
            assert!(message.starts_with(variable), "{message}");
        }
        let config = TcpConfig { timeout: Duration::ZERO, ..TcpConfig::default() };
        assert!(config.validate().is_err());
        let config = TcpConfig { timeout: Duration::MAX, ..TcpConfig::default() };
        assert!(config.validate().is_ok() && config.bounded_timeout() < Duration::MAX);
    }
}
