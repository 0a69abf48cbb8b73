//! PyTorch's initial weights for candle models, as a variable builder.

use std::collections::HashMap;
use std::sync::Mutex;

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::init::{FanInOut, NonLinearity, NormalOrUniform};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use sampler::{Generator, SamplerError, SharedGenerator, initial};

use crate::{Error, Result};
use ops::kernels::lock;

/// Gives any candle model PyTorch's initial weights from a seed, without a change to the model.
///
/// The model is built with the [`VarBuilder`] of [`TorchInit::var_builder`]. Each variable is drawn when the model
/// requests it, so a model that creates its layers in the order of its PyTorch counterpart gets the same weights:
///
/// - a weight as `candle_nn`'s linear and convolution layers request it: uniform, Kaiming's bound with slope
///   sqrt(5), with all dimensions but the first as fan-in (what `nn.Linear` and `nn.Conv2d` do);
/// - the bias that goes with such a weight (`fc.bias` after `fc.weight`): uniform in +-1/sqrt(fan_in) of the *weight*,
///   where `candle_nn`'s convolutions request another bound;
/// - everything else as requested: normal (`nn.Embedding`), constant (`nn.LayerNorm`), uniform, or another of
///   Kaiming's rules. A constant draws nothing.
///
/// A variable that exists already (tied weights) is returned as it is and draws nothing. Values are drawn in f32 and
/// cast.
/// The initial values of recurrent layers (`candle_nn::rnn`) differ from PyTorch's.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::VarMap;
/// use sampler::{Generator, SharedGenerator};
/// use training::TorchInit;
///
/// let generator = SharedGenerator::from(Generator::new(42)); // torch.manual_seed(42)
/// let vars = VarMap::new();
/// let builder = TorchInit::var_builder(&generator, &vars, DType::F32, &Device::Cpu);
/// let layer = candle_nn::linear(1, 1, builder.pp("fc"))?; // nn.Linear(1, 1)
/// assert_eq!(layer.weight().to_vec2::<f32>()?, [[0.7645385]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct TorchInit {
    generator: SharedGenerator,
    /// Map that holds the variables; `None` if none are kept.
    vars: Option<Vars>,
    /// Fan-in of each weight drawn so far, by the name prefix that its bias shares.
    fan_ins: Mutex<HashMap<String, usize>>,
}

impl TorchInit {
    /// Returns a builder that draws from `generator` and stores the variables in `var_map`.
    ///
    /// The generator is shared: numbers that the program draws from it between two layers shift what follows, as in
    /// PyTorch.
    pub fn var_builder(
        generator: &SharedGenerator,
        var_map: &VarMap,
        dtype: DType,
        device: &Device,
    ) -> VarBuilder<'static> {
        Self::builder(generator, Some(Vars(var_map.clone())), dtype, device)
    }

    /// Returns a builder that draws the same values and stores none: each is an ordinary tensor, drawn again at every
    /// request. For a model that is never whole in memory, whose builder keeps only parts of the values.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use sampler::{Generator, SharedGenerator};
    /// use training::TorchInit;
    ///
    /// let generator = SharedGenerator::from(Generator::new(42));
    /// let builder = TorchInit::tensor_builder(&generator, DType::F32, &Device::Cpu);
    /// let layer = candle_nn::linear(1, 1, builder)?;
    /// assert_eq!(layer.weight().to_vec2::<f32>()?, [[0.7645385]]);
    /// assert!(!layer.weight().is_variable());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn tensor_builder(generator: &SharedGenerator, dtype: DType, device: &Device) -> VarBuilder<'static> {
        Self::builder(generator, None, dtype, device)
    }

    fn builder(
        generator: &SharedGenerator,
        vars: Option<Vars>,
        dtype: DType,
        device: &Device,
    ) -> VarBuilder<'static> {
        let backend = Self { generator: generator.clone(), vars, fan_ins: Mutex::default() };
        VarBuilder::from_backend(Box::new(backend), dtype, device.clone())
    }

    /// Draws the initial values of a new variable, in row-major order.
    fn draw(&self, name: &str, shape: &Shape, init: Init) -> candle_core::Result<Vec<f32>> {
        let count = shape.elem_count();
        let values = match init {
            Init::Const(value) => Ok(vec![value as f32; count]),
            Init::Randn { mean, stdev } => self.generator.with(|g| g.normal(count, mean, stdev)),
            Init::Uniform { lo, up } => match self.fan_in_of_weight(name) {
                Some(fan_in) => self.generator.with(|g| initial::bias(g, count, fan_in)),
                None => self.generator.with(|g| g.uniform(count, lo, up)),
            },
            // Candle's layers request this for their default initialization.
            Init::Kaiming {
                dist: NormalOrUniform::Normal,
                fan: FanInOut::FanIn,
                non_linearity: NonLinearity::ReLU,
            } => {
                let fan_in = fan_in(name, shape)?;
                if let Some(prefix) = name.strip_suffix("weight") {
                    lock(&self.fan_ins).insert(prefix.to_string(), fan_in);
                }
                self.generator.with(|g| initial::weight(g, count, fan_in))
            }
            Init::Kaiming { dist, fan, non_linearity } => {
                let deviation = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
                self.generator.with(|g| kaiming(g, count, dist, deviation))
            }
        };
        values.map_err(|error| candle_core::Error::Wrapped(Box::new(error)))
    }

    fn fan_in_of_weight(&self, name: &str) -> Option<usize> {
        lock(&self.fan_ins).get(name.strip_suffix("bias")?).copied()
    }
}

