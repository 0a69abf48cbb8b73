//! The `VarBuilder` backend inside a unit: turns each requested parameter into this rank's shard of it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use comm::internal::Digest;
use strategy::ParameterGroups;
use training::build::RangeReader;
use training::internal::is_buffer;

use crate::built::{BuiltUnit, Model, Param, ParamIndex};
use crate::bytes::{Bytes, Place};
use crate::hook::{CoreRef, parameter};
use crate::layout::{FlatLayout, piece};
use crate::storage::{is_supported, is_trainable};
use crate::values::copy_range;
use crate::{Error, FsdpConfig, ShardingStrategy, UnitConfig, lock};

/// Elements at the start of each parameter that all ranks compare, if each reads only what it keeps.
const COMPARED: usize = 64;

/// What the units of a model share during construction.
pub(crate) struct Plan {
    pub(crate) config: FsdpConfig,
    pub(crate) shards: usize,
    pub(crate) shard_rank: usize,
    /// Whether other ranks keep the same shard.
    pub(crate) has_copies: bool,
    /// The ranks that have a part of a parameter.
    pub(crate) averaged_over: ParameterGroups,
    pub(crate) link: CoreRef,
    /// One-element variable from which every parameter's tensor is computed in the autograd graph.
    pub(crate) anchor: Var,
    pub(crate) model: Mutex<Model>,
}

/// What a unit has requested while it is built.
#[derive(Default)]
pub(crate) struct UnitRequests {
    /// Names, and the tensors that the model computes with.
    params: Vec<(String, Tensor)>,
    values: Vec<Value>,
    names: HashMap<String, usize>,
    bytes: Vec<Bytes>,
    /// By group of replicas.
    digests: Vec<Digest>,
    closed: bool,
}

/// Initial value of a parameter.
enum Value {
    /// This rank's piece of a large parameter; the whole of a small one.
    Here(Tensor),
    /// A range of a parameter of this shape, to be read when it is known which range this rank keeps.
    ToRead(Arc<dyn RangeReader>, Shape, Init),
}

/// What was read of a parameter.
struct Read {
    kept: Tensor,
    /// The first elements, the same on every rank.
    first: Tensor,
}

impl UnitRequests {
    /// Returns what was requested; no further request is accepted.
    pub(crate) fn close(&mut self) -> Self {
        std::mem::replace(self, Self { closed: true, ..Self::default() })
    }

    fn known(&self, name: &str) -> Option<Tensor> {
        self.names.get(name).map(|&param| self.params[param].1.clone())
    }

    /// The hash of the values of a group.
    fn digest(&mut self, group: usize) -> &mut Digest {
        if self.digests.len() <= group {
            self.digests.resize(group + 1, Digest::new());
        }
        &mut self.digests[group]
    }

    fn add(&mut self, name: &str, tensor: Tensor, value: Value) {
        self.names.insert(name.into(), self.params.len());
        self.params.push((name.into(), tensor));
        self.values.push(value);
    }

    pub(crate) fn finish(
        mut self,
        plan: &Plan,
        unit: &str,
        (dtype, computed): (DType, DType),
        config: &UnitConfig,
    ) -> Result<BuiltUnit> {
        let placed =
            self.params.iter().map(|(name, tensor)| (tensor.elem_count(), plan.averaged_over.index_of(name)));
        let placed: Vec<(usize, usize)> = placed.collect();
        if placed.iter().all(|(len, _)| *len == 0) {
            return Err(Error::EmptyUnit { unit: unit.into() }.into());
        }
        let layout = FlatLayout::new(&placed, plan.config.pack_elements, plan.shards);
        let (rank, device) = (plan.shard_rank, plan.anchor.device());
        let groups = plan.averaged_over.groups().count();
        self.digest(groups - 1);
        let (mut digests, mut is_read) = (self.digests, false);
        let mut kept_digests = plan.has_copies.then(|| vec![Digest::new(); groups]);
        let mut params = Vec::with_capacity(placed.len());
        // Each value is freed as soon as it has been copied into its variable.
        for (param, ((name, tensor), value)) in self.params.into_iter().zip(self.values).enumerate() {
            let Some((part, slot)) = layout.find(param) else { continue };
            let shard = Var::zeros(part.variable_len(slot, rank), dtype, device)?;
            let (kept, _) = part.kept(slot, rank);
            let value = match value {
                Value::Here(value) => {
                    // Of a large parameter, only the kept range is present.
                    let first = if part.is_packed { kept.start } else { 0 };
                    value.narrow(0, first, kept.len())?
                }
                Value::ToRead(source, shape, init) => {
                    let of_tensor = (&*name, tensor.elem_count(), dtype);
                    let read = read(&*source, of_tensor, (&shape, init), kept)?;
                    let digest = &mut digests[part.group];
                    *digest = digest.floats(&read.first).map_err(comm::carry)?.text(&name);
                    if let Some(kept) = &mut kept_digests {
                        let digest = &mut kept[part.group];
                        *digest = digest.floats(&read.kept).map_err(comm::carry)?.text(&name);
                    }
                    is_read = true;
                    read.kept.to_device(device)?
                }
            };
            if value.elem_count() > 0 {
                shard.slice_set(&value, 0, 0)?;
            }
            params.push(Param { name, tensor, shard });
        }
        let kept = plan.config.strategy != ShardingStrategy::FullShard;
        Ok(BuiltUnit {
            name: unit.into(),
            params,
            bytes: self.bytes,
            layout,
            rank,
            dtype: computed,
            keep: config.keep_after_forward.unwrap_or(kept),
            digests,
            is_read,
            kept_digests,
        })
    }
}

