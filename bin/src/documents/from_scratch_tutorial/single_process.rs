//! Single-process training, the first half of the from-scratch tutorial.

use std::time::Instant;

use candle_nn::{Module, Optimizer};
use cli::prelude::*;
use cli::run_log::{LogConfig, RunLog};
use cli::trainer::{Logged, RunEnd, SingleProcess};
use comm::internal::peak_rss_bytes;
use launch::machine::gpu_count;
use ops::{backward, mse};
use report::metrics::Summary;
use sampler::RandomSampler;
use training::{Sgd, SgdConfig};

use super::data::{Batch, Setup};
use super::model::SimpleModel;
use super::options::DdpLinearOptions;
use super::{PRINT_EVERY, line};

const RUN: &str = "single";

pub(super) fn run(
    options: &DdpLinearOptions,
    setup: &Setup,
    mut metrics: Option<&mut MetricsWriter>,
) -> Result<RunSeries> {
    say(format_args!("available GPUs: {}", gpu_count()))?;
    if options.common.device()?.is_cpu() {
        let why = if gpu_count() == 0 { "no GPU found" } else { "no GPU is used" };
        say(format_args!("warning: {why}, training on the CPU"))?;
    }
    say(format_args!("\n===== single-process training ====="))?;
    let model = SimpleModel::new(setup.variables.builder())?;
    let sampler = RandomSampler::new(setup.len(), setup.variables.generator.clone());
    let loader = setup.loader(sampler, options.batch_size, options.loader)?;
    let config = SgdConfig { learning_rate: options.lr, ..SgdConfig::default() };
    let mut optimizer = Sgd::new(setup.variables.map.all_vars(), config)?;

    let began = Instant::now();
    let steps_per_epoch = loader.len();
    let (keep, steps) = (options.common.report.is_some(), options.epochs.saturating_mul(steps_per_epoch));
    let log = LogConfig { run: Some(RUN), keep, steps, ..LogConfig::default() };
    let log = RunLog::new(&log, metrics.as_deref_mut());
    let step = |(x, y): &Batch| {
        let loss = mse(&model.forward(x)?, y)?;
        optimizer.step(&backward(&loss)?)?;
        Ok(loss)
    };
    let mut trainer = Trainer::new(SingleProcess::new(step), loader);
    let mut means = Means::new(PRINT_EVERY, line);
    let mut logged = Logged::new(Some(log), &mut means);
    trainer.train(RunEnd::Epochs(options.epochs), &mut logged)?;
    let seconds = began.elapsed().as_secs_f64();
    let series = logged.finish();

    if let Some(metrics) = metrics {
        let peak: Vec<u64> = peak_rss_bytes().into_iter().collect();
        metrics.summary(&Summary {
            run: Some(RUN),
            seconds,
            world_size: 1,
            peak_rss_bytes: &peak,
            ..Summary::default()
        })?;
    }
    say(format_args!("single-process training done, total time: {seconds:.2} s"))?;
    setup.say_parameters()?;
    Ok(RunSeries { name: "one process".into(), seconds, world_size: 1, steps_per_epoch, ..series })
}
