//! Running statistics are neither trained nor divided, and are kept in checkpoints.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{BatchNorm, ModuleT, Optimizer, batch_norm};
use girandole::comm::{Communicator, Local};
use girandole::training::build::{Builder, Division, Linear, LinearConfig, Model, Unit, Units};
use girandole::training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints};
use girandole::{InitialWeights, Layout, Parallel, ParallelConfig};

struct Block {
    layer: Linear,
    norm: BatchNorm,
    trains: Arc<AtomicBool>,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = self.layer.forward(x)?;
        match self.trains.load(Ordering::Relaxed) {
            true => self.norm.forward_train(&y)?,
            false => self.norm.forward_t(&y, false)?,
        }
        .tanh()
    }
}

struct Net(Vec<Unit<Block>>);

const WIDTH: usize = 4;
const ROWS: usize = 16;

impl Net {
    fn new(builder: &Builder, trains: &Arc<AtomicBool>) -> candle_core::Result<Self> {
        let unit = |place: usize| {
            builder.unit(&format!("{place}"), |part| {
                let part = part.pp(place);
                let layer = part
                    .pp("layer")
                    .linear(&LinearConfig::new(WIDTH, WIDTH, Division::Whole).with_bias(true))?;
                let norm = batch_norm(WIDTH, 1e-5, part.pp("norm").whole())?;
                Ok(Block { layer, norm, trains: trains.clone() })
            })
        };
        Ok(Self((0..3).map(unit).collect::<candle_core::Result<_>>()?))
    }
}

impl Units for Net {
    fn units(&self) -> Vec<&dyn Module> {
        self.0.iter().map(|unit| unit as &dyn Module).collect()
    }
}

impl Model for Net {
    fn output_loss(output: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
        candle_nn::loss::mse(output, targets)
    }
}

fn data(parallel: &Parallel<Net>) -> candle_core::Result<(Tensor, Tensor)> {
    let ranks = parallel.data_ranks();
    let rows = ROWS / ranks.world_size();
    let all = Tensor::arange(0f64, (ROWS * WIDTH) as f64, &Device::Cpu)?.reshape((ROWS, WIDTH))?;
    let own = all.narrow(0, ranks.rank() * rows, rows)?.contiguous()?;
    Ok(((&own * 0.7)?.sin()?, (own * 0.3)?.cos()?))
}

/// What a rank has of one state.
type Numbers = Vec<(String, Vec<f64>)>;

/// Loads the latest checkpoint, where there is one; trains, where there is none, and writes one. By rank: the loss of an evaluation, and state.
fn run(layout: &str, dir: &Path, frozen: bool) -> Vec<(f64, Numbers)> {
    let layout: Layout = layout.parse().unwrap();
    let on_rank = |comm: Arc<dyn Communicator>| -> girandole::Result<_> {
        let trains = Arc::new(AtomicBool::new(true));
        let example = Tensor::zeros((ROWS / layout.data_ranks() / 2, WIDTH), DType::F64, &Device::Cpu)?;
        let settings = ParallelConfig {
            dtype: DType::F64,
            micro_batches: 2,
            example: Some(example),
            is_trained: frozen.then(|| Arc::new(|name: &str| name.contains("layer")) as _),
            ..ParallelConfig::default()
        };
        let flag = trains.clone();
        let build = move |builder: &Builder| Net::new(builder, &flag);
        let mut parallel = Parallel::new(comm, &layout, InitialWeights::seed(5), &settings, build)?;
        let mut adam = Adam::named(parallel.named_vars(), AdamConfig::adamw())?;
        assert!(parallel.named_vars().iter().all(|(name, _)| !name.contains("running")));
        let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.into(), keep: 1 })?;
        let (x, y) = data(&parallel)?;
        match checkpoints.latest()? {
            Some(contents) => drop(parallel.load(&contents, Some(&mut adam))?),
            None => {
                for _ in 0..3 {
                    let step = parallel.step(&x, &y)?;
                    adam.step(&step.grads)?;
                }
                parallel.save(&checkpoints, Some(&adam), &Checkpoint::default())?;
            }
        }
        trains.store(false, Ordering::Relaxed);
        let evaluated = parallel.evaluate(&x, &y)?.loss;
        let numbers =
            |(name, var): (String, candle_core::Var)| Ok((name, var.flatten_all()?.to_vec1::<f64>()?));
        let state = parallel.buffers().into_iter().map(numbers).collect::<girandole::Result<Numbers>>()?;
        Ok((evaluated, state))
    };
    Local::run_shared(layout.ranks(), |comm| Ok(on_rank(comm)?)).unwrap()
}

#[test]
fn statistics_go_on_in_any_layout() {
    let layouts = ["", "dp=2", "shard=2", "dp=2,shard=2", "pp=2", "pp=2,dp=2", "pp=2,shard=2"];
    for frozen in [false, true] {
        for from in layouts {
            let dir = tempfile::tempdir().unwrap();
            let first = run(from, dir.path(), frozen).remove(0).1;
            let expected = run("", dir.path(), frozen).remove(0);
            assert_eq!(expected.1.len(), 6);
            // What the first rank came to.
            let of = |name: &str| expected.1.iter().find(|(known, _)| known == name).unwrap();
            assert!(first.iter().all(|kept| of(&kept.0) == kept), "{from}: {first:?}, {expected:?}");
            assert!(expected.1.iter().all(|(_, numbers)| numbers.iter().all(|x| *x != 0.0 && *x != 1.0)));
            for to in layouts {
                for (loss, state) in run(to, dir.path(), frozen) {
                    assert!((loss - expected.0).abs() < 1e-12, "{from} to {to}: {loss}, {}", expected.0);
                    assert!(state.iter().all(|kept| of(&kept.0) == kept), "{from} to {to}: {state:?}");
                }
            }
        }
    }
}
