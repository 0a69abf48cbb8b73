//! Several ranks over NCCL on one GPU. NCCL refuses that, except to ranks that `NCCL_HOSTID` puts on different hosts: these
//! are processes, which NCCL connects by sockets.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use comm::{Communicator, InitMethod, Nccl, Result, TcpConfig};

use crate::{Backend, DEVICE};

/// Environment variable with a folder for a job's files; unset in the process that starts the job.
const FOLDER: &str = "GIRANDOLE_CUDA_FOLDER";

/// What NCCL cannot do, see the documentation of [`Nccl`]: two messages of a batch to a rank that receives them one by one.
pub(crate) const LEFT_OUT: &[&str] = &["batches and single messages"];

/// Returns this program as a rank of a job that has a folder for its files.
pub(crate) fn as_rank(rank: usize, world_size: usize, folder: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", world_size.to_string());
    command.env("GIRANDOLE_INIT_METHOD", format!("file://{}", folder.join("meeting").display()));
    command
}

/// Makes `command` rank `rank` of a group whose ranks share a GPU.
pub(crate) fn alone_on_its_host(command: &mut Command, rank: usize) {
    command.env("NCCL_HOSTID", format!("host-of-rank-{rank}"));
    for (name, value) in [("NCCL_NET", "Socket"), ("NCCL_SOCKET_IFNAME", "lo")] {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
}

/// Runs the cases on `world_size` processes.
pub(crate) fn conform(world_size: usize) {
    let folder = tempfile::tempdir().unwrap();
    let start = |rank: usize| {
        let mut command = as_rank(rank, world_size, folder.path());
        command.args(["shared", &world_size.to_string()]).env(FOLDER, folder.path());
        alone_on_its_host(&mut command, rank);
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        command.spawn().unwrap()
    };
    let ranks: Vec<_> = (0..world_size).map(start).collect();
    let ended: Vec<_> = ranks.into_iter().map(|mut rank| rank.wait().unwrap()).collect();
    assert!(ended.iter().all(std::process::ExitStatus::success), "{world_size} ranks on one GPU: {ended:?}");
}

/// This process as a rank of such a job.
pub(crate) struct Rank {
    folder: PathBuf,
    pub(crate) config: TcpConfig,
    /// How many groups it has joined.
    groups: Cell<usize>,
}

impl Rank {
    /// Returns None in a process that no such job has started.
    pub(crate) fn from_env() -> Option<Self> {
        let folder = std::env::var_os(FOLDER)?.into();
        let config = TcpConfig { timeout: Duration::from_secs(60), ..TcpConfig::from_env().unwrap() };
        Some(Self { folder, config, groups: Cell::new(0) })
    }
}

impl Backend for Rank {
    fn run(&self, world_size: usize, body: &(dyn Fn(&dyn Communicator) -> Result<()> + Sync)) {
        if world_size != self.config.world_size {
            return;
        }
        self.groups.set(self.groups.get() + 1);
        let config = TcpConfig {
            init_method: InitMethod::File(self.folder.join(format!("meeting-{}", self.groups.get()))),
            ..self.config.clone()
        };
        let run = || {
            let device = comm::open_cuda_device(0)?;
            DEVICE.set(device.clone());
            body(&Nccl::connect(&config, &device)?)
        };
        run().unwrap_or_else(|error| panic!("rank {} of {world_size}: {error}", self.config.rank));
    }
}
