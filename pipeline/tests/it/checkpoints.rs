//! A run resumed from a checkpoint is bitwise equal; with other stages, ranks and replicas it is equal within rounding.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::Optimizer;
use comm::{Local, Mesh};
use pipeline::{DistributedModel, ParameterGroups, Pipeline, PipelineConfig, Result, ScheduleKind};
use training::{Checkpoint, CheckpointConfig, Checkpoints, OptimizerState, Sgd, SgdConfig};

use crate::common::{Comm, ROWS, Trained, WIDTH, assert_equal, batch, loss, modules, values, weights};

const MICRO_BATCHES: usize = 4;

fn open(dir: &Path) -> Checkpoints {
    Checkpoints::open(CheckpointConfig { dir: dir.to_path_buf(), ..CheckpointConfig::default() }).unwrap()
}

fn tensor(error: candle_core::Error) -> pipeline::Error {
    pipeline::Error::Comm(comm::Error::from(error))
}

fn sgd(pipeline: &Pipeline) -> Sgd {
    let config = SgdConfig { learning_rate: 0.1, momentum: 0.9, ..SgdConfig::default() };
    Sgd::named(pipeline.named_vars(), config).unwrap()
}

/// Trains steps `from..to`, resuming first if `from` is not 0, and writes a checkpoint at the end. Returns the parameters,
/// and the extra data that was loaded.
fn train(
    comm: Comm,
    (schedule, copies): (ScheduleKind, usize),
    (from, to): (usize, usize),
    dir: &Path,
) -> Result<(Trained, serde_json::Value)> {
    let mesh = Mesh::new(comm.clone(), &[("pp", comm.world_size() / copies), ("dp", copies)])?;
    let (stages, group) = (mesh.axis("pp")?.clone(), mesh.axis("dp")?.clone());
    let copy = group.rank();
    let micro_batches = MICRO_BATCHES / copies;
    let config = PipelineConfig {
        schedule,
        micro_batches,
        averaged_over: Some(ParameterGroups::of(group)),
        ..PipelineConfig::default()
    };
    let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu).map_err(tensor)?;
    let mut pipeline = Pipeline::new(stages, &modules(3), &weights(), &example, loss, &config)?;
    let mut optimizer = sgd(&pipeline);
    let (checkpoints, mut kept) = (open(dir), serde_json::Value::Null);
    if from > 0 {
        let contents = checkpoints.latest().unwrap().unwrap();
        assert_eq!(contents.step, from as u64);
        kept = pipeline.load_checkpoint(&contents, Some(&mut optimizer))?;
    }
    let rows = ROWS * micro_batches;
    for step in from..to {
        let (x, y) = batch(step, rows * copies).map_err(tensor)?;
        let own = |all: &Tensor| all.narrow(0, copy * rows, rows).map_err(tensor);
        let step = pipeline.step(Some(&own(&x)?), Some(&own(&y)?))?;
        optimizer.step(&step.grads).map_err(tensor)?;
    }
    // Every rank passes its own extra data; that of the first rank is saved.
    let extra = serde_json::json!({ "rank": comm.rank() });
    let checkpoint = Checkpoint { step: to as u64, extra, ..Checkpoint::default() };
    let folder = pipeline.save_checkpoint(&checkpoints, Some(&optimizer), &checkpoint)?;
    assert!(folder.join("checkpoint.json").exists());
    let own = if copy == 0 { values(&pipeline.named_vars()) } else { Vec::new() };
    Ok((own, kept))
}

fn on_ranks(ranks: usize, how: (ScheduleKind, usize), steps: (usize, usize), dir: &Path) -> Trained {
    let results = Local::run_shared(ranks, |comm| Ok(train(comm, how, steps, dir)?)).unwrap();
    if steps.0 > 0 {
        assert!(results.iter().all(|(_, kept)| kept["rank"] == 0));
    }
    let mut all: Trained = results.into_iter().flat_map(|(trained, _)| trained).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn a_run_goes_on_where_it_was() {
    let how = (ScheduleKind::OneFOneB, 1);
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let expected = on_ranks(3, how, (0, 6), whole.path());
    on_ranks(3, how, (0, 3), parts.path());
    assert_eq!(on_ranks(3, how, (3, 6), parts.path()), expected, "to the bit");
}

#[test]
fn a_run_goes_on_in_other_stages_and_copies() {
    let whole = tempfile::tempdir().unwrap();
    let expected = on_ranks(2, (ScheduleKind::GPipe, 1), (0, 8), whole.path());
    let dir = tempfile::tempdir().unwrap();
    on_ranks(2, (ScheduleKind::GPipe, 1), (0, 2), dir.path());
    on_ranks(3, (ScheduleKind::ZbV, 1), (2, 4), dir.path());
    on_ranks(4, (ScheduleKind::OneFOneB, 2), (4, 6), dir.path());
    let got = on_ranks(1, (ScheduleKind::Naive, 1), (6, 8), dir.path());
    assert_equal(&got, &expected, "after three resumes");
}

#[test]
fn what_cannot_be_trusted_or_does_not_fit_is_refused_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    on_ranks(2, (ScheduleKind::GPipe, 1), (0, 1), dir.path());
    let resume = |blocks: usize| {
        Local::run_shared(2, |comm| {
            let config = PipelineConfig { micro_batches: 2, ..PipelineConfig::default() };
            let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu)?;
            let mut pipeline = Pipeline::new(comm, &modules(blocks), &weights(), &example, loss, &config)?;
            let before = values(&pipeline.named_vars());
            let contents = open(dir.path()).latest().unwrap().unwrap();
            let mut optimizer = sgd(&pipeline);
            let error = pipeline.load_checkpoint(&contents, Some(&mut optimizer)).unwrap_err();
            let changed = values(&pipeline.named_vars()) != before || !optimizer.state().unwrap().is_empty();
            Ok((error.to_string(), error.is_peer_failure(), changed))
        })
        .unwrap()
    };
    let refused = resume(4);
    assert!(refused[1].0.contains("it has no parameter blocks.3.fc."), "{refused:?}");
    assert!(refused[0].0.starts_with("rank 1 failed: "), "{refused:?}");
    assert!(refused[0].1 && !refused[1].1);
    let file = open(dir.path()).latest().unwrap().unwrap().path("rank-00001");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let refused = resume(3);
    assert!(refused[1].0.contains("rank-00001.safetensors` cannot be trusted"), "{refused:?}");
    assert!(refused[0].0.starts_with("rank 1 failed: "), "{refused:?}");
    // A rank that can read all its own files changes nothing, either.
    assert!(!refused[0].2 && !refused[1].2, "{refused:?}");
}

#[test]
fn an_optimizer_without_names_cannot_be_kept() {
    let dir = tempfile::tempdir().unwrap();
    let lines = Local::run_shared(2, |comm| {
        let config = PipelineConfig { micro_batches: 2, ..PipelineConfig::default() };
        let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu)?;
        let mut pipeline = Pipeline::new(comm, &modules(1), &weights(), &example, loss, &config)?;
        let mut unnamed = crate::common::optimizer(pipeline.vars());
        let (x, y) = batch(0, 2 * ROWS)?;
        unnamed.step(&pipeline.step(Some(&x), Some(&y))?.grads)?;
        let saved = pipeline.save_checkpoint(&open(dir.path()), Some(&unnamed), &Checkpoint::default());
        Ok(saved.unwrap_err().to_string())
    });
    assert!(lines.unwrap()[0].contains("make it from `Pipeline::named_vars`"));
    assert!(open(dir.path()).latest().unwrap().is_none());
}
