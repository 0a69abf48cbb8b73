//! `ddp-transformer`, the DDP tutorial: a Transformer that learns to repeat a token.

mod options;

use ops::cross_entropy;
use std::sync::Arc;

use candle_core::Tensor;
use candle_nn::ModuleT;
use cli::prelude::*;
use ddp::{Ddp, DdpConfig};
use sampler::{Generator, SharedGenerator};
use training::{Sgd, SgdConfig};

use crate::documents::shared::python::{Float, IntTensor};
use crate::documents::shared::transformer::Transformer;
use crate::documents::shared::transformer::module_tree;
use crate::documents::shared::transformer::rows::{self, Batch, Row};

pub(crate) use options::{DdpTransformerOptions, Mask};

/// What each process creates at the start.
pub(crate) struct Setup {
    rows: Arc<Vec<Row>>,
    variables: Variables,
    /// Generator of dropout masks.
    random: SharedGenerator,
}

impl Command for DdpTransformerOptions {
    const NAME: &'static str = "ddp-transformer";
    const WORLD_SIZE: usize = 2;
    type Setup = Setup;
    type Trained = RunSeries;

    options_of!(common, checkpoints, elastic);

    fn settings(&self, _: usize) -> Vec<(String, String)> {
        let own = settings!(self, lr, batch_size, mask = value_name(&self.mask), reshuffle);
        [own, self.sizes.settings()].concat()
    }

    fn check(&self, world_size: usize) -> Result<()> {
        self.sizes.check(&self.common, world_size, 1)
    }

    fn setup(&self) -> Result<Setup> {
        let rows = Arc::new(self.sizes.rows(self.common.data.as_deref())?);
        let variables = Variables::new(&self.common)?;
        let random = SharedGenerator::from(Generator::new(self.common.seed));
        variables.make(&self.common, |builder| Transformer::new(builder, &self.model(), &random))?;
        Ok(Setup { rows, variables, random })
    }

    fn prepare(&self, setup: &Setup, _: usize, _: Option<&mut MetricsWriter>) -> Result<()> {
        self.remark();
        say(format_args!("{}", module_tree::tutorial_transformer(&self.sizes.config())))?;
        setup.rows.iter().try_for_each(|row| say(format_args!("{}", IntTensor(row))))
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<RunSeries> {
        let Setup { rows, variables, random } = setup;
        let (sampler, device) = (rank.sampler(rows.len(), true)?, &variables.device);
        let loader = self
            .loader
            .loader(rows, sampler, self.batch_size, device, |rows, device| rows::batch(&rows, device))?;
        let config = DdpConfig { buffers: vec!["pe".into()], ..DdpConfig::default() };
        let model = |builder| Transformer::new(builder, &self.model(), &random);
        let ddp = Ddp::new(rank.comm.clone(), variables.builder(), &config, model)?;
        let config = SgdConfig { learning_rate: self.lr, ..SgdConfig::default() };
        let optimizer = Sgd::named(ddp.named_vars(), config)?;
        let random =
            (self.sizes.dropout > 0.0).then_some(StepRandom { generator: random, seed: self.common.seed });
        let model = DataParallel::new(ddp, optimizer, next_token_loss, &variables.map)
            .drawing(random, rank.comm.rank());
        let epochs = Epochs::new(loader).reshuffling(self.reshuffle);
        let mut losses = Losses(|step: &Step<'_>, loss: f32| {
            let loss = Float(loss.into());
            step.say(format_args!("Epoch {}, Batch {}, Loss: {loss}", step.epoch, step.batch))
        });
        let mut trainer = Trainer::new(model, epochs);
        let save = |_: &_, rank: &Rank| variables.save(&self.common, rank);
        let (ran, ()) = trainer.run_and(rank, &self.run_config(rank), &mut losses, save)?;
        Ok(ran.series)
    }

    fn report(&self, outcome: Outcome<RunSeries>) -> Report {
        let data = match &self.common.data {
            Some(path) => fact("data", path.display()),
            None => fact("data", format!("{} rows of {} tokens", self.sizes.samples, self.sizes.length)),
        };
        Report {
            facts: vec![
                data,
                fact("epochs", self.epochs),
                fact("batch size, each rank", self.batch_size),
                fact("learning rate", self.lr),
                fact("mask", value_name(&self.mask)),
                fact("dropout", self.sizes.dropout),
                fact("d_model", self.sizes.d_model),
                fact("layers", self.sizes.num_layers),
            ],
            runs: vec![outcome.trained],
            ..Report::default()
        }
    }
}

impl Experiment for DdpTransformerOptions {
    options_of!(epochs);
}

impl DdpTransformerOptions {
    /// Prints a note about the tutorial's mistakes that this run repeats.
    fn remark(&self) {
        let mask =
            "shows each token only those after it, so that the answer is in sight (--mask causal hides them)";
        let order = "goes through the data in the same order in every epoch (--reshuffle gives each its own)";
        let remarks: Vec<&str> = [(self.mask == Mask::Document, mask), (!self.reshuffle, order)]
            .into_iter()
            .filter_map(|(errs, remark)| errs.then_some(remark))
            .collect();
        if !remarks.is_empty() {
            note(format_args!("as the DDP tutorial does, this run {}", remarks.join(", and ")));
        }
    }
}

/// Returns the cross-entropy of the next-token predictions.
fn next_token_loss(model: &Transformer, (tokens, next): &Batch) -> candle_core::Result<Tensor> {
    cross_entropy(&model.forward_t(tokens, true)?, next, None)
}
