//! Configuration with which a rank joins its group over TCP.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use crate::config::scheduler::{self, SchedulerInfo, local_address_towards};
use crate::config::variables::Variables;
use crate::{Elastic, Error, InitMethod, Result, Secret, Tls, Transport};

/// More than any cluster has. What bounds the number of ranks is how many files rank 0 may have open, since it holds a
/// control connection to every other rank.
const MAX_WORLD_SIZE: usize = 1 << 20;
/// What regrouping sends to each rank grows with the number of ranks.
const MAX_ELASTIC: usize = 10_000;
/// Longer than any run; keeps arithmetic with [`Instant`] within its range.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Configuration with which a rank joins its group over TCP.
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
    /// Number of ranks. Default 1, which opens no connection at all. Rank 0 holds a connection to every other rank, so the
    /// limit of its open files (`ulimit -n`) must be higher; an elastic group has at most 10,000.
    pub world_size: usize,
    /// Where the ranks meet. Default `env://`.
    pub init_method: InitMethod,
    /// The address on which this rank listens for the others. Default 127.0.0.1, which only ranks of the same host can
    /// reach. With ranks on several hosts: this host's address in the network that connects them.
    pub bind: IpAddr,
    /// Whether `bind` is only what is likely: the ranks then listen on the addresses over which they have reached rank 0,
    /// where its name has several and not all lead there. Default false.
    pub bind_by_route: bool,
    /// Time limit for the rendezvous as a whole, and later for each operation as a whole, including the time spent
    /// waiting for other ranks. Default 300 s; more than a year counts as a year.
    ///
    /// An operation that moves much data may take longer, as long as data is moving: time in which a rank sends and
    /// receives at least 1 MiB a second does not count, and below that rate each MiB counts as one second less. So a slow
    /// but steady network makes no operation fail, and a rank that sends a byte now and then holds the others up no
    /// longer than one that sends nothing. With NCCL and MPI, progress is not visible before an operation completes:
    /// there the time-out is that of the whole operation, whatever it moves.
    pub timeout: Duration,
    /// How long to wait before a warning names the ranks that are waited for, counted like `timeout`. Default 30 s.
    pub slow_warning: Duration,
    /// Secret that the ranks prove to each other that they hold. Without one (the default) every user of this host may
    /// join, and addresses other than loopback are refused.
    pub secret: Option<Secret>,
    /// What carries the data between ranks. Default [`Transport::Auto`].
    pub transport: Transport,
    /// Which TCP connections are encrypted; the same on every rank. The keys come from the secret, so there must be one.
    /// Default [`Tls::Off`].
    pub tls: Tls,
    /// Name that distinguishes jobs with the same secret, or with none. Default empty.
    pub job_id: String,
    /// Whether the group may change while it runs ([`ElasticGroup::shrink`](crate::ElasticGroup::shrink)), the same on
    /// every rank. Default: `None`, it does not change.
    pub elastic: Option<Elastic>,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            rank: 0,
            world_size: 1,
            init_method: InitMethod::Env,
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            bind_by_route: false,
            timeout: Duration::from_secs(300),
            slow_warning: Duration::from_secs(30),
            secret: None,
            transport: Transport::Auto,
            tls: Tls::Off,
            job_id: String::new(),
            elastic: None,
        }
    }
}

