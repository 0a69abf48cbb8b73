//! Initial weights of a model: from a folder, or random.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Shape, Tensor, Var, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use ops::quantized::{Format, QuantizedMatrix};
use sampler::Generator;
use training::build::RangeReader;
use training::internal::lock;

use crate::bitsandbytes::Weight;
use crate::error::TensorMismatches;
use crate::files::{ADAPTER_TENSORS, CONFIG};
use crate::folder::Folder;
use crate::lora::experts::ExpertMatrix;
use crate::names::{self, PEFT_PREFIX};
use crate::quantized::Quantized;
use crate::reading::{gguf, pad_token};
use crate::shapes::shapes;
use crate::{Error, LabelsConfig, Lora, ModelConfig, Result, Tokenizer};

/// Initial values of a model's parameters.
///
/// Values do not depend on the layout, nor on the order in which they are read. Parameters that are not the model's
/// own, such as adapters, are drawn in the requested shape.
#[derive(Debug, Clone)]
pub struct Weights {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) config: ModelConfig,
    pub(super) shapes: BTreeMap<String, Vec<usize>>,
    /// `None` for random weights.
    pub(super) folder: Option<Folder>,
    /// Previously trained adapters.
    pub(super) adapters: Option<Folder>,
    /// Those of a layer's experts that were read last, and their name.
    joined: Mutex<Option<(String, Tensor)>>,
    seed: u64,
    pub(super) quantized: Quantized,
}

impl Weights {
    /// Opens a folder with `config.json` and `model.safetensors`, or several such files with
    /// `model.safetensors.index.json`. Weights may be f32, bf16, f16 or f64. Only headers are read here; weights are
    /// read on demand.
    ///
    /// Weights may be in 4 or 8 bits, as transformers saves them with bitsandbytes: they are widened as they are read, but by
    /// [`Lora::quantized_as`] taken as they are.
    ///
    /// Or a GGUF file of a Llama, Mistral, Mixtral, Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE or GPT-2. Its weights may be quantized, in blocks
    /// that candle knows: they are widened as they are read.
    ///
    /// # Errors
    /// A configuration that is not supported; files that are missing or damaged; [`Error::Tensors`] lists all tensors
    /// that are missing, surplus or misshapen.
    pub fn folder(path: &Path) -> Result<Self> {
        Self::of_folder(path, ModelConfig::from_folder(path)?, false)
    }

    /// Opens the folder of a language model for a head that scores documents for labels, in place of its own: as
    /// [`folder`](Self::folder), but the new head is drawn ([`with_seed`](Self::with_seed)), as transformers draws it.
    ///
    /// # Errors
    /// Those of [`folder`](Self::folder) and [`ModelConfig::with_labels`].
    pub fn with_new_head(path: &Path, labels: &LabelsConfig) -> Result<Self> {
        Self::of_folder(path, ModelConfig::from_folder(path)?.with_labels(labels.clone())?, true)
    }

    /// Opens the folder of a model for [adapters](Lora) in another: as [`folder`](Self::folder), but where the model has no labels and
    /// the adapters have a head for some ([`Lora::labels_of`]), with that head.
    ///
    /// # Errors
    /// Those of [`folder`](Self::folder), also for the adapters.
    pub fn for_adapters(path: &Path, adapters: &Path) -> Result<Self> {
        let model = ModelConfig::from_folder(path)?;
        let labels = if model.labels.is_some() { None } else { Lora::labels_of(adapters)? };
        let Some(mut labels) = labels else { return Self::of_folder(path, model, false) };
        if labels.pad_token.is_none() {
            let tokenizer = Tokenizer::is_in(path)?.then(|| Tokenizer::from_folder(path)).transpose()?;
            labels.pad_token = pad_token(&model, tokenizer.as_ref());
        }
        let (count, is_said) = (labels.names.len(), adapters.join(CONFIG).exists());
        let mut model = model.with_labels(labels)?;
        if count > 1 && !is_said {
            model = model.noting(format!(
                "the adapters do not say what their {count} scores are for: each document is taken to have one label of as many; \
                 a config.json beside them with id2label and problem_type says otherwise"
            ));
        }
        Self::of_folder(path, model, true)
    }

