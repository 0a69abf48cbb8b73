//! `Unit`: a part of a model whose parameters are gathered and released together.

use std::fmt;
use std::sync::{Arc, Weak};

use candle_core::{DType, Result, Tensor};
use candle_nn::{Module, ModuleT};

use crate::Error;
use crate::core::{Core, Run};
use crate::hook::{CoreRef, boundary};
use crate::storage::is_released;

/// A layer or a group of layers, of whose parameters each rank keeps a shard. They are gathered while it runs.
///
/// At other times the parameters' tensors are empty: [`Unit::module`] returns the module, but computing with its parameters
/// fails with candle's error "unsupported dtype F4 for op ...".
pub struct Unit<M> {
    module: M,
    name: String,
    index: usize,
    /// Dtype that its parameters are gathered in.
    dtype: DType,
    link: CoreRef,
}

/// Output of a unit: tensors, each of which gradients may flow through.
pub trait Outputs: Sized {
    /// Returns the same structure with each tensor replaced.
    ///
    /// # Errors
    /// Errors of `replace`.
    fn map(self, replace: impl FnMut(Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl Outputs for Tensor {
    fn map(self, mut replace: impl FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        replace(self)
    }
}

impl Outputs for (Tensor, Tensor) {
    fn map(self, mut replace: impl FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok((replace(self.0)?, replace(self.1)?))
    }
}

impl Outputs for Vec<Tensor> {
    fn map(self, replace: impl FnMut(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.into_iter().map(replace).collect()
    }
}

impl<M> Unit<M> {
    pub(crate) fn new(module: M, name: String, index: usize, dtype: DType, link: CoreRef) -> Self {
        Self { module, name, index, dtype, link }
    }

    /// Returns its name: the path that it was built under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the module. Its parameters have no values outside of [`Unit::run`].
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Gathers the parameters, runs `body`, and releases them. Must be called in the same order on every rank. The loss may
    /// depend on the unit only through what `body` returns: backward gathers the parameters again when it reaches one of
    /// these tensors, and needs them, including detached ones, until it has passed everything that `body` has computed with
    /// gradients.
    ///
    /// It may also be called during backward, when a part of the model is recomputed instead of its activations being kept
    /// ([`ops::recompute`]). The parameters then stay until the graph of the recomputation is dropped; meanwhile those
    /// of the previous unit are gathered.
    ///
    /// # Cost
    /// An all-gather of each of the unit's large parameters, and one of the small ones together, which are started when the previous unit starts to run, and a copy of what
    /// `body` returns.
    ///
    /// # Errors
    /// Errors of `body`; [`Error::ParameterReturned`]; failures of communication.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{Linear, VarBuilder, VarMap, linear};
    /// use comm::{Local, LocalConfig};
    /// use fsdp::{Fsdp, FsdpConfig, Unit};
    ///
    /// let comm = Arc::new(Local::group(1, &LocalConfig::default())?.remove(0));
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let fsdp = Fsdp::new(comm, vb, &FsdpConfig::default(), |units| units.pp("fc").unit(|vb| linear(3, 2, vb)))?;
    /// let unit: &Unit<Linear> = fsdp.model()?;
    /// let norm = unit.run(|linear| linear.weight().sqr()?.sum_all())?;
    /// assert!(norm.to_scalar::<f32>()? > 0.0);
    /// assert!(unit.module().weight().sqr().is_err());
    /// # Ok::<(), fsdp::Error>(())
    /// ```
    pub fn run<T: Outputs>(&self, body: impl FnOnce(&M) -> Result<T>) -> Result<T> {
        let Some(core) = self.link.get().and_then(Weak::upgrade) else {
            return Err(Error::NotReady { unit: self.name.clone() }.into());
        };
        let run = core.enter_forward(self.index)?;
        let running = Running { core: &core, run: &run };
        let outputs = tracing::info_span!("unit", name = self.name).in_scope(|| body(&self.module));
        drop(running);
        let outputs = outputs?;
        run.end()?;
        outputs.map(|output| {
            if is_released(&output) {
                return Err(Error::ParameterReturned { unit: self.name.clone() }.into());
            }
            boundary(&output, Arc::clone(&run), Arc::clone(&self.link))
        })
    }

    /// Casts a floating-point input to the dtype that the unit computes in.
    pub(crate) fn cast(&self, input: &Tensor) -> Result<Tensor> {
        if input.dtype().is_float() { input.to_dtype(self.dtype) } else { Ok(input.clone()) }
    }
}

/// Guard that releases the parameters again, however the run ends.
struct Running<'a> {
    core: &'a Core,
    run: &'a Run,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.core.leave_forward(self.run);
    }
}

impl<M: Module> Module for Unit<M> {
    /// Runs the module as [`Unit::run`] does; a floating-point input is cast to [`crate::MixedPrecision::param_dtype`].
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let input = self.cast(input)?;
        self.run(|module| module.forward(&input))
    }
}

impl<M: ModuleT> Unit<M> {
    /// Runs forward of a module that behaves differently in training and in evaluation; otherwise as [`Module::forward`].
    ///
    /// # Errors
    /// Those of [`Unit::run`].
    pub fn forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let input = self.cast(input)?;
        self.run(|module| module.forward_t(&input, train))
    }
}

impl<M: fmt::Debug> fmt::Debug for Unit<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unit").field("name", &self.name).finish_non_exhaustive()
    }
}
