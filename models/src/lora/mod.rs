//! LoRA: low-rank adapters of a frozen model.

mod base;
mod config;
mod dora;
mod dropout;
pub(crate) mod experts;
mod folder;
mod layers;
mod product;
mod targets;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Tensor};
use ops::quantized::Format;
use training::build::Builder;

use crate::names::ADAPTER;
use crate::shapes::{shapes, shapes_of};
use crate::{Error, ModelConfig, Result, names};

pub use config::LoraConfig;

use layers::LoraLayers;

/// Adapters of a model: `scale * (x a') b'` is added to the output `x w'` of each target layer, where `a` is (rank,
/// inputs), `b` is (outputs, rank) and `'` is the transpose. With [`dora`](LoraConfig::dora) the sum is multiplied, output by output, by
/// a trained magnitude over the norm of a row of `w + scale * b a`.
///
/// All other parameters are frozen, but those of [`LoraConfig::save_modules`]: they have no gradient, in any layout. A head that scores
/// documents is always among those, as in peft (its task type `SEQ_CLS`).
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
    /// The folder of the model, which is saved with the adapters.
    base: Option<PathBuf>,
    /// Names and shapes of the parameters that are trained.
    shapes: BTreeMap<String, Vec<usize>>,
    /// Names of the model's own weights that are trained; of a tied embedding and head both.
    saved: BTreeSet<String>,
    /// How the model's weights are held, if they are quantized.
    format: Option<Format>,
    /// Names of those that are.
    quantized: BTreeSet<String>,
    /// Names of those that are not, of linear layers.
    wide: BTreeSet<String>,
    /// Whether they are so in the folder already.
    is_held_so: bool,
}

impl Lora {
    /// Defines the adapters for a model.
    ///
    /// # Errors
    /// A rank of 0; a target that is the embedding, the head, a norm or a router; adapters of experts with dropout or magnitudes; a target
    /// or a pattern that matches no layer of the model: the error lists the layers' names.
    pub fn new(config: &LoraConfig, model: &ModelConfig) -> Result<Self> {
        let (lora, unknown) = Self::with_known_targets(config, model)?;
        lora.check_targets(unknown.first())?;
        Ok(lora)
    }

    /// As [`new`](Self::new), but as in peft one target that matches a layer is enough.
    pub(super) fn with_any_target(config: &LoraConfig, model: &ModelConfig) -> Result<Self> {
        let (lora, unknown) = Self::with_known_targets(config, model)?;
        lora.check_targets(unknown.first().filter(|_| lora.config.targets.is_empty()))?;
        Ok(lora)
    }

    /// Refuses a target that matches no layer, and patterns.
    fn check_targets(&self, unknown: Option<&String>) -> Result<()> {
        let Some(target) = unknown.cloned() else { return self.check_patterns(&layers(&self.shapes)) };
        let known = last_names(&self.all_layers()?);
        Err(Error::Target { what: "LoRA target", target, known })
    }

    /// Defines the adapters without targets that match no layer, which it returns.
    fn with_known_targets(config: &LoraConfig, model: &ModelConfig) -> Result<(Self, Vec<String>)> {
        config.validate()?;
        let (mut config, model) = (config.clone(), model.clone());
        config.check_experts()?;
        if model.labels.is_some() && !config.save_modules.iter().any(|module| module == names::SCORE_MODULE) {
            config.save_modules.push(names::SCORE_MODULE.into());
        }
        let saved = saved_weights(&config, &model)?;
        let mut lora = Self {
            config,
            model,
            base: None,
            shapes: BTreeMap::new(),
            saved,
            format: None,
            quantized: BTreeSet::new(),
            wide: BTreeSet::new(),
            is_held_so: false,
        };
        lora.shapes = lora.trained_shapes()?;
        let adapted = layers(&lora.shapes);
        let is_unused =
            |target: &&String| !adapted.iter().any(|layer| targets::ends_with_target(target, layer));
        let targets = lora.config.targets.clone();
        let (unused, used): (Vec<String>, Vec<String>) =
            targets.into_iter().partition(|target| target != targets::ALL && is_unused(&target));
        let others = shapes(&lora.model)?;
        let is_another = |target: &&String| {
            let mut others = others.keys().map(String::as_str).chain([names::HEAD]);
            others.any(|name| targets::ends_with_target(&format!("{target}.weight"), name))
        };
        if let Some(target) = unused.iter().find(is_another) {
            let help = "adapters of the embedding, the head, norms and routers are not supported; name linear layers";
            return Err(Error::Invalid { what: "LoraConfig", field: "targets", got: target.clone(), help });
        }
        lora.config.targets = used;
        Ok((lora, unused))
    }