impl SimpleBackend for TorchInit {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let known = self.vars.as_ref().and_then(|vars| lock(vars.0.data()).get(name).cloned());
        if let Some(var) = known {
            return Ok(existing(&var, name, &shape, dtype)?);
        }
        let values = self.draw(name, &shape, init)?;
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
        let Some(Vars(vars)) = &self.vars else { return Ok(tensor) };
        let var = Var::from_tensor(&tensor)?;
        let tensor = var.as_tensor().clone();
        lock(vars.data()).insert(name.to_string(), var);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        match self.vars.as_ref().and_then(|vars| lock(vars.0.data()).get(name).cloned()) {
            Some(var) => Ok(existing(&var, name, var.shape(), dtype)?),
            None => Err(Error::NoVariable { name: name.to_string() }.into()),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vars.as_ref().is_some_and(|vars| lock(vars.0.data()).contains_key(name))
    }
}

/// A map of variables whose `Debug` output lists their names.
struct Vars(VarMap);

impl std::fmt::Debug for Vars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let vars = lock(self.0.data());
        let mut names: Vec<_> = vars.keys().collect();
        names.sort();
        f.debug_list().entries(names).finish()
    }
}

fn kaiming(
    generator: &mut Generator,
    count: usize,
    dist: NormalOrUniform,
    deviation: f64,
) -> std::result::Result<Vec<f32>, SamplerError> {
    match dist {
        NormalOrUniform::Normal => generator.normal(count, 0., deviation),
        NormalOrUniform::Uniform => {
            let bound = 3f64.sqrt() * deviation;
            generator.uniform(count, -bound, bound)
        }
    }
}

fn fan_in(name: &str, shape: &Shape) -> Result<usize> {
    match shape.dims() {
        [_, rest @ ..] if !rest.is_empty() => Ok(rest.iter().product()),
        dims => Err(Error::NoFanIn { name: name.to_string(), shape: dims.to_vec() }),
    }
}

fn existing(var: &Var, name: &str, shape: &Shape, dtype: DType) -> Result<Tensor> {
    if var.shape() == shape && var.dtype() == dtype {
        return Ok(var.as_tensor().clone());
    }
    Err(Error::VariableMismatch {
        name: name.to_string(),
        expected: shape.dims().to_vec(),
        got: var.dims().to_vec(),
        dtype,
        got_dtype: var.dtype(),
    })
}
