//! What optimizers remember of each parameter, and how it is saved and loaded.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use candle_core::{CpuStorage, DType, Device, Shape, Tensor, Var, WithDType};
use candle_nn::VarMap;

use crate::{Error, Result};

/// An optimizer whose memory can be saved and loaded.
///
/// The keys are `{parameter}.{what}` with PyTorch's words (`fc.weight.momentum_buffer`, `fc.weight.exp_avg`); the parameter
/// is the name that the optimizer was made with, or its place in the list. [`VarMap::all_vars`] gives
/// another order in each process: make an optimizer that will be saved from [`named_vars`].
///
/// Configuration is not part of it: make the optimizer with the same one, and set the learning rate that a schedule had reached.
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_nn::Optimizer;
/// use training::{OptimizerState, Sgd, SgdConfig};
///
/// let weight = Var::new(&[1f32, 2.], &Device::Cpu)?;
/// let config = SgdConfig { learning_rate: 0.1, momentum: 0.9, ..SgdConfig::default() };
/// let mut sgd = Sgd::named([("fc.weight".into(), weight.clone())], config.clone())?;
/// sgd.backward_step(&weight.as_tensor().sum_all()?)?;
/// let state = sgd.state()?;
/// assert_eq!(state[0].0, "fc.weight.momentum_buffer");
///
/// let mut resumed = Sgd::named([("fc.weight".into(), weight)], config)?;
/// resumed.load_state(&state.into_iter().collect())?;
/// # Ok::<(), training::Error>(())
/// ```
pub trait OptimizerState {
    /// Copies of all that is remembered, in the order of the parameters. A parameter that never had a gradient has nothing.
    ///
    /// # Errors
    /// candle's, where there is no memory.
    fn state(&self) -> Result<Vec<(String, Tensor)>>;

    /// The same to be copied later, on another thread: each copy is of what is remembered now, whatever steps are taken meanwhile. A step
    /// that comes before a copy is made makes one itself.
    ///
    /// # Errors
    /// Those of [`state`](Self::state).
    fn state_later(&self) -> Result<Vec<(String, CopyLater)>> {
        let now = self.state()?;
        Ok(now.into_iter().map(|(key, tensor)| (key, CopyLater::done(tensor))).collect())
    }

    /// Remembers this in place of what there was; parameters that do not occur start anew.
    ///
    /// # Errors
    /// [`Error::UnknownState`], [`Error::MissingState`] and [`Error::StateMismatch`], with nothing changed.
    fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<()>;
}

/// A tensor that is still to be copied, on any thread; see [`OptimizerState::state_later`].
pub struct CopyLater {
    shape: Shape,
    dtype: DType,
    copy: Box<dyn FnOnce() -> candle_core::Result<Tensor> + Send>,
}

impl CopyLater {
    /// A tensor of this shape and dtype, which `copy` will give.
    pub fn new(
        shape: &Shape,
        dtype: DType,
        copy: impl FnOnce() -> candle_core::Result<Tensor> + Send + 'static,
    ) -> Self {
        Self { shape: shape.clone(), dtype, copy: Box::new(copy) }
    }

    /// One that is a copy already.
    pub fn done(tensor: Tensor) -> Self {
        Self::new(&tensor.shape().clone(), tensor.dtype(), move || Ok(tensor))
    }

    /// Its dimensions.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Its dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Copies it.
    ///
    /// # Errors
    /// candle's, where there is no memory.
    pub fn copy(self) -> candle_core::Result<Tensor> {
        (self.copy)()
    }
}

impl std::fmt::Debug for CopyLater {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CopyLater").field("shape", &self.shape).field("dtype", &self.dtype).finish()
    }
}

/// The variables of a map with their names, by name: the same order in every process.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
///
/// let vars = VarMap::new();
/// let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// candle_nn::linear(3, 2, builder.pp("fc"))?;
/// let names: Vec<String> = training::named_vars(&vars).into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["fc.bias", "fc.weight"]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn named_vars(vars: &VarMap) -> Vec<(String, Var)> {
    let data = vars.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut named: Vec<_> = data.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    named.sort_by(|(a, _), (b, _)| a.cmp(b));
    named
}

/// A parameter and what its optimizer remembers of it, once it does.
#[derive(Debug)]
pub(crate) struct Slot<S> {
    pub(crate) name: String,
    pub(crate) var: Var,
    pub(crate) state: Option<S>,
}

/// Slots for the float variables; others cannot be trained, and are left out.
pub(crate) fn slots<S>(
    optimizer: &'static str,
    vars: impl IntoIterator<Item = (String, Var)>,
) -> Result<Vec<Slot<S>>> {
    let mut names = HashSet::new();
    let mut slots = vec![];
    for (name, var) in vars {
        if !names.insert(name.clone()) {
            return Err(Error::SameName { optimizer, name });
        }
        if var.dtype().is_float() {
            slots.push(Slot { name, var, state: None });
        }
    }
    Ok(slots)
}

/// Refuses a factor that would make every gradient a NaN or an infinity.
pub(crate) fn check_scale(of: &'static str, scale: f64) -> Result<()> {
    // As parameters of f32 see it.
    match (scale as f32).is_finite() {
        true => Ok(()),
        false => {
            Err(Error::InvalidConfig { of, field: "scale", got: scale, help: "it must be a finite number" })
        }
    }
}

