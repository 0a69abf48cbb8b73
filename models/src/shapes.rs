//! Names and shapes of a model's parameters, recorded while it is built without weights.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use training::build::Builder;
use training::internal::lock;

use crate::{CausalLm, ModelConfig, Result};

/// Returns names and shapes of a model's parameters.
pub(crate) fn shapes(config: &ModelConfig) -> Result<BTreeMap<String, Vec<usize>>> {
    shapes_of(config, |builder| builder)
}

/// Returns names and shapes of the parameters of a model built with a modified builder.
pub(crate) fn shapes_of(
    config: &ModelConfig,
    change: impl FnOnce(Builder) -> Builder,
) -> Result<BTreeMap<String, Vec<usize>>> {
    let asked: Arc<Mutex<BTreeMap<String, Vec<usize>>>> = Arc::default();
    let outline = VarBuilder::from_backend(Box::new(ShapeRecorder(asked.clone())), DType::F32, Device::Cpu);
    CausalLm::new(config, &change(Builder::new(outline)))?;
    let shapes = std::mem::take(&mut *lock(&asked));
    Ok(shapes)
}

/// Backend that records the requested shapes, and returns broadcast tensors that use no memory.
struct ShapeRecorder(Arc<Mutex<BTreeMap<String, Vec<usize>>>>);

impl SimpleBackend for ShapeRecorder {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        lock(&self.0).insert(name.to_string(), shape.dims().to_vec());
        Tensor::zeros((), dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        bail!("{name}: its shape must be asked for, as in VarBuilder::get")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        false
    }
}