/// Reads what this rank keeps of a parameter of `len` elements, and the elements that all ranks compare.
fn read(
    source: &dyn RangeReader,
    (name, len, dtype): (&str, usize, DType),
    (shape, init): (&Shape, Init),
    kept: Range<usize>,
) -> Result<Read> {
    let (first, count) = (0..len.min(COMPARED), kept.len());
    let both = [first.clone(), kept];
    let ranges: Vec<_> = both.into_iter().filter(|range| !range.is_empty()).collect();
    let all = match ranges.is_empty() {
        true => Tensor::zeros(0, dtype, &Device::Cpu)?,
        false => source.read(name, shape, init, dtype, &ranges)?.flatten_all()?,
    };
    if all.elem_count() != first.len() + count || all.dtype() != dtype {
        let (got, expected) = (all.elem_count(), first.len() + count);
        bail!(
            "parameter {name}: {got} numbers of {:?} were read, and {expected} of {dtype:?} were asked for",
            all.dtype()
        )
    }
    Ok(Read { kept: all.narrow(0, first.len(), count)?, first: all.narrow(0, 0, first.len())? })
}

/// Returns an error if a tensor that was requested before is now requested with another shape.
fn check_shape(name: &str, known: &Tensor, shape: Option<&Shape>) -> Result<()> {
    let Some(shape) = shape.filter(|shape| *shape != known.shape()) else { return Ok(()) };
    let (first, then) = (format!("{:?}", known.dims()), format!("{:?}", shape.dims()));
    Err(Error::Ambiguous { parameter: name.into(), first, then }.into())
}

/// The `VarBuilder` backend inside a unit.
pub(crate) struct Sharding<'a> {
    pub(crate) inner: VarBuilder<'a>,
    pub(crate) parts: Option<Arc<dyn RangeReader>>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) asked: Arc<Mutex<UnitRequests>>,
    pub(crate) unit: String,
    pub(crate) index: usize,
    /// Dtype of the shards, and dtype that the unit computes in.
    pub(crate) dtypes: (DType, DType),
}

impl<'a> Sharding<'a> {
    fn check_open(&self, name: &str) -> Result<()> {
        match lock(&self.asked).closed {
            true => {
                Err(Error::RequestedAfterBuild { parameter: name.into(), unit: self.unit.clone() }.into())
            }
            false => Ok(()),
        }
    }

