//! Runs two processes as ranks of one job, the second possibly on another processor.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use girandole::Result;
use girandole::comm::{Communicator, InitMethod, Secret, Tcp, TcpConfig, Transport};

use super::Outcome;

/// Variable with the task of a process that is a rank: see [`Part`].
pub(super) const PART: &str = "GIRANDOLE_MIXED_RANK";
/// Variable with the command that starts rank 1.
const COMMAND: &str = "GIRANDOLE_MIXED";

/// Rank, transport, job name, and the folder for the rendezvous and the results.
type Part = (usize, String, String, PathBuf);

/// Runs both ranks, and returns their results.
pub(super) fn run_pair(job: &str, transport: Transport) -> [Outcome; 2] {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("secret"), Secret::random().unwrap().to_hex()).unwrap();
    let mut ranks = [0, 1].map(|rank| Running(start(rank, job, transport, folder.path())));
    let ended = [0, 1].map(|rank| ranks[rank].0.wait().unwrap());
    assert!(ended.iter().all(std::process::ExitStatus::success), "{job}: {ended:?}");
    [0, 1].map(|rank| {
        let bytes = std::fs::read(folder.path().join(format!("outcome-{rank}"))).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    })
}

/// A process that is killed when the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Fails only if the process has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(rank: usize, job: &str, transport: Transport, folder: &Path) -> Child {
    let other = std::env::var(COMMAND).ok().filter(|_| rank == 1);
    let mut command = match other.as_deref().map(|text| text.split_whitespace().collect::<Vec<_>>()) {
        Some(words) => {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            command
        }
        None => Command::new(std::env::current_exe().unwrap()),
    };
    let transport = if transport == Transport::Tcp { "tcp" } else { "auto" };
    let part: Part = (rank, transport.into(), job.into(), folder.into());
    command
        .args(["--exact", "one_rank"])
        .stdout(Stdio::null())
        .env(PART, serde_json::to_string(&part).unwrap());
    command.spawn().unwrap()
}

/// Does the job as one rank, and writes the result to the file that [`run_pair`] reads.
pub(super) fn be_a_rank(part: &str, body: impl Fn(Arc<dyn Communicator>, &str) -> Result<Outcome>) {
    let (rank, transport, job, folder): Part = serde_json::from_str(part).unwrap();
    let secret = Secret::from_hex(&std::fs::read_to_string(folder.join("secret")).unwrap()).unwrap();
    let config = TcpConfig {
        rank,
        world_size: 2,
        init_method: InitMethod::File(folder.join("meeting")),
        timeout: Duration::from_secs(120),
        secret: Some(secret),
        transport: transport.parse().unwrap(),
        ..TcpConfig::default()
    };
    let outcome = body(Arc::new(Tcp::connect(&config).unwrap()), &job).unwrap();
    let bytes = serde_json::to_vec(&outcome).unwrap();
    std::fs::write(folder.join(format!("outcome-{rank}")), bytes).unwrap();
}
