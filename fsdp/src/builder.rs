//! What a model is built with: units, and in each a `VarBuilder` that keeps this rank's pieces of what is asked for.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use comm::Digest;

use crate::hook::{Link, ParamIndex, parameter};
use crate::layout::{Layout, Part, piece};
use crate::storage::{is_supported, is_trainable};
use crate::unit::Unit;
use crate::values::cut;
use crate::{Error, FsdpConfig, Strategy, UnitConfig, lock};

/// Builds the units of a model. [`crate::Fsdp::new`] gives one to the function that makes the model.
#[derive(Clone)]
pub struct UnitBuilder<'a> {
    vb: VarBuilder<'a>,
    plan: Arc<Plan>,
}

/// What all units are built by.
pub(crate) struct Plan {
    pub(crate) config: FsdpConfig,
    pub(crate) shards: usize,
    pub(crate) shard_rank: usize,
    pub(crate) link: Link,
    /// What every parameter's tensor hangs on in the graph, of one element.
    pub(crate) anchor: Var,
    pub(crate) model: Mutex<Model>,
}

/// What was built so far.
#[derive(Default)]
pub(crate) struct Model {
    pub(crate) units: Vec<Built>,
    /// The unit of each parameter.
    owners: HashMap<String, String>,
    /// The unit that is being built.
    building: Option<String>,
    pub(crate) buffers: Vec<(String, Var)>,
}

/// A unit that was built.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    pub(crate) layout: Layout,
    /// Which of its shards is this rank's.
    rank: usize,
    /// What it computes in.
    pub(crate) dtype: DType,
    pub(crate) keep: bool,
    /// Of all first values, this rank's and the others'.
    pub(crate) digest: Digest,
}

/// A parameter.
#[derive(Debug, Clone)]
pub(crate) struct Param {
    pub(crate) name: String,
    /// What the model computes with, released unless its unit runs.
    pub(crate) tensor: Tensor,
    /// What this rank keeps of it, flat and padded.
    pub(crate) shard: Var,
}

impl Built {
    pub(crate) fn device(&self) -> &Device {
        self.params[0].shard.device()
    }

    /// Of its shards.
    pub(crate) fn shard_dtype(&self) -> DType {
        self.params[0].shard.dtype()
    }

    pub(crate) fn shard_bytes(&self) -> usize {
        let elements: usize = self.params.iter().map(|param| param.shard.elem_count()).sum();
        elements * self.shard_dtype().size_in_bytes()
    }

    /// This rank's piece of a part, padded.
    pub(crate) fn piece(&self, part: &Part) -> Result<Tensor> {
        let mut pieces = Vec::with_capacity(part.slots.len());
        for slot in &part.slots {
            let (shard, len) = (&self.params[slot.param].shard, part.kept_len(slot, self.rank));
            if len > 0 {
                pieces.push(shard.as_detached_tensor().narrow(0, 0, len)?);
            }
        }
        match &pieces[..] {
            [] => Tensor::zeros(0, self.shard_dtype(), self.device()),
            [one] => Ok(one.clone()),
            several => Tensor::cat(several, 0),
        }
    }

    /// What lies of a parameter in a tensor made of this rank's pieces: as long as the parameter's variable.
    pub(crate) fn of_param(&self, pieces: &Tensor, param: usize) -> Result<Tensor> {
        match self.layout.find(param) {
            Some((part, slot)) if part.kept_len(slot, self.rank) > 0 => {
                let (_, start) = part.kept(slot, self.rank);
                pieces.narrow(0, part.offset + start, part.kept_len(slot, self.rank))
            }
            _ => self.params[param].shard.as_tensor().zeros_like(),
        }
    }

    /// The elements of a parameter that this rank keeps.
    pub(crate) fn kept(&self, param: usize) -> Range<usize> {
        self.layout.find(param).map_or(0..0, |(part, slot)| part.kept(slot, self.rank).0)
    }
}