    /// Checks whether a parameter may be requested with this shape and dtype. Returns its tensor if it was requested before.
    fn check_request(&self, name: &str, shape: Option<&Shape>, dtype: DType) -> Result<Option<Tensor>> {
        let unit = || self.unit.clone();
        let parameter = || name.to_string();
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
            check_shape(name, &tensor, shape)?;
            return Ok(Some(tensor));
        }
        let owner = lock(&self.plan.model).owners.insert(parameter(), unit());
        if let Some(first) = owner.filter(|owner| *owner != self.unit) {
            return Err(Error::SharedParameter { parameter: parameter(), first, second: unit() }.into());
        }
        Ok(None)
    }

    fn check_dtype(&self, name: &str, dtype: DType) -> Result<()> {
        match is_trainable(dtype) {
            true => Ok(()),
            false => {
                let (parameter, unit) = (name.into(), self.unit.clone());
                Err(Error::UnsupportedDtype { parameter, unit, dtype }.into())
            }
        }
    }

    /// Creates the released tensor of a parameter, which the model computes with.
    fn tensor(&self, asked: &UnitRequests, shape: &Shape) -> Result<Tensor> {
        let index = ParamIndex { unit: self.index, param: asked.params.len() };
        parameter(&self.plan.anchor, index, shape, self.dtypes.1, self.plan.link.clone())
    }

    /// Keeps this rank's piece of a parameter.
    fn shard(&self, name: &str, value: Tensor) -> Result<Tensor> {
        self.check_dtype(name, value.dtype())?;
        if !is_supported(value.device()) || !value.device().same_device(self.plan.anchor.device()) {
            let device = format!("{:?}", value.device().location());
            return Err(Error::UnsupportedDevice { parameter: name.into(), device }.into());
        }
        let mut asked = lock(&self.asked);
        let tensor = self.tensor(&asked, value.shape())?;
        let flat = value.detach().contiguous()?.flatten_all()?;
        let digest = asked.digest(self.plan.averaged_over.index_of(name));
        *digest = digest.floats(&flat).map_err(comm::carry)?.text(name);
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
        asked.add(name, tensor.clone(), Value::Here(copy_range(&flat, range)?));
        Ok(tensor)
    }

    /// Records that this rank's range of a parameter is to be read later. `whole` is the shape that the model requests.
    fn read_later(
        &self,
        source: &Arc<dyn RangeReader>,
        name: &str,
        whole: Shape,
        init: Init,
    ) -> Result<Tensor> {
        self.check_dtype(name, self.dtypes.0)?;
        let shape = source.shape(name, &whole)?;
        let mut asked = lock(&self.asked);
        let tensor = self.tensor(&asked, &shape)?;
        asked.add(name, tensor.clone(), Value::ToRead(source.clone(), whole, init));
        Ok(tensor)
    }

    /// Keeps this rank's piece of a parameter of bytes.
    fn bytes(&self, shape: Shape, name: &str, init: Init, device: &Device) -> Result<Tensor> {
        let mut asked = lock(&self.asked);
        if let Some(known) = asked.bytes.iter().find(|known| known.name == name) {
            return Ok(known.tensor.clone());
        }
        let place = Place { rank: self.plan.shard_rank, ranks: self.plan.shards };
        let bytes = match &self.parts {
            Some(source) => Bytes::read(source, (name, &shape, init), place, device)?,
            None => {
                let whole = self.inner(device).get_with_hints_dtype(shape, name, init, DType::U8)?;
                Bytes::of_whole(name, &whole, place)?
            }
        };
        let tensor = bytes.tensor.clone();
        asked.bytes.push(bytes);
        Ok(tensor)
    }

    fn buffer(
        &self,
        name: &str,
        shape: Option<&Shape>,
        read: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut model = lock(&self.plan.model);
        if let Some((_, known)) = model.buffers.iter().find(|(known, _)| known == name) {
            check_shape(name, known, shape)?;
            return Ok(known.as_tensor().clone());
        }
        let value = read()?;
        let dtype = self.plan.config.buffer_dtype.filter(|_| is_trainable(value.dtype()));
        let var = Var::from_tensor(&value.to_dtype(dtype.unwrap_or(value.dtype()))?)?;
        model.buffers.push((name.into(), var.clone()));
        Ok(var.as_tensor().clone())
    }

    /// Returns the dtype to read a buffer in: integers as they are asked for, floats in the dtype of the shards, unless a wider one is
    /// asked for.
    fn buffer_dtype(&self, asked: DType) -> DType {
        let is_wider = asked.size_in_bytes() > self.dtypes.0.size_in_bytes();
        if is_trainable(asked) && !is_wider { self.dtypes.0 } else { asked }
    }

    fn inner(&self, device: &Device) -> VarBuilder<'a> {
        let inner = self.inner.clone();
        if inner.device().same_device(device) { inner } else { inner.set_device(device.clone()) }
    }
}

impl SimpleBackend for Sharding<'_> {
    fn get(&self, shape: Shape, name: &str, hints: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let whole = |dtype| self.inner(device).get_with_hints_dtype(shape.clone(), name, hints, dtype);
        self.check_open(name)?;
        if is_buffer(&self.plan.config.buffers, name) {
            return self.buffer(name, Some(&shape), || whole(self.buffer_dtype(dtype)));
        }
        if dtype == DType::U8 {
            return self.bytes(shape, name, hints, device);
        }
        if let Some(known) = self.check_request(name, Some(&shape), dtype)? {
            return Ok(known);
        }
        // A parameter on another device is not read by range: `shard` refuses it.
        match self.parts.as_ref().filter(|_| device.same_device(self.plan.anchor.device())) {
            Some(source) => self.read_later(source, name, shape, hints),
            None => self.shard(name, whole(self.dtypes.0)?),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let whole = |dtype| self.inner(device).get_unchecked_dtype(name, dtype);
        self.check_open(name)?;
        if is_buffer(&self.plan.config.buffers, name) {
            return self.buffer(name, None, || whole(self.buffer_dtype(dtype)));
        }
        match self.check_request(name, None, dtype)? {
            Some(known) => Ok(known),
            None => self.shard(name, whole(self.dtypes.0)?),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.inner.contains_tensor(name)
    }
}
