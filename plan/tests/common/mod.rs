//! A language model in a layout, as it is planned.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comm::Communicator;
use girandole::{IsTrained, Layout, Parallel, ParallelConfig};
use models::{CausalLm, Lora, ModelConfig, Weights};
use plan::language::Training;
use training::build::Builder;

/// Builds the model as `training` says, perhaps with adapters, training what is said; returns it with the tokens of one rank's batch.
pub(crate) fn parallel(
    comm: Arc<dyn Communicator>,
    (model, lora): (&ModelConfig, Option<&Lora>),
    layout: &Layout,
    training: &Training,
    is_trained: Option<IsTrained>,
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
        is_trained,
        ..ParallelConfig::default()
    };
    let (weights, model) = (Weights::random(model, 1).unwrap(), model.clone());
    let lora = lora.cloned();
    let build = move |builder: &Builder| match &lora {
        Some(lora) => CausalLm::new(&model, &lora.adapt(builder.clone())),
        None => CausalLm::new(&model, builder),
    };
    Ok((Parallel::new(comm, layout, weights.parts(), &config, build).unwrap(), tokens))
}