impl<'a> UnitBuilder<'a> {
    pub(crate) fn new(vb: VarBuilder<'a>, plan: Arc<Plan>) -> Self {
        Self { vb, plan }
    }

    /// One level down, as [`VarBuilder::pp`].
    pub fn pp(&self, name: impl ToString) -> Self {
        Self { vb: self.vb.pp(name), plan: self.plan.clone() }
    }

    /// Makes a unit of what `build` builds: its parameters are gathered together, before it runs.
    ///
    /// # Memory
    /// While it is built: one parameter whole, as the `VarBuilder` that was given to [`crate::Fsdp::new`] makes it.
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
            plan: self.plan.clone(),
            asked: asked.clone(),
            unit: name.clone(),
            index,
            dtypes: (dtype, computed),
        };
        let path = self.vb.prefix();
        let root = VarBuilder::from_backend(Box::new(backend), computed, device);
        let module = build(if path.is_empty() { root } else { root.pp(path) })?;
        let closed = Asked { closed: true, ..Asked::default() };
        let asked = std::mem::replace(&mut *lock(&asked), closed);
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

/// What a unit has asked for while it is built.
#[derive(Debug, Default)]
struct Asked {
    /// Names, and what the model computes with.
    params: Vec<(String, Tensor)>,
    /// This rank's piece of a large parameter, all of a small one.
    values: Vec<Tensor>,
    names: HashMap<String, usize>,
    digest: Digest,
    closed: bool,
}

impl Asked {
    fn known(&self, name: &str) -> Option<Tensor> {
        self.names.get(name).map(|&param| self.params[param].1.clone())
    }

    fn finish(
        self,
        plan: &Plan,
        unit: &str,
        (dtype, computed): (DType, DType),
        config: &UnitConfig,
    ) -> Result<Built> {
        let lens: Vec<usize> = self.params.iter().map(|(_, tensor)| tensor.elem_count()).collect();
        if lens.iter().sum::<usize>() == 0 {
            return Err(Error::EmptyUnit { unit: unit.into() }.into());
        }
        let layout = Layout::new(&lens, plan.config.pack_elements, plan.shards);
        let rank = plan.shard_rank;
        let mut params = Vec::with_capacity(lens.len());
        // A value is freed as soon as it lies in its variable.
        for (param, ((name, tensor), value)) in self.params.into_iter().zip(self.values).enumerate() {
            let Some((part, slot)) = layout.find(param) else { continue };
            let shard = Var::zeros(part.variable_len(slot, rank), dtype, plan.anchor.device())?;
            let (kept, _) = part.kept(slot, rank);
            // Of a large one, there is no more than what is kept.
            let first = if part.is_packed { kept.start } else { 0 };
            if !kept.is_empty() {
                shard.slice_set(&value.narrow(0, first, kept.len())?, 0, 0)?;
            }
            params.push(Param { name, tensor, shard });
        }
        let kept = plan.config.strategy != Strategy::FullShard;
        Ok(Built {
            name: unit.into(),
            params,
            layout,
            rank,
            dtype: computed,
            keep: config.keep_after_forward.unwrap_or(kept),
            digest: self.digest,
        })
    }
}

/// The builder inside a unit.
struct Sharding<'a> {
    inner: VarBuilder<'a>,
    plan: Arc<Plan>,
    asked: Arc<Mutex<Asked>>,
    unit: String,
    index: usize,
    /// Of shards, and of what the unit computes with.
    dtypes: (DType, DType),
}

