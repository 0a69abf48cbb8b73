//! An experiment whose layers are divided over ranks, which form a mesh, with the memory and communication compared to
//! data parallelism.

mod measurements;
mod options;
mod table;
mod training;

pub use measurements::Measurements;
pub use options::MeshOptions;
pub use table::print;
pub use training::{Task, TensorParallelRunConfig, Trained, train};

use std::ffi::OsString;

use cli::Experiment;
use cli::error::Result;
use cli::memory_check;
use cli::options::{Backend, CommonOptions};
use comm::LaunchedRank;
use sampler::{Generator, SharedGenerator};
use tensor_parallel::Weights;

/// An experiment whose ranks form a mesh.
pub trait OnMesh: Experiment {
    /// The options of the mesh.
    fn mesh(&self) -> &MeshOptions;
}

/// Runs an experiment on as many ranks as its mesh has.
///
/// # Errors
/// Those of [`run`](cli::run).
pub fn run<E: OnMesh>(experiment: &E) -> Result<()> {
    let is_set = |name| std::env::var_os(name).is_some_and(|value: OsString| !value.is_empty());
    // A process started as a rank has its world size from the launcher.
    let launched = experiment.common().ranks.backend == Backend::Mpi
        || is_set("WORLD_SIZE")
        || LaunchedRank::is_from_scheduler()?;
    match experiment.mesh().ranks() {
        Some(ranks) if !launched && experiment.common().ranks.world_size.is_none() => {
            let mut common = experiment.common().clone();
            common.ranks.world_size = Some(ranks);
            cli::run(&experiment.with_common(common))
        }
        _ => cli::run(experiment),
    }
}

/// Returns the source of the weights: `--init`, or the generator that has drawn the data.
pub fn weights(common: &CommonOptions, generator: Generator) -> Weights {
    match &common.init {
        Some(path) => Weights::File(path.clone()),
        None => Weights::Random(SharedGenerator::from(generator)),
    }
}

/// Returns the minimum bytes per rank, and the ranks on this machine, for a model that takes `bytes(parts)` on each
/// rank if cut into `parts`. On the CPU a whole copy is counted, since the comparison at the end uses data
/// parallelism.
pub fn memory_per_rank(
    common: &CommonOptions,
    world_size: usize,
    tp: usize,
    bytes: impl Fn(usize) -> f64,
) -> (f64, usize) {
    match memory_check::ranks_on_host(&common.ranks, common.device, world_size) {
        Some(ranks) => (bytes(1), ranks),
        None => (bytes(tp), 1),
    }
}
