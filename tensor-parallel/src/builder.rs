//! `ShardBuilder`: supplies layers with this rank's parts of the weights.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, VarMap};
use comm::{Local, LocalConfig};
use ops::EXPERT_CORRECTION;
use sampler::{Generator, SharedGenerator};
use training::build::RangeReader;
use training::internal::{Runs, lock};
use training::{TensorFile, TorchInit};

use crate::context::check_own_backward;
use crate::division::Division;
use crate::parameter::Parameter;
use crate::source::{RequestedDivision, WeightSource};
use crate::{Context, Error, RandomStreams, Result, Split, TensorParallelConfig};

/// Source of a model's weights. It describes the whole model; each rank takes its part.
#[derive(Debug, Clone)]
pub enum Weights {
    /// PyTorch's initial values, drawn from a generator in the order in which the layers are created. Each rank draws all of
    /// them, one weight at a time, and keeps its part.
    Random(SharedGenerator),
    /// A safetensors file of the whole model, of which each rank reads only its part.
    File(PathBuf),
    /// Any other source that can read parts of weights.
    Parts(WeightParts),
}

/// A source that can read parts of weights.
#[derive(Clone)]
pub struct WeightParts(Arc<dyn RangeReader>);

impl From<Arc<dyn RangeReader>> for Weights {
    fn from(source: Arc<dyn RangeReader>) -> Self {
        Self::Parts(WeightParts(source))
    }
}

impl fmt::Debug for WeightParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightParts").finish_non_exhaustive()
    }
}

impl Weights {
    /// Returns random weights from a seed: the same that `torch.manual_seed(seed)` gives the model in a single process.
    pub fn seed(seed: u64) -> Self {
        Self::Random(Generator::new(seed).into())
    }

    /// Checks, in one process before any rank starts, that a file contains exactly the tensors that the model built by
    /// `build` requests. Reads only the file's header. Weights from other sources are not checked.
    ///
    /// # Errors
    /// Those of [`TensorParallel::new`](crate::TensorParallel::new) for a single rank.
    ///
    /// ```
    /// use tensor_parallel::{ParallelMlp, TensorParallelConfig, Weights};
    ///
    /// let weights = Weights::File("no/such/file.safetensors".into());
    /// let checked = weights.check(&TensorParallelConfig::default(), |builder| ParallelMlp::new(8, 32, &builder));
    /// assert!(checked.is_err_and(|error| error.to_string().starts_with("cannot read no/such/file.safetensors")));
    /// ```
    pub fn check<M>(
        &self,
        config: &TensorParallelConfig,
        build: impl FnOnce(ShardBuilder) -> Result<M>,
    ) -> Result<()> {
        let Weights::File(path) = self else { return Ok(()) };
        let alone = Local::group(1, &LocalConfig::default())?.remove(0);
        let context = Context::new(Arc::new(alone), config.sequence_parallel, RandomStreams::new(0, 0, 0));
        let source = WeightSource::Outline(TensorFile::open(path)?, BTreeSet::new());
        let builder = ShardBuilder::of(source, config, context, false);
        build(builder.clone())?;
        builder.finish().map(drop)
    }
}

struct Inner {
    source: Mutex<WeightSource>,
    parameters: Mutex<Vec<Parameter>>,
    device: Device,
    context: Context,
    /// Whether gradients of all weights are averaged over replicas.
    is_averaged: bool,
}

/// Corresponds to `VarBuilder` for a single process: supplies each layer with this rank's part of a weight, by name.
#[derive(Clone)]
pub struct ShardBuilder {
    inner: Arc<Inner>,
    prefix: String,
    dtype: DType,
    /// Whether the weights it returns have no gradient.
    frozen: bool,
}

impl ShardBuilder {
    pub(crate) fn new(
        weights: &Weights,
        config: &TensorParallelConfig,
        context: Context,
        is_averaged: bool,
    ) -> Result<Self> {
        let source = match weights {
            Weights::Random(generator) => {
                let scratch = VarMap::new();
                let builder = TorchInit::var_builder(generator, &scratch, config.dtype, &Device::Cpu);
                WeightSource::Random { builder, scratch }
            }
            Weights::File(path) => WeightSource::File(TensorFile::open(path)?, BTreeSet::new()),
            Weights::Parts(WeightParts(source)) => WeightSource::Parts(source.clone()),
        };
        Ok(Self::of(source, config, context, is_averaged))
    }