impl TcpConfig {
    /// Reads the environment: `RANK` and `WORLD_SIZE`; `MASTER_ADDR` and `MASTER_PORT` (under `torchrun`: the address of
    /// its store), unless `GIRANDOLE_INIT_METHOD` is something other than `env://`; and these variables, all optional:
    /// `GIRANDOLE_SECRET` (64 hexadecimal digits) or `GIRANDOLE_SECRET_FILE`, `GIRANDOLE_JOB_ID`, `GIRANDOLE_BIND` (an IP
    /// address), `GIRANDOLE_TIMEOUT` (seconds), `GIRANDOLE_TRANSPORT` (`auto`, `tcp` or `shm`; see [`Transport`]),
    /// `GIRANDOLE_TLS` (`off`, `hosts` or `all`; see [`Tls`]), `GIRANDOLE_ELASTIC` (1: the group may change),
    /// `GIRANDOLE_ELASTIC_FILE`, `GIRANDOLE_ELASTIC_ENDED` and `GIRANDOLE_NEWCOMER` (1; see [`Elastic`]).
    ///
    /// Where `RANK` and `WORLD_SIZE` are not set, and in any Kubeflow pod that is a rank without a launcher, rank and
    /// world size come from the variables of Slurm, Open MPI, MPICH or Kubeflow (see
    /// [`LaunchedRank::from_env`](crate::LaunchedRank::from_env)); so does the meeting point, if `MASTER_ADDR` or `MASTER_PORT` is not
    /// set. Unless `GIRANDOLE_BIND` is set, such a rank listens on the address from which it reaches the host of rank 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for the first variable that is missing or wrong, with its value.
    pub fn from_env() -> Result<Self> {
        Self::from_env_at(None, None)
    }

    /// As [`TcpConfig::from_env`], with the init method or the time-out given by the caller, which override
    /// `GIRANDOLE_INIT_METHOD` and `GIRANDOLE_TIMEOUT`. Resolving the host of rank 0, where a scheduler names it, takes
    /// no longer than the time-out.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for the first variable that is missing or wrong, with its value.
    pub fn from_env_at(init_method: Option<InitMethod>, timeout: Option<Duration>) -> Result<Self> {
        let given = init_method.map(|method| OsString::from(method.to_string()));
        let lookup = |name: &str| match name {
            "GIRANDOLE_INIT_METHOD" if given.is_some() => given.clone(),
            name => std::env::var_os(name),
        };
        Self::from_lookup(&lookup, timeout)
    }

    /// As [`TcpConfig::from_env`], for a process whose rank, world size, meeting point and secret come from elsewhere.
    #[cfg(feature = "mpi")]
    pub(crate) fn from_env_as(rank: usize, world_size: usize) -> Result<Self> {
        // The real one comes through MPI; without any, TLS would be refused.
        let secret = Secret::random()?.to_hex();
        let lookup = |name: &str| match name {
            "RANK" => Some(rank.to_string().into()),
            "WORLD_SIZE" => Some(world_size.to_string().into()),
            "GIRANDOLE_INIT_METHOD" => Some("tcp://127.0.0.1:1".into()),
            "GIRANDOLE_SECRET" => Some(secret.clone().into()),
            "GIRANDOLE_SECRET_FILE" | "PET_NNODES" => None,
            name => std::env::var_os(name),
        };
        Self::from_lookup(&lookup, None)
    }

