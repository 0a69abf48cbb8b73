//! The first half of document 002: one process.

use candle_nn::{Module, Optimizer, loss};
use sampler::RandomSampler;
use training::{Sgd, SgdConfig};

use crate::console::say;
use crate::error::Result;
use crate::metrics::MetricsWriter;
use crate::models::linear::SimpleModel;
use crate::report::{RunSeries, peak_rss_bytes};

use super::data::Setup;
use super::options::DdpLinearOptions;
use super::training::{Log, train};

pub(super) fn run(options: &DdpLinearOptions, metrics: Option<&mut MetricsWriter>) -> Result<RunSeries> {
    say(format_args!("\n===== single-process training ====="))?;
    let setup = Setup::new(options)?;
    let model = SimpleModel::new(setup.builder())?;
    let sampler = RandomSampler::new(setup.len(), setup.generator.clone());
    let mut loader = setup.loader(Box::new(sampler), options.batch_size)?;
    let mut optimizer =
        Sgd::new(setup.vars.all_vars(), SgdConfig { learning_rate: options.lr, ..SgdConfig::default() })?;

    let mut log = Log::new("single", true, metrics);
    let seconds = train(&mut loader, options.epochs, &mut log, |(x, y)| {
        let loss = loss::mse(&model.forward(x)?, y)?;
        optimizer.step(&loss.backward()?)?;
        Ok(loss)
    })?;

    let peak: Vec<u64> = peak_rss_bytes().into_iter().collect();
    log.summary(seconds, 1, &peak)?;
    say(format_args!("single-process training done, total time: {seconds:.2} s"))?;
    let (weight, bias) = setup.parameters()?;
    say(format_args!("linear.weight: {weight:.4}\nlinear.bias: {bias:.4}"))?;
    let steps_per_epoch = loader.len();
    Ok(RunSeries { name: "one process".into(), losses: log.losses, seconds, world_size: 1, steps_per_epoch })
}
