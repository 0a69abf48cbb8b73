//! `ddp-trainer`, the Trainer tutorial: a `Trainer` on every rank, each printing its number of steps per epoch.

pub(crate) mod model;

use std::sync::Arc;

use candle_core::Tensor;
use candle_nn::Module;
use clap::{Args, ValueEnum};
use cli::memory_check::INDEX_BYTES;
use cli::prelude::*;
use ddp::{Ddp, DdpConfig};
use ops::{Linear, linear, log_softmax, mse};
use training::{Sgd, SgdConfig, TensorFile};

use self::model::{Batch, FEATURES, Sample};

/// What is minimised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LossKind {
    /// The mean squared error.
    Mse,
    /// Cross-entropy over the one output, as in the tutorial: always 0.
    Document,
}

/// Options of `ddp-trainer`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains Linear(20, 1) on random samples, on --world-size ranks with averaged gradients. Each rank
prints one line per epoch, with the samples of its first batch and the number of its steps.

--data FILE holds the tensors x (samples, 20) and y (samples, 1), both f32. --init and --save hold
weight (1, 20) and bias (1).")]
pub(crate) struct DdpTrainerOptions {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointOptions,
    #[command(flatten)]
    pub(crate) elastic: ElasticOptions,
    /// How batches are loaded.
    #[command(flatten)]
    pub(crate) loader: LoaderOptions,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "5", value_parser = count)]
    pub(crate) epochs: usize,
    /// Samples per step, on each rank
    #[arg(long, value_name = "N", default_value = "32", value_parser = count)]
    pub(crate) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.001", value_parser = learning_rate)]
    pub(crate) lr: f64,
    /// Samples in the data set
    #[arg(long, value_name = "N", default_value = "2048", value_parser = count, conflicts_with = "data")]
    pub(crate) samples: usize,
    /// Loss to minimise
    #[arg(long, value_enum, default_value = "mse")]
    pub(crate) loss: LossKind,
}

/// What each process creates at the start.
pub(crate) struct Setup {
    samples: Arc<Vec<Sample>>,
    variables: Variables,
}

impl Command for DdpTrainerOptions {
    const NAME: &'static str = "ddp-trainer";
    const WORLD_SIZE: usize = 2;
    type Setup = Setup;
    type Trained = RunSeries;

    options_of!(common, checkpoints, elastic);

    fn settings(&self, _: usize) -> Vec<(String, String)> {
        settings!(self, lr, batch_size, loss = value_name(&self.loss), samples)
    }

    fn check(&self, world_size: usize) -> Result<()> {
        let bytes = size_of::<Sample>() + INDEX_BYTES;
        memory_check::check_samples("--samples", self.samples, bytes, &self.common, world_size)
    }

    fn setup(&self) -> Result<Setup> {
        let variables = Variables::new(&self.common)?;
        let samples = match &self.common.data {
            Some(path) => model::read(&TensorFile::open(path)?)?,
            None => variables.generator.with(|generator| model::draw(generator, self.samples))?,
        };
        variables.make(&self.common, |builder| linear(FEATURES, 1, builder))?;
        Ok(Setup { samples: Arc::new(samples), variables })
    }

    fn prepare(&self, _: &Setup, _: usize, _: Option<&mut MetricsWriter>) -> Result<()> {
        if self.loss == LossKind::Mse {
            note(format_args!(
                "the Trainer tutorial takes the cross-entropy of a single output, which is always 0 and teaches nothing; this run \
                 takes the mean squared error; --loss document does what the tutorial does"
            ));
        }
        Ok(())
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<RunSeries> {
        let Setup { samples, variables } = setup;
        let sampler = rank.sampler(samples.len(), true)?;
        let device = &variables.device;
        let loader = self.loader.loader(samples, sampler, self.batch_size, device, model::batch)?;
        let model = |builder| linear(FEATURES, 1, builder);
        let ddp = Ddp::new(rank.comm.clone(), variables.builder(), &DdpConfig::default(), model)?;
        let config = SgdConfig { learning_rate: self.lr, ..SgdConfig::default() };
        let optimizer = Sgd::named(ddp.named_vars(), config)?;
        let loss = match self.loss {
            LossKind::Mse => squared_error,
            LossKind::Document => cross_entropy_with_shares,
        };
        let model = DataParallel::new(ddp, optimizer, loss, &variables.map);
        let mut workload = Workload { rank: rank.comm.rank() };
        let mut trainer = Trainer::new(model, Epochs::new(loader));
        let save = |_: &_, rank: &Rank| variables.save(&self.common, rank);
        let (ran, ()) = trainer.run_and(rank, &self.run_config(rank), &mut workload, save)?;
        Ok(ran.series)
    }

    fn report(&self, outcome: Outcome<RunSeries>) -> Report {
        Report {
            facts: vec![
                self.common.data_fact(self.samples),
                fact("epochs", self.epochs),
                fact("batch size, each rank", self.batch_size),
                fact("learning rate", self.lr),
            ],
            runs: vec![outcome.trained],
            ..Report::default()
        }
    }
}

impl Experiment for DdpTrainerOptions {
    options_of!(epochs);
}

fn squared_error(model: &Linear, (x, y): &Batch) -> candle_core::Result<Tensor> {
    mse(&model.forward(x)?, y)
}

/// `F.cross_entropy(output, y)` with y of the output's shape: y holds class probabilities, here of a single class.
fn cross_entropy_with_shares(model: &Linear, (x, y): &Batch) -> candle_core::Result<Tensor> {
    let rows = (log_softmax(&model.forward(x)?)? * y)?.sum(1)?;
    rows.mean(0)?.neg()
}

/// Prints a line on every rank at the beginning of an epoch.
struct Workload {
    /// The rank number at the start: it stays in the printed lines when ranks are lost and numbers change.
    rank: usize,
}

impl Observer for Workload {
    fn epoch_begins(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        let Epoch { epoch: number, batch, batch_size, steps, .. } = epoch;
        // A resumed epoch has been announced already.
        if *batch > 0 {
            return Ok(());
        }
        let rank = self.rank;
        epoch.say(format_args!("[GPU: {rank}] Epoch: {number} | Batchsize: {batch_size} | Steps: {steps}"))
    }
}
