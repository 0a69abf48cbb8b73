//! The whole model is read from a file, by any number of stages and replicas.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use comm::{Local, Mesh};
use pipeline::{DistributedModel, ParameterGroups, Pipeline, PipelineConfig, Result};

use crate::common::{Comm, ROWS, Trained, WIDTH, loss, modules, values, weights};

const BLOCKS: usize = 2;

fn pipeline(comm: Comm, copies: usize) -> Result<Pipeline> {
    let mesh = Mesh::new(comm.clone(), &[("pp", comm.world_size() / copies), ("dp", copies)])?;
    let config = PipelineConfig {
        averaged_over: Some(ParameterGroups::of(mesh.axis("dp")?.clone())),
        ..PipelineConfig::default()
    };
    let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu).map_err(comm::Error::from)?;
    Pipeline::new(mesh.axis("pp")?.clone(), &modules(BLOCKS), &weights(), &example, loss, &config)
}

/// Writes a file of the whole model, whose numbers are `factor` times the initial ones.
fn save(path: &Path, factor: f64) -> Trained {
    let saved = Local::run_shared(1, |comm| {
        let pipeline = pipeline(comm, 1)?;
        for (_, var) in pipeline.named_vars() {
            var.set(&(var.as_tensor() * factor)?)?;
        }
        pipeline.save_full(path)?;
        Ok(values(&pipeline.named_vars()))
    });
    saved.unwrap().remove(0)
}

#[test]
fn every_split_reads_what_one_process_has_saved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let saved = save(&path, 3.0);
    for (ranks, copies) in [(1, 1), (2, 1), (3, 1), (4, 2)] {
        let found = Local::run_shared(ranks, |comm| {
            let pipeline = pipeline(comm, copies)?;
            pipeline.load_full(&path)?;
            Ok(values(&pipeline.named_vars()))
        });
        let mut found: Trained = found.unwrap().into_iter().flatten().collect();
        assert_eq!(found.len(), copies * saved.len());
        found.sort_by(|a, b| a.0.cmp(&b.0));
        found.dedup();
        assert_eq!(found, saved, "{ranks} ranks, {copies} copies");
    }
}

#[test]
fn a_file_that_does_not_fit_changes_nothing_on_any_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    save(&path, 3.0);
    let mut tensors = training::load_tensors(&path, &Device::Cpu).unwrap();
    let first = tensors.remove("blocks.0.fc.weight").unwrap();
    for (name, expected) in [("", "has no tensor `blocks.0.fc.weight`"), ("more", "has a tensor `more`")] {
        let mut tensors = tensors.clone();
        if !name.is_empty() {
            tensors.extend([("blocks.0.fc.weight".to_string(), first.clone()), (name.into(), first.clone())]);
        }
        training::save_tensors(&path, &tensors).unwrap();
        let found = Local::run_shared(2, |comm| {
            let pipeline = pipeline(comm, 1)?;
            let before = values(&pipeline.named_vars());
            let error = pipeline.load_full(&path).unwrap_err().to_string();
            assert_eq!(values(&pipeline.named_vars()), before);
            Ok(error)
        });
        let found = found.unwrap();
        assert!(
            found.iter().all(|message| message.contains(expected) && !message.contains('\n')),
            "{found:?}"
        );
    }
}
