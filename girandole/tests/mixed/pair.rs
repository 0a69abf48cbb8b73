//! Two processes that are ranks of one job, the second maybe on another processor.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use girandole::Result;
use girandole::comm::{Communicator, InitMethod, Secret, Tcp, TcpConfig, Transport};

use super::Outcome;

/// What a rank is to do.
pub(super) const JOB: &str = "GIRANDOLE_MIXED_JOB";
const RANK: &str = "GIRANDOLE_MIXED_RANK";
const FOLDER: &str = "GIRANDOLE_MIXED_FOLDER";
const TRANSPORT: &str = "GIRANDOLE_MIXED_TRANSPORT";
/// How rank 1 is started.
const COMMAND: &str = "GIRANDOLE_MIXED";

/// What both ranks have in the end.
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

/// Ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended cannot be killed any more.
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
    command.args(["--exact", "one_rank"]).stdout(Stdio::null());
    command.env(JOB, job).env(RANK, rank.to_string()).env(FOLDER, folder).env(TRANSPORT, transport);
    command.spawn().unwrap()
}

/// Does what the job says, and leaves the outcome where [`run_pair`] looks for it.
pub(super) fn be_a_rank(body: impl Fn(Arc<dyn Communicator>) -> Result<Outcome>) {
    let variable = |name: &str| std::env::var(name).unwrap();
    let folder = std::path::PathBuf::from(variable(FOLDER));
    let rank: usize = variable(RANK).parse().unwrap();
    let secret = Secret::from_hex(&std::fs::read_to_string(folder.join("secret")).unwrap()).unwrap();
    let config = TcpConfig {
        rank,
        world_size: 2,
        init_method: InitMethod::File(folder.join("meeting")),
        timeout: Duration::from_secs(120),
        secret: Some(secret),
        transport: variable(TRANSPORT).parse().unwrap(),
        ..TcpConfig::default()
    };
    let outcome = body(Arc::new(Tcp::connect(&config).unwrap())).unwrap();
    let bytes = serde_json::to_vec(&outcome).unwrap();
    std::fs::write(folder.join(format!("outcome-{rank}")), bytes).unwrap();
}
