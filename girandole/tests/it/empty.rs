//! A parameter without elements is stored in a checkpoint like any other.

use std::path::Path;
use std::sync::Arc;

use crate::common::Chain;
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::Optimizer;
use girandole::checkpoint::CheckpointReader;
use girandole::comm::{Communicator, Local};
use girandole::training::build::{Builder, Division, Linear, LinearConfig};
use girandole::training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints};
use girandole::{DistributedModel, InitialWeights, Layout, Parallel, ParallelConfig};

const WIDTH: usize = 4;
const ROWS: usize = 8;

struct Block {
    layer: Linear,
    /// Further rows; there are none.
    more: Tensor,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Tensor::cat(&[&self.layer.forward(x)?, &self.more], 0)?.tanh()
    }
}

type Net = Chain<Block>;

impl Net {
    fn new(builder: &Builder) -> candle_core::Result<Self> {
        let unit = |place: usize| {
            builder.unit(&format!("{place}"), |part| {
                let part = part.pp(place);
                let layer = part.pp("layer").linear(&LinearConfig::new(WIDTH, WIDTH, Division::Whole))?;
                Ok(Block { layer, more: part.whole().get((0, WIDTH), "more")? })
            })
        };
        Ok(Self((0..2).map(unit).collect::<candle_core::Result<_>>()?))
    }
}

/// Resumes from the latest checkpoint for a step, and writes one; returns the losses of all ranks.
fn go_on(layout: &str, dir: &Path) -> Vec<f64> {
    let layout: Layout = layout.parse().unwrap();
    let on_rank = |comm: Arc<dyn Communicator>| -> girandole::Result<f64> {
        let rows = ROWS / layout.data_ranks();
        let settings = ParallelConfig {
            dtype: DType::F64,
            example: Some(Tensor::zeros((rows, WIDTH), DType::F64, &Device::Cpu)?),
            ..ParallelConfig::default()
        };
        let mut parallel = Parallel::new(comm, &layout, InitialWeights::seed(5), &settings, Net::new)?;
        let mut adam = Adam::named(parallel.named_vars(), AdamConfig::adamw())?;
        let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.into(), keep: 1 }).unwrap();
        if let Some(contents) = checkpoints.latest().unwrap() {
            parallel.load_checkpoint(&contents, Some(&mut adam))?;
        }
        let first = parallel.data_ranks().rank() * rows;
        let x = Tensor::arange(0f64, (ROWS * WIDTH) as f64, &Device::Cpu)?.reshape((ROWS, WIDTH))?;
        let x = x.narrow(0, first, rows)?.contiguous()?;
        let step = parallel.step(&(&x * 0.7)?.sin()?, &(x * 0.3)?.cos()?)?;
        adam.step(&step.grads)?;
        parallel.save_checkpoint(&checkpoints, Some(&adam), &Checkpoint::default())?;
        let mut saved = CheckpointReader::open(&checkpoints.latest().unwrap().unwrap())?;
        assert_eq!(saved.whole("0.more")?.dims(), [0, WIDTH]);
        Ok(step.loss)
    };
    Local::run_shared(layout.ranks(), |comm| Ok(on_rank(comm)?)).unwrap()
}

#[test]
fn it_is_written_and_read_in_any_layout() {
    let layouts = ["", "dp=2", "shard=2", "pp=2", "dp=2,shard=2"];
    let whole = tempfile::tempdir().unwrap();
    let expected: Vec<f64> = layouts.iter().map(|_| go_on("", whole.path())[0]).collect();
    assert!(expected[4] < expected[0]);
    let dir = tempfile::tempdir().unwrap();
    for (layout, expected) in layouts.into_iter().zip(expected) {
        for loss in go_on(layout, dir.path()) {
            assert!((loss - expected).abs() < 1e-12, "{layout}: {loss}, expected {expected}");
        }
    }
}
