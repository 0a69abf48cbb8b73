//! `tensor-parallel-mlp` and `tensor-parallel-transformer`, document 004: layers divided over ranks, and what that saves and
//! costs beside copies of the whole model.

mod batches;
mod figures;
mod keeping;
mod mesh;
mod mlp;
mod run;
mod table;
mod transformer;

pub use figures::Figures;
pub use mesh::MeshOptions;
pub use mlp::{Mlp, TensorParallelMlpOptions};
pub use transformer::TensorParallelTransformerOptions;

use crate::error::Result;
use crate::experiment::{self, Experiment};

/// An experiment whose ranks are a mesh.
pub trait OnMesh: Experiment + Clone {
    /// The options of the mesh.
    fn mesh(&self) -> &MeshOptions;

    /// Sets the number of ranks.
    fn set_world_size(&mut self, world_size: usize);
}

/// Runs an experiment on as many ranks as its mesh has.
///
/// # Errors
/// As [`experiment::run`].
pub fn run<E: OnMesh>(experiment: &E) -> Result<()> {
    // A launcher has said how many there are.
    let launched = std::env::var_os("WORLD_SIZE").is_some_and(|value| !value.is_empty());
    match experiment.mesh().ranks() {
        Some(ranks) if !launched && experiment.common().ranks.world_size.is_none() => {
            let mut sized = experiment.clone();
            sized.set_world_size(ranks);
            experiment::run(&sized)
        }
        _ => experiment::run(experiment),
    }
}
