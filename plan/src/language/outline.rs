//! Units, parameters and linear layers of a rank's part of a model, found by building the model without allocating.

use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Device, Result as CandleResult, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use fsdp::FsdpConfig;
use girandole::trainer::OptimizerConfig;
use models::{CausalLm, Lora, ModelConfig};
use ops::quantized::Format;
use ops::{DividedExperts, ExpertExchange};
use training::MuonConfig;
use training::build::{
    Builder, Division, Layers, Linear, LinearConfig, UnitPlace, UnitSource, Vocabulary, VocabularyConfig,
    WholeLayers,
};
use training::internal::lock;

/// Unit of a model, as held by the rank with the largest part of its layers, and of its experts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Unit {
    /// Its name.
    pub name: String,
    /// Its parameters.
    pub tensors: Vec<Parameter>,
    /// Its linear layers, in the order in which they are built.
    pub layers: Vec<Layer>,
}

/// A rank's part of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Name of the parameter.
    pub name: String,
    /// Number of elements.
    pub elements: usize,
    /// Whether it is trained.
    pub is_trained: bool,
    /// Rows and columns, where it is one or several matrices.
    pub matrix: Option<[usize; 2]>,
    /// How it is held, if it is quantized, whatever the dtype of the others.
    pub quantized: Option<Format>,
    /// Bytes of scales, which have no elements.
    pub scale_bytes: usize,
}

impl Parameter {
    /// Whether it belongs to one of several experts.
    pub(super) fn is_expert(&self) -> bool {
        is_of_expert(&self.name)
    }

    /// Whether it is trained, and a matrix of a hidden layer for Muon.
    pub(super) fn is_hidden(&self) -> bool {
        self.is_trained
            && self.matrix.is_some()
            && OptimizerConfig::muon(MuonConfig::default()).needs_whole(&self.name)
    }
}

/// A rank's part of a linear layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Its name.
    pub name: String,
    /// Input features of this rank's part.
    pub inputs: usize,
    /// Output features of this rank's part.
    pub outputs: usize,
    /// How it is divided.
    pub division: Division,
}

impl Layer {
    /// Whether it belongs to one of several experts.
    pub(super) fn is_expert(&self) -> bool {
        is_of_expert(&self.name)
    }

    /// Whether it belongs to an expert that all tokens use.
    pub(super) fn is_of_shared_expert(&self) -> bool {
        self.name.contains(".shared_expert")
    }

    /// Returns the share of tokens that use it: the rest of an expert's parameters is not active.
    pub(super) fn share(&self, config: &ModelConfig) -> f64 {
        match config.experts.as_ref().filter(|_| self.is_expert()) {
            Some(experts) => experts.per_token as f64 / experts.count as f64,
            None => 1.0,
        }
    }
}

impl Unit {
    /// Returns the number of elements of all parameters.
    pub fn elements(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.elements).sum()
    }

    /// Returns the number of elements of the parameters that have the model's dtype.
    pub(super) fn wide_elements(&self) -> usize {
        self.tensors.iter().filter(|tensor| tensor.quantized.is_none()).map(|tensor| tensor.elements).sum()
    }

    /// Returns the bytes of the parameters that are quantized.
    pub(super) fn quantized_bytes(&self) -> usize {
        let bytes = |tensor: &Parameter| {
            let format = tensor.quantized?;
            Some(tensor.elements / format.block() * format.block_bytes() + tensor.scale_bytes)
        };
        self.tensors.iter().filter_map(bytes).sum()
    }

    /// Returns the elements of the largest of `shard` shards of some of the parameters, as FSDP shards them: small tensors are
    /// packed together. Those that are quantized are not counted.
    pub(super) fn shard_elements(&self, shard: usize, wanted: impl Fn(&Parameter) -> bool) -> usize {
        let pack = FsdpConfig::default().pack_elements;
        let wanted = self.tensors.iter().filter(|tensor| wanted(tensor) && tensor.quantized.is_none());
        let (small, large): (Vec<usize>, Vec<usize>) =
            wanted.map(|tensor| tensor.elements).partition(|elements| *elements < pack);
        large.into_iter().map(|elements| elements.div_ceil(shard)).sum::<usize>()
            + small.into_iter().sum::<usize>().div_ceil(shard)
    }

    /// Returns the elements of the largest of `shard` shards of some of the parameters, each divided separately, as the
    /// optimizers of pipeline stages do.
    pub(super) fn flat_share(&self, shard: usize, wanted: impl Fn(&Parameter) -> bool) -> usize {
        let wanted = self.tensors.iter().filter(|tensor| wanted(tensor));
        wanted.map(|tensor| tensor.elements.div_ceil(shard)).sum()
    }

    /// Returns the number of trained elements of experts.
    pub(super) fn trained_experts(&self) -> usize {
        let own = self.tensors.iter().filter(|tensor| tensor.is_trained && is_of_expert(&tensor.name));
        own.map(|tensor| tensor.elements).sum()
    }

    /// Returns the number of trained elements.
    pub fn trained(&self) -> usize {
        self.tensors.iter().filter(|tensor| tensor.is_trained).map(|tensor| tensor.elements).sum()
    }
}

