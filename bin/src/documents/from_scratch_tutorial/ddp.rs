//! Data-parallel training, the second half of the from-scratch tutorial.

use candle_nn::Module;
use cli::prelude::*;
use cli::trainer::RunConfig;
use ddp::{Ddp, DdpConfig};
use ops::mse;
use training::{Sgd, SgdConfig};

use super::data::{Batch, Setup};
use super::model::SimpleModel;
use super::options::DdpLinearOptions;
use super::{PRINT_EVERY, line};

const RUN: &str = "ddp";

/// Trains as one rank.
pub(super) fn run(options: &DdpLinearOptions, setup: &Setup, rank: &mut Rank) -> Result<RunSeries> {
    let world_size = rank.comm.world_size();
    let sampler = rank.sampler(setup.len(), true)?;
    let loader = setup.loader(sampler, options.rank_batch_size(world_size), options.loader)?;
    let ddp =
        Ddp::new(rank.comm.clone(), setup.variables.builder(), &DdpConfig::default(), SimpleModel::new)?;
    let learning_rate = options.ddp_lr(world_size);
    let optimizer = Sgd::named(ddp.named_vars(), SgdConfig { learning_rate, ..SgdConfig::default() })?;
    let loss = |model: &SimpleModel, (x, y): &Batch| mse(&model.forward(x)?, y);
    let mut trainer =
        Trainer::new(DataParallel::new(ddp, optimizer, loss, &setup.variables.map), Epochs::new(loader));
    let config = RunConfig { name: Some(RUN), ..options.run_config(rank) };
    let series = trainer.run(rank, &config, &mut Means::new(PRINT_EVERY, line))?.series;

    if rank.is_first() {
        say(format_args!("DDP training done, total time: {:.2} s", series.seconds))?;
        setup.say_parameters()?;
    }
    setup.variables.save(&options.common, rank)?;
    Ok(series)
}