    fn of_folder(path: &Path, config: ModelConfig, has_new_head: bool) -> Result<Self> {
        let shapes = shapes(&config)?;
        let folder = match gguf::is_file(path) {
            true => gguf::folder(path, &config, &shapes)?,
            false => Folder::open(path)?,
        };
        let mut misfits = misfits(&config, &shapes, &folder);
        if has_new_head {
            misfits.missing.retain(|name| name != names::SCORE);
            misfits.surplus.retain(|name| name != names::HEAD);
        }
        if !misfits.is_empty() {
            return Err(Error::Tensors { folder: path.into(), misfits: Box::new(misfits) });
        }
        if let Some(bits) = config.bits() {
            check_bits(bits, &folder, path)?;
        }
        if config.tied && folder.entry(names::HEAD).is_some() {
            check_tied(&config, &folder, path)?;
        }
        Ok(Inner { folder: Some(folder), ..Inner::random(config, shapes, 0) }.into())
    }

    /// Returns random weights with the distributions of transformers: normal with `initializer_range` for weights,
    /// zeros for biases, ones for norms. The values differ from PyTorch's, because each parameter has its own random
    /// numbers, which depend on the seed and its name.
    ///
    /// # Errors
    /// Sizes that no model can have.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use models::{ModelConfig, Weights};
    ///
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama").as_ref();
    /// let weights = Weights::random(&ModelConfig::from_folder(folder)?, 42)?;
    /// let builder = weights.tensors(DType::F32, &Device::Cpu);
    /// assert_eq!(builder.get(32, "model.norm.weight")?.to_vec1::<f32>()?, [1.0; 32]);
    /// # Ok::<(), models::Error>(())
    /// ```
    pub fn random(config: &ModelConfig, seed: u64) -> Result<Self> {
        let shapes = shapes(config)?;
        Ok(Inner::random(config.clone(), shapes, seed).into())
    }

    /// Returns these weights with adapters from a folder that [`Lora::save`] or `peft` wrote, for a model that `lora`
    /// builds. Without this, adapters are newly initialized.
    ///
    /// # Errors
    /// A file that is missing or damaged; [`Error::Tensors`] lists all tensors that are missing, surplus or misshapen.
    pub fn with_adapters(&self, folder: &Path, lora: &Lora) -> Result<Self> {
        let tensors = Folder::of_file(folder, ADAPTER_TENSORS)?;
        let mut misfits =
            lora.misfits(|name| Some(tensors.entry(&format!("{PEFT_PREFIX}{name}"))?.dims.clone()));
        let known = lora.names_in_folder();
        let is_known = |name: &str| name.strip_prefix(PEFT_PREFIX).is_some_and(|name| known.contains(name));
        misfits.surplus = tensors.names().filter(|name| !is_known(name)).cloned().collect();
        if !misfits.is_empty() {
            return Err(Error::Tensors { folder: folder.into(), misfits: Box::new(misfits) });
        }
        let Inner { config, shapes, folder, seed, .. } = &*self.inner;
        let (config, shapes, folder) = (config.clone(), shapes.clone(), folder.clone());
        Ok(Inner { folder, adapters: Some(tensors), ..Inner::random(config, shapes, *seed) }.into())
    }

    /// Returns these weights with another seed for parameters that are not in a folder: new adapters.
    #[must_use]
    pub fn with_seed(&self, seed: u64) -> Self {
        let Inner { config, shapes, folder, adapters, .. } = &*self.inner;
        let (config, shapes) = (config.clone(), shapes.clone());
        let (folder, adapters) = (folder.clone(), adapters.clone());
        Inner { folder, adapters, ..Inner::random(config, shapes, seed) }.into()
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.inner.config
    }

