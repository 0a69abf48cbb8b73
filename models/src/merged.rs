//! A model's weights with adapters merged into them, one at a time.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};

use crate::{Error, Lora, Result, Weights, names};

/// Weights of a model, with adapters merged into them.
#[derive(Debug)]
pub struct MergedWeights<'a> {
    weights: &'a Weights,
    lora: Option<&'a Lora>,
}

impl<'a> MergedWeights<'a> {
    /// Returns the weights of a model; `lora` are adapters that the weights were given
    /// ([`Weights::with_adapters`]).
    pub fn new(weights: &'a Weights, lora: Option<&'a Lora>) -> Self {
        Self { weights, lora }
    }

    /// Returns the weights without adapters.
    pub(crate) fn weights(&self) -> &Weights {
        self.weights
    }

    /// Returns a parameter in f32, with its adapter merged into it. Only this parameter is read.
    ///
    /// # Errors
    /// A parameter that the model does not have; files that cannot be read.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        let Some(dims) = self.weights.shapes().get(name) else {
            let (what, help) = ("MergedWeights", "take a name of Weights::shapes");
            return Err(Error::Invalid { what, field: "the name", got: name.into(), help });
        };
        let builder = self.weights.tensors(DType::F32, &Device::Cpu);
        let weight = builder.get(dims.as_slice(), name)?;
        let Some(lora) = self.lora else { return Ok(weight) };
        let (layer, _) = lora.adapted(name);
        let mut adapters = HashMap::new();
        for name in names::of_adapter(&layer) {
            if let Some(dims) = lora.shapes().get(&name) {
                adapters.insert(name.clone(), builder.get(dims.as_slice(), &name)?);
            }
        }
        lora.merged(name, &weight, &adapters)
    }
}
