//! `ddp-linear`, the from-scratch tutorial: one process compared with data-parallel ranks, with the measured speed-up.

mod data;
mod ddp;
pub(crate) mod model;
mod options;
mod single_process;

pub(crate) use data::Setup;
pub(crate) use options::DdpLinearOptions;

use cli::prelude::*;
use report::Speedup;

use crate::documents::shared::python::Fixed;

/// The tutorial prints the mean loss of every so many batches.
const PRINT_EVERY: usize = 100;

/// Formats the line printed for them.
fn line(epoch: usize, batch: usize, mean: f64) -> String {
    format!("[{epoch}, {batch}] loss: {}", Fixed::<5>(mean))
}

impl Command for DdpLinearOptions {
    const NAME: &'static str = "ddp-linear";
    const WORLD_SIZE: usize = 2;
    const PREPARES_ON_DEVICE: bool = true;
    type Setup = Setup;
    type Trained = RunSeries;

    options_of!(common);

    fn check(&self, world_size: usize) -> Result<()> {
        self.check_batch(world_size)?;
        memory_check::check_samples("--samples", self.samples, data::SAMPLE_BYTES, &self.common, world_size)
    }

    fn setup(&self) -> Result<Setup> {
        Setup::new(self)
    }

    fn prepare(&self, _: &Setup, world_size: usize, metrics: Option<&mut MetricsWriter>) -> Result<()> {
        if world_size > 1 && !self.keep_total_batch {
            note(format_args!(
                "the from-scratch tutorial means to keep the total batch size, but keeps that of each rank, and so does this \
                 run; --keep-total-batch does what the tutorial says"
            ));
        }
        // It trains, and the ranks begin where it began.
        let single = single_process::run(self, &self.setup()?, metrics)?;
        self.single.get_or_init(|| single);
        let total = self.rank_batch_size(world_size) as u128 * world_size as u128;
        let ranks = counted(world_size, "rank");
        say(format_args!("\n===== DDP training ({ranks}, total batch size {total}) ====="))
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<RunSeries> {
        ddp::run(self, &setup, rank)
    }

    fn conclude(&self, outcome: &Outcome<RunSeries>) -> Result<()> {
        let (single, ddp, ranks) = (self.single_s(), outcome.trained.seconds, outcome.ranks.len());
        say(format_args!("\n===== comparison ====="))?;
        say(format_args!("single-process training time: {single:.3} s"))?;
        say(format_args!("DDP training time with {}: {ddp:.3} s", counted(ranks, "rank")))?;
        say(format_args!("speed-up: {:.2}x (ideal: {ranks}.00x)", single / ddp))
    }

    fn report(&self, outcome: Outcome<RunSeries>) -> Report {
        let ranks = outcome.ranks.len();
        Report {
            facts: vec![
                self.common.data_fact(self.samples),
                fact("epochs", self.epochs),
                fact("batch size, one process", self.batch_size),
                fact("batch size, each rank", self.rank_batch_size(ranks)),
                fact("learning rate, one process", self.lr),
                fact("learning rate, DDP", self.ddp_lr(ranks)),
            ],
            speedup: Some(Speedup { single_s: self.single_s(), ddp_s: outcome.trained.seconds, ranks }),
            runs: self.single.get().cloned().into_iter().chain([outcome.trained]).collect(),
            ..Report::default()
        }
    }
}

impl Experiment for DdpLinearOptions {
    options_of!(epochs);
}
