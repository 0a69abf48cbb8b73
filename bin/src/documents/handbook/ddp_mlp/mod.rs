//! `ddp-mlp`, the data-parallel example of the PyTorch handbook: a small classifier with distributed validation.

mod data;
pub mod model;

use crate::documents::shared::validation::{Validation, ValidationConfig, validate};
use candle_nn::Module;
use clap::Args;
use cli::prelude::*;
use ddp::{Ddp, DdpConfig};
use ops::cross_entropy;
use serde::{Deserialize, Serialize};
use training::{Sgd, SgdConfig, TensorFile};

use data::Sets;

use self::model::{Batch, CLASSES, Mlp, Sample};
use crate::documents::shared::python::Fixed;

/// Options of `ddp-mlp`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains Linear(10, 20), ReLU, Linear(20, 2) with cross-entropy, on --world-size ranks with averaged
gradients. Each rank has one random batch, the same in every epoch; rank 0 prints its loss. At the
end the model is validated: loss and accuracy over a whole set, which is divided over the ranks so
that each sample counts once.

--data FILE holds the tensors x, f32 of shape (samples, 10), and y, i64 of shape (samples) with
classes 0 and 1; they are divided over the ranks and shuffled. Optional val_x and val_y are for
validation. --init and --save hold 0.weight (20, 10), 0.bias (20), 2.weight (2, 20) and 2.bias (2).")]
pub struct DdpMlpOptions {
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
    #[arg(long, value_name = "N", default_value = "10", value_parser = count)]
    pub(crate) epochs: usize,
    /// Samples per step, on each rank
    #[arg(long, value_name = "N", default_value = "32", value_parser = count)]
    pub(crate) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.01", value_parser = learning_rate)]
    pub(crate) lr: f64,
    /// Samples in the validation set
    #[arg(long, value_name = "N", default_value = "1000", value_parser = count, conflicts_with = "data")]
    pub(crate) validation_samples: usize,
}

/// Samples per forward pass of the validation; does not affect the result.
const VALIDATION_BATCH: usize = 64;

/// What each process creates at the start.
pub struct Setup {
    variables: Variables,
    sets: Sets,
}

/// Result of training and validation.
#[derive(Debug, Serialize, Deserialize)]
pub struct Trained {
    series: RunSeries,
    validation: Validation,
}

impl Command for DdpMlpOptions {
    const NAME: &'static str = "ddp-mlp";
    const WORLD_SIZE: usize = 2;
    type Setup = Setup;
    type Trained = Trained;

    options_of!(common, checkpoints, elastic);

    fn settings(&self, world_size: usize) -> Vec<(String, String)> {
        let mut settings = settings!(self, lr, batch_size);
        if self.common.data.is_none() {
            // Each rank generates its own batch, so another number of ranks means other data.
            settings.push(("--world-size".into(), world_size.to_string()));
        }
        settings
    }

    fn check(&self, world_size: usize) -> Result<()> {
        let sizes = [("--batch-size", self.batch_size), ("--validation-samples", self.validation_samples)];
        let check = |(option, samples)| {
            memory_check::check_samples(option, samples, size_of::<Sample>(), &self.common, world_size)
        };
        sizes.into_iter().try_for_each(check)
    }

    fn setup(&self) -> Result<Setup> {
        let variables = Variables::new(&self.common)?;
        // As in the PyTorch handbook, the model is created before the data.
        variables.make(&self.common, Mlp::new)?;
        let sets = match &self.common.data {
            Some(path) => Sets::read(&TensorFile::open(path)?)?,
            None => variables.generator.with(|generator| Sets::draw(generator, self.validation_samples))?,
        };
        Ok(Setup { variables, sets })
    }

    fn prepare(&self, _: &Setup, _: usize, _: Option<&mut MetricsWriter>) -> Result<()> {
        note(format_args!(
            "the PyTorch handbook does not sum right answers over ranks, and its validation loss is the sum of the batches' \
            means, \
             never divided by how many there are; here every sample of the validation set counts once, whatever the number of \
             ranks"
        ));
        Ok(())
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<Trained> {
        let Setup { variables, sets } = setup;
        let loader = sets.loader(self, rank, &variables.device)?;
        let ddp = Ddp::new(rank.comm.clone(), variables.builder(), &DdpConfig::default(), Mlp::new)?;
        let config = SgdConfig { learning_rate: self.lr, ..SgdConfig::default() };
        let optimizer = Sgd::named(ddp.named_vars(), config)?;
        let loss = |model: &Mlp, (x, y): &Batch| cross_entropy(&model.forward(x)?, y, None);
        let model = DataParallel::new(ddp, optimizer, loss, &variables.map);
        let mut trainer = Trainer::new(model, Epochs::new(loader));
        let whole = ValidationConfig {
            samples: sets.validation_len(),
            batch_size: VALIDATION_BATCH,
            classes: CLASSES,
        };
        let run = self.run_config(rank);
        let (ran, validation) = trainer.run_and(rank, &run, &mut LastLoss(None), |trained, rank| {
            variables.save(&self.common, rank)?;
            let model = trained.ddp().model()?;
            validate(&*rank.comm, &whole, |range| {
                let (x, y) = sets.validation(range, &variables.device)?;
                Ok((model.forward(&x)?.detach(), y))
            })
        })?;
        Ok(Trained { series: ran.series, validation })
    }

    fn conclude(&self, outcome: &Outcome<Trained>) -> Result<()> {
        let validation = &outcome.trained.validation;
        let (loss, total) = (Fixed::<4>(validation.loss()), validation.total());
        let accuracy = Fixed::<4>(total.accuracy());
        say(format_args!(
            "Validation, Loss: {loss}, Accuracy: {accuracy} ({} of {})",
            total.correct, total.samples
        ))
    }

    fn report(&self, outcome: Outcome<Trained>) -> Report {
        let Trained { series, validation } = outcome.trained;
        let mut facts = vec![
            fact("epochs", self.epochs),
            fact("batch size, each rank", self.batch_size),
            fact("learning rate", self.lr),
            fact("validation samples", validation.total().samples),
            fact("validation loss", Fixed::<4>(validation.loss())),
            fact("validation accuracy", Fixed::<4>(validation.total().accuracy())),
        ];
        facts.extend(self.common.data.as_ref().map(|path| fact("data", path.display())));
        Report { facts, runs: vec![series], ..Report::default() }
    }
}

impl Experiment for DdpMlpOptions {
    options_of!(epochs);
}

/// Prints the last loss of each epoch, on rank 0.
struct LastLoss(Option<f32>);

impl Observer for LastLoss {
    fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
        self.0 = step.value();
        Ok(())
    }

    fn epoch_ends(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        let Some(loss) = self.0.take() else { return Ok(()) };
        epoch.say(format_args!("Epoch {}, Loss: {}", epoch.epoch, Fixed::<4>(loss.into())))
    }
}
