//! The `VarBuilder` that a model is built with: returns hooked copies of the tensors of the user's builder.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Shape, Tensor, TensorId, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use training::internal::is_buffer;

use crate::hook::{Hook, ReducerRef};
use crate::parameter::Parameter;
use crate::{DdpConfig, Error, lock};

/// What a model has requested so far.
#[derive(Default)]
pub(crate) struct Registry {
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) buffers: Vec<(String, Var)>,
    /// Integers, which have no gradient.
    pub(crate) integers: Vec<(String, Var)>,
    /// By name, and for the user's variables by identity: a variable may have several names.
    names: HashMap<String, usize>,
    variables: HashMap<TensorId, usize>,
    closed: bool,
}

impl Registry {
    /// Returns what was registered, and refuses all later requests.
    pub(crate) fn close(&mut self) -> Self {
        std::mem::replace(self, Self { closed: true, ..Self::default() })
    }

    /// Returns the tensor that an earlier request for this name got.
    fn find(&self, name: &str, shape: Option<&Shape>, dtype: DType) -> Result<Option<Tensor>> {
        let Some(parameter) = self.names.get(name).and_then(|&index| self.parameters.get(index)) else {
            return Ok(None);
        };
        let known = parameter.tensor();
        check_shape(name, known, shape)?;
        if known.dtype() != dtype && !parameter.shared {
            let (first, then) = (format!("{:?}", known.dtype()), format!("{dtype:?}"));
            return Err(Error::Ambiguous { parameter: name.into(), first, then }.into());
        }
        Ok(Some(known.clone()))
    }

    fn add(&mut self, name: &str, given: Tensor, link: &ReducerRef) -> Result<Tensor> {
        if !matches!(given.dtype(), DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
            if given.dtype().is_float() {
                return Err(Error::UnsupportedDtype { parameter: name.into(), dtype: given.dtype() }.into());
            }
            return self.add_integers(name, given);
        }
        let index = match self.variables.get(&given.id()) {
            Some(&index) => index,
            None => {
                let index = self.parameters.len();
                // `from_tensor` returns the user's own variable if it is one, otherwise a new variable with its values.
                let var = Var::from_tensor(&given)?;
                let tensor = ops::tape::apply_op1(&var, Hook { index, link: link.clone() })?;
                self.parameters.push(Parameter::new(name, var, tensor, given.is_variable())?);
                self.variables.insert(given.id(), index);
                index
            }
        };
        self.names.insert(name.into(), index);
        Ok(self.parameters[index].tensor().clone())
    }

    /// Registers integers, which have no gradient: those of the dtypes that ranks exchange become rank 0's.
    fn add_integers(&mut self, name: &str, given: Tensor) -> Result<Tensor> {
        if !matches!(given.dtype(), DType::U8 | DType::U32 | DType::I64) {
            return Ok(given);
        }
        if let Some((_, known)) = self.integers.iter().find(|(known, _)| known == name) {
            if (known.dims(), known.dtype()) == (given.dims(), given.dtype()) {
                return Ok(known.as_detached_tensor());
            }
            let describe = |tensor: &Tensor| format!("{:?} {:?}", tensor.dims(), tensor.dtype());
            let (first, then) = (describe(known), describe(&given));
            return Err(Error::Ambiguous { parameter: name.into(), first, then }.into());
        }
        let var = Var::from_tensor(&given)?;
        // Without a graph, and with the variable's memory, in which the broadcast writes.
        let tensor = var.as_detached_tensor();
        self.integers.push((name.into(), var));
        Ok(tensor)
    }

    fn add_buffer(&mut self, name: &str, given: &Tensor) -> Result<Tensor> {
        let var = Var::from_tensor(given)?;
        let tensor = var.as_tensor().clone();
        self.buffers.push((name.into(), var));
        Ok(tensor)
    }
}

/// Returns an error if a tensor that was requested before is now requested with another shape.
fn check_shape(name: &str, known: &Tensor, shape: Option<&Shape>) -> Result<()> {
    let Some(shape) = shape.filter(|shape| *shape != known.shape()) else { return Ok(()) };
    let (first, then) = (format!("{:?}", known.shape()), format!("{shape:?}"));
    Err(Error::Ambiguous { parameter: name.into(), first, then }.into())
}

/// `VarBuilder` backend that wraps the user's builder.
pub(crate) struct HookingBackend<'a> {
    inner: VarBuilder<'a>,
    registry: Arc<Mutex<Registry>>,
    link: ReducerRef,
    config: DdpConfig,
}

impl<'a> HookingBackend<'a> {
    /// Creates a builder that returns hooked copies of what `inner` returns, and registers them in `registry`.
    pub(crate) fn builder(
        inner: VarBuilder<'a>,
        registry: Arc<Mutex<Registry>>,
        link: ReducerRef,
        config: &DdpConfig,
    ) -> VarBuilder<'a> {
        let (dtype, device) = (inner.dtype(), inner.device().clone());
        VarBuilder::from_backend(
            Box::new(Self { inner, registry, link, config: config.clone() }),
            dtype,
            device,
        )
    }

    fn inner(&self, device: &Device) -> VarBuilder<'a> {
        let inner = self.inner.clone();
        if inner.device().same_device(device) { inner } else { inner.set_device(device.clone()) }
    }

    fn hooked(
        &self,
        name: &str,
        shape: Option<&Shape>,
        dtype: DType,
        read: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut registry = lock(&self.registry);
        if registry.closed {
            return Err(Error::RequestedAfterBuild { parameter: name.into() }.into());
        }
        if is_buffer(&self.config.buffers, name) {
            if let Some((_, known)) = registry.buffers.iter().find(|(known, _)| known == name) {
                check_shape(name, known, shape)?;
                return Ok(known.as_tensor().clone());
            }
            return registry.add_buffer(name, &read()?);
        }
        match registry.find(name, shape, dtype)? {
            Some(known) => Ok(known),
            None => registry.add(name, read()?, &self.link),
        }
    }
}

impl SimpleBackend for HookingBackend<'_> {
    fn get(&self, shape: Shape, name: &str, hints: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let read = || self.inner(device).get_with_hints_dtype(shape.clone(), name, hints, dtype);
        self.hooked(name, Some(&shape), dtype, read)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.hooked(name, None, dtype, || self.inner(device).get_unchecked_dtype(name, dtype))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.inner.contains_tensor(name)
    }
}
