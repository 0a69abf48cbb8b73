//! Running statistics are neither trained nor divided, and are stored in checkpoints.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::common::Chain;
use candle_core::{DType, Device, Module, Tensor, bail};
use candle_nn::{BatchNorm, ModuleT, Optimizer, batch_norm};
use girandole::comm::{Communicator, Local};
use girandole::trainer::{Data, NoObserver, TrainConfig, Trainer};
use girandole::training::build::{Builder, Division, Linear, LinearConfig};
use girandole::training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints};
use girandole::{Batch, DistributedModel, InitialWeights, Layout, Parallel, ParallelConfig};

/// Controls the blocks of a rank.
struct Switch {
    trains: AtomicBool,
    /// Number of forward passes until one fails.
    forwards: AtomicUsize,
}

impl Switch {
    fn new(forwards: usize) -> Arc<Self> {
        Arc::new(Self { trains: AtomicBool::new(true), forwards: AtomicUsize::new(forwards) })
    }
}

struct Block {
    layer: Linear,
    norm: BatchNorm,
    switch: Arc<Switch>,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        if self.switch.forwards.fetch_sub(1, Ordering::Relaxed) == 0 {
            bail!("this rank leaves");
        }
        let y = self.layer.forward(x)?;
        match self.switch.trains.load(Ordering::Relaxed) {
            true => self.norm.forward_train(&y)?,
            false => self.norm.forward_t(&y, false)?,
        }
        .tanh()
    }
}

type Net = Chain<Block>;

const WIDTH: usize = 4;
const ROWS: usize = 16;

impl Net {
    fn new(builder: &Builder, switch: &Arc<Switch>) -> candle_core::Result<Self> {
        let unit = |place: usize| {
            builder.unit(&format!("{place}"), |part| {
                let part = part.pp(place);
                let layer = part
                    .pp("layer")
                    .linear(&LinearConfig::new(WIDTH, WIDTH, Division::Whole).with_bias(true))?;
                let norm = batch_norm(WIDTH, 1e-5, part.pp("norm").whole())?;
                Ok(Block { layer, norm, switch: switch.clone() })
            })
        };
        Ok(Self((0..3).map(unit).collect::<candle_core::Result<_>>()?))
    }
}

fn data(parallel: &Parallel<Net>) -> candle_core::Result<(Tensor, Tensor)> {
    let ranks = parallel.data_ranks();
    let rows = ROWS / ranks.world_size();
    let all = Tensor::arange(0f64, (ROWS * WIDTH) as f64, &Device::Cpu)?.reshape((ROWS, WIDTH))?;
    let own = all.narrow(0, ranks.rank() * rows, rows)?.contiguous()?;
    Ok(((&own * 0.7)?.sin()?, (own * 0.3)?.cos()?))
}

/// Names and values of a rank's state.
type Numbers = Vec<(String, Vec<f64>)>;

/// Loads the latest checkpoint, or trains and writes one if there is none. Returns by rank the loss of an evaluation,
/// and the state.
fn run(layout: &str, dir: &Path, frozen: bool) -> Vec<(f64, Numbers)> {
    let layout: Layout = layout.parse().unwrap();
    let on_rank = |comm: Arc<dyn Communicator>| -> girandole::Result<_> {
        let switch = Switch::new(usize::MAX);
        let example = Tensor::zeros((ROWS / layout.data_ranks() / 2, WIDTH), DType::F64, &Device::Cpu)?;
        let settings = ParallelConfig {
            dtype: DType::F64,
            micro_batches: 2,
            example: Some(example),
            is_trained: frozen.then(|| Arc::new(|name: &str| name.contains("layer")) as _),
            ..ParallelConfig::default()
        };
        let own = switch.clone();
        let build = move |builder: &Builder| Net::new(builder, &own);
        let mut parallel = Parallel::new(comm, &layout, InitialWeights::seed(5), &settings, build)?;
        let mut adam = Adam::named(parallel.named_vars(), AdamConfig::adamw())?;
        assert!(parallel.named_vars().iter().all(|(name, _)| !name.contains("running")));
        let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.into(), keep: 1 })?;
        let (x, y) = data(&parallel)?;
        match checkpoints.latest()? {
            Some(contents) => drop(parallel.load_checkpoint(&contents, Some(&mut adam))?),
            None => {
                for _ in 0..3 {
                    let step = parallel.step(&x, &y)?;
                    adam.step(&step.grads)?;
                }
                parallel.save_checkpoint(&checkpoints, Some(&adam), &Checkpoint::default())?;
            }
        }
        switch.trains.store(false, Ordering::Relaxed);
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
            // The state of the first rank.
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

/// Equal rows, so that their statistics do not depend on their number.
struct Equal;

impl Data for Equal {
    fn rows(&self) -> usize {
        ROWS
    }

    fn batch(&self, rows: &[usize], device: &Device) -> candle_core::Result<Batch> {
        let tensor = |value: f64| Tensor::full(value, (rows.len(), WIDTH), device);
        Ok((tensor(0.5)?, tensor(0.25)?).into())
    }
}

/// Runs five steps with a negligible learning rate. Returns the statistics by rank; `None` for a rank that has left.
fn count(ranks: usize, leaves_after: Option<usize>) -> Vec<Option<Numbers>> {
    let on_rank = |comm: Arc<dyn Communicator>| -> girandole::Result<Option<Numbers>> {
        let leaves = leaves_after.filter(|_| comm.rank() == 1);
        let switch = Switch::new(leaves.unwrap_or(usize::MAX));
        let settings = ParallelConfig { dtype: DType::F64, ..ParallelConfig::default() };
        let build = move |builder: &Builder| Net::new(builder, &switch);
        let mut parallel =
            Parallel::new(comm, &Layout::copies(ranks), InitialWeights::seed(5), &settings, build)?;
        let config = TrainConfig {
            steps: 5,
            batch_size: 6,
            learning_rate: 1e-30,
            fewest_ranks: (ranks > 1).then_some(1),
            ..TrainConfig::default()
        };
        match Trainer::new(&mut parallel, Arc::new(Equal), config)?.run(&mut NoObserver) {
            Err(_) if leaves.is_some() => return Ok(None),
            ended => ended?,
        };
        let numbers =
            |(name, var): (String, candle_core::Var)| Ok((name, var.flatten_all()?.to_vec1::<f64>()?));
        Ok(Some(parallel.buffers().into_iter().map(numbers).collect::<girandole::Result<Numbers>>()?))
    };
    Local::run_shared(ranks, |comm| Ok(on_rank(comm)?)).unwrap()
}

#[test]
fn a_step_that_is_taken_again_after_a_loss_counts_once() {
    let expected = count(1, None).remove(0).unwrap();
    // A rank leaves before, between and after the norms of its third step.
    for leaves_after in [None, Some(6), Some(7), Some(8)] {
        let seen: Vec<_> = count(3, leaves_after).into_iter().flatten().collect();
        assert_eq!(seen.len(), 3 - usize::from(leaves_after.is_some()));
        for ((name, numbers), (_, expected)) in seen.iter().flatten().zip(expected.iter().cycle()) {
            let gap =
                numbers.iter().zip(expected).map(|(one, other)| (one - other).abs()).fold(0.0, f64::max);
            assert!(
                gap < 1e-12,
                "{name}, one leaves after {leaves_after:?}: {numbers:?}, expected {expected:?}"
            );
        }
    }
}
