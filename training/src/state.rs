//! Optimizer state: buffers of each parameter, saving and loading.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor, Var, WithDType, bail,
};
use candle_nn::VarMap;

use crate::Result;
use ops::kernels::lock;

/// An optimizer whose state can be saved and loaded.
///
/// The keys are `{parameter}.{what}` with PyTorch's names (`fc.weight.momentum_buffer`, `fc.weight.exp_avg`), and
/// `{parameter}.low_bits` for what a parameter of 16 bits has no room for: the bits, in a tensor of the parameter's dtype. The
/// parameter is the name that the optimizer was made with, or its index in the list. The order of
/// [`VarMap::all_vars`] differs in each process: make an optimizer whose state will be saved from [`named_vars`].
///
/// The configuration is not included: make the optimizer with the same one, and set the current learning rate of a
/// schedule.
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
    /// Copies of all state, in the order of the parameters. A parameter that never had a gradient has no state.
    ///
    /// # Errors
    /// candle's, if memory is exhausted.
    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        self.state_later()?.into_iter().map(|(key, later)| Ok((key, later.copy()?))).collect()
    }

    /// As [`state`](Self::state), but the copies are made later, on any thread: each has the state as of now, even if
    /// steps are taken in the meantime. A step before a copy is made copies the state itself.
    ///
    /// # Errors
    /// Errors of [`state`](Self::state).
    fn state_later(&self) -> Result<Vec<(String, DeferredCopy)>>;

    /// Replaces all state by this; parameters that are not in it start without state.
    ///
    /// # Errors
    /// [`UnknownState`](crate::Error::UnknownState), [`MissingState`](crate::Error::MissingState) and
    /// [`StateMismatch`](crate::Error::StateMismatch); nothing is changed then.
    fn load_state(&mut self, state: &HashMap<String, Tensor>) -> Result<()>;
}

/// A tensor to be copied later, on any thread; see [`OptimizerState::state_later`].
pub struct DeferredCopy {
    shape: Shape,
    dtype: DType,
    source: CopySource,
}

enum CopySource {
    Copied(Tensor),
    Tensor(Tensor),
    /// From this element on.
    Host(Arc<CpuStorage>, usize),
}

impl DeferredCopy {
    /// The copy of a tensor, which must not change before it is made.
    pub fn new(tensor: Tensor) -> Self {
        Self { shape: tensor.shape().clone(), dtype: tensor.dtype(), source: CopySource::Tensor(tensor) }
    }

    /// The copy of an optimizer's numbers on a CPU; a step before it is made copies them itself.
    pub(crate) fn of_storage(storage: Arc<CpuStorage>, shape: &Shape, dtype: DType) -> Self {
        Self { shape: shape.clone(), dtype, source: CopySource::Host(storage, 0) }
    }

    /// Wraps a tensor that is already a copy, and that nobody else uses.
    pub fn done(tensor: Tensor) -> Self {
        Self { shape: tensor.shape().clone(), dtype: tensor.dtype(), source: CopySource::Copied(tensor) }
    }

    /// Its dimensions.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Its dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether the copy is still to be made.
    pub fn is_pending(&self) -> bool {
        !matches!(self.source, CopySource::Copied(_))
    }

    /// Copies only a range of the elements, to a tensor of one dimension.
    ///
    /// # Errors
    /// candle's, if there are fewer.
    pub fn range(mut self, range: Range<usize>) -> candle_core::Result<Self> {
        let (start, len, count) = (range.start, range.len(), self.shape.elem_count());
        if range.end > count {
            bail!("elements {start} to {} of {count}", range.end);
        }
        let narrow = |tensor: Tensor| tensor.flatten_all()?.narrow(0, start, len);
        self.source = match self.source {
            CopySource::Copied(tensor) if len == count => CopySource::Copied(tensor.flatten_all()?),
            CopySource::Copied(tensor) => CopySource::Copied(narrow(tensor)?.force_contiguous()?),
            CopySource::Tensor(tensor) => CopySource::Tensor(narrow(tensor)?),
            CopySource::Host(storage, first) => CopySource::Host(storage, first + start),
        };
        self.shape = len.into();
        Ok(self)
    }

    /// Makes the copy, in new memory.
    ///
    /// # Errors
    /// candle's, if memory is exhausted.
    pub fn copy(self) -> candle_core::Result<Tensor> {
        self.copy_over(None)
    }