    /// Reads variables through `lookup`. `timeout` overrides `GIRANDOLE_TIMEOUT`.
    pub(crate) fn from_lookup(
        lookup: &dyn Fn(&str) -> Option<OsString>,
        timeout: Option<Duration>,
    ) -> Result<Self> {
        let env = Variables(lookup);
        let found = scheduler::detect(&env)?;
        let (rank, world_size) = match &found {
            Some(found) => (found.place.rank, found.place.world_size),
            None => (
                env.required("RANK", "a rank's number, from 0 to WORLD_SIZE - 1")?,
                env.required("WORLD_SIZE", "the number of ranks, from 1")?,
            ),
        };
        let job = found.as_ref().and_then(|found| found.job.clone());
        let job_id = env.text("GIRANDOLE_JOB_ID")?.or(job).unwrap_or_default();
        let mut config = Self { rank, world_size, secret: env.secret()?, job_id, ..Self::default() };
        if let Some(bind) = env.host("GIRANDOLE_BIND")? {
            let wrong = |_| Error::invalid("GIRANDOLE_BIND", &bind, give(BIND_HELP));
            config.bind = bind.parse().map_err(wrong)?;
        }
        if let Some(seconds) = env.optional::<f64>("GIRANDOLE_TIMEOUT", TIMEOUT_HELP)? {
            config.timeout = Duration::try_from_secs_f64(seconds)
                .map_err(|_| Error::invalid("GIRANDOLE_TIMEOUT", seconds, give(TIMEOUT_HELP)))?;
        }
        config.timeout = timeout.unwrap_or(config.timeout);
        if let Some(transport) = env.optional("GIRANDOLE_TRANSPORT", "auto, tcp or shm")? {
            config.transport = transport;
        }
        if let Some(tls) = env.optional("GIRANDOLE_TLS", "off, hosts or all")? {
            config.tls = tls;
        }
        config.elastic = elastic(&env)?;
        if let Some(method) = env.text("GIRANDOLE_INIT_METHOD")? {
            config.init_method =
                method.parse().map_err(|error| with_argument_name(error, "GIRANDOLE_INIT_METHOD"))?;
        }
        let (rank_from, world_size_from) =
            found.as_ref().map_or(("RANK", "WORLD_SIZE"), |found| (found.rank_from, found.world_size_from));
        config.validate().map_err(|error| match &error {
            Error::InvalidArgument { what, .. } if what == RANK => with_argument_name(error, rank_from),
            Error::InvalidArgument { what, .. } if what == WORLD_SIZE => {
                with_argument_name(error, world_size_from)
            }
            Error::InvalidArgument { what, .. } if what == TIMEOUT && timeout.is_none() => {
                with_argument_name(error, "GIRANDOLE_TIMEOUT")
            }
            Error::InvalidArgument { what, .. } if what == BIND => {
                with_argument_name(error, "GIRANDOLE_BIND")
            }
            _ => error,
        })?;
        match &found {
            _ if config.world_size == 1 => {}
            Some(found) => config.use_scheduler_meeting_point(&env, found)?,
            None if config.init_method == InitMethod::Env => drop(env.master()?),
            None => {}
        }
        Ok(config)
    }

    /// Takes the meeting point from the scheduler, and listens on the address at which ranks that know it reach this
    /// host.
    fn use_scheduler_meeting_point(&mut self, env: &Variables<'_>, found: &SchedulerInfo) -> Result<()> {
        if self.init_method == InitMethod::Env {
            let (host, port) = found.master(env)?;
            self.init_method = InitMethod::Tcp { host, port };
        }
        if let (InitMethod::Tcp { host, port }, None) = (&self.init_method, env.text("GIRANDOLE_BIND")?) {
            let deadline = Instant::now() + self.bounded_timeout();
            self.bind = local_address_towards(host, *port, found.is_on_several_hosts(), deadline).map_err(
                |reason| {
                    let help = format!("{reason}; set MASTER_ADDR to an address of it");
                    Error::invalid("the host of rank 0", host, help)
                },
            )?;
            self.bind_by_route = true;
        }
        Ok(())
    }

    /// Checks what can be checked without system calls.
    pub(crate) fn validate(&self) -> Result<()> {
        let Self { rank, world_size, .. } = *self;
        if world_size == 0 || world_size > MAX_WORLD_SIZE {
            return Err(Error::invalid(WORLD_SIZE, world_size, format!("give 1 to {MAX_WORLD_SIZE} ranks")));
        }
        if self.elastic.is_some() && world_size > MAX_ELASTIC {
            let help = format!("a group that changes (GIRANDOLE_ELASTIC) has at most {MAX_ELASTIC} ranks");
            return Err(Error::invalid(WORLD_SIZE, world_size, help));
        }
        let newcomer = self.elastic.as_ref().is_some_and(|elastic| elastic.newcomer);
        // Regrouping sends numbers of ranks as 32 bits.
        if newcomer && u32::try_from(rank).is_err() {
            return Err(Error::invalid(RANK, rank, "give a newcomer a number below 4294967296"));
        }
        if rank >= world_size && !newcomer {
            return Err(Error::invalid(
                RANK,
                rank,
                format!("with world size {world_size}, give 0 to {}", world_size - 1),
            ));
        }
        if self.timeout.is_zero() {
            return Err(Error::invalid(TIMEOUT, "0 s", give(TIMEOUT_HELP)));
        }
        if let Some(what) = why_unusable_bind(self.bind) {
            let help = format!("{what}; give an address of this host in the network that connects the ranks");
            return Err(Error::invalid(BIND, self.bind, help));
        }
        if self.tls != Tls::Off && self.secret.is_none() && (world_size > 1 || self.elastic.is_some()) {
            let help = "its keys come from the job's secret: set GIRANDOLE_SECRET_FILE or GIRANDOLE_SECRET on every rank";
            return Err(Error::invalid("TLS (GIRANDOLE_TLS)", self.tls, help));
        }
        Ok(())
    }