    /// Returns the dtype that a parameter has in the folder, or had before bitsandbytes quantized it; `None` for random weights, for
    /// parameters that it does not have, and for those that are quantized in a GGUF file.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        let (inner, folder) = (&*self.inner, self.inner.folder.as_ref()?);
        let in_file = file_name(&inner.config, folder, &inner.stored_name(name));
        match folder.in_bits(&in_file) {
            Some(_) => inner.config.saved_dtype(),
            None => folder.entry(&in_file)?.dtype(),
        }
    }

    /// Returns the bits of the weights that the folder has in 4 or 8 bits, as bitsandbytes saves them; `None` if it has none.
    pub fn bits(&self) -> Option<u8> {
        let folder = self.inner.folder.as_ref()?;
        folder.names().find_map(|name| folder.in_bits(name)).map(Weight::bits)
    }

    /// Returns the weights that layers compute with as the folder has them, in 4 or 8 bits, for [`Lora::quantized_as`]. Those that they do
    /// not are widened: FP4, blocks of other than 64 numbers, such that cross rows, and those of a GGUF file.
    pub fn formats(&self) -> BTreeMap<String, Format> {
        let format = |name: &String| {
            let (folder, in_file) = self.inner.in_folder(name)?;
            Some((name.clone(), folder.in_bits(&in_file)?.format()?))
        };
        self.inner.shapes.keys().filter_map(format).collect()
    }

    /// Returns the type of the weights that are quantized in the file; `None` if none is.
    pub fn quantized(&self) -> Option<String> {
        let blocks = format!(".{}.", names::of(self.inner.config.family).blocks);
        let quantized = self.inner.folder.as_ref()?.entries().filter(|(_, entry)| entry.is_quantized());
        // The embedding and the head may be of a wider type.
        let shown = quantized.max_by_key(|(name, _)| name.contains(&blocks));
        shown.map(|(_, entry)| entry.dtype_name())
    }

    /// Returns names and shapes of the model's parameters.
    pub fn shapes(&self) -> &BTreeMap<String, Vec<usize>> {
        &self.inner.shapes
    }

    /// Returns a builder whose parameters are variables in `vars`: for one process, and for `Pipeline`.
    pub fn vars(&self, vars: &VarMap, dtype: DType, device: &Device) -> VarBuilder<'static> {
        self.builder(Some(vars.clone()), dtype, device)
    }

    /// Returns a builder that reads or draws each parameter whole on request and keeps none: for `Ddp` and `Fsdp`,
    /// which make their own variables.
    pub fn tensors(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        self.builder(None, dtype, device)
    }

    /// Returns a source from which each rank reads only its own part: for divided layers with
    /// `tensor_parallel::Weights::from(weights.parts())`, for shards with `units.reading(weights.parts())`, where
    /// `units` is the argument that `Fsdp::new` passes. Random parameters are temporarily drawn whole.
    pub fn parts(&self) -> Arc<dyn RangeReader> {
        self.inner.clone()
    }

    fn builder(&self, vars: Option<VarMap>, dtype: DType, device: &Device) -> VarBuilder<'static> {
        let backend = Backend { inner: self.inner.clone(), vars };
        VarBuilder::from_backend(Box::new(backend), dtype, device.clone())
    }
}

impl From<Inner> for Weights {
    fn from(inner: Inner) -> Self {
        Self { inner: Arc::new(inner) }
    }
}

impl Inner {
    /// Weights that are drawn, without a folder and adapters.
    fn random(config: ModelConfig, shapes: BTreeMap<String, Vec<usize>>, seed: u64) -> Self {
        let (joined, quantized) = Default::default();
        Self { config, shapes, folder: None, adapters: None, joined, seed, quantized }
    }

