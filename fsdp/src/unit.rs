//! A part of a model whose parameters come and go together.

use std::fmt;
use std::sync::{Arc, Weak};

use candle_core::{DType, Result, Tensor};
use candle_nn::{Module, ModuleT};

use crate::Error;
use crate::core::{Core, Run};
use crate::hook::{Link, boundary};

/// A layer or a group of layers, of whose parameters each rank keeps a part. They are gathered when it runs.
///
/// Outside of that the parameters' tensors are empty: [`Unit::module`] shows the module, but to compute with its parameters
/// is an error of candle's, "unsupported dtype F4 for op ...".
pub struct Unit<M> {
    module: M,
    name: String,
    index: usize,
    /// What its parameters are computed in.
    dtype: DType,
    link: Link,
}

/// What a unit may give: tensors, each of which backward may come through.
pub trait Outputs: Sized {
    /// The same, with each tensor replaced.
    ///
    /// # Errors
    /// What `replace` fails with.
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
    pub(crate) fn new(module: M, name: String, index: usize, dtype: DType, link: Link) -> Self {
        Self { module, name, index, dtype, link }
    }

    /// Its name: the path that it was built under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What was built, without its parameters' values.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Gathers the parameters, runs `body`, and releases them. To be called in the same order on every rank. What `body`
    /// gives must be all that a loss is computed from: backward gathers the parameters again when it comes to one of these
    /// tensors. Backward needs the parameters until it is past all that `body` has computed from what gradients flow through,
    /// detached ones, too.
    ///
    /// It may also run while backward does, which computes a part of the model again in place of keeping what it had computed
    /// ([`training::recompute`]). The parameters then stay until the graph that this makes is dropped; those of the unit before come
    /// meanwhile.
    ///
    /// # Cost
    /// An all-gather of the unit's parameters, under way since the unit before it began, and a copy of what `body` gives.
    ///
    /// # Errors
    /// What `body` fails with; failures of communication.
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
        outputs.map(|output| boundary(&output, Arc::clone(&run), Arc::clone(&self.link)))
    }

    /// An input in the dtype that the unit computes in.
    fn cast(&self, input: &Tensor) -> Result<Tensor> {
        if input.dtype().is_float() { input.to_dtype(self.dtype) } else { Ok(input.clone()) }
    }
}

/// Releases the parameters again, however the run ends.
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
    /// As [`Unit::run`]; an input of floats is cast to [`crate::MixedPrecision::param_dtype`].
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let input = self.cast(input)?;
        self.run(|module| module.forward(&input))
    }
}

impl<M: ModuleT> Unit<M> {
    /// Forward of a module that does something else in training than in evaluation; otherwise as [`Module::forward`].
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
