//! Where layers get their parts of the weights from.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, VarMap};
use comm::{Local, LocalConfig};
use sampler::{Generator, SharedGenerator};
use tape::Guard;
use training::build::PartSource;
use training::{Runs, TorchInit};

use crate::averaging::{Averaging, Weight};
use crate::context::check_own_backward;
use crate::division::Division;
use crate::file::ShardedFile;
use crate::source::{Asked, Source};
use crate::{Context, Error, RandomStreams, Result, Split, TensorParallelConfig};

/// Where the weights of a model come from: the whole model's, of which each rank takes its part.
#[derive(Debug, Clone)]
pub enum Weights {
    /// PyTorch's initial values, drawn from a generator in the order in which the layers are made. Each rank draws all of them,
    /// one weight at a time, and keeps its part.
    Random(SharedGenerator),
    /// A safetensors file of the whole model, of which each rank reads its part only.
    File(PathBuf),
    /// Whatever gives each rank its part.
    Parts(WeightParts),
}

/// A source of parts of weights, of any kind.
#[derive(Clone)]
pub struct WeightParts(Arc<dyn PartSource>);

impl From<Arc<dyn PartSource>> for Weights {
    fn from(source: Arc<dyn PartSource>) -> Self {
        Self::Parts(WeightParts(source))
    }
}

impl fmt::Debug for WeightParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightParts").finish_non_exhaustive()
    }
}

impl Weights {
    /// Random weights from a seed: those that `torch.manual_seed(seed)` gives the same model in one process.
    pub fn seed(seed: u64) -> Self {
        Self::Random(Generator::new(seed).into())
    }

    /// Whether a file has what the model that `build` makes asks for, and nothing else: by its header alone, in one process, before
    /// any rank begins. Other weights are not looked at.
    ///
    /// # Errors
    /// Those of [`TensorParallel::new`](crate::TensorParallel::new) that one rank would have.
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
        let source = Source::Outline(ShardedFile::open(path)?);
        let builder = ShardBuilder::of(source, config, context, None);
        build(builder.clone())?;
        builder.finish().map(drop)
    }
}

/// One rank's part of a parameter.
#[derive(Debug, Clone)]
pub struct Parameter {
    name: String,
    var: Var,
    dims: Vec<usize>,
    split: Split,
    summed: bool,
    /// See [`Averaging::token`]; made where a layer asks for it.
    token: Option<Tensor>,
    /// Refuses a backward that is not the model's own, where ranks put gradients of it together.
    _guard: Option<Arc<Guard>>,
}

impl Parameter {
    /// Its name, which is PyTorch's for a model of PyTorch's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This rank's part, which an optimizer changes.
    pub fn var(&self) -> &Var {
        &self.var
    }

    /// The shape of the whole.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// How it is divided.
    pub fn split(&self) -> Split {
        self.split
    }

    /// Whether each rank has the gradient of its part of the sequence only, so that all of them have to be summed.
    pub(crate) fn is_summed(&self) -> bool {
        self.summed
    }

    pub(crate) fn describe(&self) -> String {
        let Self { name, var, dims, split, summed, .. } = self;
        format!(
            "parameter {name} {dims:?} {:?}, {split:?}{}",
            var.dtype(),
            if *summed { ", summed" } else { "" }
        )
    }
}

struct Inner {
    source: Mutex<Source>,
    parameters: Mutex<Vec<Parameter>>,
    dtype: DType,
    device: Device,
    context: Context,
    averaging: Option<Arc<Averaging>>,
}

/// What `VarBuilder` is to the layers of one process: it gives each layer its rank's part of a weight, by name.
#[derive(Clone)]
pub struct ShardBuilder {
    inner: Arc<Inner>,
    prefix: String,
    /// What it gives has no gradient.
    frozen: bool,
}

