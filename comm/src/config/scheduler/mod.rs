//! Rank and world size of this process, from the environment variables of the scheduler or launcher that started it.
//!
//! One file for each. They are queried from the innermost to the outermost, since each leaves the variables of those
//! around it set (`mpirun` within a Slurm job, a launcher within a pod).

#[cfg(any(test, fuzzing))]
mod fuzz;
mod kubeflow;
mod mpi;
mod node_list;
mod route;
mod slurm;

use std::ffi::OsString;

#[cfg(any(test, fuzzing))]
pub use fuzz::fuzz_environment;
pub(crate) use route::check_loopback;
pub use route::{addresses, local_address_towards, without_loopback};

use crate::config::address::{is_host, parse_port};
use crate::config::variables::Variables;
use crate::{Error, Result};

/// Ports that no system assigns by itself, for jobs whose ranks must choose the same one without communicating.
const FIRST_PORT: u16 = 10_000;
const PORTS: u64 = 20_000;
const PORT: &str = "the launcher does not name the job, and there are several hosts, so that no port follows from a name: set it \
                    to a free port of rank 0's host, the same on every rank, such as with mpiexec -genv MASTER_PORT 29500";

/// Rank of this process and size of its job, and the same for its node.
///
/// ```
/// // Nothing has started this documentation's test as a rank.
/// assert!(comm::LaunchedRank::from_env()?.is_none());
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchedRank {
    /// Rank in the job.
    pub rank: usize,
    /// Number of ranks in the job.
    pub world_size: usize,
    /// Rank among those of the same node, where known.
    pub local_rank: Option<usize>,
    /// Number of ranks on this node, where known.
    pub local_world_size: Option<usize>,
    /// Number of this node, where known.
    pub node_rank: Option<usize>,
}

impl LaunchedRank {
    /// Reads the variables of a launcher (`RANK` and so on, as `torchrun` sets them), Slurm (`SLURM_PROCID`), Open MPI
    /// (`OMPI_COMM_WORLD_RANK`), MPICH and compatible launchers (`PMI_RANK`), or Kubeflow's training operator
    /// (`PET_NODE_RANK`). `None` where nothing has started this process as a rank.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for the first variable that is missing or wrong, with its name and value.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_lookup(&|name| std::env::var_os(name))
    }

    /// Returns whether a scheduler has started this process as a rank, without a launcher in between: `RANK` and
    /// `WORLD_SIZE` need not be set then.
    ///
    /// # Errors
    /// Those of [`LaunchedRank::from_env`].
    pub fn is_from_scheduler() -> Result<bool> {
        Ok(detect(&Variables(&|name| std::env::var_os(name)))?.is_some())
    }

    fn from_lookup(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Option<Self>> {
        let env = Variables(lookup);
        if let Some(found) = detect(&env)? {
            return Ok(Some(found.place));
        }
        if env.text("RANK")?.is_none() && env.text("WORLD_SIZE")?.is_none() {
            return Ok(None);
        }
        launched(&env).map(Some)
    }
}

/// Reads the variables that `torchrun` and `launch` set.
fn launched(env: &Variables<'_>) -> Result<LaunchedRank> {
    let number = |name| env.optional(name, "a whole number");
    Ok(LaunchedRank {
        rank: env.required("RANK", "a rank's number, from 0 to WORLD_SIZE - 1")?,
        world_size: env.required("WORLD_SIZE", "the number of ranks, from 1")?,
        local_rank: number("LOCAL_RANK")?,
        local_world_size: number("LOCAL_WORLD_SIZE")?.filter(|&size| size > 0),
        node_rank: number("GROUP_RANK")?.map_or_else(|| number("NODE_RANK"), |node| Ok(Some(node)))?,
    })
}

/// What a scheduler's variables say about this process.
#[derive(Debug, PartialEq)]
pub(crate) struct SchedulerInfo {
    pub(crate) place: LaunchedRank,
    /// Names of the variables that rank and world size come from.
    pub(crate) rank_from: &'static str,
    pub(crate) world_size_from: &'static str,
    /// Host of rank 0; or, where it is not known, the help text of the error.
    host: std::result::Result<String, &'static str>,
    /// Variable that is read for the port where `MASTER_PORT` is not set.
    port_from: Option<&'static str>,
    /// Name of the job: the same for all its ranks, different for each job that may run at the same time. A constant
    /// under Kubeflow, where the port comes from a variable. `None` where nothing names it.
    pub(crate) job: Option<String>,
}

impl SchedulerInfo {
    /// Returns whether there are ranks on other hosts, as far as is known.
    pub(crate) fn is_on_several_hosts(&self) -> bool {
        self.place.local_world_size.is_some_and(|local| local < self.place.world_size)
    }

    /// Returns where the ranks meet: `MASTER_ADDR` and `MASTER_PORT` where they are set, else the host and port that
    /// follow from the scheduler's variables.
    pub(crate) fn master(&self, env: &Variables<'_>) -> Result<(String, u16)> {
        let host = match (env.host("MASTER_ADDR")?, &self.host) {
            (Some(host), _) if is_host(&host) => host,
            (Some(host), _) => {
                return Err(Error::invalid(
                    "MASTER_ADDR",
                    host,
                    "give the host of rank 0, such as 127.0.0.1",
                ));
            }
            (None, Ok(host)) => host.clone(),
            (None, Err(help)) => return Err(Error::invalid("MASTER_ADDR", "nothing", *help)),
        };
        for name in [Some("MASTER_PORT"), self.port_from].into_iter().flatten() {
            if let Some(text) = env.text(name)? {
                let wrong =
                    || Error::invalid(name, &text, "give a port from 1 to 65535, the same on every rank");
                return Ok((host, parse_port(text.trim()).ok_or_else(wrong)?));
            }
        }
        match self.job.clone().or(env.text("GIRANDOLE_JOB_ID")?) {
            Some(job) => Ok((host, derived_port(&job))),
            None => Err(Error::invalid("MASTER_PORT", "nothing", PORT)),
        }
    }
}

/// Reads the scheduler's variables. `None` where there is no scheduler, or a launcher stands between it and this process.
pub(crate) fn detect(env: &Variables<'_>) -> Result<Option<SchedulerInfo>> {
    if let Some(found) = kubeflow::find(env)? {
        return checked(found).map(Some);
    }
    if env.text("RANK")?.is_some() || env.text("WORLD_SIZE")?.is_some() {
        return Ok(None);
    }
    let finders = [mpi::open_mpi, mpi::pmi, slurm::find];
    for finder in finders {
        if let Some(found) = finder(env)? {
            return checked(found).map(Some);
        }
    }
    Ok(None)
}

fn checked(found: SchedulerInfo) -> Result<SchedulerInfo> {
    let LaunchedRank { rank, world_size, .. } = found.place;
    if world_size == 0 {
        return Err(Error::invalid(found.world_size_from, 0, "give the number of ranks, from 1"));
    }
    if rank >= world_size {
        let help = format!("with {}={world_size}, give 0 to {}", found.world_size_from, world_size - 1);
        return Err(Error::invalid(found.rank_from, rank, help));
    }
    Ok(found)
}

/// Derives a port from the name of a job (FNV-1a): the same for all its ranks, different for most other jobs.
fn derived_port(job: &str) -> u16 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
    let hash = job.bytes().fold(0xCBF2_9CE4_8422_2325, step);
    FIRST_PORT + u16::try_from(hash % PORTS).unwrap_or_default()
}

#[cfg(test)]
mod tests;
