//! What a model is built with: units, and in each a `VarBuilder` that keeps this rank's pieces of what is asked for.

use std::sync::{Arc, Mutex};

use candle_core::Result;
use candle_nn::VarBuilder;
use training::build::PartSource;

use crate::sharding::{Asked, Plan, Sharding};
use crate::unit::Unit;
use crate::{Error, UnitConfig, lock};

/// Builds the units of a model. [`crate::Fsdp::new`] gives one to the function that makes the model.
#[derive(Clone)]
pub struct UnitBuilder<'a> {
    vb: VarBuilder<'a>,
    parts: Option<Arc<dyn PartSource>>,
    plan: Arc<Plan>,
}

impl<'a> UnitBuilder<'a> {
    pub(crate) fn new(vb: VarBuilder<'a>, plan: Arc<Plan>) -> Self {
        Self { vb, parts: None, plan }
    }

    /// One level down, as [`VarBuilder::pp`].
    pub fn pp(&self, name: impl ToString) -> Self {
        Self { vb: self.vb.pp(name), ..self.clone() }
    }

    /// The same with first values from a source of parts, of which each rank reads what it keeps of a parameter, and the first 64 numbers,
    /// which are compared. It must give what the `VarBuilder` of [`crate::Fsdp::new`] does, which then gives buffers alone, and what is asked
    /// for without a shape.
    ///
    /// ```
    /// # use std::ops::Range;
    /// # use std::sync::Arc;
    /// # use candle_core::{DType, Device, Result, Shape, Tensor};
    /// # use candle_nn::{Init, VarBuilder, VarMap, linear_no_bias};
    /// # use comm::{Communicator, Local};
    /// # use fsdp::{Fsdp, FsdpConfig};
    /// # use training::build::PartSource;
    /// /// Every number is its place.
    /// struct Places;
    ///
    /// impl PartSource for Places {
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
    pub fn reading(&self, source: Arc<dyn PartSource>) -> Self {
        Self { parts: Some(source), ..self.clone() }
    }

    /// Makes a unit of what `build` builds: its parameters are gathered together, before it runs.
    ///
    /// # Memory
    /// While it is built: one parameter whole, as the `VarBuilder` that was given to [`crate::Fsdp::new`] makes it; of a source of
    /// parts ([`reading`](Self::reading)), what a rank keeps of one.
    ///
    /// # Errors
    /// What `build` fails with; [`Error::EmptyUnit`], [`Error::NestedUnit`], [`Error::SameUnit`], [`Error::SharedParameter`];
    /// parameters that cannot be sharded.
    pub fn unit<M>(&self, build: impl FnOnce(VarBuilder<'a>) -> Result<M>) -> Result<Unit<M>> {
        self.unit_with(&UnitConfig::default(), build)
    }

    /// [`UnitBuilder::unit`] with a configuration of its own.
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

    /// A unit whose name is not the path that its parameters are under.
    pub(crate) fn named_unit<M>(
        &self,
        name: String,
        config: &UnitConfig,
        build: impl FnOnce(VarBuilder<'a>) -> Result<M>,
    ) -> Result<Unit<M>> {
        // Its index is its place in the list of all, so that no other one may come in between.
        let _building = Building::begin(&self.plan, &name)?;
        let index = lock(&self.plan.model).units.len();
        let asked: Arc<Mutex<Asked>> = Arc::default();
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

/// While it lives, a unit is being built, and no other one can be.
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