impl ShardBuilder {
    pub(crate) fn new(
        weights: &Weights,
        config: &TensorParallelConfig,
        context: Context,
        averaging: Option<Arc<Averaging>>,
    ) -> Result<Self> {
        let source = match weights {
            Weights::Random(generator) => {
                let scratch = VarMap::new();
                let builder = TorchInit::var_builder(generator, &scratch, config.dtype, &Device::Cpu);
                Source::Random { builder, scratch }
            }
            Weights::File(path) => Source::File(ShardedFile::open(path)?),
            Weights::Parts(WeightParts(source)) => Source::Parts(source.clone()),
        };
        Ok(Self::of(source, config, context, averaging))
    }

    fn of(
        source: Source,
        config: &TensorParallelConfig,
        context: Context,
        averaging: Option<Arc<Averaging>>,
    ) -> Self {
        let (source, parameters) = (Mutex::new(source), Mutex::default());
        let (dtype, device) = (config.dtype, config.device.clone());
        let inner = Inner { source, parameters, dtype, device, context, averaging };
        Self { inner: Arc::new(inner), prefix: String::new(), frozen: false }
    }

    /// A builder that asks `builder`, and tells it how each weight is divided. One that does not listen gives whole weights.
    pub(crate) fn elsewhere(builder: VarBuilder<'static>, asked: Asked, context: Context) -> Self {
        let (dtype, device) = (builder.dtype(), builder.device().clone());
        let (source, parameters) = (Mutex::new(Source::Elsewhere(builder, asked)), Mutex::default());
        let inner = Inner { source, parameters, dtype, device, context, averaging: None };
        Self { inner: Arc::new(inner), prefix: String::new(), frozen: false }
    }

    /// A builder for a part of the model, whose names begin with `name` and a dot.
    pub fn pp(&self, name: impl std::fmt::Display) -> Self {
        Self { prefix: format!("{}{name}.", self.prefix), ..self.clone() }
    }

    /// The same, of parameters that get no gradient or do.
    pub(crate) fn frozen(self, frozen: bool) -> Self {
        Self { frozen, ..self }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.inner.dtype
    }

    pub(crate) fn device(&self) -> &Device {
        &self.inner.device
    }

    /// What a layer knows of the ranks.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// This rank's part of a weight of the whole shape `dims`: the variable itself. Operations of candle's on it do not notice
    /// `loss.backward()`: see [`TensorParallel::backward`](crate::TensorParallel::backward).
    ///
    /// # Errors
    /// A shape that the ranks do not divide; a file that lacks it, or has it in another shape or dtype.
    pub fn get(&self, dims: impl Into<Shape>, name: &str, init: Init, split: Split) -> Result<Tensor> {
        Ok(self.parameter(dims.into(), name, init, split.into())?.0)
    }

    /// The same for a layer that computes the weight's gradient itself.
    pub(crate) fn weight(
        &self,
        dims: impl Into<Shape>,
        name: &str,
        init: Init,
        division: impl Into<Division>,
    ) -> Result<Weight> {
        let (value, index) = self.parameter(dims.into(), name, init, division.into())?;
        let index = index.filter(|_| !self.frozen);
        let (Some(averaging), Some(index)) = (&self.inner.averaging, index) else {
            return Ok(Weight::new(value, None));
        };
        let parameter = &mut lock(&self.inner.parameters)[index];
        let token = match &parameter.token {
            Some(token) => token.clone(),
            None => averaging.token(index, &parameter.var)?,
        };
        parameter.token = Some(token.clone());
        Ok(Weight::new(value, Some((token, index, averaging.clone()))))
    }

