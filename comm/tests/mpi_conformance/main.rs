//! Conformance suite on ranks started by `mpirun`, and fault tests. Without a launcher this program starts itself under
//! one: `mpirun`, or the program named by `GIRANDOLE_MPIRUN`.
#![allow(clippy::unwrap_used, clippy::print_stdout, dead_code)]

mod absent;
#[path = "../conformance/batch.rs"]
mod batch;
#[path = "../conformance/cases.rs"]
mod cases;
mod faults;
#[path = "../conformance/groups.rs"]
mod groups;
#[path = "../conformance/halves.rs"]
mod halves;
mod job;
#[path = "../conformance/list.rs"]
mod list;
#[path = "../conformance/moves.rs"]
mod moves;
#[path = "../conformance/overlaps.rs"]
mod overlaps;
#[path = "../conformance/reference.rs"]
mod reference;
#[path = "../conformance/uneven.rs"]
mod uneven;

use std::path::Path;
use std::time::Duration;

use candle_core::Device;
use comm::{Communicator, Mpi, Result, TcpConfig};

/// Runs `body` on every rank of a group of one backend.
trait Backend {
    fn run(&self, world_size: usize, body: &(dyn Fn(&dyn Communicator) -> Result<()> + Sync));
}

/// Returns the device of the cases' tensors.
fn device() -> Device {
    Device::Cpu
}

/// The ranks of this job. Cases for another number of ranks are skipped.
struct Job(TcpConfig);

impl Backend for Job {
    fn run(&self, world_size: usize, body: &(dyn Fn(&dyn Communicator) -> Result<()> + Sync)) {
        if world_size == self.0.world_size {
            let run = || body(&Mpi::connect(&self.0)?);
            run().unwrap_or_else(|error| panic!("rank {} of {world_size}: {error}", self.0.rank));
        }
    }
}

/// No rank continues before all have written a file.
fn barrier(backend: &dyn Backend) {
    let folder = std::env::var_os(job::FOLDER).unwrap();
    let file = |round: usize, rank: usize| Path::new(&folder).join(format!("{round}.{rank}"));
    for world_size in 1..=4 {
        backend.run(world_size, &|comm| {
            for round in 0..20 {
                std::fs::write(file(round, comm.rank()), "").unwrap();
                comm.barrier()?.wait()?;
                assert!((0..world_size).all(|rank| file(round, rank).exists()), "round {round}");
            }
            Ok(())
        });
    }
}

fn main() {
    match std::env::var(job::ROLE) {
        Ok(role) => as_rank(&role),
        Err(_) => {
            for ranks in 1..=4 {
                job::succeed("conformance", ranks);
                println!("conformance on {ranks} of {}: ok", Mpi::version());
            }
            faults::all();
        }
    }
}

fn as_rank(role: &str) {
    let config = TcpConfig { timeout: Duration::from_secs(60), ..Mpi::config().unwrap() };
    if role != "conformance" {
        return faults::play(role, &config);
    }
    let rank = config.rank;
    let backend = Job(config);
    let own: list::Case = ("barrier", barrier);
    for (name, case) in list::CASES.into_iter().chain([own]) {
        if rank == 0 {
            println!("{name}");
        }
        case(&backend);
    }
}
