//! LoRA: a model whose weights are frozen, and small trained matrices beside some of its layers.

mod config;
pub(crate) mod files;
mod layers;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use candle_core::{DType, Tensor};
use training::build::Builder;

use crate::names::ADAPTER;
use crate::weights::shapes_of;
use crate::{Error, ModelConfig, Result};

pub use config::LoraConfig;

use layers::Adapted;

/// Adapters of a model: beside each target layer `x w'` there is `scale * (x a') b'`, with `a` (rank, inputs) and `b` (outputs, rank).
///
/// All else is frozen: it has no gradient, in any layout.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Optimizer, VarMap};
/// use models::{CausalLm, Lora, LoraConfig, Weights};
/// use training::{Adam, AdamConfig, build::Builder, named_vars};
///
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama").as_ref();
/// # let out = tempfile::tempdir()?;
/// let (weights, vars) = (Weights::folder(folder)?, VarMap::new());
/// let lora = Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, weights.config())?;
/// let builder = lora.adapt(Builder::new(weights.vars(&vars, DType::F32, &Device::Cpu)));
/// let model = CausalLm::new(weights.config(), &builder)?;
/// let adapters: Vec<_> = named_vars(&vars).into_iter().filter(|(name, _)| Lora::is_adapter(name)).collect();
/// let mut optimizer = Adam::named(adapters.clone(), AdamConfig::adamw())?;
/// let tokens = Tensor::new(&[[1u32, 5, 9, 2]], &Device::Cpu)?;
/// optimizer.backward_step(&model.loss(&tokens.narrow(1, 0, 3)?, &tokens.narrow(1, 1, 3)?)?)?;
/// lora.save(out.path(), adapters.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
#[derive(Debug, Clone)]
pub struct Lora {
    config: LoraConfig,
    model: ModelConfig,
    /// Names and shapes of the adapters' parameters.
    shapes: BTreeMap<String, Vec<usize>>,
}

impl Lora {
    /// Adapters for a model.
    ///
    /// # Errors
    /// A rank of 0; a target that no layer of the model has, with the names of those that there are.
    pub fn new(config: &LoraConfig, model: &ModelConfig) -> Result<Self> {
        config.validate()?;
        let mut lora = Self { config: config.clone(), model: model.clone(), shapes: BTreeMap::new() };
        lora.shapes = lora.adapters()?;
        let adapted = layers(&lora.shapes);
        let is_unused = |target: &&String| !adapted.iter().any(|layer| config::is_of(target, layer));
        let unused = config.targets.iter().filter(|target| *target != config::ALL).find(is_unused);
        let Some(target) = unused else { return Ok(lora) };
        lora.config = LoraConfig::default();
        let all = layers(&lora.adapters()?);
        let names = all.iter().filter_map(|layer| Some(layer.rsplit_once('.')?.1));
        let names: BTreeSet<&str> = names.collect();
        let known = names.into_iter().collect::<Vec<_>>().join(", ");
        Err(Error::Target { target: target.clone(), known })
    }

    /// What a model with these adapters has more.
    fn adapters(&self) -> Result<BTreeMap<String, Vec<usize>>> {
        let mut shapes = shapes_of(&self.model, |builder| self.adapt(builder))?;
        shapes.retain(|name, _| Self::is_adapter(name));
        Ok(shapes)
    }

    /// What they are.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Names and shapes of their parameters.
    pub fn shapes(&self) -> &BTreeMap<String, Vec<usize>> {
        &self.shapes
    }

    /// A builder that makes a model with adapters, in the same layout.
    pub fn adapt(&self, builder: Builder) -> Builder {
        let inner = builder.layers().clone();
        builder.with_layers(Arc::new(Adapted { inner, config: self.config.clone() }))
    }

    /// Whether a parameter is an adapter's, and trained.
    pub fn is_adapter(name: &str) -> bool {
        ADAPTER.iter().any(|part| name.ends_with(&format!(".{part}.weight")))
    }

    /// A weight of the model with its adapter added, so that the model is the same without adapters. `adapters` has those of all
    /// layers, by the names that the model asks for them by. A weight that has no adapter is given as it is.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn merged(&self, name: &str, weight: &Tensor, adapters: &HashMap<String, Tensor>) -> Result<Tensor> {
        let layer = name.strip_suffix("weight").unwrap_or(name);
        let part = |part: &str| adapters.get(&format!("{layer}{part}.weight"));
        let [Some(a), Some(b)] = ADAPTER.map(part) else { return Ok(weight.clone()) };
        let wide = |tensor: &Tensor| match tensor.dtype() {
            DType::F64 => Ok(tensor.clone()),
            _ => tensor.to_dtype(DType::F32),
        };
        let change = (wide(b)?.matmul(&wide(a)?)? * self.config.scale())?;
        Ok((wide(weight)? + change.to_dtype(wide(weight)?.dtype())?)?.to_dtype(weight.dtype())?)
    }
}

/// The layers that these adapters are of.
fn layers(shapes: &BTreeMap<String, Vec<usize>>) -> Vec<String> {
    let end = format!(".{}.weight", ADAPTER[0]);
    shapes.keys().filter_map(|name| name.strip_suffix(&end)).map(String::from).collect()
}
