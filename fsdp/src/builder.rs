//! `UnitBuilder`: builds the units of a model; inside a unit, a `VarBuilder` that keeps only this rank's shard of each
//! parameter.

use std::sync::{Arc, Mutex};

use candle_core::Result;
use candle_nn::VarBuilder;
use training::build::RangeReader;

use crate::sharding::{Plan, Sharding, UnitRequests};
use crate::unit::Unit;
use crate::{Error, UnitConfig, lock};

/// Builds the units of a model. [`crate::Fsdp::new`] passes one to the function that builds the model.
#[derive(Clone)]
pub struct UnitBuilder<'a> {
    vb: VarBuilder<'a>,
    parts: Option<Arc<dyn RangeReader>>,
    plan: Arc<Plan>,
}

impl<'a> UnitBuilder<'a> {
    pub(crate) fn new(vb: VarBuilder<'a>, plan: Arc<Plan>) -> Self {
        Self { vb, parts: None, plan }
    }

    /// Enters a sub-path, as [`VarBuilder::pp`] does.
    pub fn pp(&self, name: impl ToString) -> Self {
        Self { vb: self.vb.pp(name), ..self.clone() }
    }

    /// Returns a builder that reads initial values from `source`, which can read ranges of a tensor: each rank reads only the
    /// range of a parameter that it keeps, and the first 64 elements, which are compared over ranks. `source` must return the
    /// same values as the `VarBuilder` given to [`crate::Fsdp::new`], which is then used only for buffers and for tensors
    /// requested without a shape.
    ///
    /// ```
    /// # use std::ops::Range;
    /// # use std::sync::Arc;
    /// # use candle_core::{DType, Device, Result, Shape, Tensor};
    /// # use candle_nn::{Init, VarBuilder, VarMap, linear_no_bias};
    /// # use comm::{Communicator, Local};
    /// # use fsdp::{Fsdp, FsdpConfig};
    /// # use training::build::RangeReader;
    /// /// Every number is its place.
    /// struct Places;
    ///
    /// impl RangeReader for Places {
    ///     fn read(&self, _: &str, _: &Shape, _: Init, dtype: DType, ranges: &[Range<usize>]) -> Result<Tensor> {
    ///         let all = ranges.iter().flat_map(|range| range.clone()).map(|place| place as f64);
    ///         Tensor::from_iter(all, &Device::Cpu)?.to_dtype(dtype)
    ///     }
    /// }
    ///
    /// let shards = Local::run_shared(2, |comm| {
    ///     let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    ///     let build = |units: fsdp::UnitBuilder<'static>| {
    ///         let units = units.reading(Arc::new(Places));
    ///         units.pp("layer").unit(|vb| linear_no_bias(3, 2, vb))
    ///     };
    ///     Ok(Fsdp::new(comm, vb, &FsdpConfig::default(), build)?.vars()[0].to_vec1::<f32>()?)
    /// })?;
    /// assert_eq!(shards, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]);
    /// # Ok::<(), fsdp::Error>(())
    /// ```
    #[must_use]
    pub fn reading(&self, source: Arc<dyn RangeReader>) -> Self {
        Self { parts: Some(source), ..self.clone() }
    }

    /// Makes one unit of what `build` builds: its parameters are gathered together, before it runs.
    ///
    /// # Memory
    /// While the unit is built: one whole parameter at a time, as the `VarBuilder` given to [`crate::Fsdp::new`] makes it;
    /// with a range source ([`reading`](Self::reading)), only what this rank keeps of it.
    ///
    /// # Errors
    /// Errors of `build`; [`Error::EmptyUnit`], [`Error::NestedUnit`], [`Error::SameUnit`], [`Error::SharedParameter`];
    /// parameters that cannot be sharded.
    pub fn unit<M>(&self, build: impl FnOnce(VarBuilder<'a>) -> Result<M>) -> Result<Unit<M>> {
        self.unit_with(&UnitConfig::default(), build)
    }

    /// Does the same as [`UnitBuilder::unit`], with a configuration for this unit.
    ///
    /// # Errors
    /// Those of [`UnitBuilder::unit`].
    pub fn unit_with<M>(
        &self,
        config: &UnitConfig,
        build: impl FnOnce(VarBuilder<'a>) -> Result<M>,
    ) -> Result<Unit<M>> {
        let name = match self.vb.prefix() {
            prefix if prefix.is_empty() => "the model".to_string(),
            prefix => prefix,
        };
        self.named_unit(name, config, build)
    }

    /// Builds a unit whose name differs from the path of its parameters.
    pub(crate) fn named_unit<M>(
        &self,
        name: String,
        config: &UnitConfig,
        build: impl FnOnce(VarBuilder<'a>) -> Result<M>,
    ) -> Result<Unit<M>> {
        // The index is the unit's position in the list of all units, so no other unit may be built meanwhile.
        let _building = Building::begin(&self.plan, &name)?;
        let index = lock(&self.plan.model).units.len();
        let asked: Arc<Mutex<UnitRequests>> = Arc::default();
        let (dtype, device) = (self.vb.dtype(), self.vb.device().clone());
        let computed = self.plan.config.mixed_precision.param_dtype.unwrap_or(dtype);
        let backend = Sharding {
            inner: self.vb.root(),
            parts: self.parts.clone(),
            plan: self.plan.clone(),
            asked: asked.clone(),
            unit: name.clone(),
            index,
            dtypes: (dtype, computed),
        };
        let path = self.vb.prefix();
        let root = VarBuilder::from_backend(Box::new(backend), computed, device);
        let module = build(if path.is_empty() { root } else { root.pp(path) })?;
        let asked = lock(&asked).close();
        let built = asked.finish(&self.plan, &name, (dtype, computed), config)?;
        let mut model = lock(&self.plan.model);
        if model.units.iter().any(|unit| unit.name == name) {
            return Err(Error::SameUnit { unit: name }.into());
        }
        model.units.push(built);
        Ok(Unit::new(module, name, index, computed, self.plan.link.clone()))
    }
}

/// Guard that marks a unit as being built; while it lives, no other unit can be started.
struct Building<'a>(&'a Plan);

impl<'a> Building<'a> {
    fn begin(plan: &'a Plan, unit: &str) -> Result<Self> {
        let mut model = lock(&plan.model);
        if let Some(outer) = model.building.clone() {
            return Err(Error::NestedUnit { outer, inner: unit.into() }.into());
        }
        model.building = Some(unit.into());
        Ok(Self(plan))
    }
}

impl Drop for Building<'_> {
    fn drop(&mut self) {
        lock(&self.0.model).building = None;
    }
}
