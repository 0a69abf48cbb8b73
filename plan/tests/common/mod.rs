//! A language model in a layout, as it is planned.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comm::Communicator;
use girandole::{Layout, Parallel, ParallelConfig};
use models::{CausalLm, ModelConfig, Weights};
use plan::language::Training;
use training::build::Builder;

/// Builds the model as `training` says; returns it with the tokens of one rank's batch.
pub(crate) fn parallel(
    comm: Arc<dyn Communicator>,
    model: &ModelConfig,
    layout: &Layout,
    training: &Training,
) -> candle_core::Result<(Parallel<CausalLm>, Tensor)> {
    let micro_batches = training.micro_batches(layout);
    let rows = training.batch_size / layout.data_ranks();
    let tokens = Tensor::zeros((rows, training.length), DType::U32, &Device::Cpu)?;
    let config = ParallelConfig {
        dtype: training.dtype,
        micro_batches,
        example: Some(Tensor::zeros((rows / micro_batches, training.length), DType::U32, &Device::Cpu)?),
        recompute: training.recompute,
        schedule: training.schedule,
        ..ParallelConfig::default()
    };
    let (weights, model) = (Weights::random(model, 1).unwrap(), model.clone());
    let build = move |builder: &Builder| CausalLm::new(&model, builder);
    Ok((Parallel::new(comm, layout, weights.parts(), &config, build).unwrap(), tokens))
}