    /// Returns the time-out, capped so that it can be added to any [`Instant`].
    pub(crate) fn bounded_timeout(&self) -> Duration {
        self.timeout.min(MAX_TIMEOUT)
    }
}

impl Secret {
    /// The secret that this process was given for its job, if any: that of `GIRANDOLE_SECRET` or `GIRANDOLE_SECRET_FILE`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a variable that cannot be used.
    pub fn from_env() -> Result<Option<Self>> {
        Variables(&|name| std::env::var_os(name)).secret()
    }
}

/// Returns the meeting point of `env://`: `MASTER_ADDR` and `MASTER_PORT`.
pub(crate) fn master_from_env() -> Result<(String, u16)> {
    Variables(&|name| std::env::var_os(name)).master()
}

/// Returns the key under which rank 0 publishes its address, where `torchrun` keeps a store for its ranks at
/// `MASTER_PORT`; else `None`.
pub(crate) fn agent_store_from_env() -> Option<String> {
    let value = |name| std::env::var(name).unwrap_or_default();
    let names = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GIRANDOLE_JOB_ID"].map(value);
    (value("TORCHELASTIC_USE_AGENT_STORE") == "True").then(|| format!("girandole/{}", names.join("/")))
}

/// Reads whether and how the group may change.
fn elastic(env: &Variables<'_>) -> Result<Option<Elastic>> {
    let is_on = |name: &str| match env.text(name)?.as_deref() {
        None | Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(other) => Err(Error::invalid(name, other, "give 0 or 1")),
    };
    let (wanted, newcomer) = (is_on("GIRANDOLE_ELASTIC")?, is_on("GIRANDOLE_NEWCOMER")?);
    let file = env.text("GIRANDOLE_ELASTIC_FILE")?.map(std::path::PathBuf::from);
    let ended = env.text("GIRANDOLE_ELASTIC_ENDED")?.map(std::path::PathBuf::from);
    Ok((wanted || newcomer || file.is_some()).then_some(Elastic { file, ended, newcomer }))
}

const RANK: &str = "the rank";
const WORLD_SIZE: &str = "the world size";
const BIND: &str = "bind (GIRANDOLE_BIND)";
const BIND_HELP: &str = "an IP address of this host, without port";
const TIMEOUT: &str = "the time-out";
const TIMEOUT_HELP: &str = "a number of seconds greater than 0, such as 300";

fn give(what: &str) -> String {
    format!("give {what}")
}

/// Renames the argument in an error to the variable that held the value.
fn with_argument_name(error: Error, name: &str) -> Error {
    match error {
        Error::InvalidArgument { got, help, .. } => Error::invalid(name, got, help),
        other => other,
    }
}

/// Returns why no rank can be reached at this address; `None` where one can.
fn why_unusable_bind(ip: IpAddr) -> Option<&'static str> {
    match ip {
        _ if ip.is_multicast() => Some("it is the address of a multicast group"),
        IpAddr::V4(ip) if ip.is_broadcast() => Some("it is the address of all hosts of a network"),
        IpAddr::V6(ip) if ip.is_unicast_link_local() => {
            Some("it is a link-local address, which differs between the interfaces of a host")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
