//! The roles of this program when it is started as a user's program.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use candle_core::{Device, Tensor};
use comm::{Communicator, ReduceOp};
use launch::{MasterPort, RankContext, SpawnConfig};

/// Variable with the role.
pub(crate) const ROLE: &str = "RUN_TEST_ROLE";
/// Number of launchers above this process. No test needs many; without this limit, a failing test would fill the
/// machine.
const DEPTH: &str = "RUN_TEST_DEPTH";
const DEEPEST: usize = 3;

/// An error that only implements `Display`, as a program's own may.
struct Problem(String);

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch 3: {}", self.0)
    }
}

impl From<comm::Error> for Problem {
    fn from(error: comm::Error) -> Self {
        Self(error.to_string())
    }
}

pub(crate) fn main(role: &str) -> ExitCode {
    match role {
        "mean" => launch::run(2, mean),
        "no ranks" => launch::run(0, mean),
        "fail" => launch::run(3, fail),
        "wait" => launch::run(2, wait),
        "talk" => launch::run(2, talk),
        "launch mean" => launch_mean(),
        "spawn" => spawn(SpawnConfig::default()),
        "spawn with arguments" => {
            spawn(SpawnConfig { args: Some(vec!["other".into()]), ..SpawnConfig::default() })
        }
        "spawn by name" => {
            spawn(SpawnConfig { program: std::env::current_exe().ok(), ..SpawnConfig::default() })
        }
        "spawn by a shell" => {
            spawn(shell(&format!("{}; exit $?", std::env::current_exe().unwrap().display())))
        }
        "spawn counted" => spawn_counted(),
        "spawn another" if launch::is_worker() => spawn(shell("echo another")),
        "spawn another" => spawn(SpawnConfig::default()),
        other => panic!("no role {other}"),
    }
}

/// Does what `girandole launch` does for a program.
fn launch_mean() -> ExitCode {
    let config = SpawnConfig {
        world_size: 3,
        program: std::env::current_exe().ok(),
        port_kind: MasterPort::Reserved,
        env: vec![(ROLE.into(), "mean".into())],
        ..SpawnConfig::default()
    };
    launch::worker_guard().unwrap();
    launch::spawn(&config).unwrap();
    ExitCode::SUCCESS
}

/// Configuration of a job whose ranks are another program.
pub(crate) fn shell(script: &str) -> SpawnConfig {
    let (program, args) = (Some(PathBuf::from("/bin/sh")), Some(vec!["-c".into(), script.into()]));
    SpawnConfig { program, args, ..SpawnConfig::default() }
}

fn mean(rank: RankContext) -> comm::Result<()> {
    let comm = rank.connect()?;
    let tensor = Tensor::new(&[comm.rank() as f32], &Device::Cpu)?;
    comm.all_reduce(&tensor, ReduceOp::Avg)?.wait()?;
    let [mean] = tensor.to_vec1::<f32>()?[..] else { panic!("{tensor}") };
    assert_eq!((rank.place.rank, rank.place.world_size), (comm.rank(), comm.world_size()));
    println!("rank {} of {}: {mean}", comm.rank(), comm.world_size());
    Ok(())
}

/// Rank 1 fails by itself, and the others because of that.
fn fail(rank: RankContext) -> Result<(), Problem> {
    let comm = rank.connect()?;
    comm.barrier()?.wait()?;
    if comm.rank() == 1 {
        return Err(Problem("the data are gone".into()));
    }
    Ok(comm.barrier()?.wait()?)
}

fn wait(rank: RankContext) -> comm::Result<()> {
    println!("rank {} is here", rank.place.rank);
    loop {
        std::thread::park();
    }
}

fn talk(_: RankContext) -> comm::Result<()> {
    loop {
        println!("on and on");
    }
}

/// Starts itself as one rank, each time with another argument.
fn spawn_counted() -> ExitCode {
    let depth = std::env::var(DEPTH).unwrap_or_default();
    if depth.len() > 2 * DEEPEST {
        println!("too deep");
        return ExitCode::FAILURE;
    }
    let (program, args) = (std::env::current_exe().ok(), Some(vec![depth.clone().into()]));
    let env = vec![(DEPTH.into(), format!("{depth}1").into())];
    match launch::spawn(&SpawnConfig { world_size: 1, program, args, env, ..SpawnConfig::default() }) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            println!("at depth {}: {error}", depth.len());
            ExitCode::from(error.exit_code())
        }
    }
}

/// Starts ranks without checking whether this process is one.
fn spawn(config: SpawnConfig) -> ExitCode {
    let depth = std::env::var(DEPTH).map_or(0, |depth| depth.parse().unwrap());
    if depth == DEEPEST {
        println!("too deep");
        return ExitCode::FAILURE;
    }
    let env = vec![(DEPTH.into(), (depth + 1).to_string().into())];
    match launch::spawn(&SpawnConfig { world_size: 2, env, ..config }) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            println!("at depth {depth}: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