    /// Refuses patterns that match none of the layers with adapters.
    fn check_patterns(&self, adapted: &[String]) -> Result<()> {
        let is_unused =
            |pattern: &str, layers: &[String]| !layers.iter().any(|layer| targets::matches(pattern, layer));
        let unused = self.config.patterns().find(|(_, pattern)| is_unused(pattern, adapted));
        let Some((what, target)) = unused.map(|(what, target)| (what, target.clone())) else { return Ok(()) };
        let all = self.all_layers()?;
        match is_unused(&target, &all) {
            true => Err(Error::Target { what, target, known: last_names(&all) }),
            false => Err(Error::WithoutAdapter { what, target, known: last_names(adapted) }),
        }
    }

    /// Returns the names of all layers that can have an adapter.
    fn all_layers(&self) -> Result<Vec<String>> {
        let of_experts = names::JOINED.map(|weight| format!("experts.{weight}"));
        let targets = [targets::ALL.to_string()].into_iter().chain(of_experts).collect();
        let all = Self { config: LoraConfig { targets, ..LoraConfig::default() }, ..self.clone() };
        Ok(layers(&all.trained_shapes()?))
    }

    /// Returns names and shapes of the parameters that are trained.
    fn trained_shapes(&self) -> Result<BTreeMap<String, Vec<usize>>> {
        let mut shapes = shapes_of(&self.model, |builder| self.adapt(builder))?;
        shapes.retain(|name, _| self.trains(name));
        Ok(shapes)
    }

