//! Rendezvous: each init method in turn, a rank that never joins, and what remains of the rendezvous address or file.

use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use candle_core::{Device, Tensor};
use cli::interrupt;
use cli::prelude::*;
use comm::{Communicator, InitMethod, ReduceOp, Tcp, TcpConfig, broadcast_object};
use launch::ReservedPort;

use super::stage::{OrderedOutput, numbers};

/// Timeout of the group that waits for a rank that never joins; a shorter configured timeout is kept.
const SHORT: Duration = Duration::from_secs(1);

pub(super) fn show(stage: &OrderedOutput<'_>, config: &TcpConfig) -> Result<()> {
    let world_size = config.world_size;
    stage.title("meeting places")?;
    let main = kind(&config.init_method);
    stage
        .say(format_args!("{main}: {world_size} of {world_size} ranks have met; this is the world group"))?;
    if matches!(config.init_method, InitMethod::Env) && world_size > 1 {
        by_tcp(stage, config)?;
        by_file(stage, config)?;
    }
    missing_rank(stage, config)
}

fn kind(method: &InitMethod) -> &'static str {
    match method {
        InitMethod::Env => "env:// (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE)",
        InitMethod::Tcp { .. } => "tcp://",
        InitMethod::File(_) => "file://",
    }
}

fn by_tcp(stage: &OrderedOutput<'_>, config: &TcpConfig) -> Result<()> {
    let first = config.rank == 0;
    // A port for rank 0 to listen on.
    let reserved = first.then(|| ReservedPort::at(SocketAddr::new(config.bind, 0))).transpose()?;
    let own = reserved.as_ref().map(|reserved| reserved.address().to_string());
    let address = broadcast_object(stage.comm, &own.unwrap_or_default(), 0)?;
    let group = Tcp::connect(&at(config, format!("tcp://{address}").parse()?))?;
    stage.say(format_args!("tcp://: {0} of {0} ranks have met", config.world_size))?;
    // Nothing else can have taken the port meanwhile: it is still reserved.
    let gone = address.parse::<SocketAddr>().is_ok_and(|address| TcpStream::connect(address).is_err());
    let state = if gone { "nobody listens there any more" } else { "somebody listens there" };
    works_without_rendezvous(stage, &group, "tcp://", state)
}

fn by_file(stage: &OrderedOutput<'_>, config: &TcpConfig) -> Result<()> {
    let path = rendezvous_file(stage, config)?;
    let group = Tcp::connect(&at(config, InitMethod::File(path.clone())))?;
    stage.say(format_args!("file://: {0} of {0} ranks have met", config.world_size))?;
    works_without_rendezvous(
        stage,
        &group,
        "file://",
        if path.exists() { "the file is there" } else { "the file is gone" },
    )
}

/// Runs a collective over the group, to show that it no longer needs its rendezvous address or file.
fn works_without_rendezvous(stage: &OrderedOutput<'_>, group: &Tcp, method: &str, state: &str) -> Result<()> {
    let tensor = Tensor::new(&[group.rank() as f32], &Device::Cpu)?;
    group.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
    let sum = numbers(&tensor)?;
    stage.say(format_args!("{method}: {state}, and all_reduce of the rank over that group gives {sum}"))
}

/// Connects a group with one rank more than exist, and shows the timeout.
fn missing_rank(stage: &OrderedOutput<'_>, config: &TcpConfig) -> Result<()> {
    let path = rendezvous_file(stage, config)?;
    let (come, world_size) = (config.world_size, config.world_size + 1);
    let timeout = config.timeout.min(SHORT);
    let config = TcpConfig { world_size, timeout, ..at(config, InitMethod::File(path)) };
    let ranks = if come == 1 { "rank comes" } else { "ranks come" };
    match Tcp::connect(&config) {
        Err(comm::Error::Rendezvous { detail, .. }) => stage.say(format_args!(
            "time-out: a group of {world_size} to which {come} {ranks} gives up after {} s: {detail}",
            timeout.as_secs_f64()
        )),
        // Rank 0 reports it; which error the other ranks see does not matter.
        Err(_) if config.rank > 0 => Ok(()),
        Err(other) => Err(other.into()),
        Ok(_) => stage.say(format_args!("time-out: rank {come} came from nowhere")),
    }
}

/// Returns the configuration of the same rank for another group.
fn at(config: &TcpConfig, init_method: InitMethod) -> TcpConfig {
    TcpConfig { init_method, job_id: format!("{}/meeting", config.job_id), ..config.clone() }
}

/// Returns a path that no other job uses. The job's ranks share a host, or a folder for temporary files.
fn rendezvous_file(stage: &OrderedOutput<'_>, config: &TcpConfig) -> Result<PathBuf> {
    let number = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos());
    let path = std::env::temp_dir().join(format!("girandole-{}-{number:x}", std::process::id()));
    let path = broadcast_object(stage.comm, &path, 0)?;
    if config.rank == 0 {
        interrupt::remove_on_signal(&path);
    }
    Ok(path)
}