    /// Returns the name under which a parameter is stored: a stage's copy of a tied head is the embedding.
    pub(super) fn stored_name<'a>(&self, name: &'a str) -> Cow<'a, str> {
        match self.config.tied && name == names::HEAD {
            true => names::of(self.config.family).embedding().into(),
            false => name.into(),
        }
    }

    pub(super) fn value(
        &self,
        shape: &Shape,
        name: &str,
        init: Init,
        dtype: DType,
    ) -> candle_core::Result<Tensor> {
        let whole = |weight: &str, shape: &Shape, format: Format| self.matrix(weight, shape, format);
        if let Some(part) = self.quantized.part(name, &self.shapes, whole) {
            return part?.reshape(shape);
        }
        let name = &*self.stored_name(name);
        let Some(expected) = self.shapes.get(name) else {
            return self.extra_parameter(shape, name, init, dtype);
        };
        if shape.dims() != expected {
            bail!("parameter {name} is asked for as {:?}, and is {expected:?}", shape.dims())
        }
        let Some((folder, in_file)) = self.in_folder(name) else {
            let init = names::init(&self.config, name, shape.dims());
            return self.draw(shape, name, init, dtype);
        };
        let tensor = folder.read(&in_file, dtype)?;
        match folder.is_transposed(self.config.family, &in_file) {
            true => tensor.t()?.contiguous(),
            false => Ok(tensor),
        }
    }

    /// Returns a weight in few bits: as the folder has it, if that is in these, and else quantized.
    fn matrix(&self, name: &str, shape: &Shape, format: Format) -> candle_core::Result<QuantizedMatrix> {
        if let Some((folder, in_file)) = self.in_folder(name)
            && let Some(matrix) = folder.quantized(&in_file)?.filter(|matrix| matrix.format() == format)
        {
            return Ok(matrix);
        }
        QuantizedMatrix::quantize(format, &self.value(shape, name, Init::Const(0.0), DType::F32)?)
    }

    /// Returns the folder and the name in it of one of the model's parameters: that of the adapters, if it was trained whole beside
    /// them. `None` if it is drawn, as a new head is.
    pub(super) fn in_folder(&self, name: &str) -> Option<(&Folder, String)> {
        let saved = format!("{PEFT_PREFIX}{name}");
        if let Some(adapters) = self.adapters.as_ref().filter(|adapters| adapters.entry(&saved).is_some()) {
            return Some((adapters, saved));
        }
        let folder = self.folder.as_ref()?;
        let in_file = file_name(&self.config, folder, name);
        folder.entry(&in_file).is_some().then_some((folder, in_file))
    }

    /// Returns a parameter that is not the model's own: an adapter's, or drawn from `init`.
    fn extra_parameter(
        &self,
        shape: &Shape,
        name: &str,
        init: Init,
        dtype: DType,
    ) -> candle_core::Result<Tensor> {
        let (Some(adapters), true) = (&self.adapters, names::is_adapter(name)) else {
            if let Some(weight) = name.strip_suffix(names::MAGNITUDE).map(|layer| format!("{layer}weight")) {
                return self.norms(&weight, init)?.to_dtype(dtype);
            }
            let init = names::adapter_init(name, shape.dims()).unwrap_or(init);
            return self.draw(shape, name, init, dtype);
        };
        let read = match ExpertMatrix::of(name) {
            Some(matrix) => self.of_expert(adapters, &matrix, dtype)?,
            None => adapters.read(&format!("{PEFT_PREFIX}{name}"), dtype)?,
        };
        if read.shape() != shape {
            bail!("parameter {name} is asked for as {:?}, and is {:?}", shape.dims(), read.dims())
        }
        Ok(read)
    }

    /// Reads a matrix of an expert's adapter, which the file has joined with those of the layer's other experts.
    fn of_expert(
        &self,
        adapters: &Folder,
        matrix: &ExpertMatrix<'_>,
        dtype: DType,
    ) -> candle_core::Result<Tensor> {
        let [inner, outer] = [true, false].map(|both| format!("{PEFT_PREFIX}{}", matrix.in_file(both)));
        let name = if adapters.entry(&inner).is_some() { inner } else { outer };
        let experts = self.config.experts.as_ref().map_or(0, |experts| experts.count);
        let mut last = lock(&self.joined);
        let known = last.as_ref().filter(|(known, read)| *known == name && read.dtype() == dtype);
        let joined = match known {
            Some((_, read)) => read.clone(),
            None => {
                // Freed before the next ones are read.
                *last = None;
                let read = adapters.read(&name, dtype)?;
                last.insert((name, read)).1.clone()
            }
        };
        matrix.part_of(&joined, experts)
    }

    /// Returns the norms of the rows of a weight: the initial magnitudes of its adapter.
    fn norms(&self, name: &str, init: Init) -> candle_core::Result<Tensor> {
        let Some(dims) = self.shapes.get(name) else { bail!("{name}: the model has no such weight") };
        let mut weight = self.value(&Shape::from(&dims[..]), name, Init::Const(0.0), DType::F64)?;
        let is_in_bits =
            self.in_folder(name).is_some_and(|(folder, in_file)| folder.in_bits(&in_file).is_some());
        if let Some(format) = names::format_of_magnitudes(init).filter(|_| !is_in_bits) {
            let narrow = weight.to_dtype(DType::F32)?;
            weight = QuantizedMatrix::quantize(format, &narrow)?.widen()?.to_dtype(DType::F64)?;
        }
        let norms = weight.sqr()?.sum(1)?.sqrt()?;
        if let Some(row) = norms.to_vec1::<f64>()?.iter().position(|norm| *norm == 0.0) {
            bail!(
                "{name}: row {row} is zero, and has no direction: DoRA divides by its norm; leave the layer out (--lora-targets), or train without magnitudes"
            )
        }
        Ok(norms)
    }

    fn draw(&self, shape: &Shape, name: &str, init: Init, dtype: DType) -> candle_core::Result<Tensor> {
        let mut generator = Generator::new(seed_of(self.seed, name));
        let count = shape.elem_count();
        let numbers = match init {
            Init::Const(value) => Ok(vec![value as f32; count]),
            Init::Randn { mean, stdev } => generator.normal(count, mean, stdev),
            Init::Uniform { lo, up } => generator.uniform(count, lo, up),
            Init::Kaiming { .. } => bail!("parameter {name}: say whether it is normal, uniform or constant"),
        };
        Tensor::from_vec(numbers.map_err(candle_core::Error::wrap)?, shape.clone(), &Device::Cpu)?
            .to_dtype(dtype)
    }
}