    fn of(source: WeightSource, config: &TensorParallelConfig, context: Context, is_averaged: bool) -> Self {
        let (source, parameters) = (Mutex::new(source), Mutex::default());
        let (dtype, device) = (config.dtype, config.device.clone());
        let inner = Inner { source, parameters, device, context, is_averaged };
        Self { inner: Arc::new(inner), prefix: String::new(), dtype, frozen: false }
    }

    /// Creates a builder that requests weights from `builder`, and stores in `asked` how each one is divided. A `builder`
    /// that does not read `asked` returns whole weights, which are then cut.
    pub(crate) fn external(builder: VarBuilder<'static>, asked: RequestedDivision, context: Context) -> Self {
        let (dtype, device) = (builder.dtype(), builder.device().clone());
        let (source, parameters) = (Mutex::new(WeightSource::Elsewhere(builder, asked)), Mutex::default());
        let inner = Inner { source, parameters, device, context, is_averaged: false };
        Self { inner: Arc::new(inner), prefix: String::new(), dtype, frozen: false }
    }

    /// Returns a builder for a part of the model, whose names start with `name` and a dot.
    pub fn pp(&self, name: impl std::fmt::Display) -> Self {
        Self { prefix: format!("{}{name}.", self.prefix), ..self.clone() }
    }

    /// Returns the same builder, for weights with or without a gradient.
    pub(crate) fn frozen(self, frozen: bool) -> Self {
        Self { frozen, ..self }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the same builder for a weight of this dtype: that of all weights, or one of integers, or for the correction of a router,
    /// which has no gradient, any.
    ///
    /// # Errors
    /// Another dtype of floating-point numbers.
    pub(crate) fn of_dtype(self, name: &str, dtype: DType) -> Result<Self> {
        let is_correction = name.rsplit('.').next() == Some(EXPERT_CORRECTION);
        if dtype != self.dtype && dtype.is_float() && !is_correction {
            let help = format!(
                "ask for {:?}: all weights of a divided model have one floating-point dtype",
                self.dtype
            );
            return Err(Error::invalid(
                &format!("the dtype of {}{name}", self.prefix),
                format!("{dtype:?}"),
                help,
            ));
        }
        Ok(Self { dtype, ..self })
    }

    pub(crate) fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Returns the tensor-parallel context of the layers.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Returns this rank's part of a weight of the whole shape `dims`: the variable itself. Candle's own operations on it
    /// cannot detect `loss.backward()`: see [`TensorParallel::backward`](crate::TensorParallel::backward).
    ///
    /// # Errors
    /// A dimension that is not divisible by the number of ranks; a file that lacks the tensor, or contains it with another
    /// shape or dtype.
    pub fn get(&self, dims: impl Into<Shape>, name: &str, init: Init, split: Split) -> Result<Tensor> {
        self.parameter(dims, name, init, split)
    }

    /// Returns a weight that every rank holds whole and applies to activations between the divided layers, such as a norm's.
    /// With sequence parallelism each rank's gradient comes from its part of the sequence, and the gradients are summed over
    /// ranks.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn get_between(&self, dims: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        let summed = self.inner.context.sequence_parallel() && self.inner.context.ranks() > 1;
        let division = Division { summed, ..Split::Whole.into() };
        self.parameter(dims, name, init, division)
    }

    /// Returns this rank's part of a weight; without a gradient if it is frozen.
    pub(crate) fn parameter(
        &self,
        dims: impl Into<Shape>,
        name: &str,
        init: Init,
        division: impl Into<Division>,
    ) -> Result<Tensor> {
        let value = self.find(dims.into(), name, init, division.into())?;
        Ok(if self.frozen { value.detach() } else { value })
    }

