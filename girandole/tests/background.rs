//! Checkpoints that are written while training goes on: the same files as those for which it stands still.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Module, Result, Tensor};
use girandole::comm::Local;
use girandole::models::{CausalLm, ModelConfig, Weights};
use girandole::trainer::{CheckpointPlan, Data, Observer, StepReport, Summary, TrainConfig, Trainer};
use girandole::training::build::{Builder, Division, Linear, LinearConfig, Model, Unit, Units};
use girandole::training::{CheckpointConfig, Checkpoints, FileHash};
use girandole::{InitialWeights, Layout, Parallel, ParallelConfig};

/// Rows of a few tokens.
struct Rows {
    len: usize,
    tokens: usize,
}

impl Data for Rows {
    fn rows(&self) -> usize {
        16
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<(Tensor, Tensor)> {
        let (len, tokens) = (self.len, self.tokens);
        let all = |first| {
            rows.iter().flat_map(move |row| {
                (0..len).map(move |place| ((row * 37 + place * 11 + first) % tokens) as i64)
            })
        };
        let tensor = |first| Tensor::from_iter(all(first), device)?.reshape((rows.len(), len));
        Ok((tensor(0)?.to_dtype(DType::U32)?, tensor(1)?))
    }
}

fn model((vocabulary, hidden, layers): (usize, usize, usize)) -> ModelConfig {
    let intermediate = 8 * hidden / 3 / 32 * 32;
    let json = format!(
        r#"{{"model_type": "llama", "vocab_size": {vocabulary}, "hidden_size": {hidden}, "intermediate_size": {intermediate},
             "num_hidden_layers": {layers}, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu",
             "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": true,
             "rope_theta": 10000.0}}"#
    );
    ModelConfig::from_json(&json).unwrap()
}

/// The time of each step.
#[derive(Default)]
struct Times(Vec<f64>);

impl<M> Observer<M> for Times {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        self.0.push(report.seconds);
        Ok(())
    }
}

/// Trains with checkpoints every so many steps; what rank 0 has seen.
fn train(
    (layout, sizes): (&str, (usize, usize, usize)),
    rows: &Rows,
    (steps, every): (usize, usize),
    plan: Option<(&Path, bool)>,
) -> (Summary, Vec<f64>) {
    let layout: Layout = layout.parse().unwrap();
    let plan =
        plan.map(|(dir, in_background)| CheckpointPlan { dir: dir.into(), every, keep: 9, in_background });
    let train = TrainConfig { steps, batch_size: 2, checkpoints: plan, ..TrainConfig::default() };
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let config = model(sizes);
        let weights = Weights::random(&config, 1).unwrap();
        let build = move |builder: &_| CausalLm::new(&config, builder);
        let mut model = Parallel::new(comm, &layout, weights.parts(), &ParallelConfig::default(), build)?;
        let mut times = Times::default();
        let summary = Trainer::new(&mut model, rows, train.clone())?.run(&mut times)?;
        Ok((summary, times.0))
    });
    ranks.unwrap().swap_remove(0)
}

/// By step, the files of all checkpoints.
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

/// A model that is copied far more slowly than it computes a step: what a step changes has the last name, and so is copied last.
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

    fn batch(&self, rows: &[usize], device: &Device) -> Result<(Tensor, Tensor)> {
        let x = Tensor::from_iter(rows.iter().flat_map(|row| [*row as f32; 4]), device)?;
        let x = x.reshape((rows.len(), 4))?.sin()?;
        Ok((x.clone(), (x * 0.5)?))
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
            Ok(Trainer::new(&mut model, &Numbers, config)?.run(&mut Times::default())?)
        })
        .unwrap();
        files(dir.path())
    });
    assert_eq!(all[0].len(), 3);
    assert_eq!(all[1], all[0]);
}

/// How long training stands still for a checkpoint of 115 million parameters, written at once and in the background: to be run by hand,
/// with `--ignored --nocapture`.
#[test]
#[ignore = "it measures, and needs 6 GB of memory and of disk"]
fn standing_still() {
    let (rows, sizes) = (Rows { len: 64, tokens: 257 }, (257, 896, 12));
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
    for layout in ["", "shard=2"] {
        let (_, plain) = train((layout, sizes), &rows, (6, 1), None);
        println!("layout {layout:?}: a step takes {:.3} s", mean(&plain[1..]));
        for in_background in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let (summary, times) = train((layout, sizes), &rows, (24, 12), Some((dir.path(), in_background)));
            println!(
                "in background {in_background}: {:.3} s a checkpoint, {:.3} s at the end; the 8 steps after it take {:.3} s each",
                summary.checkpoint_seconds / summary.checkpoints as f64,
                summary.last_checkpoint_seconds,
                mean(&times[12..20])
            );
        }
    }
}
