//! `tensor-parallel-mlp` and `tensor-parallel-transformer`, the PyTorch handbook: layers divided over ranks, and what that
//! saves and
//! costs beside copies of the whole model.

mod figures;
mod mesh;
mod mlp;
mod run;
mod table;
mod transformer;

pub use figures::Figures;
pub use mesh::MeshOptions;
pub use mlp::{Mlp, TensorParallelMlpOptions};
pub use transformer::TensorParallelTransformerOptions;

use std::ffi::OsString;

use comm::Place;
use sampler::{Generator, SharedGenerator};
use tensor_parallel::Weights;

use crate::error::Result;
use crate::experiment::{self, Experiment};
use crate::options::{Backend, CommonOptions};
use crate::room;

/// An experiment whose ranks are a mesh.
pub trait OnMesh: Experiment {
    /// The options of the mesh.
    fn mesh(&self) -> &MeshOptions;
}

/// Runs an experiment on as many ranks as its mesh has.
///
/// # Errors
/// As [`experiment::run`].
pub fn run<E: OnMesh>(experiment: &E) -> Result<()> {
    let is_set = |name| std::env::var_os(name).is_some_and(|value: OsString| !value.is_empty());
    // Whoever has started this process as a rank has said how many there are.
    let launched = experiment.common().ranks.backend == Backend::Mpi
        || is_set("WORLD_SIZE")
        || Place::is_from_scheduler()?;
    match experiment.mesh().ranks() {
        Some(ranks) if !launched && experiment.common().ranks.world_size.is_none() => {
            let mut common = experiment.common().clone();
            common.ranks.world_size = Some(ranks);
            experiment::run(&experiment.with_common(common))
        }
        _ => experiment::run(experiment),
    }
}

/// Where weights come from: from `--init`, or the generator that has drawn the data.
fn weights(common: &CommonOptions, generator: Generator) -> Weights {
    match &common.init {
        Some(path) => Weights::File(path.clone()),
        None => Weights::Random(SharedGenerator::from(generator)),
    }
}

/// Bytes that each rank needs at least, and the ranks of this machine, where a model that is cut into so many parts takes
/// `bytes(parts)` on each. The comparison in the end takes a whole copy of it.
fn needed(
    common: &CommonOptions,
    (world_size, tp): (usize, usize),
    bytes: impl Fn(usize) -> f64,
) -> (f64, usize) {
    match room::ranks_on_host(&common.ranks, common.device, world_size) {
        Some(ranks) => (bytes(1), ranks),
        None => (bytes(tp), 1),
    }
}