    /// Returns the same adapters of the model in a folder, whose path is saved with them, as `peft` does: who loads them
    /// finds the model by it.
    #[must_use]
    pub fn of_folder(&self, folder: &Path) -> Self {
        let base = folder.canonicalize().unwrap_or_else(|_| folder.into());
        Self { base: Some(base), ..self.clone() }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Returns names and shapes of the parameters that are trained: the adapters', and those of
    /// [`save_modules`](LoraConfig::save_modules).
    pub fn shapes(&self) -> &BTreeMap<String, Vec<usize>> {
        &self.shapes
    }

    /// Returns a builder, in the same layout, that builds the model with these adapters.
    pub fn adapt(&self, builder: Builder) -> Builder {
        let inner = builder.layers().clone();
        let (config, saved) = (self.config.clone(), self.saved.clone());
        let (format, wide) = (self.format, self.wide.clone());
        builder.with_layers(Arc::new(LoraLayers { inner, config, saved, format, wide }))
    }

    /// Returns whether a parameter is trained: an adapter's, or one of [`save_modules`](LoraConfig::save_modules).
    pub fn trains(&self, name: &str) -> bool {
        trains(&self.saved, name)
    }

    /// Returns [`trains`](Self::trains), for `ParallelConfig::is_trained` of `girandole`.
    pub fn trained(&self) -> Arc<dyn Fn(&str) -> bool + Send + Sync> {
        let saved = self.saved.clone();
        Arc::new(move |name| trains(&saved, name))
    }

    /// Returns the names of parameters whose gradients are not the loss's on purpose, for `GradientCheckConfig::frozen`: with
    /// [`dora`](LoraConfig::dora) the matrices of adapters, since norms are constants in backward.
    pub fn stopped_gradients(&self) -> Vec<String> {
        let is_matrix = |name: &&String| Self::is_adapter(name) && !name.ends_with(names::MAGNITUDE);
        self.shapes.keys().filter(|name| self.config.dora && is_matrix(name)).cloned().collect()
    }

    /// Returns whether a parameter belongs to an adapter.
    pub fn is_adapter(name: &str) -> bool {
        names::is_adapter(name)
    }

    /// Returns a weight of the model with its adapter merged, so that the model computes the same without adapters.
    /// `adapters` has the adapters of all layers, by the model's parameter names. A weight without an adapter is
    /// returned unchanged; one that is in few bits below the adapters ([`quantized`](Self::quantized)) as these hold it. One that a folder
    /// has in few bits ([`quantized_as`](Self::quantized_as)) is given as it was widened.
    ///
    /// # Errors
    /// Shapes that do not match.
    pub fn merged(&self, name: &str, weight: &Tensor, adapters: &HashMap<String, Tensor>) -> Result<Tensor> {
        let widened = self.widened(name, weight)?;
        let weight = widened.as_ref().unwrap_or(weight);
        let (layer, half) = self.adapted(name);
        let [a, b, magnitude] = names::of_adapter(&layer).map(|name| adapters.get(&name));
        let (Some(a), Some(b)) = (a, b) else { return Ok(weight.clone()) };
        let rows = weight.dim(0)?;
        let b = half.map_or(Ok(b.clone()), |half| b.narrow(0, half * rows, rows))?;
        let wide = |tensor: &Tensor| match tensor.dtype() {
            DType::F64 => Ok(tensor.clone()),
            _ => tensor.to_dtype(DType::F32),
        };
        let change = (wide(&b)?.matmul(&wide(a)?)? * self.config.scale_of(&layer))?;
        let mut sum = (wide(weight)? + change.to_dtype(wide(weight)?.dtype())?)?;
        if let Some(magnitude) = magnitude {
            sum = dora::merged(&sum, magnitude)?;
        }
        Ok(sum.to_dtype(weight.dtype())?)
    }
}

impl Lora {
    /// Returns the name of the layer whose adapter changes a weight, and which half of that layer's outputs the weight is, if it is one.
    pub(crate) fn adapted(&self, weight: &str) -> (String, Option<usize>) {
        let of_layer = || (weight.strip_suffix(".weight").unwrap_or(weight).to_string(), None);
        experts::adapted(self.model.family, weight).unwrap_or_else(of_layer)
    }
}

/// Returns the names of the model's own weights that are trained.
fn saved_weights(config: &LoraConfig, model: &ModelConfig) -> Result<BTreeSet<String>> {
    let head = if model.labels.is_some() { names::SCORE } else { names::HEAD };
    let known = [names::of(model.family).embedding(), head.to_string()];
    let mut saved = BTreeSet::new();
    for module in &config.save_modules {
        let end = format!("{module}.weight");
        let Some(weight) = known.iter().find(|weight| targets::ends_with_target(&end, weight)) else {
            let help = "modules that can be trained whole are the embedding, embed_tokens (of GPT-2 wte), and the head, lm_head (of a model with labels score)";
            return Err(Error::Invalid {
                what: "LoraConfig",
                field: "save_modules",
                got: module.clone(),
                help,
            });
        };
        match model.tied {
            true => saved.extend(known.clone()),
            false => saved.extend([weight.clone()]),
        }
    }
    Ok(saved)
}

/// Whether a parameter is trained, beside these of the model's own.
fn trains(saved: &BTreeSet<String>, name: &str) -> bool {
    names::is_adapter(name) || saved.contains(name)
}

/// Returns the last parts of layers' names, each once.
fn last_names(layers: &[String]) -> String {
    let of = |layer: &String| {
        let last = layer.rsplit_once('.')?.1;
        Some(if names::is_of_expert(layer) { format!("experts.{last}") } else { last.to_string() })
    };
    layers.iter().filter_map(of).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(", ")
}

/// Returns the names of the layers that have adapters.
fn layers(shapes: &BTreeMap<String, Vec<usize>>) -> Vec<String> {
    let end = format!(".{}.weight", ADAPTER[0]);
    shapes.keys().filter_map(|name| name.strip_suffix(&end)).map(String::from).collect()
}