/// Returns the seed of one parameter's random numbers, in the 32 bits that the generator takes.
fn seed_of(seed: u64, name: &str) -> u64 {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let hash = seed.to_le_bytes().into_iter().chain(name.bytes()).fold(0xcbf2_9ce4_8422_2325, mix);
    (hash ^ (hash >> 32)) & 0xffff_ffff
}

/// Returns the name of a parameter in a folder's files: models without a head are saved without the base prefix.
pub(super) fn file_name(config: &ModelConfig, folder: &Folder, name: &str) -> String {
    let base = format!("{}.", names::of(config.family).base);
    if folder.names().any(|known| known.starts_with(&base)) {
        return name.to_string();
    }
    name.strip_prefix(&base).unwrap_or(name).to_string()
}

fn misfits(config: &ModelConfig, shapes: &BTreeMap<String, Vec<usize>>, folder: &Folder) -> TensorMismatches {
    let mut misfits = TensorMismatches { missing: folder.lost.clone(), ..TensorMismatches::default() };
    let mut known = HashSet::with_capacity(shapes.len());
    for (name, dims) in shapes {
        let in_file = file_name(config, folder, name);
        let mut expected = dims.clone();
        if folder.is_transposed(config.family, &in_file) {
            expected.reverse();
        }
        match folder.entry(&in_file) {
            None if !misfits.missing.contains(&in_file) => misfits.missing.push(in_file.clone()),
            None => {}
            Some(entry) if entry.dims != expected => {
                misfits.misshapen.push((in_file.clone(), entry.dims.clone(), expected));
            }
            Some(entry) if !entry.is_readable() => {
                misfits.unreadable.push((in_file.clone(), entry.dtype_name()));
            }
            Some(_) => {}
        }
        known.insert(in_file);
    }
    // A tied head may be present.
    let is_known = |name: &String| {
        known.contains(name) || names::is_ignored(config, name) || (config.tied && name == names::HEAD)
    };
    misfits.surplus = folder.names().filter(|name| !is_known(name)).cloned().collect();
    misfits
}

