//! The second half of document 002: data-parallel ranks.

use candle_nn::{Module, Optimizer, loss};
use ddp::{Ddp, DdpConfig};
use sampler::{DistributedSampler, DistributedSamplerConfig};
use training::{Sgd, SgdConfig};

use crate::console::say;
use crate::error::Result;
use crate::models::linear::SimpleModel;
use crate::rank::Rank;
use crate::report::RunSeries;
use crate::weights::save_weights;

use super::data::Setup;
use super::options::DdpLinearOptions;
use super::training::train;

const RUN: &str = "ddp";

/// Trains as one rank.
pub(super) fn run(options: &DdpLinearOptions, setup: &Setup, rank: &mut Rank) -> Result<RunSeries> {
    let world_size = rank.comm.world_size();
    let sampler = DistributedSampler::new(DistributedSamplerConfig {
        dataset_len: setup.len(),
        num_replicas: world_size,
        rank: rank.comm.rank(),
        ..DistributedSamplerConfig::default()
    })?;
    let mut loader = setup.loader(Box::new(sampler), options.rank_batch_size(world_size))?;
    let ddp = Ddp::new(rank.comm.clone(), setup.builder(), &DdpConfig::default(), SimpleModel::new)?;
    let learning_rate = options.ddp_lr(world_size);
    let mut optimizer = Sgd::new(ddp.vars(), SgdConfig { learning_rate, ..SgdConfig::default() })?;

    let watch = rank.stopwatch();
    let prints = rank.is_first();
    let mut log = prints.then(|| options.log(RUN, loader.len(), rank.metrics.as_mut()));
    train(&mut loader, options.epochs, log.as_mut(), |(x, y)| {
        let loss = loss::mse(&ddp.model()?.forward(x)?, y)?;
        optimizer.step(&ddp.backward(&loss)?)?;
        Ok(loss)
    })?;
    let measured = watch.stop();
    let series = log.map(|log| log.finish()).unwrap_or_default();
    let steps_per_epoch = loader.len();
    let seconds = rank.measured(measured, Some(RUN), (options.epochs * steps_per_epoch, 0.0))?;

    if prints {
        say(format_args!("DDP training done, total time: {seconds:.2} s"))?;
        setup.say_parameters()?;
        if let Some(path) = &options.common.save {
            save_weights(path, &setup.vars)?;
        }
    }
    let name = format!("DDP, {world_size} {}", if world_size == 1 { "rank" } else { "ranks" });
    Ok(RunSeries { name, seconds, world_size, steps_per_epoch, ..series })
}