/// Whether a parameter or layer belongs to one of several experts.
fn is_of_expert(name: &str) -> bool {
    name.contains(".experts.")
}

/// Returns the units of a model whose layers are divided over `tp` ranks, and its experts over `ep`. With `apart`, units are built separately, as
/// in stages: then a tied head has its own copy of the embedding.
pub(super) fn units(
    (config, lora): (&ModelConfig, Option<&Lora>),
    (tp, ep): (usize, usize),
    apart: bool,
) -> CandleResult<Vec<Unit>> {
    let all = built((config, lora), (tp, ep), None)?;
    if !apart {
        return Ok(all);
    }
    // If the first unit, the embedding, is elsewhere, the last unit has its own table.
    let mut others = built((config, lora), (tp, ep), all.first().map(|unit| unit.name.clone()))?;
    if let (Some(first), Some(place)) = (all.into_iter().next(), others.first_mut()) {
        *place = first;
    }
    Ok(others)
}

fn built(
    (config, lora): (&ModelConfig, Option<&Lora>),
    (tp, ep): (usize, usize),
    elsewhere: Option<String>,
) -> CandleResult<Vec<Unit>> {
    let found = Recorder { units: Arc::default(), lora: lora.cloned() };
    let source = Source { found: found.clone(), elsewhere };
    let layers = DividedLayers { ranks: tp, of_experts: ep, found: found.clone() };
    let builder = Builder::of_units(Arc::new(source)).with_layers(Arc::new(layers));
    let builder = match lora {
        Some(lora) => lora.adapt(builder),
        None => builder,
    };
    CausalLm::new(config, &builder)?;
    Ok(std::mem::take(&mut *found.lock()))
}

/// Records the parameters and layers that are requested.
#[derive(Clone)]
struct Recorder {
    units: Arc<Mutex<Vec<Unit>>>,
    /// Adapters, if only they are trained.
    lora: Option<Lora>,
}

impl Recorder {
    fn lock(&self) -> MutexGuard<'_, Vec<Unit>> {
        lock(&self.units)
    }
}

struct Source {
    found: Recorder,
    /// Name of a unit that is not built.
    elsewhere: Option<String>,
}

impl UnitSource for Source {
    fn unit(
        &self,
        name: &str,
        build: &mut dyn FnMut(VarBuilder<'static>) -> CandleResult<()>,
    ) -> CandleResult<UnitPlace> {
        self.found.lock().push(Unit { name: name.into(), ..Unit::default() });
        if self.elsewhere.as_deref() == Some(name) {
            return Ok(UnitPlace::OtherProcess);
        }
        build(VarBuilder::from_backend(Box::new(self.found.clone()), DType::F32, Device::Cpu))?;
        Ok(UnitPlace::Here)
    }
}

impl Recorder {
    /// Returns how a weight of this dtype is held, if it is quantized.
    fn quantized(&self, dtype: DType) -> Option<Format> {
        self.lora.as_ref().and_then(Lora::base_format).filter(|_| dtype == DType::U8)
    }
}

impl SimpleBackend for Recorder {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> CandleResult<Tensor> {
        if let Some(unit) = self.lock().last_mut() {
            let is_trained = self.lora.as_ref().is_none_or(|lora| lora.trains(name));
            let matrix = match shape.dims() {
                [.., rows, columns] => Some([*rows, *columns]),
                _ => None,
            };
            let (quantized, count) = (self.quantized(dtype), shape.elem_count());
            // Of a quantized weight blocks, or scales.
            let (elements, scale_bytes) = match quantized {
                None => (count, 0),
                Some(_) if name.contains(".scales") => (0, count),
                Some(format) => (count / format.block_bytes() * format.block(), 0),
            };
            let name = name.into();
            unit.tensors.push(Parameter { name, elements, is_trained, matrix, quantized, scale_bytes });
        }
        // A single element, broadcast to the shape.
        Tensor::zeros((), dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> CandleResult<Tensor> {
        bail!("{name}: its shape must be asked for, as in VarBuilder::get")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        false
    }
}

/// The last of so many ranks that experts are divided over, which has most of them. Nothing is computed.
#[derive(Debug)]
struct LastOf(usize);

impl ExpertExchange for LastOf {
    fn rank(&self) -> usize {
        self.0 - 1
    }

