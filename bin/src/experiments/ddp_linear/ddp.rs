//! The second half of the from-scratch tutorial: data-parallel ranks.

use candle_nn::{Module, Optimizer, loss};
use ddp::{Ddp, DdpConfig};
use report::RunSeries;
use report::metrics::Held;
use sampler::{DistributedSampler, DistributedSamplerConfig};
use training::{Sgd, SgdConfig, activation_bytes};

use crate::console::say;
use crate::error::Result;
use crate::held::{bytes, gradient_bytes};
use crate::models::linear::SimpleModel;
use crate::rank::Rank;
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
    let mut loader = setup.loader(Box::new(sampler), options.rank_batch_size(world_size), options.loader)?;
    let ddp = Ddp::new(rank.comm.clone(), setup.builder(), &DdpConfig::default(), SimpleModel::new)?;
    let learning_rate = options.ddp_lr(world_size);
    let mut optimizer = Sgd::new(ddp.vars(), SgdConfig { learning_rate, ..SgdConfig::default() })?;

    let (mut held, sent) = (Held::default(), ddp.stats().bytes_sent);
    let copies = || ddp.parameters().iter().map(|parameter| parameter.tensor());
    let watch = rank.stopwatch();
    let prints = rank.is_first();
    let mut log = prints.then(|| options.log(RUN, loader.len(), rank.metrics.as_mut()));
    train(&mut loader, options.epochs, log.as_mut(), |(x, y)| {
        let loss = loss::mse(&ddp.model()?.forward(x)?, y)?;
        let is_first = held.activations == 0;
        if is_first {
            held.activations = activation_bytes(&loss, copies()) as u64;
        }
        let grads = ddp.backward(&loss)?;
        if is_first {
            held.gradients = gradient_bytes(&ddp.vars(), &grads);
        }
        optimizer.step(&grads)?;
        Ok(loss)
    })?;
    let measured = watch.stop();
    let steps = options.epochs * loader.len();
    held.weights = bytes(ddp.vars().iter().map(|var| var.as_tensor()));
    held.copies = bytes(copies());
    held.sent = (ddp.stats().bytes_sent - sent) as f64 / steps.max(1) as f64;
    rank.held = Some(held);
    let series = log.map(|log| log.finish()).unwrap_or_default();
    let steps_per_epoch = loader.len();
    let seconds = rank.measured(measured, Some(RUN), (steps, 0.0))?;

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