    fn find(&self, shape: Shape, name: &str, init: Init, division: Division) -> Result<Tensor> {
        let Division { split, summed, .. } = division;
        let (name, dims) = (format!("{}{name}", self.prefix), shape.dims().to_vec());
        let mut parameters = lock(&self.inner.parameters);
        if let Some(known) = parameters.iter().find(|known| known.name == name) {
            if known.dims == dims && known.split == split {
                return Ok(known.var.as_tensor().clone());
            }
            let got = format!("{dims:?}, {split:?}");
            let help = format!("before, it was asked for as {:?}, {:?}", known.dims, known.split);
            return Err(Error::invalid(&format!("parameter {name}"), got, help));
        }
        let (rank, ranks) = (self.inner.context.rank(), self.inner.context.ranks());
        let mut source = lock(&self.inner.source);
        let shard_dims = division.dims(&source.full_name(&name), &dims, (rank, ranks))?;
        let runs = split.runs(&dims, rank, ranks);
        let tensor = match &mut *source {
            WeightSource::Random { builder, scratch } => {
                let whole = builder.get_with_hints_dtype(shape, &name, init, self.dtype)?;
                // The whole weight is not needed any more; this frees memory for the next one.
                lock(scratch.data()).clear();
                slice_part(&whole, runs, &shard_dims)?
            }
            WeightSource::File(..) | WeightSource::Parts(_) => {
                let ranges: Vec<_> = runs.ranges().collect();
                source.read(&name, &shape, init, self.dtype, &ranges)?.reshape(&shard_dims[..])?
            }
            // Returns a broadcast scalar, so that no memory is allocated for values that are not used.
            WeightSource::Outline(file, asked_for) => {
                file.check(&name, &dims, self.dtype)?;
                asked_for.insert(name.clone());
                let var = Var::zeros((), self.dtype, &Device::Cpu)?;
                let tensor = var.broadcast_as(&dims[..])?;
                parameters.push(Parameter { name, var, dims, split, summed, _guard: None });
                return Ok(tensor);
            }
            WeightSource::Elsewhere(builder, asked) => {
                *lock(asked) = Some(division);
                let found = builder.get_with_hints_dtype(shape, &name, init, self.dtype);
                lock(asked).take();
                let found = found?;
                let own =
                    if found.dims() == shard_dims { found } else { slice_part(&found, runs, &shard_dims)? };
                return Ok(own);
            }
        };
        drop(source);
        let var = Var::from_tensor(&tensor.to_device(&self.inner.device)?)?;
        let tensor = var.as_tensor().clone();
        let is_put_together = summed || self.inner.is_averaged;
        let guard = is_put_together.then(|| Arc::new(ops::tape::guard(&var, || Ok(check_own_backward()?))));
        parameters.push(Parameter { name, var, dims, split, summed, _guard: guard });
        Ok(tensor)
    }

    /// Returns whether the source can read any part of any weight, rather than drawing whole weights in sequence.
    pub(crate) fn has_parts(&self) -> bool {
        lock(&self.inner.source).has_parts()
    }

    /// Reads these ranges of a weight of the whole shape `shape`, from a source that can read parts.
    pub(crate) fn read(
        &self,
        name: &str,
        shape: &Shape,
        init: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> Result<Tensor> {
        lock(&self.inner.source).read(name, shape, init, dtype, ranges)
    }

    /// Removes and returns the parameter that was requested last; the caller owns it.
    pub(crate) fn take_last(&self) -> Option<Parameter> {
        lock(&self.inner.parameters).pop()
    }

    /// Returns the parameters that were requested, when the model is complete.
    pub(crate) fn finish(&self) -> Result<Vec<Parameter>> {
        if let WeightSource::File(file, asked_for) | WeightSource::Outline(file, asked_for) =
            &*lock(&self.inner.source)
        {
            file.only_of_model(&asked_for.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
        Ok(std::mem::take(&mut *lock(&self.inner.parameters)))
    }
}

/// Returns the part of a whole weight that `runs` describes.
pub(crate) fn slice_part(whole: &Tensor, runs: Runs, shard_dims: &[usize]) -> Result<Tensor> {
    if runs.count == 1 && runs.len == whole.elem_count() {
        return Ok(whole.as_ref().detach().reshape(shard_dims)?);
    }
    // Runs of equal length at equal distances: seen as a matrix, a block of columns.
    let matrix = whole.detach().reshape((runs.count, runs.stride))?;
    Ok(matrix.narrow(1, runs.start, runs.len)?.force_contiguous()?.reshape(shard_dims)?)
}
