//! A model on two axes of a mesh is independent of the other axes.

use crate::common::{INPUTS, Mlp, builder, on_all_ranks, parameters, values};
use candle_core::DType;
use candle_nn::Module;
use comm::Mesh;
use fsdp::{DistributedModel, Fsdp, FsdpConfig};
use training::{Checkpoint, CheckpointConfig, Checkpoints};

#[test]
fn other_axes_have_models_of_their_own() {
    let folder = tempfile::tempdir().expect("a folder");
    for axes in [
        [("pp", 2), ("dp", 2), ("shard", 2)],
        [("dp", 2), ("pp", 2), ("shard", 2)],
        [("shard", 2), ("dp", 1), ("pp", 2)],
        [("shard", 1), ("dp", 1), ("pp", 3)],
    ] {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let ends = on_all_ranks(ranks, |comm| {
            let mesh = Mesh::new(comm, &axes)?;
            let stage = mesh.axis("pp")?.rank();
            let config = FsdpConfig::default();
            // Different values for each stage.
            let vb = builder(1 + stage as u64, DType::F64);
            let mut fsdp = Fsdp::hybrid(&mesh, ("shard", "dp"), vb, &config, Mlp::new)?;
            let x = values(3, &[2, INPUTS], DType::F64);
            // The first stage runs forward twice.
            let y = if stage == 0 { fsdp.forward(&x)?.add(&fsdp.forward(&x)?)? } else { fsdp.forward(&x)? };
            fsdp.backward(&y.sum_all()?)?;
            let dir = folder.path().join(format!("stage-{stage}"));
            let checkpoints = Checkpoints::open(CheckpointConfig { dir, ..CheckpointConfig::default() })?;
            fsdp.save_checkpoint(&checkpoints, None, &Checkpoint::default())?;
            let before = parameters(&fsdp)?;
            fsdp.load_checkpoint(&checkpoints.latest()?.expect("one"), None)?;
            assert_eq!(parameters(&fsdp)?, before);
            Ok((stage, before))
        });
        let stages = axes.iter().find(|(name, _)| *name == "pp").map_or(0, |(_, size)| *size);
        let mut models: Vec<_> = ends.into_iter().filter(|(_, model)| !model.is_empty()).collect();
        models.sort_by_key(|(stage, _)| *stage);
        assert_eq!(models.len(), stages, "a first rank for each model");
        assert!(models.windows(2).all(|pair| pair[0].1 != pair[1].1), "a model for each stage");
    }
}