    /// Makes the copy, in the memory of `spare` if that is on the CPU and has this dtype and number of elements: this is
    /// several times as fast as new memory, which the operating system clears. The tensor is overwritten, so nobody else may use
    /// it.
    ///
    /// # Errors
    /// candle's, if memory is exhausted.
    pub fn copy_over(self, spare: Option<Tensor>) -> candle_core::Result<Tensor> {
        let (dtype, count) = (self.dtype, self.shape.elem_count());
        let fits = |spare: &Tensor| {
            let is_dense = spare.device().is_cpu() && spare.is_contiguous();
            is_dense && spare.dtype() == dtype && spare.elem_count() == count
        };
        let over = |spare: Tensor, storage: &CpuStorage, layout: &Layout| {
            spare.inplace_op1(&CopyOf(storage, layout))?;
            spare.reshape(&self.shape)
        };
        match (self.source, spare.filter(fits)) {
            (CopySource::Copied(tensor), _) => Ok(tensor),
            (CopySource::Host(storage, first), Some(spare)) => {
                over(spare, &storage, &Layout::contiguous_with_offset(&self.shape, first))
            }
            (CopySource::Host(storage, first), None) => copied(&storage, first, &self.shape),
            (CopySource::Tensor(tensor), spare) => match (&*tensor.storage_and_layout().0, spare) {
                (Storage::Cpu(storage), Some(spare)) => over(spare, storage, tensor.layout()),
                _ => tensor.force_contiguous(),
            },
        }
    }
}

/// Overwrites a tensor by elements of a storage.
struct CopyOf<'a>(&'a CpuStorage, &'a Layout);

impl InplaceOp1 for CopyOf<'_> {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        self.0.copy_strided_src(storage, layout.start_offset(), self.1)
    }
}

impl std::fmt::Debug for DeferredCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeferredCopy").field("shape", &self.shape).field("dtype", &self.dtype).finish()
    }
}

/// Returns the variables of a map with their names, sorted by name: the same order in every process.
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
    let data = lock(vars.data());
    let mut named: Vec<_> = data.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    named.sort_by(|(a, _), (b, _)| a.cmp(b));
    named
}

/// Last components of the names of state that is not trained: running statistics, as `candle_nn::BatchNorm` names them, and the
/// corrections of routers ([`ops::EXPERT_CORRECTION`]).
///
/// ```
/// assert!(training::internal::known_buffers().contains(&"running_mean".to_string()));
/// ```
pub fn known_buffers() -> Vec<String> {
    ["running_mean", "running_var", ops::EXPERT_CORRECTION].map(String::from).into()
}

/// Whether a variable is one of `buffers` (state that is not trained), by the last component of its name.
///
/// ```
/// use training::internal::is_buffer;
///
/// let buffers = ["running_mean".to_string(), "running_var".into()];
/// assert!(is_buffer(&buffers, "layers.0.running_mean") && is_buffer(&buffers, "running_var"));
/// assert!(!is_buffer(&buffers, "running_mean.weight") && !is_buffer(&buffers, "my_running_mean"));
/// ```
pub fn is_buffer(buffers: &[String], name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    buffers.iter().any(|buffer| buffer == last)
}

pub(crate) fn on_host(var: &Var) -> bool {
    let known = matches!(var.dtype(), DType::F32 | DType::F64 | DType::F16 | DType::BF16);
    matches!(var.device(), Device::Cpu) && known
}

/// The dtype in which a parameter is stepped and its buffers are kept.
pub(crate) fn state_dtype(var: &Var) -> DType {
    if var.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Optimizer state with one element for each of a parameter's.
#[derive(Debug)]
pub(crate) enum Buffer {
    /// For steps in place; a step copies it first if a [`DeferredCopy`] still shares it.
    Host(Arc<CpuStorage>),
    /// For steps by candle's tensor operations.
    Tensor(Tensor),
}

impl Buffer {
    pub(crate) fn zeros(var: &Var) -> candle_core::Result<Self> {
        Self::from_tensor(&Tensor::zeros(var.shape(), state_dtype(var), &Device::Cpu)?, var)
    }

    /// Copies the tensor to where the parameter is.
    pub(crate) fn from_tensor(tensor: &Tensor, var: &Var) -> candle_core::Result<Self> {
        if !on_host(var) {
            return Ok(Self::Tensor(tensor.detach().force_contiguous()?.to_device(var.device())?));
        }
        let flat = tensor.to_device(&Device::Cpu)?.flatten_all()?;
        Ok(Self::Host(Arc::new(match flat.dtype() {
            DType::F64 => CpuStorage::F64(flat.to_vec1()?),
            _ => CpuStorage::F32(flat.to_vec1()?),
        })))
    }

    /// Copies it later, on any thread.
    pub(crate) fn to_tensor_later(&self, var: &Var) -> candle_core::Result<DeferredCopy> {
        Ok(match self {
            Self::Host(storage) => DeferredCopy::of_storage(storage.clone(), var.shape(), state_dtype(var)),
            Self::Tensor(tensor) => DeferredCopy::done(tensor.force_contiguous()?),
        })
    }
}

fn copied(storage: &CpuStorage, start: usize, shape: &Shape) -> candle_core::Result<Tensor> {
    let range = start..start + shape.elem_count();
    match storage {
        CpuStorage::F64(data) => Tensor::from_slice(&data[range], shape, &Device::Cpu),
        CpuStorage::F16(data) => Tensor::from_slice(&data[range], shape, &Device::Cpu),
        CpuStorage::BF16(data) => Tensor::from_slice(&data[range], shape, &Device::Cpu),
        other => Tensor::from_slice(&f32::cpu_storage_as_slice(other)?[range], shape, &Device::Cpu),
    }
}