impl<'a> Sharding<'a> {
    fn provide(
        &self,
        name: &str,
        shape: Option<&Shape>,
        dtype: DType,
        read: impl FnOnce(DType) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let unit = || self.unit.clone();
        let parameter = || name.to_string();
        if lock(&self.asked).closed {
            return Err(Error::TooLate { parameter: parameter(), unit: unit() }.into());
        }
        if self.plan.config.is_buffer(name) {
            return self.buffer(name, || read(self.dtypes.0));
        }
        if dtype != self.dtypes.1 {
            return Err(match is_trainable(dtype) {
                true => {
                    let expected = self.dtypes.1;
                    Error::MixedDtypes { parameter: parameter(), unit: unit(), got: dtype, expected }.into()
                }
                false => Error::UnsupportedDtype { parameter: parameter(), unit: unit(), dtype }.into(),
            });
        }
        if let Some(tensor) = lock(&self.asked).known(name) {
            return match shape.filter(|shape| *shape != tensor.shape()) {
                None => Ok(tensor),
                Some(then) => {
                    let (first, then) = (format!("{:?}", tensor.dims()), format!("{:?}", then.dims()));
                    Err(Error::Ambiguous { parameter: parameter(), first, then }.into())
                }
            };
        }
        let owner = lock(&self.plan.model).owners.insert(parameter(), unit());
        if let Some(first) = owner.filter(|owner| *owner != self.unit) {
            return Err(Error::SharedParameter { parameter: parameter(), first, second: unit() }.into());
        }
        self.shard(name, read(self.dtypes.0)?)
    }

    /// Keeps this rank's piece of a parameter, and gives a tensor without elements in its place.
    fn shard(&self, name: &str, value: Tensor) -> Result<Tensor> {
        if !is_trainable(value.dtype()) {
            let (parameter, unit, dtype) = (name.into(), self.unit.clone(), value.dtype());
            return Err(Error::UnsupportedDtype { parameter, unit, dtype }.into());
        }
        if !is_supported(value.device()) || !value.device().same_device(self.plan.anchor.device()) {
            let device = format!("{:?}", value.device().location());
            return Err(Error::UnsupportedDevice { parameter: name.into(), device }.into());
        }
        let mut asked = lock(&self.asked);
        let param = asked.params.len();
        let place = ParamIndex { unit: self.index, param };
        let tensor =
            parameter(&self.plan.anchor, place, value.shape(), self.dtypes.1, self.plan.link.clone())?;
        let flat = value.detach().contiguous()?.flatten_all()?;
        let digest = asked.digest.floats(&flat).map_err(comm::carry)?;
        asked.digest = digest.text(name);
        let len = flat.elem_count();
        let whole = len < self.plan.config.pack_elements || len == 0;
        let range = match whole {
            true => 0..len,
            false => {
                let piece = piece(len, self.plan.shards);
                let start = (piece * self.plan.shard_rank).min(len);
                start..(start + piece).min(len)
            }
        };
        asked.values.push(cut(&flat, range)?);
        asked.params.push((name.into(), tensor.clone()));
        asked.names.insert(name.into(), param);
        Ok(tensor)
    }

    fn buffer(&self, name: &str, read: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        let mut model = lock(&self.plan.model);
        if let Some((_, known)) = model.buffers.iter().find(|(known, _)| known == name) {
            return Ok(known.as_tensor().clone());
        }
        let value = read()?;
        let dtype = self.plan.config.buffer_dtype.filter(|_| is_trainable(value.dtype()));
        let var = Var::from_tensor(&value.to_dtype(dtype.unwrap_or(value.dtype()))?)?;
        model.buffers.push((name.into(), var.clone()));
        Ok(var.as_tensor().clone())
    }

    fn inner(&self, device: &Device) -> VarBuilder<'a> {
        let inner = self.inner.clone();
        if inner.device().same_device(device) { inner } else { inner.set_device(device.clone()) }
    }
}

impl SimpleBackend for Sharding<'_> {
    fn get(&self, shape: Shape, name: &str, hints: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let read = |dtype| self.inner(device).get_with_hints_dtype(shape.clone(), name, hints, dtype);
        self.provide(name, Some(&shape), dtype, read)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.provide(name, None, dtype, |dtype| self.inner(device).get_unchecked_dtype(name, dtype))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.inner.contains_tensor(name)
    }
}
