//! Variables of Open MPI's `mpirun`, and of PMI launchers: MPICH's `mpiexec` and compatible ones.

use super::{LaunchedRank, SchedulerInfo};
use crate::Result;
use crate::config::variables::Variables;

const NUMBER: &str = "a rank's number, from 0";
const SIZE: &str = "the number of ranks, from 1";
const LOCAL: &str = "a whole number";
const HOST: &str = "mpirun does not tell where rank 0 runs, and there are several hosts: set it to the host of rank 0, such as \
                    with mpirun -x MASTER_ADDR=HOST (MPICH: -genv MASTER_ADDR HOST)";

/// Reads Open MPI's variables.
pub(super) fn open_mpi(env: &Variables<'_>) -> Result<Option<SchedulerInfo>> {
    if env.text("OMPI_COMM_WORLD_RANK")?.is_none() {
        return Ok(None);
    }
    let local_world_size: Option<usize> = env.optional("OMPI_COMM_WORLD_LOCAL_SIZE", LOCAL)?;
    // Not set under srun --mpi=pmix, where Slurm's own variable is.
    let local_rank = match env.optional("OMPI_COMM_WORLD_LOCAL_RANK", LOCAL)? {
        Some(local) => Some(local),
        None => env.optional("SLURM_LOCALID", LOCAL)?,
    };
    let world_size = env.required("OMPI_COMM_WORLD_SIZE", SIZE)?;
    let is_alone = is_alone(local_world_size, world_size);
    Ok(Some(SchedulerInfo {
        place: LaunchedRank {
            rank: env.required("OMPI_COMM_WORLD_RANK", NUMBER)?,
            world_size,
            local_rank,
            local_world_size,
            node_rank: None,
        },
        rank_from: "OMPI_COMM_WORLD_RANK",
        world_size_from: "OMPI_COMM_WORLD_SIZE",
        host: host(is_alone),
        port_from: None,
        job: job(env, &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"], is_alone)?,
    }))
}

/// Reads the variables of a PMI launcher.
pub(super) fn pmi(env: &Variables<'_>) -> Result<Option<SchedulerInfo>> {
    let told_by_slurm = env.text("PMI_RANK")? == env.text("SLURM_PROCID")?;
    // Under `srun --mpi=pmi2`, Slurm's own variables say more.
    if env.text("PMI_RANK")?.is_none()
        || told_by_slurm && env.text("PMI_SIZE")? == env.text("SLURM_NTASKS")?
    {
        return Ok(None);
    }
    let local_world_size = env.optional("MPI_LOCALNRANKS", LOCAL)?;
    let world_size = env.required("PMI_SIZE", SIZE)?;
    let is_alone = is_alone(local_world_size, world_size);
    Ok(Some(SchedulerInfo {
        place: LaunchedRank {
            rank: env.required("PMI_RANK", NUMBER)?,
            world_size,
            local_rank: env.optional("MPI_LOCALRANKID", LOCAL)?,
            local_world_size,
            node_rank: None,
        },
        rank_from: "PMI_RANK",
        world_size_from: "PMI_SIZE",
        host: host(is_alone),
        port_from: None,
        job: job(env, &["PMI_JOBID", "PMI_PORT", "PMI_KVS"], is_alone)?,
    }))
}

/// Whether all ranks run on this host.
fn is_alone(local_world_size: Option<usize>, world_size: usize) -> bool {
    world_size == 1 || local_world_size == Some(world_size)
}

/// Returns loopback where all ranks run on this host; otherwise the host of rank 0 is unknown.
fn host(is_alone: bool) -> std::result::Result<String, &'static str> {
    if is_alone { Ok("127.0.0.1".into()) } else { Err(HOST) }
}

/// Names the job after the first of these variables that is set; failing that, after the process that started the ranks
/// of this host. Each host has its own such process, so that with several hosts the job has no name.
fn job(env: &Variables<'_>, names: &[&str], is_alone: bool) -> Result<Option<String>> {
    for name in names {
        if let Some(text) = env.text(name)? {
            return Ok(Some(format!("mpi-{text}")));
        }
    }
    let parent = rustix::process::getppid().map_or(0, |parent| parent.as_raw_pid());
    Ok(is_alone.then(|| format!("mpi-of-process-{parent}")))
}