    /// A weight that every rank has whole and applies to activations between the divided layers, such as a norm's: with
    /// sequence parallelism each rank's gradient is of its part of the sequence, and all of them are summed.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn get_between(&self, dims: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        let summed = self.inner.context.sequence_parallel() && self.inner.context.ranks() > 1;
        let division = Division { summed, ..Split::Whole.into() };
        Ok(self.parameter(dims.into(), name, init, division)?.0)
    }

    /// A weight, and its place among the parameters unless something else has it.
    pub(crate) fn parameter(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        division: Division,
    ) -> Result<(Tensor, Option<usize>)> {
        let (value, index) = self.find(shape, name, init, division)?;
        Ok((if self.frozen { value.detach() } else { value }, index))
    }

    fn find(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        division: Division,
    ) -> Result<(Tensor, Option<usize>)> {
        let Division { split, summed, .. } = division;
        let (name, dims) = (format!("{}{name}", self.prefix), shape.dims().to_vec());
        let mut parameters = lock(&self.inner.parameters);
        if let Some(index) = parameters.iter().position(|known| known.name == name) {
            let known = &parameters[index];
            if known.dims == dims && known.split == split {
                return Ok((known.var.as_tensor().clone(), Some(index)));
            }
            let got = format!("{dims:?}, {split:?}");
            let help = format!("before, it was asked for as {:?}, {:?}", known.dims, known.split);
            return Err(Error::invalid(&format!("parameter {name}"), got, help));
        }
        let (rank, ranks) = (self.inner.context.rank(), self.inner.context.ranks());
        let shard_dims = division.dims(&name, &dims, (rank, ranks))?;
        let runs = split.runs(&dims, rank, ranks);
        let mut source = lock(&self.inner.source);
        let tensor = match &mut *source {
            Source::Random { builder, scratch } => {
                let whole = builder.get_with_hints(shape, &name, init)?;
                // Nobody else needs the whole; the next weight takes its place.
                scratch.data().lock().unwrap_or_else(PoisonError::into_inner).clear();
                cut(&whole, runs, &shard_dims)?
            }
            Source::File(_) | Source::Parts(_) => {
                let ranges: Vec<_> = runs.ranges().collect();
                source.read(&name, &shape, init, self.inner.dtype, &ranges)?.reshape(&shard_dims[..])?
            }
            // No memory for numbers that nobody needs.
            Source::Outline(file) => {
                file.find(&name, &dims, self.inner.dtype)?;
                let var = Var::zeros((), self.inner.dtype, &Device::Cpu)?;
                let tensor = var.broadcast_as(&dims[..])?;
                parameters.push(Parameter { name, var, dims, split, summed, token: None, _guard: None });
                return Ok((tensor, Some(parameters.len() - 1)));
            }
            Source::Elsewhere(builder, asked) => {
                *lock(asked) = Some(division);
                let found = builder.get_with_hints(shape, &name, init);
                lock(asked).take();
                let found = found?;
                let own = if found.dims() == shard_dims { found } else { cut(&found, runs, &shard_dims)? };
                return Ok((own, None));
            }
        };
        drop(source);
        let var = Var::from_tensor(&tensor.to_device(&self.inner.device)?)?;
        let tensor = var.as_tensor().clone();
        let is_put_together = summed || self.inner.averaging.is_some();
        let guard = is_put_together.then(|| Arc::new(tape::guard(&var, || Ok(check_own_backward()?))));
        parameters.push(Parameter { name, var, dims, split, summed, token: None, _guard: guard });
        Ok((tensor, Some(parameters.len() - 1)))
    }

    /// Whether the source gives any part of any weight, and does not draw one whole weight after the other.
    pub(crate) fn has_parts(&self) -> bool {
        lock(&self.inner.source).has_parts()
    }

    /// Numbers of a weight of the whole shape `shape`, in these ranges of the whole, from a source that has parts.
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

    /// The parameter that was asked for last, which is then nobody's here.
    pub(crate) fn take_last(&self) -> Option<Parameter> {
        lock(&self.inner.parameters).pop()
    }

    /// The parameters that were asked for, once the model is whole.
    pub(crate) fn finish(&self) -> Result<Vec<Parameter>> {
        if let Source::File(file) | Source::Outline(file) = &*lock(&self.inner.source) {
            file.finish()?;
        }
        Ok(std::mem::take(&mut *lock(&self.inner.parameters)))
    }
}

/// The part that `runs` names.
pub(crate) fn cut(whole: &Tensor, runs: Runs, shard_dims: &[usize]) -> Result<Tensor> {
    if runs.count == 1 && runs.len == whole.elem_count() {
        return Ok(whole.as_ref().detach().reshape(shard_dims)?);
    }
    // Rows of runs at equal distances: a matrix, of which a block of columns is taken.
    let matrix = whole.detach().reshape((runs.count, runs.stride))?;
    Ok(matrix.narrow(1, runs.start, runs.len)?.force_contiguous()?.reshape(shard_dims)?)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