/// Variables without names go by their places.
pub(crate) fn numbered(vars: Vec<Var>) -> impl Iterator<Item = (String, Var)> {
    vars.into_iter().enumerate().map(|(index, var)| (index.to_string(), var))
}

impl<S> Slot<S> {
    /// Whether the parameter can be stepped in place.
    pub(crate) fn on_host(&self) -> bool {
        on_host(&self.var)
    }

    pub(crate) fn check(&self, optimizer: &'static str, grad: &Tensor) -> Result<()> {
        // A gradient of a parameter of 16 bits may have been added up or scaled in f32.
        let fits = [self.var.dtype(), wide(&self.var)].contains(&grad.dtype());
        if self.var.shape() == grad.shape() && fits {
            return Ok(());
        }
        Err(Error::GradientMismatch {
            optimizer,
            parameter: self.name.clone(),
            expected: self.var.dims().to_vec(),
            got: grad.dims().to_vec(),
            dtype: self.var.dtype(),
            got_dtype: grad.dtype(),
        })
    }
}

fn on_host(var: &Var) -> bool {
    matches!(var.device(), Device::Cpu) && matches!(var.dtype(), DType::F32 | DType::F64)
}

/// The dtype in which a parameter is stepped and its buffers are kept.
pub(crate) fn wide(var: &Var) -> DType {
    if var.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

/// As many numbers as a parameter has.
#[derive(Debug)]
pub(crate) enum Buffer {
    /// For steps in place; copied by a step where somebody else still has it.
    Host(Arc<CpuStorage>),
    /// For steps by candle's tensor operations.
    Tensor(Tensor),
}

impl Buffer {
    pub(crate) fn zeros(var: &Var) -> candle_core::Result<Self> {
        Self::from_tensor(&Tensor::zeros(var.shape(), wide(var), &Device::Cpu)?, var)
    }

    /// A copy of the tensor, kept where the parameter is.
    pub(crate) fn from_tensor(tensor: &Tensor, var: &Var) -> candle_core::Result<Self> {
        if !on_host(var) {
            return Ok(Self::Tensor(tensor.detach().copy()?.to_device(var.device())?));
        }
        let flat = tensor.to_device(&Device::Cpu)?.flatten_all()?;
        Ok(Self::Host(Arc::new(match flat.dtype() {
            DType::F64 => CpuStorage::F64(flat.to_vec1()?),
            _ => CpuStorage::F32(flat.to_vec1()?),
        })))
    }

    pub(crate) fn to_tensor(&self, var: &Var) -> candle_core::Result<Tensor> {
        match self {
            Self::Host(storage) => copied(storage, var.shape()),
            Self::Tensor(tensor) => tensor.copy(),
        }
    }

    /// The same, later and on another thread.
    pub(crate) fn to_tensor_later(&self, var: &Var) -> candle_core::Result<CopyLater> {
        Ok(match self {
            Self::Host(storage) => {
                let (storage, shape) = (storage.clone(), var.shape().clone());
                CopyLater::new(var.shape(), wide(var), move || copied(&storage, &shape))
            }
            Self::Tensor(tensor) => CopyLater::done(tensor.copy()?),
        })
    }
}

fn copied(storage: &CpuStorage, shape: &Shape) -> candle_core::Result<Tensor> {
    match storage {
        CpuStorage::F64(data) => Tensor::from_slice(data, shape, &Device::Cpu),
        other => Tensor::from_slice(f32::cpu_storage_as_slice(other)?, shape, &Device::Cpu),
    }
}

/// Reads a saved state, and knows in the end what of it was not asked for.
pub(crate) struct Reader<'a> {
    optimizer: &'static str,
    state: &'a HashMap<String, Tensor>,
    read: BTreeSet<String>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(optimizer: &'static str, state: &'a HashMap<String, Tensor>) -> Self {
        Self { optimizer, state, read: BTreeSet::new() }
    }

    /// The entry `{parameter}.{field}`, of this shape and dtype, if there is one.
    pub(crate) fn optional(
        &mut self,
        parameter: &str,
        field: &str,
        dims: &[usize],
        dtype: DType,
    ) -> Result<Option<&'a Tensor>> {
        let key = format!("{parameter}.{field}");
        let Some(tensor) = self.state.get(&key) else { return Ok(None) };
        if tensor.dims() != dims || tensor.dtype() != dtype {
            return Err(Error::StateMismatch {
                optimizer: self.optimizer,
                key,
                expected: dims.to_vec(),
                got: tensor.dims().to_vec(),
                dtype,
                got_dtype: tensor.dtype(),
            });
        }
        self.read.insert(key);
        Ok(Some(tensor))
    }

    /// As [`Self::optional`], where it must be there.
    pub(crate) fn required(
        &mut self,
        parameter: &str,
        field: &str,
        dims: &[usize],
        dtype: DType,
    ) -> Result<&'a Tensor> {
        self.optional(parameter, field, dims, dtype)?.ok_or_else(|| Error::MissingState {
            optimizer: self.optimizer,
            key: format!("{parameter}.{field}"),
        })
    }

    /// Names what nobody read.
    pub(crate) fn finish(self) -> Result<()> {
        match self.state.keys().filter(|key| !self.read.contains(*key)).min() {
            None => Ok(()),
            Some(key) => Err(Error::UnknownState { optimizer: self.optimizer, key: key.clone() }),
        }
    }
}