/// Checks that a folder has weights of so many bits, as its configuration says.
fn check_bits(bits: u8, folder: &Folder, path: &Path) -> Result<()> {
    let found = folder.names().find_map(|name| folder.in_bits(name)).map(Weight::bits);
    match found {
        Some(found) if found == bits => Ok(()),
        _ => {
            let found = found.map_or_else(|| "none in 4 or 8".into(), |found| format!("some in {found}"));
            let problem = format!(
                "config.json says that weights are in {bits} bits (quantization_config), and there are {found}; leave the field out of it \
                 if they are not quantized"
            );
            Err(Error::Format { path: path.into(), problem })
        }
    }
}

/// Checks that a head that is saved with a tied embedding equals it, as the configuration says.
fn check_tied(config: &ModelConfig, folder: &Folder, path: &Path) -> Result<()> {
    /// Elements read at a time.
    const PIECE: usize = 1 << 20;
    let embedding = file_name(config, folder, &names::of(config.family).embedding());
    let len = |name: &str| folder.entry(name).map(|entry| entry.dims.iter().product::<usize>());
    let len_of_both = len(&embedding).filter(|_| {
        let dims = |name: &str| folder.entry(name).map(|entry| entry.dims.clone());
        dims(&embedding) == dims(names::HEAD)
    });
    let piece = |name: &str, at: usize, end: usize| -> candle_core::Result<Vec<f32>> {
        folder.read_ranges(name, std::slice::from_ref(&(at..end)), DType::F32)?.to_vec1()
    };
    let mut are_equal = len_of_both.is_some();
    for at in (0..len_of_both.unwrap_or(0)).step_by(PIECE) {
        let end = len_of_both.unwrap_or(0).min(at + PIECE);
        are_equal &= piece(&embedding, at, end)? == piece(names::HEAD, at, end)?;
    }
    match are_equal {
        true => Ok(()),
        false => {
            let problem = format!(
                "{} is not {embedding}, which config.json says it is; set tie_word_embeddings to false there",
                names::HEAD
            );
            Err(Error::Format { path: path.into(), problem })
        }
    }
}

/// Backend of a candle builder that reads or draws parameters.
struct Backend {
    inner: Arc<Inner>,
    vars: Option<VarMap>,
}

impl Backend {
    fn known(&self, name: &str) -> Option<Var> {
        lock(self.vars.as_ref()?.data()).get(name).cloned()
    }
}

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        if let Some(known) = self.known(name) {
            if *known.shape() != shape {
                bail!("parameter {name} is asked for as {:?}, and is {:?}", shape.dims(), known.dims())
            }
            return Ok(known.as_tensor().clone());
        }
        let tensor = self.inner.value(&shape, name, init, dtype)?.to_device(device)?;
        let Some(vars) = &self.vars else { return Ok(tensor) };
        let var = Var::from_tensor(&tensor)?;
        let tensor = var.as_tensor().clone();
        lock(vars.data()).insert(name.to_string(), var);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        bail!("{name}: its shape must be asked for, as in VarBuilder::get")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.inner.shapes.contains_key(name) || self.known(name).is_some()
    }
}