    fn ranks(&self) -> usize {
        self.0
    }

    fn numbers(&self, _: &[u32]) -> CandleResult<Vec<Vec<u32>>> {
        bail!("a plan does not compute")
    }

    fn rows(&self, _: &Tensor, _: &[usize], _: &[usize]) -> CandleResult<Tensor> {
        bail!("a plan does not compute")
    }
}

/// Layer factory that builds a rank's part of each layer.
struct DividedLayers {
    ranks: usize,
    /// Number of ranks that experts are divided over.
    of_experts: usize,
    found: Recorder,
}

impl DividedLayers {
    fn share(&self, name: &str, what: &str, size: usize, parts: usize) -> CandleResult<usize> {
        match size.is_multiple_of(self.ranks * parts.max(1)) {
            true => Ok(size / self.ranks),
            false => bail!("the {size} {what} of {name} cannot be divided over tp={} ranks", self.ranks),
        }
    }

    /// Records a rank's part of a layer, and returns it.
    fn part(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> CandleResult<LinearConfig> {
        let (mut own, name) = (config.clone(), vb.prefix());
        match config.division {
            Division::Whole => {}
            Division::Outputs => own.outputs = self.share(&name, "outputs", config.outputs, config.groups)?,
            Division::Inputs => own.inputs = self.share(&name, "inputs", config.inputs, 1)?,
        }
        // Scales of a weight in few bits are no layer.
        let is_layer = self.found.quantized(vb.dtype()).is_none() || !name.ends_with(".scales");
        if let Some(unit) = self.found.lock().last_mut().filter(|_| is_layer) {
            let LinearConfig { mut inputs, outputs, division, .. } = own;
            if let Some(format) = self.found.quantized(vb.dtype()) {
                inputs = inputs / format.block_bytes() * format.block();
            }
            unit.layers.push(Layer { name, inputs, outputs, division });
        }
        Ok(own)
    }
}

impl Layers for DividedLayers {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn linear(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> CandleResult<Linear> {
        WholeLayers.linear(vb, &self.part(vb, config)?)
    }

    fn weight(&self, vb: &VarBuilder<'static>, config: &LinearConfig) -> CandleResult<Tensor> {
        WholeLayers.weight(vb, &self.part(vb, config)?)
    }

    fn experts(&self, count: usize) -> CandleResult<Option<DividedExperts>> {
        match self.of_experts {
            1 => Ok(None),
            ranks => DividedExperts::new(count, Arc::new(LastOf(ranks))).map(Some),
        }
    }

    fn weight_of_expert(
        &self,
        vb: &VarBuilder<'static>,
        config: &LinearConfig,
        (expert, count): (usize, usize),
    ) -> CandleResult<Option<Tensor>> {
        match self.experts(count)?.is_none_or(|divided| divided.own().contains(&expert)) {
            true => self.weight(vb, config).map(Some),
            false => Ok(None),
        }
    }

    fn vector(
        &self,
        vb: &VarBuilder<'static>,
        name: &str,
        init: Init,
        config: &LinearConfig,
    ) -> CandleResult<Tensor> {
        let parts = if config.division == Division::Outputs { self.ranks } else { 1 };
        let own = LinearConfig { outputs: config.outputs / parts, ..config.clone() };
        WholeLayers.vector(vb, name, init, &own)
    }

    fn vocabulary(
        &self,
        vb: &VarBuilder<'static>,
        config: &VocabularyConfig,
    ) -> CandleResult<Arc<dyn Vocabulary>> {
        if config.tokens < self.ranks {
            bail!(
                "the vocabulary of {} tokens is less than one for each of tp={} ranks",
                config.tokens,
                self.ranks
            )
        }
        // If the ranks do not divide it, the first ranks have one more.
        let tokens = config.tokens.div_ceil(self.ranks);
        WholeLayers.vocabulary(vb, &VocabularyConfig { tokens, ..config.clone() })
    }
}
