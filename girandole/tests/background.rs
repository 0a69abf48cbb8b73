//! Background checkpoints: the files are the same as those of checkpoints for which training stops.
#![allow(clippy::unwrap_used)]

#[path = "background/run.rs"]
mod run;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Module, Result, Tensor};
use girandole::comm::Local;
use girandole::trainer::{CheckpointPlan, Data, TrainConfig, Trainer};
use girandole::training::build::{Builder, Division, Linear, LinearConfig, Model, Unit, Units};
use girandole::training::{CheckpointConfig, Checkpoints, FileHash};
use girandole::{Batch, InitialWeights, Layout, Parallel, ParallelConfig};
use run::{Rows, Times, train};

/// Returns the files of all checkpoints, with their steps.
fn files(dir: &Path) -> Vec<(u64, BTreeMap<String, FileHash>)> {
    let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.into(), keep: 9 }).unwrap();
    let of = |folder: PathBuf| checkpoints.contents(&folder).map(|contents| (contents.step, contents.files));
    checkpoints.list().unwrap().into_iter().map(|folder| of(folder).unwrap()).collect()
}

#[test]
fn files_are_those_of_the_step() {
    let (rows, sizes) = (Rows { len: 4, tokens: 257 }, (257, 32, 1));
    for layout in ["", "shard=2", "tp=2", "dp=2"] {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let all = dirs.iter().zip([false, true]).map(|(dir, in_background)| {
            let (summary, _) = train((layout, sizes), &rows, (4, 1), Some((dir.path(), in_background)));
            assert_eq!((summary.steps, summary.checkpoints), (4, 4));
            files(dir.path())
        });
        let all: Vec<_> = all.collect();
        assert_eq!(all[0].len(), 4);
        assert_eq!(all[1], all[0], "{layout}");
    }
}

/// A model whose copy takes far longer than a step. The variables that a step changes have the last name, and so are
/// copied last.
struct Mostly {
    unit: Unit<Layer>,
}

struct Layer {
    layer: Linear,
    _unused: Tensor,
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layer.forward(x)
    }
}

impl Units for Mostly {
    fn units(&self) -> Vec<&dyn Module> {
        vec![&self.unit]
    }
}

impl Model for Mostly {
    fn output_loss(output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        candle_nn::loss::mse(output, targets)
    }
}

impl Mostly {
    fn new(builder: &Builder) -> Result<Self> {
        let unit = builder.unit("all", |part| {
            let unused = part.whole().get_with_hints(8 << 20, "a", candle_nn::Init::Const(0.5))?;
            let layer = part.pp("z").linear(&LinearConfig::new(4, 4, Division::Whole))?;
            Ok(Layer { layer, _unused: unused })
        });
        Ok(Self { unit: unit? })
    }
}

struct Numbers;

impl Data for Numbers {
    fn rows(&self) -> usize {
        16
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let x = Tensor::from_iter(rows.iter().flat_map(|row| [*row as f32; 4]), device)?;
        let x = x.reshape((rows.len(), 4))?.sin()?;
        Ok((x.clone(), (x * 0.5)?).into())
    }
}

#[test]
fn the_optimizer_waits_for_copies() {
    let all = [false, true].map(|in_background| {
        let dir = tempfile::tempdir().unwrap();
        Local::run_shared(1, |comm| {
            let plan = CheckpointPlan { dir: dir.path().into(), every: 1, keep: 9, in_background };
            let config =
                TrainConfig { steps: 3, batch_size: 2, checkpoints: Some(plan), ..TrainConfig::default() };
            let (layout, parallel) = (Layout::default(), ParallelConfig::default());
            let mut model = Parallel::new(comm, &layout, InitialWeights::seed(5), &parallel, Mostly::new)?;
            Ok(Trainer::new(&mut model, Arc::new(Numbers), config)?.run(&mut Times::default())?)
        })
        .unwrap();
        files(dir.path())
    });
    assert_eq!(all[0].len(), 3);
    assert_eq!(all[1], all[0]);
}
