//! Units: the parts of a model whose parameters are gathered or placed together.

use std::fmt;
use std::sync::Arc;

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::VarBuilder;
use ops::{recompute, recompute_cheap};

use super::recompute::RecomputeMode;

/// A part of a model (a block, the embedding, the head) whose parameters are gathered or placed together.
///
/// # Errors
/// Running a unit that is in another process is an error.
pub struct Unit<M> {
    name: String,
    module: Option<Arc<M>>,
    runs: Vec<Arc<dyn RunUnit>>,
    again: Option<RecomputeMode>,
}

/// Makes units; implemented by each strategy.
pub trait UnitSource: Send + Sync {
    /// Builds a unit with `build`, unless another process has it. The builder passed to `build` is at the model's
    /// root.
    ///
    /// # Errors
    /// Errors of `build`; a unit that the strategy does not support.
    fn unit(&self, name: &str, build: &mut dyn FnMut(VarBuilder<'static>) -> Result<()>)
    -> Result<UnitPlace>;
}

/// Where a unit's parameters are.
pub enum UnitPlace {
    /// In this process, always.
    Here,
    /// In this process only while the unit is run through this [`RunUnit`].
    Gathered(Arc<dyn RunUnit>),
    /// In another process.
    OtherProcess,
}

/// Runs a unit whose parameters are gathered and released.
pub trait RunUnit: Send + Sync {
    /// Returns the unit's input as it computes with it, for example in the dtype of its parameters. Default: as it is.
    ///
    /// # Errors
    /// Those of the conversion.
    fn input(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }

    /// Calls `body` once, with the unit's parameters gathered.
    ///
    /// # Errors
    /// Errors of `body`; failures of communication.
    fn run(&self, body: &mut dyn FnMut() -> Result<Tensor>) -> Result<Tensor>;
}

/// A model that is a chain of units, each of which takes the output of the one before.
pub trait Units {
    /// The units, in the order of the forward pass.
    fn units(&self) -> Vec<&dyn Module>;
}

impl<M> Unit<M> {
    pub(super) fn new(name: &str, module: Option<M>, place: UnitPlace, again: Option<RecomputeMode>) -> Self {
        let runs = match place {
            UnitPlace::Here | UnitPlace::OtherProcess => Vec::new(),
            UnitPlace::Gathered(run) => vec![run],
        };
        Self { name: name.into(), module: module.map(Arc::new), runs, again }
    }

    /// Makes this unit run only while the parameters of `other` are gathered as well.
    pub(super) fn needs<N>(&mut self, other: &Unit<N>) {
        self.runs.splice(0..0, other.runs.iter().cloned());
    }

    /// The unit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The module, or `None` if another process has the unit. Its parameters may be released unless the unit is being
    /// run.
    pub fn module(&self) -> Option<&M> {
        self.module.as_deref()
    }

    fn module_or_error(&self) -> Result<&Arc<M>> {
        match &self.module {
            Some(module) => Ok(module),
            None => bail!("unit {} is not in this process: it belongs to another stage", self.name),
        }
    }

    /// Runs `body` with the unit's parameters gathered. A loss may depend on `body` only through its result. It is
    /// not recomputed in backward; for that, use [`apply`](Self::apply).
    ///
    /// # Errors
    /// Errors of `body`; a unit of another process; failures of communication.
    pub fn run(&self, body: impl FnOnce(&M) -> Result<Tensor>) -> Result<Tensor> {
        let module = self.module_or_error()?;
        let mut body = Some(body);
        run_inside_all(&self.runs, &mut || match body.take() {
            Some(body) => body(module),
            None => bail!("unit {}: it was run twice by one call", self.name),
        })
    }
}

impl<M: Send + Sync + 'static> Unit<M> {
    /// Runs `body` on `x`, converted as the unit's strategy does ([`RunUnit::input`]), with the unit's parameters gathered. Where [`Recompute`](super::Recompute) selects the unit
    /// and `x` is of floats, backward runs `body` again: see [`recompute`], also for what `body` may do.
    ///
    /// # Errors
    /// Errors of [`run`](Self::run).
    ///
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use ops::backward;
    /// use training::build::{Builder, Division, LinearConfig, Recompute};
    ///
    /// let vars = VarMap::new();
    /// let builder = Builder::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu)).recomputing(Recompute::Units);
    /// let unit = builder.unit("layer", |part| part.linear(&LinearConfig::new(2, 2, Division::Whole)))?;
    /// let x = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?;
    /// let y = unit.apply(&x, |layer, x| layer.forward(x)?.tanh())?;
    /// assert!(backward(&y.sum_all()?)?.get(&vars.all_vars()[0]).is_some());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn apply(
        &self,
        x: &Tensor,
        body: impl Fn(&M, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        // Those before the last are of units whose parameters are shared.
        let x = &self.runs.last().map_or_else(|| Ok(x.clone()), |run| run.input(x))?;
        let Some(again) = self.again.filter(|_| x.dtype().is_float()) else {
            return self.run(|module| body(module, x));
        };
        let (module, runs) = (self.module_or_error()?.clone(), self.runs.clone());
        let part = move |x: &Tensor| run_inside_all(&runs, &mut || body(&module, x));
        match again {
            RecomputeMode::All => recompute(x, part),
            RecomputeMode::Cheap => recompute_cheap(x, part),
        }
    }
}

/// Calls `body` inside all of `runs`, the first outermost.
fn run_inside_all(runs: &[Arc<dyn RunUnit>], body: &mut dyn FnMut() -> Result<Tensor>) -> Result<Tensor> {
    match runs.split_first() {
        None => body(),
        Some((first, others)) => first.run(&mut || run_inside_all(others, body)),
    }
}

impl<M: Module + Send + Sync + 'static> Module for Unit<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.apply(x, M::forward)
    }
}

impl<M> fmt::Debug for Unit<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_here = self.module.is_some();
        f.debug_struct("Unit").field("name", &self.name).field("is_here", &is_here).finish_non_exhaustive()
    }
}

/// Source of units that are all in this process.
pub(super) struct LocalUnits(pub(super) VarBuilder<'static>);

impl UnitSource for LocalUnits {
    fn unit(&self, _: &str, build: &mut dyn FnMut(VarBuilder<'static>) -> Result<()>) -> Result<UnitPlace> {
        build(self.0.clone())?;
        Ok(UnitPlace::Here)
    }
}
