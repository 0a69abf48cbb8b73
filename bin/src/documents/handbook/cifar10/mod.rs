//! `cifar10`, from the PyTorch handbook: a convolutional picture classifier, trained, saved, loaded and tested.

mod data;
mod grid;
pub mod model;
mod options;
pub mod pictures;
mod records;
pub mod synthetic;
mod testing;

use std::cell::Cell;

use crate::documents::shared::validation::Validation;
use candle_core::Tensor;
use candle_nn::Module;
use cli::options::contents_of;
use cli::prelude::*;
use cli::same_options::content_of;
use ddp::{Ddp, DdpConfig};
use girandole::settings::Setting;
use ops::cross_entropy;
use serde::{Deserialize, Serialize};
use training::{Sgd, SgdConfig};

use self::model::ConvNet;
use self::pictures::Batch;
use crate::documents::shared::python::Fixed;

pub use data::Setup;
pub use options::Cifar10Options;

/// Result of training and testing on a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Trained {
    series: RunSeries,
    tested: Validation,
}

impl Command for Cifar10Options {
    const NAME: &'static str = "cifar10";
    const WORLD_SIZE: usize = 2;
    const JOINT: &'static [&'static str] = &["save"];
    type Setup = Setup;
    type Trained = Trained;

    options_of!(common, checkpoints, elastic);

    fn settings(&self, _: usize) -> Vec<(String, String)> {
        let pictures = match &self.data_dir {
            None => "none".into(),
            Some(dir) if self.checkpoints.keeps() => contents_of("a folder", records::files(dir)),
            Some(_) => "a folder".into(),
        };
        let drawn = if self.draws() { settings!(self, samples) } else { Vec::new() };
        [settings!(self, lr, momentum, batch_size, data_dir = pictures), drawn].concat()
    }

    fn check(&self, world_size: usize) -> Result<()> {
        self.check_samples(world_size)?;
        self.picture.as_deref().map_or(Ok(()), |path| self.common.check_output("--picture", path))
    }

    fn setup(&self) -> Result<Setup> {
        Setup::new(self)
    }

    fn contents(&self, _: &Setup) -> Result<Vec<Setting>> {
        let files = self.data_dir.as_deref().map(records::files).unwrap_or_default();
        Ok([self.common.contents()?, content_of("--data-dir", &files)?].concat())
    }

    fn prepare(&self, setup: &Setup, _: usize, _: Option<&mut MetricsWriter>) -> Result<()> {
        if self.draws() {
            note(format_args!(
                "no --data-dir with CIFAR-10: these pictures of its shape are drawn from the seed"
            ));
        }
        let found = [setup.train.labels.len(), setup.test.labels.len()];
        if let (Some(dir), true) = (&self.data_dir, found != records::WHOLE) {
            let ([train, test], [all_train, all_test]) = (found, records::WHOLE);
            note(format_args!(
                "{} has {train} pictures to train on and {test} to test with; all of CIFAR-10 are {all_train} and {all_test}",
                dir.display()
            ));
        }
        note(format_args!(
            "the PyTorch handbook gives the sum of the batches' means, never divided by how many there are, as the loss of \
            several \
             ranks, and one rank's accuracy as that of all; this run counts every test picture once"
        ));
        Ok(())
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<Trained> {
        let Setup { train, test, variables } = setup;
        let device = &variables.device;
        let sampler = rank.sampler(train.labels.len(), true)?;
        let loader = data::loader(&train, sampler, self.batch_size, device, self.loader)?;
        let ddp = Ddp::new(rank.comm.clone(), variables.builder(), &DdpConfig::default(), ConvNet::new)?;
        let config = SgdConfig { learning_rate: self.lr, momentum: self.momentum, ..SgdConfig::default() };
        let optimizer = Sgd::named(ddp.named_vars(), config)?;
        let mut means = Means::new(self.print_every(), |epoch, batch, mean| {
            format!("[{epoch}, {batch:5}] loss: {}", Fixed::<3>(mean))
        });
        let model = DataParallel::new(ddp, optimizer, loss, &variables.map);
        let mut trainer = Trainer::new(model, Epochs::new(loader));
        let has_finished = Cell::new(false);
        let (ran, tested) = trainer.run_and(rank, &self.run_config(rank), &mut means, |trained, rank| {
            // It may be done again, after the loss of a rank.
            if rank.is_first() && !has_finished.replace(true) {
                say(format_args!("finish"))?;
            }
            variables.save(&self.common, rank)?;
            match &self.common.save {
                None => testing::test(self, rank, trained.ddp(), &test, device),
                Some(path) => testing::test(self, rank, &testing::load(path, rank, device)?, &test, device),
            }
        })?;
        Ok(Trained { series: ran.series, tested })
    }

    fn report(&self, outcome: Outcome<Trained>) -> Report {
        let Trained { series, tested } = outcome.trained;
        let source = match (&self.data_dir, &self.common.data) {
            (Some(path), _) | (None, Some(path)) => path.display().to_string(),
            (None, None) => format!("{} drawn pictures", self.samples),
        };
        let total = tested.total();
        Report {
            facts: vec![
                fact("data", source),
                fact("epochs", self.epochs),
                fact("batch size, each rank", self.batch_size),
                fact("learning rate", self.lr),
                fact("momentum", self.momentum),
                fact("test pictures", total.samples),
                fact("test accuracy", format!("{:.1} %", 100.0 * total.accuracy())),
                fact("test loss", Fixed::<4>(tested.loss())),
            ],
            runs: vec![series],
            ..Report::default()
        }
    }
}

impl Experiment for Cifar10Options {
    options_of!(epochs);
}

fn loss(net: &ConvNet, (x, labels): &Batch) -> candle_core::Result<Tensor> {
    cross_entropy(&net.forward(x)?, labels, None)
}
