//! A parameter source that registers gradient hooks only for trained parameters.

use candle_core::{DType, Device, Result as CandleResult, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use super::ParallelConfig;

/// Takes parameters that are trained from `hooked`, and all others from `whole`.
pub(super) fn trained(
    hooked: VarBuilder<'static>,
    whole: VarBuilder<'static>,
    config: &ParallelConfig,
) -> VarBuilder<'static> {
    if config.is_trained.is_none() {
        return hooked;
    }
    let (dtype, device) = (whole.dtype(), whole.device().clone());
    let config = config.clone();
    VarBuilder::from_backend(Box::new(Trained { hooked, whole, config }), dtype, device)
}

struct Trained {
    hooked: VarBuilder<'static>,
    whole: VarBuilder<'static>,
    config: ParallelConfig,
}

impl SimpleBackend for Trained {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> CandleResult<Tensor> {
        match self.config.is_trained(name) || self.config.is_buffer(name) {
            true => self.hooked.get_with_hints_dtype(shape, name, init, dtype),
            false => Ok(self.whole.get_with_hints_dtype(shape, name, init, dtype)?.detach()),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> CandleResult<Tensor> {
        self.hooked.get_unchecked_dtype(name, dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.whole.contains_tensor(name)
    }
}
